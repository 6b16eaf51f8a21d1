"""How much work each request of a queue waits for, by order of arrival. Pure."""

from __future__ import annotations

import math
from itertools import accumulate

# Places in one block. Chosen: with 10,000 that wait, a look at all blocks takes as long as one at a block's places.
BLOCK = 128
GONE = -math.inf


class _Block:
    """Of BLOCK successive places, what each waits for less `raised`, which counts for all of them. most: of them."""

    __slots__ = ("ahead", "most", "num_left", "raised")

    def __init__(self, ahead: list[float], raised: float, most: float, num_left: int) -> None:
        self.ahead, self.raised, self.most, self.num_left = ahead, raised, most, num_left

    def copy(self) -> _Block:
        return _Block(self.ahead.copy(), self.raised, self.most, self.num_left)


class Waits:
    """Requests have places, which count up from 0 as they come; those that have left wait for nothing.

    Costs, with n places between the first and the last that wait: `copy` and changes some n / BLOCK + BLOCK look-ups, 5 to 20 µs; `most_before` as
    many for the first time after a change, then 2 µs.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._shared: set[int] = set()
        """Blocks that another has too."""
        self._num = 0
        self._most_before: list[float] | None = None
        self._at: dict[int, int] = {}

    def copy(self) -> Waits:
        """Another one that begins as this one is. This one must not change as long as the other is used."""
        found = Waits()
        found._blocks, found._num = dict(self._blocks), self._num
        found._shared = set(self._blocks)
        return found

    def append(self, ahead: float) -> int:
        """The next request, which waits for so much. Returns its place."""
        place, self._num = self._num, self._num + 1
        number, at = divmod(place, BLOCK)
        if at == 0:
            self._blocks[number] = _Block([], 0.0, GONE, 0)
        block = self._own(number)
        block.ahead.append(ahead - block.raised)
        block.most = max(block.most, ahead - block.raised)
        block.num_left += 1
        self._most_before = None
        return place

    def remove(self, place: int) -> None:
        number, at = divmod(place, BLOCK)
        block = self._own(number)
        block.ahead[at] = GONE
        block.most = max(block.ahead)
        block.num_left -= 1
        if not block.num_left and len(block.ahead) == BLOCK:
            del self._blocks[number]
        self._most_before = None

    def raise_before(self, place: int, work: float) -> None:
        """Those before it wait for so much more."""
        own, at = divmod(place, BLOCK)
        for number in self._blocks:
            if number < own:
                self._own(number).raised += work
            elif number == own:
                self._raise(self._own(own), 0, at, work)
        self._most_before = None

    def lower_after(self, place: int, work: float) -> None:
        """Those after it wait for so much less."""
        own, at = divmod(place, BLOCK)
        for number in self._blocks:
            if number > own:
                self._own(number).raised -= work
            elif number == own:
                self._raise(self._own(own), at + 1, BLOCK, -work)
        self._most_before = None

    def most_before(self, place: int) -> float:
        """What whoever before it waits longest waits for; GONE if nobody does."""
        number, at = divmod(place, BLOCK)
        if self._most_before is None:
            most = (block.most + block.raised for block in self._blocks.values())
            self._most_before = list(accumulate(most, max, initial=GONE))
            self._at = {each: index for index, each in enumerate(self._blocks)}
        found = self._most_before[self._at[number]]
        block = self._blocks[number]
        return max(found, max(block.ahead[:at], default=GONE) + block.raised)

    def _own(self, number: int) -> _Block:
        """The block, to be written to."""
        if number in self._shared:
            self._shared.discard(number)
            self._blocks[number] = self._blocks[number].copy()
        return self._blocks[number]

    def _raise(self, block: _Block, begin: int, end: int, work: float) -> None:
        block.ahead[begin:end] = [each + work for each in block.ahead[begin:end]]
        block.most = max(block.ahead)
