"""When the device's blocks of expected sessions are put behind all others in the order of eviction.

The engine evicts what was freed first. A request that ends leaves its blocks behind everything else, those of expected sessions too, though its own
session will not ask again for as long as somebody reads. So these are put in order again; but moving a block takes the engine's thread some time,
and there may be many.
"""

from __future__ import annotations

import math

# Blocks that may be moved in a second. Chosen: 1.3% of the engine's thread, which takes 1.3 µs to find and move one (measured, vLLM's block pool).
BLOCKS_PER_S = 10_000
# The order is looked after this often, as what is cut off or preempted says nothing.
LOOK_EVERY_S = 0.5


class EvictionOrder:
    """Is it time to move them? is_disturbed: something else has been put behind them since. due_s: when they may be moved again."""

    def __init__(self) -> None:
        self.is_disturbed = False
        self.due_s = -math.inf
        self._put_s = -math.inf

    def disturb(self) -> None:
        """Something else was put behind them."""
        self.is_disturbed = True

    def is_due(self, now: float) -> bool:
        """Whether they are to be moved now."""
        return now >= self.due_s and (self.is_disturbed or now >= self._put_s + LOOK_EVERY_S)

    def put(self, num_blocks: int, now: float) -> None:
        """They are in order; so many blocks were moved for it."""
        self.is_disturbed = False
        self._put_s, self.due_s = now, now + num_blocks / BLOCKS_PER_S
