"""In which order the device's blocks of expected sessions are evicted: after all others, and the most deserving ones' last.

The engine evicts what was freed first. A request that ends leaves its blocks behind everything else, those of expected sessions too, though its own
session will not ask again for as long as somebody reads. So these are put in order again; but moving a block takes the engine's thread some time,
and there may be many. Behind all of them stands what requests have on the device that wait for the rest of their KV: nothing holds that either.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_bridge.core.kv.cache_moves import Refresh
from engine_bridge.core.kv.expected import Hashes

# Blocks that may be moved in a second. Chosen: 1.3% of the engine's thread, which takes 1.3 µs to find and move one (measured, vLLM's block pool).
BLOCKS_PER_S = 10_000
# After so many the engine goes on first: 3 ms. One session's are moved together. Chosen.
MOST_AT_ONCE = 2_000
# The order is looked after this often, as what is cut off or preempted says nothing.
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Resident:
    """The leading blocks of a prefix that the device holds, without a gap; `num_unused` of them belong to no running request."""

    num_blocks: int
    num_unused: int


class Device(Protocol):
    """The device's prefix cache, to look at."""

    @property
    def num_blocks(self) -> int: ...
    def num_free_blocks(self) -> int:
        """That no running request holds, whatever lies in them."""
        ...

    def resident(self, hashes: Hashes, limit: int) -> Resident:
        """How many of the first `limit` of these blocks are on the device, from the first one on."""
        ...

    def num_evicted_before(self, hashes: Collection[bytes], limit: int) -> int | None:
        """How many other blocks the engine evicts before the first of these, which running requests may hold; at most `limit`. None: one of them is
        not there any more."""


class EvictionOrder:
    """When it is time to move them, and which. due_s: when some may be moved again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.due_s = -math.inf
        self._is_disturbed = False
        self._ended_s = -math.inf  # of the last round
        # Still to be moved in this round, the least deserving first.
        self._pending: deque[tuple[Hashes, int]] = deque()
        # Of each that a round has put behind everything else, the block that is evicted first: of the last whole round, and of the one under way.
        self._first_kept: list[bytes] = []
        self._first_moved: list[bytes] = []
        self._is_loss_told = False
        self._waiting: dict[str, Refresh] = {}  # by request id
        self._waiting_blocks: Counter[bytes] = Counter()

    @property
    def num_waiting_blocks(self) -> int:
        """Of requests that wait. What several of them begin with counts once."""
        return len(self._waiting_blocks)

    @property
    def is_owed(self) -> bool:
        """Whether something is to be moved as soon as that may be."""
        return self._is_disturbed or bool(self._pending)

    def came(self, request_id: str, hashes: Hashes) -> Refresh | None:
        """A request waits, or more of what it needs has come. Returns what keeps what the device has of it; None if that is nothing."""
        self.left(request_id)
        num_there = self._device.resident(hashes, len(hashes)).num_blocks
        if not num_there:
            return None
        self._waiting[request_id] = kept = Refresh(list(hashes[:num_there]), num_there)
        self._waiting_blocks.update(kept.hashes)
        return kept

    def left(self, request_id: str) -> None:
        """It waits no more."""
        kept = self._waiting.pop(request_id, None)
        for block in kept.hashes if kept is not None else ():
            self._waiting_blocks[block] -= 1
            if not self._waiting_blocks[block]:
                del self._waiting_blocks[block]

    def disturb(self) -> None:
        """Something else was put behind them."""
        self._is_disturbed = True

    def is_due(self, now: float, *, is_busy: bool = True) -> bool:
        """Whether some are to be moved now. is_busy: others want the engine's thread."""
        if not is_busy and self.is_owed:
            return True
        return now >= self.due_s and (self.is_owed or now >= self._ended_s + LOOK_EVERY_S)

    def num_unexpected(self, limit: int) -> int:
        """Of the next `limit` blocks that the engine would evict, how many a guess may take: those in front of all that was put behind the others.
        What has ended since lies behind these; so if there are fewer than `limit`, the order is to be put right."""
        if not self._first_kept or limit <= 0:
            return limit
        num = self._device.num_evicted_before(self._first_kept, limit) or 0
        if num < limit:
            self.disturb()
        return num

    def has_lost(self) -> bool:
        """Whether the engine has taken some of what was put behind the others. Said once in a round."""
        if self._is_loss_told or self._device.num_evicted_before(self._first_kept, 0) is not None:
            return False
        self._is_loss_told = True
        self.disturb()
        return True

    def moves(self, shares: Sequence[tuple[Hashes, int]], now: float) -> list[Refresh]:
        """What is to be carried out now, one after the other.

        shares: expected sessions' blocks and how many of these are wanted on the device, the most deserving first. Of a round that is under way the
        rest comes first, as it was begun.
        """
        if not self._pending:
            self._is_disturbed, self._first_moved = False, []
            waiting = {kept.hashes[-1]: (kept.hashes, kept.num_blocks) for kept in self._waiting.values()}
            self._pending.extend((*reversed(shares), *waiting.values()))
        moves, num_moved = [], 0
        while self._pending and num_moved < MOST_AT_ONCE:
            hashes, num_wanted = self._pending.popleft()
            num_there = self._device.resident(hashes, num_wanted).num_blocks
            if num_there:
                moves.append(Refresh(hashes, num_there))
                num_moved += num_there
        self._first_moved += [move.hashes[move.num_blocks - 1] for move in moves]
        if not self._pending:
            # Not sooner: those that a round comes to last have their old places until then.
            self._first_kept, self._is_loss_told, self._ended_s = self._first_moved, False, now
        self.due_s = now + num_moved / BLOCKS_PER_S
        return moves
