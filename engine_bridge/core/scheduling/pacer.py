"""How long the next step may be, as `policy.scheduling.pacing` says, for the requests that run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.policy.scheduling.pacing import StepPace, efficient_prefill_tokens, pace

Progress = tuple[str, int, int]
"""A running request: its id, its tokens (prompt and answer), and how many of them are computed. A tuple: there is one for each in each step."""


class StepBounds(Struct, frozen=True, gc=False):
    """The bounds of a step.

    Attributes:
        num_tokens: of the whole step.
        chunk_tokens: of each prompt under way at most; None: no bound but the step's.
        num_long: prompts under way that have so many tokens left or more.
    """

    num_tokens: int
    chunk_tokens: int | None
    num_long: int = 1


@dataclass(slots=True)
class Pacer:
    """Bounds steps. table: the time that steps take. target_s: how long one may take. most_tokens: the engine's bound."""

    table: StepTable
    target_s: float
    most_tokens: int
    _efficient_tokens: int = field(init=False)
    """Tokens of prompts with which steps beside decodes have done the most work of late."""

    def __post_init__(self) -> None:
        self._efficient_tokens = self.most_tokens

    def look(self, running: Sequence[Progress], bound_s: float = math.inf) -> StepPace:
        """Return the pace of the coming step. bound_s: the time that it may take, as for `pace` in `policy.scheduling.pacing`."""
        num_decodes = num_context = 0
        under_way = []
        for _, num_tokens, num_computed in running:
            num_context += num_computed
            if num_tokens - num_computed > 1:
                under_way.append(num_tokens - num_computed)
            else:
                num_decodes += 1
        most_tokens = self.most_tokens
        if num_decodes:
            most_tokens = self._efficient_tokens = efficient_prefill_tokens(
                self.table, num_decodes, num_context, most_tokens, self._efficient_tokens
            )
        return pace(self.table, self.target_s, num_decodes, num_context, under_way, most_tokens, bound_s)

    def bounds(self, step: StepPace, num_running: int, num_starting_tokens: int) -> StepBounds:
        """Return the step's bounds. num_starting_tokens: of prompts that begin in this step.

        The engine gives each request all the tokens that it can use, one after the other. So prompts under way are bounded beside answers: one that
        stands behind such a prompt would get no token until the prompt is computed. And beside prompts that begin, for the same reason.
        """
        num_decodes = max(num_running - len(step.under_way), 0)
        num_tokens = min(step.prefill_tokens + num_decodes, self.most_tokens)
        if step.under_way and (num_decodes or num_starting_tokens):
            starting = min(num_starting_tokens, step.starting_tokens)
            chunk_tokens = step.chunk_tokens(num_tokens - num_decodes - starting)
            num_long = sum(left >= chunk_tokens for left in step.under_way)
            return StepBounds(num_tokens, chunk_tokens, num_long)
        return StepBounds(num_tokens, None)
