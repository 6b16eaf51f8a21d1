"""Changes in a folder of adapters, told scan by scan."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_bridge.adapters.errors import quoted
from engine_bridge.adapters.files import signature_of
from engine_bridge.adapters.names import problem_of
from engine_bridge.adapters.retries import AdapterRefusal, Retries

logger = logging.getLogger(__name__)

# Between two looks at a missing folder. Chosen: a thousand times as long as it takes to move another folder into its place.
LOOK_AGAIN_S: Final = 0.1
SETTLE_S: Final = 2.0  # Chosen: longer than a copy pauses between two writes.
# A trainer may write a served adapter anew all the time. When its files have not rested for PATIENCE settle times, it is told in a pause of
# SHORT_REST of one. Chosen: writing one adapter hardly pauses so long, and a torn one is refused by the check or replaced by the next version.
PATIENCE: Final = 4
SHORT_REST: Final = 0.25
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_TAKEN: Final = AdapterRefusal(
    "An adapter of this name was loaded from elsewhere. The one in the folder is served once that one is unloaded.",
    "name_taken",
)


@dataclass(frozen=True, slots=True)
class FolderChanges:
    """Changes since the last scan, each in the order of names.

    Attributes:
        found: (name, path) of adapters not told before, whether or not they are sound, with other files than when they were last told, or due for
            another try.
        removed: names of adapters told before that have been removed.
    """

    found: tuple[tuple[str, Path], ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    """An adapter at a scan. signature: see `files.signature_of`. newest_s: last change of a file or of the folder itself, in Unix seconds."""

    signature: str
    newest_s: float


class Folder:
    """A folder whose subfolders with an adapter_config.json are adapters, named like them. Scan it from one thread, and not the event loop.

    Args:
        retries: failures of told adapters; a failure that is not the files' fault is told again when due.
        settle_s: how long an adapter's files must have rested before it is told, so that half a copy is not taken for a whole.
    """

    def __init__(self, path: Path, retries: Retries, *, settle_s: float = SETTLE_S) -> None:
        self.path = Path(os.path.abspath(path))
        self._retries = retries
        self._settle_s = settle_s
        self._told: dict[str, str] = {}
        self._restless_since: dict[str, float] = {}
        self._stands_back: set[str] = set()
        self._skipped: set[str] = set()
        self._is_readable = True

    @property
    def told(self) -> set[str]:
        """The names of the adapters that were told as found and have not been told as removed since."""
        return set(self._told)

    def tell_again(self, names: Collection[str]) -> None:
        """Tell these adapters as found with the next changes, if their folders are still there."""
        for name in names:
            del self._told[name]

    def changes(
        self, now: float, elsewhere: Collection[str] = (), *, is_settled: bool = False
    ) -> FolderChanges:
        """Scan the folder one level deep.

        A missing folder counts as empty. A folder that cannot be read for another reason (a disk that is away for a moment) has no changes.

        Args:
            now: Unix seconds, by the clock that stamps the files.
            elsewhere: names under which an adapter from another place is served: the folder's own of such a name waits until that is unloaded.
            is_settled: all adapters are told at once.
        """
        try:
            seen = self._scan(now)
        except OSError as error:
            if self._is_readable:
                logger.warning("the folder of adapters %s cannot be read: %s", self.path, error.strerror)
            self._is_readable = False
            return FolderChanges()
        self._is_readable = True
        return self._compare(self._named_well(seen), elsewhere, now, 0.0 if is_settled else self._settle_s)

    def _named_well(self, seen: dict[str, _Seen | None]) -> dict[str, _Seen | None]:
        """Return the entries with valid names. The log names the fault of each other one once."""
        problems = {name: problem for name, entry in seen.items() if (problem := problem_of(name))}
        for name in sorted(problems.keys() - self._skipped):
            # Copying tools use folders that begin with a dot for copies that should not be seen yet.
            level = logging.DEBUG if name.startswith(".") else logging.WARNING
            if seen[name] is not None:
                logger.log(level, "the folder %s is no adapter: its name %s", quoted(name), problems[name])
        self._skipped = set(problems)
        return {name: entry for name, entry in sorted(seen.items()) if name not in problems}

    def _compare(
        self, seen: dict[str, _Seen | None], elsewhere: Collection[str], now: float, settle_s: float
    ) -> FolderChanges:
        found: list[tuple[str, Path]] = []
        for name, entry in seen.items():
            if name in elsewhere:
                self._stand_back(name, now)
            elif entry is not None and self._is_to_be_told(name, entry, now, settle_s):
                found.append((name, self.path / name))
                if self._told.get(name) != entry.signature:
                    self._retries.forget(name)
                self._told[name] = entry.signature
                self._restless_since.pop(name, None)
                self._stands_back.discard(name)
        removed = tuple(sorted(self._gone(self._told.keys() - seen.keys(), now)))
        for name in (*removed, *(self._stands_back - seen.keys())):
            self._told.pop(name, None)
            self._restless_since.pop(name, None)
            self._stands_back.discard(name)
            self._retries.forget(name)
        return FolderChanges(tuple(found), removed)

    def _gone(self, names: Collection[str], now: float) -> list[str]:
        """Return the names whose folder is still missing at a second look: while one folder is moved into the place of another, both are away."""
        if names:
            time.sleep(LOOK_AGAIN_S)
        return [name for name in names if not self._is_there(name, now)]

    def _is_there(self, name: str, now: float) -> bool:
        try:
            _look(self.path / name)
        except OSError as error:
            return self._may_come_back(name, error, now)
        return True

    def _stand_back(self, name: str, now: float) -> None:
        if self._retries.failed(name, _TAKEN, now):
            logger.warning("adapter %s: %s", quoted(name), _TAKEN.reason)
        self._stands_back.add(name)
        self._told.pop(name, None)

    def _is_to_be_told(self, name: str, entry: _Seen, now: float, settle_s: float) -> bool:
        if self._told.get(name) == entry.signature and not self._retries.is_due(name, now):
            return False
        if name in self._told:
            waits_s = now - self._restless_since.setdefault(name, now)
            if waits_s >= PATIENCE * settle_s:
                settle_s *= SHORT_REST
        # A time far in the future, from a clock that was wrong, must not hold an adapter back until then.
        return abs(now - entry.newest_s) >= settle_s

    def _scan(self, now: float) -> dict[str, _Seen | None]:
        """Return the entries by name; None for an entry that is unreadable just now, or just being written.

        Raises OSError if the folder itself cannot be read.
        """
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries]
        except FileNotFoundError:
            return {}
        seen: dict[str, _Seen | None] = {}
        for name in names:
            try:
                seen[name] = _look(self.path / name)
            except OSError as error:
                if self._may_come_back(name, error, now):
                    seen[name] = None
        return seen

    def _may_come_back(self, name: str, error: OSError, now: float) -> bool:
        """Return whether a folder without an adapter may soon have one: a writer may delete all files first and write the configuration last."""
        if error.errno not in _NOT_THERE:
            return True
        try:
            return abs(now - _newest_s(self.path / name)) < self._settle_s
        except OSError:
            return False  # no folder


def _look(folder: Path) -> _Seen:
    """Look at an adapter's folder. Raises OSError: ENOENT or ENOTDIR if it holds none."""
    return _Seen(signature_of(folder), _newest_s(folder))


def _newest_s(folder: Path) -> float:
    """Return the last change of a folder or of a file in it, in Unix seconds. Raises OSError."""
    newest_ns = os.stat(folder).st_mtime_ns
    with os.scandir(folder) as entries:
        for entry in entries:  # all of them: a download grows under another name first
            try:
                newest_ns = max(newest_ns, entry.stat().st_mtime_ns)
            except OSError:
                continue  # a broken link, or just gone
    return newest_ns / 1e9
