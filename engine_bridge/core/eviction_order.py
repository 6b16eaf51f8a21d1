"""In which order the device's blocks of expected sessions are evicted: after all others, and the most deserving ones' last.

The engine evicts what was freed first. A request that ends leaves its blocks behind everything else, those of expected sessions too, though its own
session will not ask again for as long as somebody reads. So these are put in order again; but moving a block takes the engine's thread some time,
and there may be many. Behind all of them stands what requests have on the device that wait for the rest of their KV: nothing holds that either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_bridge.core.expected import Hashes

# Blocks that may be moved in a second. Chosen: 1.3% of the engine's thread, which takes 1.3 µs to find and move one (measured, vLLM's block pool).
BLOCKS_PER_S = 10_000
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

    def resident(self, hashes: Hashes) -> Resident:
        """How many of these blocks are on the device, from the first one on."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Put the first `num_blocks` of a prefix behind everything else in the order of eviction."""

    hashes: Hashes
    num_blocks: int


class EvictionOrder:
    """When it is time to move them, and which.

    is_disturbed: something else has been put behind them since. due_s: when they may be moved again. num_waiting_blocks: of requests that wait.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.is_disturbed = False
        self.due_s = -math.inf
        self.num_waiting_blocks = 0
        self._put_s = -math.inf
        self._waiting: dict[str, Refresh] = {}  # by request id

    def came(self, request_id: str, hashes: Hashes) -> Refresh | None:
        """A request waits from now on. Returns what keeps what the device has of it; None if that is nothing."""
        num_there = self._device.resident(hashes).num_blocks
        if not num_there:
            return None
        self.num_waiting_blocks += num_there
        self._waiting[request_id] = kept = Refresh(list(hashes[:num_there]), num_there)
        return kept

    def left(self, request_id: str) -> None:
        """It waits no more."""
        kept = self._waiting.pop(request_id, None)
        if kept is not None:
            self.num_waiting_blocks -= kept.num_blocks

    def disturb(self) -> None:
        """Something else was put behind them."""
        self.is_disturbed = True

    def is_due(self, now: float) -> bool:
        """Whether they are to be moved now."""
        return now >= self.due_s and (self.is_disturbed or now >= self._put_s + LOOK_EVERY_S)

    def put(self, shares: Sequence[tuple[Hashes, int]], now: float) -> list[Refresh]:
        """What puts them in order, one after the other. shares: expected sessions' blocks and how many of these are wanted on the device, the most
        deserving first."""
        waiting = [(kept.hashes, kept.num_blocks) for kept in self._waiting.values()]
        moves = list(self._moves([*reversed(shares), *waiting]))
        self.is_disturbed = False
        self._put_s = now
        self.due_s = now + sum(move.num_blocks for move in moves) / BLOCKS_PER_S
        return moves

    def _moves(self, shares: Iterable[tuple[Hashes, int]]) -> Iterable[Refresh]:
        for hashes, num_wanted in shares:
            num_there = min(self._device.resident(hashes[:num_wanted]).num_blocks, num_wanted)
            if num_there:
                yield Refresh(hashes, num_there)
