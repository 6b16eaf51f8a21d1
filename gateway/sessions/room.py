"""Room on the disk: what is deleted for ever makes the file smaller, and a reserve lets that work while the disk is full."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from gateway.errors import GatewayError
from gateway.sessions import pictures, search, transactions
from gateway.sessions.connection import SqliteConnection, is_full, is_index_damaged
from gateway.sessions.database import compact, fold_log, growth_bytes, num_free_pages

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Chosen. Folding the log back lets the file grow by the log's new pages, and frees the log. The log is folded back at 1 MiB
# (`LOG_PAGES`) and one transaction more; where that fails for lack of room, it grows by as much again before the disk is full. So for
# transactions up to 7 MiB this is enough to fold it. Behind larger ones (a body of 16 MiB) it is not, and deletions are only added to the log:
# 120 kB for a text of 1 MB (measured). So this is room for removing more than 100 MB, after which the file can be made smaller.
RESERVE_BYTES: Final = 16 << 20
_SHARE_OF_DISK: Final = 8  # Chosen: at most this part (an eighth) of a small disk.
_NUM_PORTIONS: Final = (
    8  # Chosen: the reserve is given up in portions, so that other programs on the disk find little of it.
)


class Reserve:
    """A file that keeps some of the disk for the time when it is full, because deleting writes before it frees.

    Its methods block: run them in a thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_missed = False

    def give_some(self) -> bool:
        """Free a portion of the reserve; False if nothing is left of it."""
        try:
            held = self._path.stat().st_size
            if held == 0:
                return False
            os.truncate(self._path, max(held - -(-self._full_bytes() // _NUM_PORTIONS), 0))
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                logger.warning("the reserve %s cannot be given up: %s", self._path, error.strerror)
            return False
        logger.warning("the disk is full: a part of the reserve is given up so that something can be deleted")
        return True

    @property
    def room_bytes(self) -> int:
        """Bytes that the disk would have free without the reserve."""
        try:
            return self._path.stat().st_size + self._free_bytes()
        except OSError:
            return 0

    @property
    def is_whole(self) -> bool:
        """Whether the reserve has its full size."""
        try:
            return self._path.stat().st_size >= self._full_bytes()
        except OSError:
            return False

    def take_back(self) -> bool:
        """Fill the reserve up, taking at most half of the free disk; return whether it is whole now."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                full, held = self._full_bytes(), os.fstat(fd).st_size
                if held < full:
                    os.posix_fallocate(fd, 0, max(min(full, held + self._free_bytes() // 2), 1))
            finally:
                os.close(fd)
            reason = None if self.is_whole else "the disk is nearly full"
        except OSError as error:
            reason = error.strerror
        if reason and not self._is_missed:
            logger.warning("the reserve for deleting on a full disk cannot be held whole: %s", reason)
        self._is_missed = reason is not None
        return reason is None

    def _full_bytes(self) -> int:
        disk = os.statvfs(self._path.parent)
        return min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _SHARE_OF_DISK)

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize


def _condemn(conn: sqlite3.Connection, owner: str) -> int:
    """Let the next purge remove all sessions and pictures of an owner, and return the number of sessions.

    From now on this connection overwrites removed texts; otherwise they could be read from the file until other texts take their place.
    """
    conn.execute("PRAGMA secure_delete = ON").fetchall()
    own = "owner = (SELECT row FROM owners WHERE name = ?)"
    conn.execute(f"UPDATE pictures SET given_at = 0 WHERE {own}", (owner,))
    return conn.execute("UPDATE sessions SET deleted_at = 0 WHERE owner = ?", (owner,)).rowcount


def _forget_owner(conn: sqlite3.Connection, owner: str) -> None:
    """Remove an owner's search index, with the words in it, and the owner. What came meanwhile keeps both."""
    keeper = search.find_owner(conn, owner)
    sql = "SELECT 1 FROM sessions WHERE owner = ? UNION SELECT 1 FROM pictures WHERE owner = ?"
    if keeper is None or conn.execute(sql, (owner, keeper.row)).fetchone():
        return
    search.forget(conn, keeper.row)
    conn.execute("DELETE FROM owners WHERE row = ?", (keeper.row,))


class FileRoom:
    """Frees room in the session file, even while the disk is full."""

    def __init__(
        self, writer: SqliteConnection, reader: SqliteConnection, reserve: Reserve, file: Path
    ) -> None:
        self._writer, self._reader, self._reserve, self._file = writer, reader, reserve, file
        self._was_full = False  # The disk was full, and pages freed since then are not yet given back to it.
        self._num_left_free = -1
        """Number of free pages that the last compaction could not give back; -1: compact in any case."""

    async def purge(self, now: float) -> int:
        """Remove for ever the sessions that can no longer be restored and the pictures that no turn has, and return how many.

        Each part is one transaction, so that messages get in between. On a full disk the purge uses the reserve, gives freed pages back to the
        disk, and fills the reserve up once there is room.

        Args:
            now: seconds since the epoch.
        """
        num_purged, is_more = 0, True
        while is_more:
            num, is_more = await self._purge_some(now)
            num_purged += num
        while await self.making(pictures.purge_one, now):
            num_purged += 1
        if self._was_full or not await asyncio.to_thread(lambda: self._reserve.is_whole):
            await self._give_back(shrinks_index=num_purged > 0)
        return num_purged

    async def erase_owner(self, owner: str, now: float) -> int:
        """Remove all that an owner has, for ever and at once, and return the number of sessions. Removed texts are overwritten on the disk.

        The caller must have stopped the owner's turns. Sessions of others that can no longer be restored go as well.
        """
        num_sessions = await self.making(_condemn, owner)
        await self.purge(now)
        await self.making(_forget_owner, owner)
        # Overwritten texts stay in the log until it is folded back, and freed pages stay in the file until it is compacted.
        while await self._writer.run(compact):
            pass
        await self.fold_log()
        return num_sessions

    async def making(self, work: Callable[..., _T], *args: Any) -> _T:
        """Run a transaction that frees room. On a full disk, first fold the log back, then give up portions of the reserve.

        Raises:
            GatewayError: as `SqliteConnection.transact`; `overloaded` if the whole reserve was not enough.
        """
        num_failures = 0
        while True:
            try:
                result = await self._writer.transact(work, *args)
                break
            except GatewayError as error:
                if not is_full(error.__cause__):
                    raise
                num_failures += 1
                if not (num_failures == 1 and await self.fold_log()) and not await self._use_reserve():
                    raise
        if num_failures:
            self._was_full, self._num_left_free = True, -1
            await asyncio.to_thread(self._reserve.take_back)
        return result

    async def give_some(self) -> bool:
        """Give up a portion of the reserve; return False if nothing is left of it. The next purges take it back."""
        return await asyncio.to_thread(self._reserve.give_some)

    async def fold_log(self) -> bool:
        """Fold the log into the file and empty the log; return False if the disk has no room for that."""
        try:
            return await self._writer.run(fold_log)
        except GatewayError as error:
            if not is_full(error.__cause__):
                raise
            return False

    async def _purge_some(self, now: float) -> tuple[int, bool]:
        try:
            return await self.making(transactions.purge_some, now)
        except GatewayError as error:
            if not is_full(error.__cause__) and not is_index_damaged(error.__cause__):
                raise
        self._was_full, self._num_left_free = True, -1
        return await self.making(transactions.purge_barely, now)

    async def _give_back(self, *, shrinks_index: bool) -> None:
        """Give free pages of the file back to the disk, and fill the reserve up as far as the disk has room."""
        try:
            if shrinks_index:
                await self._shrink_index()
            if shrinks_index or await self._writer.run(num_free_pages) != self._num_left_free:
                while await self._writer.run(compact):
                    pass
                self._num_left_free = await self._writer.run(num_free_pages)
        except GatewayError as error:
            if not is_full(error.__cause__):
                raise
            self._num_left_free = -1
            if await self._use_reserve():
                return await self._give_back(shrinks_index=shrinks_index)
        self._was_full = not await asyncio.to_thread(self._reserve.take_back)

    async def _shrink_index(self) -> None:
        """Drop removed texts from the search index, part by part, because the writer has other work, too."""
        for owner in await self._reader.transact(search.indexed_owners):
            is_first = True
            try:
                while await self._writer.transact(search.merge_some, owner, is_first):
                    is_first = False
            except GatewayError as error:
                if not is_index_damaged(error.__cause__):
                    raise

    async def _use_reserve(self) -> bool:
        """Give up as much of the reserve as folding the log back takes, or one portion where the whole reserve is too small for that.

        Folding frees more than it takes. Returns False if there was no reserve left.
        """
        growth = await self._writer.run(partial(growth_bytes, self._file))
        can_fold = growth < await asyncio.to_thread(lambda: self._reserve.room_bytes)
        has_given = False
        while await asyncio.to_thread(self._reserve.give_some):
            has_given = True
            if not can_fold or await self.fold_log():
                break
        return has_given
