"""Room on the disk: what is deleted for ever leaves the file smaller, and a full disk has a reserve with which that still works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gateway.errors import GatewayError
from gateway.sessions import search, transactions
from gateway.sessions.connection import SqliteConnection, is_full, is_index_damaged
from gateway.sessions.database import compact, fold_log, growth_bytes, num_free_pages
from gateway.sessions.reserve import Reserve

_T = TypeVar("_T")


class FileRoom:
    """Frees room in the store's file, and does what frees some even where the disk is full."""

    def __init__(
        self, writer: SqliteConnection, reader: SqliteConnection, reserve: Reserve, file: Path
    ) -> None:
        self._writer, self._reader, self._reserve, self._file = writer, reader, reserve, file
        self._was_full = False  # and what was freed since is not yet given back
        self._num_left_free = -1
        """Free pages that the last compaction could not give back; -1: compact in any case."""

    async def purge(self, now: float) -> int:
        """Remove for ever what can no longer be restored; returns how many sessions.

        One transaction a part, so that messages get in between. On a full disk it uses the reserve, gives what it frees back to the disk, and
        takes the reserve back once there is room.
        """
        num_purged, is_more = 0, True
        while is_more:
            num, is_more = await self._purge_some(now)
            num_purged += num
        if self._was_full or not await asyncio.to_thread(lambda: self._reserve.is_whole):
            await self._give_back(shrinks_index=num_purged > 0)
        return num_purged

    async def making(self, work: Callable[..., _T], *args: Any) -> _T:
        """A transaction that frees something: on a full disk it has what folding the log back frees, and then the reserve.

        Raises what ``transact`` raises.
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

    async def fold_log(self) -> bool:
        """Bring what the log holds into the file and make the log empty; False if the disk has no room for that."""
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
        """Make the file smaller by what is free in it, and hold the reserve again as far as the disk has room."""
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
        """Drop from the index what was removed from the tables; part by part, for the writer has other work, too."""
        for owner in await self._reader.transact(search.indexed_owners):
            is_first = True
            try:
                while await self._writer.transact(search.merge_some, owner, is_first):
                    is_first = False
            except GatewayError as error:
                if not is_index_damaged(error.__cause__):
                    raise

    async def _use_reserve(self) -> bool:
        """Give up as much of the reserve as folding the log back takes, which frees more than that; or, where all of it is not enough, a part.

        False if there was none.
        """
        growth = await self._writer.run(partial(growth_bytes, self._file))
        can_fold = growth < await asyncio.to_thread(lambda: self._reserve.room_bytes)
        has_given = False
        while await asyncio.to_thread(self._reserve.give_some):
            has_given = True
            if not can_fold or await self.fold_log():
                break
        return has_given
