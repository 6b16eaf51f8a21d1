"""How much of waiting prompts a step computes. Pure.

vLLM takes as many tokens into a step as fit its budget. Where computing is what takes the time (a CPU, a small GPU), a step with five prompts gives
all of them their first token at its end, and everybody who streams waits for it. Steps that are kept short give the short prompts theirs early; the
work is the same. Source: chunked prefill is Sarathi's (Agrawal et al., OSDI 2024); by predicted time, and with who goes first left to the policy,
ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from engine_bridge.policy.costs.costs import StepGrid, StepTable

# Share of a step's prompt tokens that prompts under way keep while others begin. Chosen: they end within twice the time, and nobody starves.
UNDER_WAY_SHARE = 0.5
# Prompts get at least this multiple of what a step's decodes take. Chosen: where those take long, short steps would only repeat them.
MIN_PREFILL_TIMES = 3.0
# A step computes at least so many, however long it takes: with fewer, a CPU's matrix products get slower per token. Chosen.
MIN_PREFILL_TOKENS = 64
# Grid of a table that was not measured ahead. Chosen: corners of what a step may be; real ones correct it.
PREFILL_AXIS = (0, 1, 32, 64, 128, 256, 512, 1024, 2048, 8192)
DECODE_AXIS = (0, 1, 4, 8, 16, 32, 64, 256)
CONTEXT_AXIS = (0, 1024, 8192, 65536, 1 << 20)


class StepPace(Struct, frozen=True, kw_only=True):
    """What a step takes. prefill_tokens: of prompts in all. starting_tokens: of these, of prompts that begin in it."""

    prefill_tokens: int
    starting_tokens: int
    num_prefilling: int

    def chunk_tokens(self, num_starting_tokens: int) -> int:
        """Of each prompt under way at most, when so many tokens of others begin."""
        if not self.num_prefilling:
            return self.prefill_tokens
        left = self.prefill_tokens - min(num_starting_tokens, self.starting_tokens)
        return max(left // self.num_prefilling, 1)


def pace(
    table: StepTable,
    target_s: float,
    num_decodes: int,
    num_context_tokens: int,
    under_way: Sequence[int],
    most_tokens: int,
    bound_s: float = math.inf,
) -> StepPace:
    """As many prompt tokens as are predicted to keep the step within `target_s`, or to take MIN_PREFILL_TIMES what its decodes do.

    Args:
        num_decodes, num_context_tokens: of the step without prompts.
        under_way: tokens that are left of prompts which have begun.
        most_tokens: the engine's own bound.
        bound_s: for which prompts have to wait, whatever its decodes take.
    """
    decodes_s = table.step_s(0, num_decodes, num_context_tokens)
    target_s = min(max(target_s, (1 + MIN_PREFILL_TIMES) * decodes_s), bound_s)
    num = most_prefill_tokens(table, target_s, num_decodes, num_context_tokens, most_tokens)
    kept = min(sum(under_way), max(int(num * UNDER_WAY_SHARE), 1))
    return StepPace(prefill_tokens=num, starting_tokens=num - kept, num_prefilling=len(under_way))


def most_prefill_tokens(
    table: StepTable, target_s: float, num_decodes: int, num_context_tokens: int, most_tokens: int
) -> int:
    """The largest prefill whose step is predicted to last no longer, and MIN_PREFILL_TOKENS at least. Halving: 12 looks for 4,096 tokens."""
    low, high = min(MIN_PREFILL_TOKENS, most_tokens), most_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if table.step_s(middle, num_decodes, num_context_tokens) <= target_s:
            low = middle
        else:
            high = middle - 1
    return low


def table_from(prefills: Sequence[tuple[int, float]], decode_s: float) -> StepTable:
    """A first table from a few steps: (tokens, seconds) of prefills without a context, and the time of a decode.

    A straight line between the smallest and the largest prefill; contexts and companions cost nothing until real steps show what they cost.
    """
    (few, few_s), (many, many_s) = min(prefills), max(prefills)
    per_token_s = max(many_s - few_s, 0.0) / max(many - few, 1)
    seconds = [
        (decode_s if decodes or prefill else 0.0) + prefill * per_token_s
        for prefill in PREFILL_AXIS
        for decodes in DECODE_AXIS
        for _ in CONTEXT_AXIS
    ]
    return StepTable(
        StepGrid(
            num_prefill_tokens=PREFILL_AXIS,
            num_decodes=DECODE_AXIS,
            num_context_tokens=CONTEXT_AXIS,
            seconds=tuple(seconds),
        )
    )
