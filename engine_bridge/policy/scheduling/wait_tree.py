"""How much work each request of a queue waits for, by order of arrival. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import add

# Places in one block. Chosen: with 10,000 that wait, a look at all blocks takes as long as one at a block's places.
BLOCK = 128
GONE = -math.inf


class Waits:
    """The waits of requests, which have places that count up from 0 as they come; requests that have left wait for nothing.

    The wait of a place is stored in two parts: its own, and the amount by which its block was raised as a whole.

    Costs, with n places between the first and the last that wait: `copy` and changes some n / BLOCK + BLOCK look-ups, 2 to 10 µs with 10,000;
    `are_within` the same number for the first time after a change, then 2 µs at most.
    """

    def __init__(self) -> None:
        # By the block's number. A list in here never changes, because copies share it.
        self._ahead: dict[int, list[float]] = {}
        self._most: dict[int, float] = {}
        self._raised: dict[int, float] = {}
        self._num_left: dict[int, int] = {}
        self._num = 0
        self._most_before: list[float] | None = None
        self._index: dict[int, int] | None = None
        """How many blocks precede each block; shared by copies, too."""

    def copy(self) -> Waits:
        """Return another queue that begins as this one is."""
        found = Waits()
        found._ahead, found._most = self._ahead.copy(), self._most.copy()
        found._raised, found._num_left = self._raised.copy(), self._num_left.copy()
        found._num, found._most_before, found._index = self._num, self._most_before, self._index
        return found

    def append(self, ahead: float) -> int:
        """Add the next request, which waits for `ahead`, and return its place."""
        place, self._num = self._num, self._num + 1
        number = place // BLOCK
        if place % BLOCK == 0:
            self._ahead[number], self._most[number] = [], GONE
            self._raised[number], self._num_left[number] = 0.0, 0
            self._index = None
        own = ahead - self._raised[number]
        self._ahead[number] = [*self._ahead[number], own]
        self._most[number] = max(self._most[number], own)
        self._num_left[number] += 1
        self._most_before = None
        return place

    def remove(self, place: int) -> None:
        """Remove the request at this place: it waits for nothing any more."""
        number, at = divmod(place, BLOCK)
        ahead = self._ahead[number].copy()
        ahead[at] = GONE
        self._num_left[number] -= 1
        if not self._num_left[number] and len(ahead) == BLOCK:
            for kept in (self._ahead, self._most, self._raised, self._num_left):
                del kept[number]
            self._index = None
        else:
            self._ahead[number], self._most[number] = ahead, max(ahead)
        self._most_before = None

    def raise_before(self, place: int, work: float) -> None:
        """Add this work to the waits of all requests before the place."""
        own, at = divmod(place, BLOCK)
        for number in self._raised:
            if number >= own:
                break
            self._raised[number] += work
        if own in self._ahead:
            self._raise(own, 0, at, work)
        self._most_before = None

    def lower_after(self, place: int, work: float) -> None:
        """Take this work off the waits of all requests after the place."""
        own, at = divmod(place, BLOCK)
        for number in reversed(self._raised):
            if number <= own:
                break
            self._raised[number] -= work
        if own in self._ahead:
            self._raise(own, at + 1, BLOCK, -work)
        self._most_before = None

    def are_within(self, limit: float, before: int) -> bool:
        """Return whether no request before this place waits for more than the limit."""
        number, at = divmod(before, BLOCK)
        if self._index is None:
            self._index = {each: index for index, each in enumerate(self._ahead)}
        index, most = self._index[number], self._mosts()
        if most[index] > limit or most[index + 1] <= limit:
            return most[index] <= limit
        return max(self._ahead[number][:at], default=GONE) + self._raised[number] <= limit

    def _mosts(self) -> Sequence[float]:
        """Return the longest wait of all blocks before the first, before the second, and so on, and of all of them."""
        if self._most_before is None:
            tops = map(add, self._most.values(), self._raised.values())
            self._most_before = list(accumulate(tops, max, initial=GONE))
        return self._most_before

    def _raise(self, number: int, begin: int, end: int, work: float) -> None:
        ahead = self._ahead[number].copy()
        ahead[begin:end] = [each + work for each in ahead[begin:end]]
        self._ahead[number], self._most[number] = ahead, max(ahead)
