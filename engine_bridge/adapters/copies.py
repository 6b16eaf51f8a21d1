"""Copies of served adapters, so that their files may be replaced, half written or taken away at any time.

An adapter is read again whenever host memory had no room for it. By then its files may be others: a trainer writes the next version over them, and
for seconds there is nothing whole. So the version that is served answers from its copy, until the next one has come to rest, is checked, copied and
takes its place. Where there is no room for a copy, or no data folder, requests wait for the next version instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.adapters.store import AdapterStore
from engine_bridge.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

FOLDER_NAME: Final = "adapter-copies"
# How long the copy of a version out of service is kept: requests under way may need it. Chosen: a new version every few seconds makes many.
KEEP_S: Final = 300.0
# After a copy that failed, a full disk most likely. Chosen.
PAUSE_S: Final = 30.0
CLEAR_EVERY_S: Final = 60.0


class Copies:
    """A node's copies. All methods but `path_of` wait for the disk: for worker threads. state_dir: the data folder; None: nothing is copied."""

    def __init__(self, state_dir: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._has_folder = state_dir is not None
        self._store = AdapterStore(state_dir / FOLDER_NAME if state_dir is not None else None, keep_s=KEEP_S)
        self._clock = clock
        self._paused_until_s = self._cleared_s = float("-inf")
        self._is_failing = False

    def path_of(self, content_hash: str) -> str:
        """Return the path of this content's copy, "" for none. From any thread, without waiting."""
        return self._store.path_of(content_hash)

    def make(self, content_hash: str, path: str, wanted: Iterable[str]) -> None:
        """Copy an adapter if there is room. Raises AdapterRejected (`changed`) if its files have changed.

        content_hash: of the files in the folder `path`. wanted: contents whose copies must not be deleted to make room.
        """
        if not self._has_folder or self._is_kept(content_hash, path) or self._clock() < self._paused_until_s:
            return
        try:
            self._store.keep({content_hash, *wanted})
            self._store.copy(content_hash, Path(path))
            self._is_failing = False
        except (InvalidRequest, OSError) as error:
            if isinstance(error, InvalidRequest) and error.code == "changed":
                raise AdapterRejected(
                    "The adapter's files changed while they were copied. Load it again.", code="changed"
                ) from error
            self._paused_until_s = self._clock() + PAUSE_S
            log.log(
                logging.DEBUG if self._is_failing else logging.WARNING,
                "adapters are served without copies for now: %s",
                error,
            )
            self._is_failing = True

    def make_missing(self, served: Iterable[AdapterRecord], budget_s: float) -> None:
        """Copy the served adapters that have no copy yet; begin no copy after `budget_s`."""
        started_s = self._clock()
        records = list(served)
        wanted = {record.content_hash for record in records}
        self._clear(wanted, started_s)
        for record in records:
            if self._clock() - started_s >= budget_s:
                return
            with suppress(AdapterRejected):  # the watch of its folder sees the change, too
                self.make(record.content_hash, record.path, wanted)

    def _clear(self, wanted: Collection[str], now: float) -> None:
        """Delete copies of adapters out of service, once every CLEAR_EVERY_S."""
        if now - self._cleared_s >= CLEAR_EVERY_S:
            self._cleared_s = now
            with suppress(OSError):  # the next copy reports the fault
                self._store.keep(wanted)

    def _is_kept(self, content_hash: str, path: str) -> bool:
        """Return whether an adapter needs no copy: it has one, or it lies in a store, whose folders are named by content and never rewritten."""
        return Path(path).name == content_hash or bool(self.path_of(content_hash))
