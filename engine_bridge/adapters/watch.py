"""What came, changed and went in a folder of adapters, told scan by scan."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_bridge.adapters.errors import quoted
from engine_bridge.adapters.files import signature_of

logger = logging.getLogger(__name__)

MAX_NAME_CHARS: Final = 200  # Chosen: names are shown in lists and typed in requests.
SETTLE_S: Final = 2.0  # Chosen: longer than a copy pauses between two writes.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(frozen=True, slots=True)
class Changes:
    """What is new since the last scan, each in the order of names.

    Attributes:
        added: (name, path) of adapters not told before, whether or not they are sound.
        changed: (name, path) of adapters whose files are others than when they were last told.
        removed: names of adapters told before that are there no longer.
        skipped: names that no adapter may have, escaped for showing; each is told once.
    """

    added: tuple[tuple[str, Path], ...] = ()
    changed: tuple[tuple[str, Path], ...] = ()
    removed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    """signature: see `files.signature_of`. newest_s: when the last of the files, or the folder itself, was changed, in Unix seconds."""

    signature: str
    newest_s: float


class Folder:
    """A folder whose subfolders with an adapter_config.json are adapters, named like them. Scan it from one thread, and not the event loop.

    Args:
        known: name -> `files.signature_of` of what is served from it already and need not be told.
        settle_s: how long an adapter's files must have been left alone before it is told, so that half a copy is not taken for a whole.
    """

    def __init__(
        self, path: Path, known: Mapping[str, str] | None = None, *, settle_s: float = SETTLE_S
    ) -> None:
        self._path = path
        self._settle_s = settle_s
        self._told: dict[str, str] = dict(known or {})
        self._skipped: set[str] = set()
        self._is_readable = True

    def changes(self, now: float) -> Changes:
        """Scan the folder one level deep. now: Unix seconds, by the clock that stamps the files.

        A folder that is missing is empty. One that cannot be read for another reason (a disk that is away for a moment) has no changes.
        """
        try:
            seen = self._scan()
        except OSError as error:
            if self._is_readable:
                logger.warning("the folder of adapters %s cannot be read: %s", self._path, error.strerror)
            self._is_readable = False
            return Changes()
        self._is_readable = True
        skipped = sorted(name for name, entry in seen.items() if entry and is_odd(name))
        newly_skipped = tuple(quoted(name) for name in skipped if name not in self._skipped)
        self._skipped = set(skipped)
        adapters = {name: entry for name, entry in sorted(seen.items()) if not is_odd(name)}
        return self._compare(adapters, newly_skipped, now)

    def _compare(self, seen: dict[str, _Seen | None], skipped: tuple[str, ...], now: float) -> Changes:
        added: list[tuple[str, Path]] = []
        changed: list[tuple[str, Path]] = []
        for name, entry in seen.items():
            if entry is None or self._told.get(name) == entry.signature or self._is_unsettled(entry, now):
                continue
            (changed if name in self._told else added).append((name, self._path / name))
            self._told[name] = entry.signature
        removed = tuple(sorted(self._told.keys() - seen.keys()))
        for name in removed:
            del self._told[name]
        return Changes(tuple(added), tuple(changed), removed, skipped)

    def _is_unsettled(self, entry: _Seen, now: float) -> bool:
        # A time far in the future, from a clock that was wrong, must not hold an adapter back until then.
        return abs(now - entry.newest_s) < self._settle_s

    def _scan(self) -> dict[str, _Seen | None]:
        """Name -> what is there; None: something that cannot be looked at just now. Raises OSError if the folder itself cannot be read."""
        try:
            with os.scandir(self._path) as entries:
                names = [entry.name for entry in entries]
        except FileNotFoundError:
            return {}
        seen: dict[str, _Seen | None] = {}
        for name in names:
            try:
                seen[name] = _look(self._path / name)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    seen[name] = None
        return seen


def _look(folder: Path) -> _Seen:
    """Raises OSError: ENOENT or ENOTDIR for what is no adapter."""
    signature = signature_of(folder)
    newest_ns = os.stat(folder).st_mtime_ns
    with os.scandir(folder) as entries:
        for entry in entries:  # all of them: a download grows under another name first
            try:
                newest_ns = max(newest_ns, entry.stat().st_mtime_ns)
            except OSError:
                continue  # a broken link, or just gone
    return _Seen(signature, newest_ns / 1e9)


def is_odd(name: str) -> bool:
    """No adapter may have this name: it is hidden, cannot be shown, or is too long."""
    return name.startswith(".") or not name.isprintable() or len(name) > MAX_NAME_CHARS
