"""Step times over prefill tokens, decodes and context, from steps of the real engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from engine_bridge.driver.profiling.budget import Budget
from engine_bridge.driver.profiling.requests import CraftedRequests
from engine_bridge.predict.steps import StepSample

# A request's prompt beside the decodes: the sizes begin with this many tokens, each twice the last. Chosen: fewer cost hardly less than one decode.
MIN_PREFILL_TOKENS = 16
# Context of a step: none, then from this many tokens on, each size CONTEXT_FACTOR times the last. Chosen.
MIN_CONTEXT_TOKENS, CONTEXT_FACTOR = 256, 3
# Long prefills take as long as dozens of other steps, so they are measured more rarely: half as often at this many tokens. Chosen.
RARER_FROM_TOKENS = 64
# One visit in this many goes to a point that was measured before: it shows how well the machine repeats itself. Chosen.
REPEAT_EVERY = 4
# The longest step takes at most this share of the time. Chosen: then there is time for all sizes.
MAX_STEP_SHARE = 0.04
# At least this many samples are taken, however long it takes: the regressors need 40, and points on both sides. Chosen.
MIN_SAMPLES = 60
# The share of KV memory for context; the rest is for the KV that the requests write. Chosen.
CONTEXT_SHARE = 0.9
CALIBRATION_TOKENS = (64, 256)
# The most tokens that a decode may write; two steps need two.
DECODE_TOKENS = 8


class Point(NamedTuple):
    """A prefill beside decodes.

    num_context_tokens: the context of all requests of the step together, roughly; the prefill gets the same share of it as each decode.
    """

    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int


class Bounds(NamedTuple):
    """The bounds of a step of the engine."""

    num_seqs: int
    num_batched_tokens: int
    num_kv_tokens: int
    max_model_len: int
    max_prefill_tokens: int


def measure_steps(requests: CraftedRequests, budget: Budget) -> list[StepSample]:
    """Return samples over the whole range that this engine can run, in random order.

    The order is random because a machine that is slow for a while would otherwise leave a feature at the points that were measured then.
    """
    token_s = _prefill_s_per_token(requests)
    most_prefill_tokens = int(MAX_STEP_SHARE * budget.left_s() / token_s)
    bounds = Bounds(
        num_seqs=requests.num_seqs,
        num_batched_tokens=requests.num_batched_tokens,
        num_kv_tokens=int(requests.num_kv_tokens * CONTEXT_SHARE),
        max_model_len=requests.max_model_len,
        max_prefill_tokens=max(most_prefill_tokens, MIN_PREFILL_TOKENS),
    )
    samples: list[StepSample] = []
    for point in visits(bounds, seed=0):
        if budget.is_over() and len(samples) >= MIN_SAMPLES:
            break
        budget.say(f"steps: {point.num_prefill_tokens} tokens beside {point.num_decodes} decodes")
        samples += visit(requests, point)
    return samples


def _prefill_s_per_token(requests: CraftedRequests) -> float:
    """Return the rough seconds per token, from the slower of two steps that come after a first, unmeasured one."""
    slowest = 0.0
    for is_measured, num_tokens in ((False, 64), *((True, num) for num in CALIBRATION_TOKENS)):
        num_tokens = min(num_tokens, requests.max_model_len - 1, requests.num_batched_tokens)
        requests.add(0, num_tokens, max_tokens=1)
        seconds = requests.step().seconds
        requests.clear()
        slowest = max(slowest, seconds / num_tokens) if is_measured else 0.0
    return slowest


def visits(bounds: Bounds, seed: int) -> Iterator[Point]:
    """Yield the corners of the range, then its other points; repeats in between; and all of it again. Endless."""
    chance = random.Random(seed)
    points = grid(bounds)
    rarities = {point: 1 + point.num_prefill_tokens / RARER_FROM_TOKENS for point in points}
    rest = sorted(points, key=lambda point: chance.random() ** rarities[point], reverse=True)
    ends = corners(points)
    chance.shuffle(ends)
    order = list(dict.fromkeys([*ends, *rest]))
    seen: list[Point] = []
    while True:
        for point in order:
            yield point
            seen.append(point)
            if len(seen) % REPEAT_EVERY == 0:
                yield chance.choice(seen)


def grid(bounds: Bounds) -> list[Point]:
    """Return all points that the engine can run."""
    most_prefill = min(bounds.num_batched_tokens, bounds.max_model_len - 1, bounds.max_prefill_tokens)
    prefills = [0, *_powers(MIN_PREFILL_TOKENS, most_prefill, 2)]
    decodes = [0, *_powers(1, min(bounds.num_seqs, bounds.num_batched_tokens), 2)]
    contexts = [0, *_powers(MIN_CONTEXT_TOKENS, bounds.num_kv_tokens, CONTEXT_FACTOR)]
    points = [Point(*numbers) for numbers in product(prefills, decodes, contexts)]
    return [point for point in points if _is_possible(point, bounds)]


def _is_possible(point: Point, bounds: Bounds) -> bool:
    num_prefill, num_decodes, num_context = point
    num_requests = num_decodes + (num_prefill > 0)
    if not num_requests or num_requests > bounds.num_seqs:
        return False
    return (
        num_prefill + num_decodes <= bounds.num_batched_tokens
        # A decode needs its prompt's last token and the tokens it may write; a prompt needs its own tokens and the first token of its answer.
        and num_context / num_requests + max(num_prefill + 1, 1 + DECODE_TOKENS) <= bounds.max_model_len
        and num_context + num_prefill + 3 * num_decodes <= bounds.num_kv_tokens
    )


def corners(points: Sequence[Point]) -> list[Point]:
    """Return the points with the least and the most of each number, as far as they can be combined."""
    found = set()
    for most in product((False, True), repeat=3):
        # The point that lies furthest in this direction, by its shares of the largest values.
        found.add(max(points, key=lambda point: _reach(point, most, points)))
    return sorted(found)


def _reach(point: Point, most: tuple[bool, ...], points: Sequence[Point]) -> float:
    largest = Point(*(max(values) for values in zip(*points, strict=True)))
    shares = [value / max(limit, 1) for value, limit in zip(point, largest, strict=True)]
    return sum(share if is_most else -share for share, is_most in zip(shares, most, strict=True))


def _powers(first: int, last: int, factor: int) -> list[int]:
    """Return `first`, then sizes each `factor` times as large, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]


def visit(requests: CraftedRequests, point: Point) -> list[StepSample]:
    """Run a point: its decodes alone if it has any, then with its prefill beside them."""
    num_prefill, num_decodes, num_context = point
    num_requests = num_decodes + (num_prefill > 0)
    context = num_context // num_requests // requests.block_size * requests.block_size
    samples = []
    try:
        if num_decodes:
            for _ in range(num_decodes):
                requests.add(context, 1, max_tokens=DECODE_TOKENS)
            requests.step()  # this step computes their prompts' last tokens
            samples.append(requests.step())
        if num_prefill:
            requests.add(context, num_prefill, max_tokens=1)
            samples.append(requests.step())
    finally:
        requests.clear()
    # A step that vLLM could not run as asked (it preempted, or it split the prefill) is as good a sample as any: it names its true work.
    return [sample for sample in samples if sample.num_prefill_tokens or sample.num_decodes]
