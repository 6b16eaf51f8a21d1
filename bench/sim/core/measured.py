"""What steps take on a machine that was measured, in place of a data sheet: `overture profile`'s table, or the one that a live engine has learned.

Without adapters: the table knows steps by tokens, decodes and context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from bench.sim.core.hardware import Gpu
from bench.sim.core.models import Model
from bench.sim.core.steps import Chunk, StepCost
from engine_bridge.policy.costs.costs import StepTable


class MeasuredCost(StepCost):
    """As `StepCost`, from a table.

    Args:
        between_s: from the end of one step to the begin of the next, which the table leaves out.
        slowness: what steps take now over what the table says: other tenants' doing. None: 1.
    """

    def __init__(
        self,
        table: StepTable,
        model: Model,
        between_s: float = 0.0,
        slowness: Callable[[], float] | None = None,
    ) -> None:
        # How fast it computes is the table's to say, how much memory it has the node's.
        machine = Gpu("measured", math.inf, math.inf, 0, math.inf, link_share=1.0)
        super().__init__(machine, model)
        self.table = table
        self._between_s, self._slowness = between_s, slowness

    def step_s(
        self, chunks: Iterable[Chunk], num_decodes: int = 0, num_context: int = 0, sum_rank: int = 0
    ) -> float:
        """Raises ValueError for adapters."""
        prompts = list(chunks)
        if sum_rank or any(chunk.rank for chunk in prompts):
            raise ValueError("a step table knows nothing of adapters")
        num_tokens = sum(chunk.num_tokens for chunk in prompts)
        num_context += sum(chunk.num_context for chunk in prompts)
        assert self.table is not None
        seconds = self.table.step_s(num_tokens, num_decodes, num_context)
        return self._between_s + (seconds if self._slowness is None else seconds * self._slowness())
