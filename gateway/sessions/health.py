"""Whether the session file can be read: the last failure is remembered, and looked into until all of the file reads well again."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.sessions.database import open_reader, quick_check

logger = logging.getLogger(__name__)

# Chosen: how long to wait between two looks at a file that has failed. Each reads all of it (2 GB/s when it is cached, measured).
LOOK_AGAIN_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)


class Health:
    """What is known of the file. A failure of one request is one of all, since nobody knows what else is damaged."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        return self._failed.is_set()

    def note(self, error: sqlite3.Error) -> None:
        """The file failed a request."""
        if not self._failed.is_set():
            logger.error("the session database has failed (%s); it is read again until it is whole", error)
        self._failed.set()

    async def watch(self, waits_s: tuple[float, ...] = LOOK_AGAIN_S) -> None:
        """For ever: once the file has failed, read all of it every now and then, and forget the failure when that succeeds."""
        while True:
            await self._failed.wait()
            number = 0
            while not await self._is_whole():
                await asyncio.sleep(waits_s[min(number, len(waits_s) - 1)])
                number += 1
            logger.warning("the session database can be read again")
            self._failed.clear()

    async def _is_whole(self) -> bool:
        try:
            return await asyncio.to_thread(is_whole, self._file)
        except Exception:
            # Else nobody would look again, and the file would count as failed for ever.
            logger.exception("the session database could not be looked into")
            return False


def is_whole(file: Path, connect: Callable[[Path], sqlite3.Connection] = open_reader) -> bool:
    """Whether a new connection can read all of the file, and it is one of ours."""
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
