"""Adapters that a gateway sent to its node: each in a folder named by its content, whole or not there.

Files come in pieces, into a folder with a name that nothing looks for. It is renamed only when its content has the announced hash, so a sender
that dies, a full disk or a kill in the middle leave nothing that could be taken for whole; such remains are deleted before the next transfer.
Nothing in here is lost for good: it can all be sent again.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from engine_bridge.adapters.config import CONFIG_FILE, MAX_CONFIG_BYTES
from engine_bridge.adapters.contents import FILES, contents_of
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import signature_of
from engine_bridge.protocol.errors import InvalidRequest, NotSupported

log = logging.getLogger(__name__)

# Largest piece in one message. Chosen: small beside a connection's bytes in the time of a token, large beside the cost of a call.
MAX_PIECE_BYTES: Final = 1 << 20
# Chosen: some two hundred adapters of rank 64 for a model of 8 billion weights.
MAX_STORE_BYTES: Final = 32 << 30
# Left free for others on the disk: the KV tiers and the registry stop at a full disk, too. Chosen.
FREE_BYTES: Final = 1 << 30
# How long unwanted adapters are kept: requests under way may still need them, and removed ones are often put back. Chosen.
KEEP_S: Final = 900.0

_HASH = re.compile(r"[0-9a-f]{64}")
_INCOMING: Final = "incoming-"


class AdapterStore:
    """A folder of this node's own. All methods, but not the making of it, wait for the disk: for worker threads. They take turns.

    Args:
        folder: made when it is needed; None: nothing is kept here, adapters are found at the gateway's own paths or not at all.
        max_bytes: of all adapters together. free_bytes: left free on the disk. keep_s: how long unwanted adapters are kept. clock: Unix seconds.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        max_bytes: int = MAX_STORE_BYTES,
        free_bytes: int = FREE_BYTES,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._max_bytes, self._free_bytes = max_bytes, free_bytes
        self._keep_s, self._clock = keep_s, clock
        self._lock = threading.Lock()
        self._hashes: dict[str, tuple[str, str]] = {}
        """Path -> signature and hash when it was read."""
        self._sizes: dict[str, Mapping[str, int]] = {}
        """Announced adapters: hash -> size of each file."""
        self._wanted: frozenset[str] = frozenset()
        self._is_cleared = False

    def find(self, content_hash: str, path: str) -> str:
        """Return the path of this content on this machine, "" for none. path: the gateway's own, which may exist here, too."""
        _check_hash(content_hash)
        with self._lock:
            if self._folder is not None and not self._is_cleared:
                self._clear_incoming(self._folder)
            if self._folder is not None and (kept := self._folder / content_hash).is_dir():
                if self._hash_of(kept) == content_hash:
                    self._touch(kept)
                    return str(kept)
                log.warning("the adapter in %s is damaged: it is deleted, and asked for again", kept)
                _delete(kept)
            return path if self._hash_of(Path(path)) == content_hash else ""

    def begin(self, content_hash: str, sizes: Mapping[str, int]) -> None:
        """Make room for an adapter. One comes at a time: the pieces of another one are given up. Raises InvalidRequest, NotSupported."""
        _check_hash(content_hash)
        _check_sizes(sizes)
        with self._lock:
            folder = self._own_folder()
            coming = folder / f"{_INCOMING}{content_hash}"
            self._clear_incoming(folder)
            self._make_room(folder, sum(sizes.values()))
            with _told_plainly():
                coming.mkdir(parents=True, mode=0o700)
            self._sizes[content_hash] = dict(sizes)

    def put(self, content_hash: str, name: str, offset: int, piece: bytes) -> None:
        """Append the next piece of a file. Raises InvalidRequest."""
        with self._lock:
            sizes = self._sizes.get(content_hash)
            if sizes is None or name not in sizes or len(piece) > MAX_PIECE_BYTES:
                raise InvalidRequest("This piece of an adapter was not announced.", code="not_announced")
            path = self._own_folder() / f"{_INCOMING}{content_hash}" / name
            there = path.stat().st_size if path.exists() else 0
            if offset != there or offset + len(piece) > sizes[name]:
                raise InvalidRequest(
                    "This piece of an adapter does not follow the last.", code="not_announced"
                )
            try:
                with _told_plainly(), open(path, "ab", opener=_privately) as file:
                    file.write(piece)
            except InvalidRequest:
                # For example a full disk: pieces that cannot become whole must not take the room that others need.
                self._clear_incoming(self._own_folder())
                raise

    def finish(self, content_hash: str) -> str:
        """Check and keep an adapter; returns its path, "" if it came damaged. Raises InvalidRequest."""
        with self._lock:
            folder = self._own_folder()
            if self._sizes.pop(content_hash, None) is None:
                raise InvalidRequest("This adapter was not announced.", code="not_announced")
            coming, kept = folder / f"{_INCOMING}{content_hash}", folder / content_hash
            if self._hash_of(coming) != content_hash:
                log.warning("an adapter came damaged, or was changed while it was sent")
                _delete(coming)
                return ""
            try:
                with _told_plainly():
                    for name in FILES:
                        _sync(coming / name)
                    _sync(coming)
                    _delete(kept)
                    coming.rename(kept)
                    _sync(folder)
            except InvalidRequest:
                _delete(coming)
                raise
            self._hashes[str(kept)] = self._hashes.pop(str(coming))
            return str(kept)

    def copy(self, content_hash: str, source: Path) -> None:
        """Copy an adapter of this machine. Raises InvalidRequest for want of room, or if its files have changed; NotSupported."""
        _check_hash(content_hash)
        with self._lock:
            folder = self._own_folder()
            coming, kept = folder / f"{_INCOMING}{content_hash}", folder / content_hash
            if kept.is_dir():
                return
            self._clear_incoming(folder)
            try:
                with _told_plainly():
                    self._copy(content_hash, source, coming)
                    coming.rename(kept)
            except InvalidRequest:
                _delete(coming)
                raise
            finally:
                self._hashes.pop(str(coming), None)

    def _copy(self, content_hash: str, source: Path, coming: Path) -> None:
        """Raises InvalidRequest, OSError."""
        try:
            self._make_room(coming.parent, sum((source / name).stat().st_size for name in FILES))
            coming.mkdir(mode=0o700)
            for name in FILES:
                shutil.copyfile(source / name, coming / name)
        except FileNotFoundError as error:
            raise InvalidRequest("Nothing lies there any more.", code="changed") from error
        if self._hash_of(coming) != content_hash:
            raise InvalidRequest("Another adapter lies there by now.", code="changed")

    def path_of(self, content_hash: str) -> str:
        """Return the path of this content, "" for none, unchecked: its reader checks it. From any thread, without waiting."""
        kept = self._folder / content_hash if self._folder is not None else None
        return str(kept) if kept is not None and kept.is_dir() else ""

    def keep(self, hashes: Collection[str]) -> None:
        """Set the wanted adapters. Others are deleted after `keep_s`, or earlier if their room is needed."""
        with self._lock:
            self._wanted = frozenset(hashes)
            if self._folder is None or not self._folder.is_dir():
                return
            for path in self._kept(self._folder):
                if path.name in self._wanted:
                    self._touch(path)
                elif self._clock() - path.stat().st_mtime > self._keep_s:
                    _delete(path)

    # -- the folder ----------------------------------------------------------------------------------------------------

    def _own_folder(self) -> Path:
        if self._folder is None:
            raise NotSupported(
                "This node keeps no adapters of its own: they must lie at the same path on its machine."
            )
        return self._folder

    def _hash_of(self, path: Path) -> str:
        """Return the content's hash at a path; "" for no adapter."""
        try:
            known = self._hashes.get(str(path))
            if known is None or known[0] != signature_of(path):
                contents = contents_of(path)
                self._hashes[str(path)] = known = (contents.signature, contents.content_hash)
        except (AdapterRejected, OSError, ValueError):
            return ""
        return known[1]

    def _make_room(self, folder: Path, num_bytes: int) -> None:
        """Delete unwanted adapters, the longest unused first, until there is room. Raises InvalidRequest."""
        with _told_plainly():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            taken = {path: _size(path) for path in folder.iterdir()}
        unwanted = [path for path in self._kept(folder) if path.name not in self._wanted]
        while True:
            free = shutil.disk_usage(folder).free - self._free_bytes
            room = min(self._max_bytes - sum(taken.values()), free)
            if num_bytes <= room:
                return
            if not unwanted:
                raise InvalidRequest(
                    f"A node has no room for the adapter's {-(-num_bytes >> 20)} MiB: {max(room, 0) >> 20} MiB are left for adapters there. "
                    "Unload others, or make room on its disk.",
                    code="no_room",
                )
            gone = unwanted.pop(0)
            taken.pop(gone)
            _delete(gone)

    def _kept(self, folder: Path) -> list[Path]:
        """Return the folders of whole adapters, the longest unused first."""
        whole = [path for path in folder.iterdir() if _HASH.fullmatch(path.name)]
        return sorted(whole, key=lambda path: path.stat().st_mtime)

    def _touch(self, path: Path) -> None:
        now = self._clock()
        os.utime(path, (now, now))

    def _clear_incoming(self, folder: Path) -> None:
        self._is_cleared = True
        self._sizes.clear()
        for path in folder.glob(f"{_INCOMING}*"):
            _delete(path)


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turn errors of the system into texts for the sender."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InvalidRequest(
                "A node's disk is full; the adapter was not stored there.", code="no_room"
            ) from error
        log.error("an adapter could not be stored: %s", error)
        raise InvalidRequest(
            "A node could not store the adapter; its log says why.", code="not_stored"
        ) from error


def _check_hash(content_hash: str) -> None:
    """Raise InvalidRequest for another form: the hash becomes the name of a folder."""
    if not _HASH.fullmatch(content_hash):
        raise InvalidRequest("This is no hash of an adapter.", code="not_announced")


def _check_sizes(sizes: Mapping[str, int]) -> None:
    if set(sizes) != set(FILES) or not all(size > 0 for size in sizes.values()):
        raise InvalidRequest("An adapter is two files.", code="not_announced")
    if sizes[CONFIG_FILE] > MAX_CONFIG_BYTES:
        raise InvalidRequest("The adapter's configuration is too large.", code="not_announced")


def _size(path: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path)) if path.is_dir() else path.stat().st_size


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _delete(path: Path) -> None:
    """Delete a folder, renamed first: a half-deleted adapter must not be found."""
    if _HASH.fullmatch(path.name):
        with suppress(OSError):
            path = path.rename(path.with_name(f"{_INCOMING}{path.name}-gone"))
    shutil.rmtree(path, ignore_errors=True)
