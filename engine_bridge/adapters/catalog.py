"""The adapters that requests may name: registered, and checked against the model before a request can name them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from engine_bridge.adapters.copies import Copies
from engine_bridge.adapters.errors import AdapterRejected, RegistryFailed, quoted
from engine_bridge.adapters.files import (
    AdapterFiles,
    ModelContract,
    check_finite,
    content_hash,
    inspect,
    read,
)
from engine_bridge.adapters.names import check_name
from engine_bridge.adapters.registry import AdapterFacts, AdapterRecord, Registry
from engine_bridge.protocol.errors import NotSupported
from kvtiers.closing import going_on

log = logging.getLogger(__name__)

# Seconds in which copies are begun at a time: the folder of adapters is looked at in between. Chosen.
_COPY_BUDGET_S = 1.0


class Catalog:
    """One node's adapters. `num_bytes` of its records is an adapter's size in memory, in the engine's type, which may differ from the file's.

    `add` and the other methods that say so wait for the disk: for a worker thread. The others only look.

    Args:
        registry, contract: None: there are no adapters, on a node without them or before its engine is up.
        max_bytes: the largest size of one adapter; a larger one would never find room in host memory.
    """

    def __init__(
        self,
        registry: Registry | None = None,
        contract: ModelContract | None = None,
        max_bytes: int = 0,
        copies: Copies | None = None,
    ) -> None:
        self._registry = registry
        self._contract = contract
        self._max_bytes = max_bytes
        self._copies = copies or Copies(None)
        self._is_looked_after = False
        self._served: dict[str, AdapterRecord] = {}
        self._uses: dict[int, tuple[int, float]] = {}
        self.unloaded: dict[str, str] = {}
        """Names that were taken out of service on purpose, and where each lay that was served then."""
        self._unregistered: dict[str, tuple[str, str, int]] = {}
        """Of files that were read and found sound, and that the registry could not take yet: path -> signature, content's hash, checksum."""
        self._lock = threading.Lock()

    @property
    def has_adapters(self) -> bool:
        """Whether adapters can be served."""
        return self._registry is not None

    def _parts(self) -> tuple[Registry, ModelContract]:
        """Return the registry and the contract. Raises NotSupported."""
        if self._registry is None or self._contract is None:
            raise NotSupported("this server runs without adapters")
        return self._registry, self._contract

    def add(self, name: str, path: str) -> AdapterRecord:
        """Check an adapter and take it into service, in place of another one of its name. Waits for the disk.

        An adapter that was registered with these very files is not read again. Raises AdapterRejected, RegistryFailed, NotSupported.
        """
        registry, contract = self._parts()
        check_name(name)
        files = inspect(path, contract)
        # All of the file is read into memory, and what is not applied let go of. Two bytes of it may be one that is held, for F32 in 16 bits.
        needed_bytes = max(files.held_bytes, files.num_bytes // 2)
        if needed_bytes > self._max_bytes:
            raise AdapterRejected(
                f"The adapter takes {needed_bytes >> 20} MiB; there are {self._max_bytes >> 20} for adapters in host memory. "
                "Raise --adapter-host-gib.",
                code="too_large",
            )
        for level, notes in ((logging.DEBUG, files.notes), (logging.WARNING, files.unapplied)):
            for note in notes:
                log.log(level, "adapter %s: %s", quoted(name), note)
        content, checksum = self._hashes(path, files)
        if self._is_looked_after:
            self._copies.make(content, path, {record.content_hash for record in self._served.copy().values()})
        facts = AdapterFacts(
            content_hash=content,
            checksum=checksum,
            signature=files.signature,
            rank=files.rank,
            num_bytes=files.num_bytes,
            target_modules=files.target_modules,
            base_model=files.base_model,
        )
        record = registry.register(name, path, facts, time.time())
        self._unregistered.pop(path, None)
        self.unloaded.pop(name, None)
        record = self._served[name] = replace(record, num_bytes=files.held_bytes)
        return record

    def look_after(self) -> None:
        """Store the counts of uses, and copy served adapters that have no copy yet. Call it every few seconds. Waits for the disk.

        Before the first call `add` makes no copies, so that a start does not wait for them.
        """
        self._is_looked_after = True
        self.flush()
        self._copies.make_missing(self._served.copy().values(), _COPY_BUDGET_S)

    def _hashes(self, path: str, files: AdapterFiles) -> tuple[str, int]:
        """Return the content's hash and the weights' checksum. Reads and checks the weights if these very files are unknown."""
        registry, contract = self._parts()
        known = registry.known(path, files.signature)
        if known is not None:
            return known.content_hash, known.checksum
        signature, content, checksum = self._unregistered.get(path, ("", "", 0))
        if signature != files.signature:
            buffer = memoryview(bytearray(files.num_bytes))
            checksum = read(files, buffer)
            check_finite(files, buffer, contract)
            content = content_hash(files, buffer)
            self._unregistered[path] = files.signature, content, checksum
        return content, checksum

    def remove(self, name: str, *, is_missing: bool = False) -> AdapterRecord | None:
        """Take a name out of service; `is_missing` if its files went by themselves and may come again. Waits for the disk.

        Raises RegistryFailed, and nothing has changed then. With `is_missing` the name is out of service even so.
        """
        if is_missing:
            record = self._served.pop(name, None)
            if record is not None:
                with suppress(
                    RegistryFailed
                ):  # which is in the log; the note only saves reading the files when they come again
                    self._parts()[0].mark_missing(record.version_id)
            return record
        if name in self._served:
            self._parts()[0].remove(name, time.time())
            self.unloaded[name] = self._served[name].path
        return self._served.pop(name, None)

    def set_pinned(self, name: str, is_pinned: bool) -> AdapterRecord | None:
        """Pin or unpin a served adapter; None for a name that is not served. Waits for the disk. Raises RegistryFailed, NotSupported."""
        registry, _ = self._parts()
        served = self._served.get(name)
        if served is None:
            return None
        record = registry.set_pinned(name, is_pinned)
        if record is not None:
            record = self._served[name] = replace(record, num_bytes=served.num_bytes)
        return record

    def note_use(self, version_id: int) -> None:
        """Count a use of a version. Kept in memory until `flush`."""
        with self._lock:
            num_uses, _ = self._uses.get(version_id, (0, 0.0))
            self._uses[version_id] = (num_uses + 1, time.time())

    def flush(self) -> None:
        """Store the counts of uses. Waits for the disk; counts that cannot be written are kept for the next time."""
        with self._lock:
            uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            self._parts()[0].note_uses(uses)
        except RegistryFailed:
            with self._lock:
                for version_id, (num_more, used_at) in self._uses.items():
                    uses[version_id] = (uses.get(version_id, (0, 0.0))[0] + num_more, used_at)
                self._uses = uses
            return
        for name, record in list(self._served.items()):
            if record.version_id in uses:
                self._served[name] = _used(record, uses)

    def served(self) -> list[AdapterRecord]:
        """Return the served adapters in the order of names, with the uses so far."""
        uses = dict(self._uses)
        return [_used(record, uses) for _, record in sorted(self._served.items())]

    def current(self, name: str) -> AdapterRecord | None:
        """Return the adapter that is served under this name."""
        return self._served.get(name)

    def close(self) -> None:
        """Store the counts of uses and close the registry. Waits for the disk."""
        with going_on("the uses of adapters"):
            self.flush()
        if self._registry is not None:
            self._registry.close()


def _used(record: AdapterRecord, uses: Mapping[int, tuple[int, float]]) -> AdapterRecord:
    num_uses, last_used_at = uses.get(record.version_id, (0, record.last_used_at))
    return replace(record, num_uses=record.num_uses + num_uses, last_used_at=last_used_at)


def open_registry(folder: Path | None) -> Registry:
    """Open the registry in a data folder; in memory without one."""
    if folder is None:
        return Registry(None)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Registry(folder / "adapters.db")
