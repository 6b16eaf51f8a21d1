"""Whether the session file can be used: a failure is remembered, and the file is checked until it reads well and takes a write again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from gateway.errors import GatewayError
from gateway.sessions.database import open_reader, quick_check

logger = logging.getLogger(__name__)

# Chosen: how long to wait between two looks at a file that has failed. Each reads all of it (2 GB/s when it is cached, measured).
LOOK_AGAIN_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
# Chosen: how long conversations may go into a file that was moved or removed before the log says so.
IN_PLACE_EVERY_S: Final = 10.0


class Health:
    """The state of the session file. One request's failure counts for all, because other parts may be damaged, too."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed = asyncio.Event()
        self._num_failures = 0
        self._opened: tuple[int, int] | None = None
        self.write: Callable[[], Awaitable[object]] | None = None
        """Writes to the file through the connection of all writes, and raises if the disk refuses; None before there is such a connection."""

    @property
    def has_failed(self) -> bool:
        """Whether a request has failed and the file was not checked to be sound since."""
        return self._failed.is_set()

    def opened(self) -> None:
        """Remember which file was opened. This blocks."""
        self._opened = _identity(self._file)

    def note(self, error: sqlite3.Error) -> None:
        """Remember that the file failed a request."""
        if not self._failed.is_set():
            logger.error("the session database has failed (%s); it is tried again until it works", error)
        self._num_failures += 1
        self._failed.set()

    async def watch(self, waits_s: tuple[float, ...] = LOOK_AGAIN_S) -> None:
        """Run until cancelled: when the file has failed, read and write it every now and then, and forget the failure once both succeed.

        A file that was moved, removed or replaced has failed, too: what is open takes all writes, and no later start finds them.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), IN_PLACE_EVERY_S)
            if not self.has_failed and await self._is_in_place():
                continue
            if not self.has_failed:
                self.note(
                    sqlite3.OperationalError(f"{self._file} was moved, removed or replaced: put it back")
                )
            number = 0
            while not await self._works():
                await asyncio.sleep(waits_s[min(number, len(waits_s) - 1)])
                number += 1
            logger.warning("the session database can be read and written again")
            self._failed.clear()

    async def _works(self) -> bool:
        """Return whether the file can be read and written, and no request has failed at it meanwhile."""
        num_before = self._num_failures
        return (
            await self._is_in_place()
            and await self._is_whole()
            and await self._takes_writes()
            and num_before == self._num_failures
        )

    async def _is_in_place(self) -> bool:
        return await asyncio.to_thread(_identity, self._file) == self._opened

    async def _takes_writes(self) -> bool:
        """Return whether the disk takes a write. It may refuse writes although all can be read."""
        try:
            if self.write is not None:
                await self.write()
        except GatewayError:
            return False  # Its cause is in the log.
        except Exception:
            logger.exception("the session database could not be written to")
            return False
        return True

    async def _is_whole(self) -> bool:
        try:
            return await asyncio.to_thread(is_whole, self._file)
        except Exception:
            # An exception would end `watch`, and the file would count as failed for ever.
            logger.exception("the session database could not be looked into")
            return False


def _identity(file: Path) -> tuple[int, int] | None:
    """Return which file has the name, whatever is in it; None if there is none, or the disk does not say."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_whole(file: Path, connect: Callable[[Path], sqlite3.Connection] = open_reader) -> bool:
    """Return whether a new connection can read all of the file, and the file has our tables."""
    try:
        conn = connect(file)
    except sqlite3.Error:
        return False
    try:
        quick_check(conn)
        conn.execute("SELECT 1 FROM sessions, turns, owners LIMIT 1").fetchone()
    except sqlite3.Error:
        return False
    finally:
        conn.close()
    return True
