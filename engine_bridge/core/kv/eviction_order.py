"""In which order the device's blocks of expected sessions are evicted: after all others, and the most deserving sessions' blocks last.

The engine evicts first the blocks that were freed first. A request that ends leaves its blocks behind all others, even behind the blocks of
expected sessions, though its own session will not ask again while its user reads the answer. So the blocks of expected sessions are put in order
again; but moving a block takes the engine's thread some time, and there may be many. Last in the order are the blocks on the device of requests
that wait for more of their KV: these blocks are not held by a running request either.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_bridge.core.kv.cache_moves import Refresh
from engine_bridge.policy.kv.kv_layout import Entry

# Blocks that may be moved in a second. Chosen: 1.3% of the engine's thread, which takes 1.3 µs to find and move one (measured, vLLM's block pool).
BLOCKS_PER_S = 10_000
# After this many moved blocks the engine gets its thread back: 3 ms. The blocks of one session are moved together. Chosen.
MOST_AT_ONCE = 2_000
# Seconds between two looks at the order, because blocks that are cut off or preempted cause no event.
LOOK_EVERY_S = 0.5


Entries = Sequence[Entry]
"""The blocks of a prefix, of all groups of layers."""


@dataclass(frozen=True, slots=True)
class Resident:
    """The leading blocks of a prefix that the device holds, without a gap; `num_unused` of them belong to no running request."""

    num_blocks: int
    num_unused: int


class Device(Protocol):
    """The device's prefix cache, for reading only."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the whole device."""

    def num_free_blocks(self) -> int:
        """Return the number of blocks that no running request holds, whether they hold cached KV or not."""
        ...

    def resident(self, entries: Entries, limit: int) -> Resident:
        """Return how many of the first `limit` of these blocks are on the device without a gap, from the first one on."""
        ...

    def holds(self, entries: Entries) -> Sequence[bool]:
        """Return of each of these blocks whether it is on the device."""
        ...

    def num_evicted_before(self, entries: Collection[Entry], limit: int) -> int | None:
        """Return how many other blocks the engine evicts before the first of these, which running requests may hold.

        Returns:
            At most `limit`; None if one of these blocks is no longer on the device.
        """


class EvictionOrder:
    """Decides when blocks of expected sessions are moved in the order of eviction, and which blocks.

    Attributes:
        due_s: the time from which some may be moved again.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.due_s = -math.inf
        self._is_disturbed = False
        self._ended_s = -math.inf  # when the last round ended
        # Blocks still to be moved in this round, the least deserving first.
        self._pending: deque[tuple[Entries, int]] = deque()
        # Of each prefix that a round has put last, the block that is evicted first: of the last complete round, and of the round under way.
        self._first_kept: list[bytes] = []
        self._first_moved: list[bytes] = []
        self._is_loss_told = False
        self._waiting: dict[str, Refresh] = {}  # by request id
        self._waiting_blocks: Counter[bytes] = Counter()
        self._awaited: dict[str, int] = {}  # by id of a waiting request: the blocks that it will take
        self._num_awaited = 0  # the sum of these

    @property
    def num_waiting_blocks(self) -> int:
        """The number of blocks on the device for requests that wait. A block that several of them begin with counts once."""
        return len(self._waiting_blocks)

    @property
    def num_awaited_blocks(self) -> int:
        """The number of blocks that waiting requests will take when they start, including cached blocks already on the device."""
        return max(self._num_awaited, self.num_waiting_blocks)

    @property
    def waiting_blocks(self) -> Collection[Entry]:
        """The blocks on the device of requests that wait, of which the counting above speaks."""
        return self._waiting_blocks.keys()

    @property
    def is_owed(self) -> bool:
        """Whether blocks are to be moved as soon as the pace allows."""
        return self._is_disturbed or bool(self._pending)

    def awaits(self, request_id: str, num_blocks: int) -> None:
        """Note that a request waits, and that it will take this many blocks when it starts."""
        self._num_awaited += num_blocks - self._awaited.pop(request_id, 0)
        self._awaited[request_id] = num_blocks

    def came(self, request_id: str, entries: Entries) -> Refresh | None:
        """Note that a request waits, or that more of the KV that it needs has come.

        Returns:
            The move that keeps its blocks on the device; None if it has no block there.
        """
        self._let_go(request_id)
        num_there = self._device.resident(entries, len(entries)).num_blocks
        if not num_there:
            return None
        self._waiting[request_id] = kept = Refresh(list(entries[:num_there]), num_there)
        self._waiting_blocks.update(kept.entries)
        return kept

    def left(self, request_id: str) -> None:
        """Note that the request no longer waits."""
        self._num_awaited -= self._awaited.pop(request_id, 0)
        self._let_go(request_id)

    def _let_go(self, request_id: str) -> None:
        """Keep no block for this request any longer."""
        kept = self._waiting.pop(request_id, None)
        for block in kept.entries if kept is not None else ():
            self._waiting_blocks[block] -= 1
            if not self._waiting_blocks[block]:
                del self._waiting_blocks[block]

    def disturb(self) -> None:
        """Note that other blocks were put behind the ones of expected sessions."""
        self._is_disturbed = True

    def is_due(self, now: float, *, is_busy: bool = True) -> bool:
        """Return whether blocks are to be moved now. is_busy: whether requests or other work want the engine's thread."""
        if not is_busy and self.is_owed:
            return True
        return now >= self.due_s and (self.is_owed or now >= self._ended_s + LOOK_EVERY_S)

    def num_unexpected(self, limit: int) -> int:
        """Return how many of the next `limit` blocks that the engine would evict may be taken for a guess.

        These are the blocks in front of all that were put last. Blocks of requests that have ended since lie behind those; so if there are fewer
        than `limit`, the order is to be put right.
        """
        if not self._first_kept or limit <= 0:
            return limit
        num = self._device.num_evicted_before(self._first_kept, limit) or 0
        if num < limit:
            self.disturb()
        return num

    def has_lost(self) -> bool:
        """Return whether the engine has taken some of the blocks that were put last. A loss is reported once in a round."""
        if self._is_loss_told or self._device.num_evicted_before(self._first_kept, 0) is not None:
            return False
        self._is_loss_told = True
        self.disturb()
        return True

    def moves(self, shares: Sequence[tuple[Entries, int]], now: float) -> list[Refresh]:
        """Return the moves to carry out now, one after the other.

        shares: blocks of expected sessions and how many of these are wanted on the device, the most deserving first. A round that is under way is
        finished first with the shares that it began with.
        """
        if not self._pending:
            self._is_disturbed, self._first_moved = False, []
            waiting = {kept.entries[-1]: (kept.entries, kept.num_blocks) for kept in self._waiting.values()}
            self._pending.extend((*reversed(shares), *waiting.values()))
        moves, num_moved = [], 0
        while self._pending and num_moved < MOST_AT_ONCE:
            entries, num_wanted = self._pending.popleft()
            num_there = self._device.resident(entries, num_wanted).num_blocks
            if num_there:
                moves.append(Refresh(entries, num_there))
                num_moved += num_there
        self._first_moved += [move.entries[move.num_blocks - 1] for move in moves]
        if not self._pending:
            # Not earlier: the blocks that a round moves last keep their old places until then.
            self._first_kept, self._is_loss_told, self._ended_s = self._first_moved, False, now
        self.due_s = now + num_moved / BLOCKS_PER_S
        return moves
