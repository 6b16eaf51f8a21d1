"""Which reads of one source go first: those that a request waits for. A read for a request that may come goes on while there is none of these.

Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class ReadTurns:
    """The reads of one source that are under way."""

    def __init__(self) -> None:
        self.under_way: set[Turn] = set()
        self.news = asyncio.Event()
        """Set once, when a read that gave way may have its turn; another event then takes its place."""

    def settle(self) -> None:
        """Let reads look again, because one has ended, or because a request now waits for a read that gave way."""
        self.news.set()
        self.news = asyncio.Event()


class Turn:
    """One read's turn, within a `with` statement that lasts as long as the read.

    Args:
        turns: of its source.
        gives_way: returns whether no request waits for the read. The answer may change at any time; `settle` then tells the others.
    """

    def __init__(self, turns: ReadTurns, gives_way: Callable[[], bool]) -> None:
        self._turns, self.gives_way = turns, gives_way

    def __enter__(self) -> Turn:
        self._turns.under_way.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.under_way.discard(self)
        self._turns.settle()

    @property
    def is_now(self) -> bool:
        """Whether the read may go on with its next portion."""
        return not self.gives_way() or all(each.gives_way() for each in self._turns.under_way)

    async def wait(self) -> None:
        """Wait until the read may go on."""
        while not self.is_now:
            await self._turns.news.wait()
