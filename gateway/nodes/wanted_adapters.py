"""Which adapters all nodes should serve: the gateway's list, with versions and pins in its registry. Of one node alone the node itself keeps it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from engine_bridge.adapters.catalog import open_registry
from engine_bridge.adapters.contents import AdapterContents, contents_of
from engine_bridge.adapters.copies import Copies
from engine_bridge.adapters.errors import RegistryFailed
from engine_bridge.adapters.names import check_name
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.node_adapters import VERSION_CHARS, info_of
from engine_bridge.policy.adapters.adapter_places import Served
from engine_bridge.protocol.node import AdapterInfo


@dataclass(frozen=True, slots=True)
class WantedAdapter:
    """An adapter that nodes should serve.

    Attributes:
        options: the other fields of the client's body, which go to each node.
        sent: the same contents, in the place that they are sent to nodes from: the gateway's copy, if there is a copy.
        record: None until it is in the list.
    """

    name: str
    contents: AdapterContents
    options: Mapping[str, Any]
    sent: AdapterContents
    record: AdapterRecord | None = None

    @property
    def served(self) -> Served:
        """The version and the pin, as nodes report them."""
        is_pinned = self.record is not None and self.record.is_pinned
        return Served(self.contents.content_hash[:VERSION_CHARS], is_pinned)


class WantedAdapters:
    """The gateway's list.

    `open`, `read`, `add`, `remove`, `set_pinned` and `close` wait for the disk: they are for worker threads, one at a time.
    """

    def __init__(self, folder: Path | None) -> None:
        """folder: the data folder; None: in memory. Nothing is read before `open`."""
        self._folder = folder
        self._copies = Copies(folder)
        self.wanted: Mapping[str, WantedAdapter] = {}
        self.unloaded: dict[str, str] = {}
        """Names that were taken off the list on purpose, and the folder of each adapter."""
        self.num_changes = 0

    def open(self) -> None:
        """Open the registry, before anything else. Raises RegistryFailed."""
        self._registry = open_registry(self._folder)

    def read(self, name: str, path: str, options: Mapping[str, Any]) -> WantedAdapter:
        """Read the adapter at a path of this machine: "~" is the home of the server's user, relative paths count from where it was started.

        Raises AdapterRejected, RegistryFailed.
        """
        check_name(name)
        folder = Path(os.path.abspath(os.path.expanduser(path)))
        contents = contents_of(folder, self._known)
        wanted = {each.contents.content_hash for each in self.wanted.values()}
        self._copies.make(contents.content_hash, str(folder), wanted)
        copy = self._copies.path_of(contents.content_hash)
        return WantedAdapter(
            name, contents, options, structs.replace(contents, path=Path(copy)) if copy else contents
        )

    def _known(self, path: str, signature: str) -> tuple[str, int] | None:
        record = self._registry.known(path, signature)
        return (record.content_hash, record.checksum) if record is not None else None

    def add(self, wanted: WantedAdapter) -> None:
        """Enter an adapter in place of another one of its name, whose pin it takes over. Raises RegistryFailed."""
        contents = wanted.contents
        record = self._registry.register(wanted.name, str(contents.path), contents, time.time())
        self._put(replace(wanted, record=record))

    def remove(self, name: str, *, is_missing: bool = False) -> None:
        """Take an adapter off the list.

        Args:
            name: the adapter's name.
            is_missing: whether its files went by themselves and may come again.

        Raises:
            RegistryFailed: unless `is_missing`; nothing has changed then.
        """
        wanted = self.wanted.get(name)
        if wanted is None or wanted.record is None:
            return
        if is_missing:
            with suppress(
                RegistryFailed
            ):  # which is in the log; the note only saves reading the files when they come again
                self._registry.mark_missing(wanted.record.version_id)
        else:
            self._registry.remove(name, time.time())
            self.unloaded[name] = str(wanted.contents.path)
        # Another one each time: the event loop may be going through the old one.
        self.wanted = {other: each for other, each in self.wanted.items() if other != name}
        self.num_changes += 1

    def set_pinned(self, name: str, is_pinned: bool) -> None:
        """Pin an adapter, or unpin it. Raises RegistryFailed."""
        record = self._registry.set_pinned(name, is_pinned)
        if record is not None and name in self.wanted:
            self._put(replace(self.wanted[name], record=record))

    def _put(self, wanted: WantedAdapter) -> None:
        self.unloaded.pop(wanted.name, None)
        self.wanted = {**self.wanted, wanted.name: wanted}
        self.num_changes += 1

    def infos(self) -> list[AdapterInfo]:
        """Return the adapters as the list itself knows them: on disk and never used."""
        records = (wanted.record for wanted in self.wanted.values())
        return [info_of(record, "disk") for record in records if record is not None]

    def close(self) -> None:
        """Close the registry."""
        self._registry.close()
