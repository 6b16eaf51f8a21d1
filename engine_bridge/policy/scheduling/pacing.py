"""How many tokens of waiting prompts a step computes. Pure.

vLLM takes as many tokens into a step as fit its budget. Where computation takes most of the time (a CPU, a small GPU), a step with five prompts
gives all of them their first token at its end, and every user who streams waits for it. Short steps give short prompts their first token early; the
work is the same, and less where a device can compute prompts while it waits for its memory. Source: chunked prefill is Sarathi's (Agrawal et al.,
OSDI 2024); by predicted time, and with the order left to the policy, ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from engine_bridge.policy.costs.costs import StepGrid, StepTable

# Share of a step's prompt tokens that prompts under way keep while others begin. Chosen: they end within twice the time, and none starves.
UNDER_WAY_SHARE = 0.5
# Prompts get at least this multiple of the time of a step's decodes. Chosen: where decodes take long, short steps would only repeat them.
MIN_PREFILL_TIMES = 3.0
# Prompts are computed at this share of their speed in the largest step at least. Chosen: between two sizes of a table that double the best one
# has 0.7 to 0.8, and what was not measured lately is a tenth off (bench/LOG.md).
MIN_PREFILL_SPEED = 0.6
# Steps change their number of prompt tokens where another does this many times as much work in its time. Chosen: beyond a table's usual error.
LEAST_GAIN = 1.1
# A step computes at least this many prompt tokens, however long it takes: with fewer, a CPU's matrix products get slower per token. Chosen.
MIN_PREFILL_TOKENS = 64
# Grid of a table that was not measured ahead. Chosen: corners of the possible steps; real ones correct it.
PREFILL_AXIS = (0, 1, 32, 64, 128, 256, 512, 1024, 2048, 8192)
DECODE_AXIS = (0, 1, 4, 8, 16, 32, 64, 256)
CONTEXT_AXIS = (0, 1024, 8192, 65536, 1 << 20)


class StepPace(Struct, frozen=True, kw_only=True):
    """The prompt tokens that a step computes.

    Attributes:
        prefill_tokens: of all prompts.
        starting_tokens: the part for prompts that begin in it.
        under_way: tokens that are left of each prompt which has begun.
    """

    prefill_tokens: int
    starting_tokens: int
    under_way: tuple[int, ...] = ()

    def chunk_tokens(self, num_tokens: int) -> int:
        """Return the most tokens of each prompt under way with which all of them take `num_tokens` at most, and one each at least."""
        num_left = len(self.under_way)
        for left in sorted(self.under_way):
            if left * num_left > num_tokens:
                return max(num_tokens // num_left, 1)
            num_tokens -= left
            num_left -= 1
        return max(self.under_way, default=1)


def pace(
    table: StepTable,
    target_s: float,
    num_decodes: int,
    num_context_tokens: int,
    under_way: Sequence[int],
    most_tokens: int,
    bound_s: float = math.inf,
) -> StepPace:
    """Return the pace with the most prompt tokens that keep the step within `target_s`, or that take MIN_PREFILL_TIMES the time of its decodes.

    Args:
        table: predicts the seconds of a step.
        target_s: seconds that a step should take at most.
        num_decodes: requests that decode a token in the step.
        num_context_tokens: tokens in KV that they attend to.
        under_way: tokens that are left of each prompt which has begun.
        most_tokens: the engine's own bound, or fewer that do more work in their time: see `efficient_prefill_tokens`.
        bound_s: seconds that the step may take in any case; prompts wait for that, however long its decodes take.
    """
    decodes_s = table.step_s(0, num_decodes, num_context_tokens)
    target_s = min(max(target_s, (1 + MIN_PREFILL_TIMES) * decodes_s), bound_s)
    num = most_prefill_tokens(table, target_s, num_decodes, num_context_tokens, most_tokens)
    kept = min(sum(under_way), max(int(num * UNDER_WAY_SHARE), 1))
    return StepPace(prefill_tokens=num, starting_tokens=num - kept, under_way=tuple(under_way))


def efficient_prefill_tokens(
    table: StepTable, num_decodes: int, num_context_tokens: int, most_tokens: int, last_tokens: int
) -> int:
    """Return the prompt tokens with which a step beside decodes does the most work in its time, while prompts keep MIN_PREFILL_SPEED.

    Work counts as the seconds that decodes take alone, and a token of a prompt in the largest step beside them: steps without decodes are rare where
    much runs, so what the table says of those is old. A GPU reads the weights and the KV of all decoding requests in each step, and computes some
    hundred prompt tokens in that time: spread over many steps a prompt is nearly free, and holds up no stream. Where each token takes its time, as on
    most CPUs, the largest step does the most.

    Args:
        table: predicts the seconds of a step.
        num_decodes: requests that decode a token in the step.
        num_context_tokens: tokens in KV that they attend to.
        most_tokens: the engine's own bound.
        last_tokens: what this returned last, which stays unless another number does LEAST_GAIN times as much; the bound at first.

    Source: decode-maximal batches are Sarathi's (Agrawal et al., OSDI 2024), whose size is fixed ahead; by a table that real steps correct, ours.
    """
    token_s = table.step_s(most_tokens, num_decodes, num_context_tokens) / most_tokens
    decodes_s = table.step_s(0, num_decodes, num_context_tokens)
    best, most_work, last_work = most_tokens, 0.0, 0.0
    for num in (*table.prefill_sizes(MIN_PREFILL_TOKENS, most_tokens), most_tokens):
        seconds = table.step_s(num, num_decodes, num_context_tokens)
        if not seconds or (num < most_tokens and num * token_s < MIN_PREFILL_SPEED * seconds):
            continue
        work = (num * token_s + decodes_s) / seconds
        if num == last_tokens:
            last_work = work
        if work > most_work:
            best, most_work = num, work
    return best if most_work > LEAST_GAIN * last_work else last_tokens


def most_prefill_tokens(
    table: StepTable, target_s: float, num_decodes: int, num_context_tokens: int, most_tokens: int
) -> int:
    """Return the largest prefill whose step is predicted to take at most `target_s`, and MIN_PREFILL_TOKENS at least.

    Found by halving: 12 look-ups for 4,096 tokens.
    """
    low, high = min(MIN_PREFILL_TOKENS, most_tokens), most_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if table.step_s(middle, num_decodes, num_context_tokens) <= target_s:
            low = middle
        else:
            high = middle - 1
    return low


def table_from(prefills: Sequence[tuple[int, float]], decode_s: float) -> StepTable:
    """Return a first table from a few steps: (tokens, seconds) of prefills without a context, and the seconds of a decode.

    A straight line between the smallest and the largest prefill; contexts and companions cost nothing until real steps show their cost.
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
