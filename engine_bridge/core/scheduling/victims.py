"""Which requests lose their device memory when the next step's KV does not fit, in order."""

from __future__ import annotations

from collections.abc import Sequence

from engine_bridge.core.scheduling.pacer import Progress
from engine_bridge.policy.scheduling.preemption import Order, RunningFacts


def most_new_blocks(running: Sequence[Progress], step_tokens: int, block_size: int) -> int:
    """Return the most blocks that a step may need for running requests: no request is preempted while this many are free.

    step_tokens: the most tokens that the step computes. Each request computes all that it has, and a token at least.
    """
    num_blocks = 0
    for _, num_tokens, num_computed in running:
        num_new = min(max(num_tokens - num_computed, 1), step_tokens)
        num_blocks += -(-(num_computed + num_new) // block_size) + -num_computed // block_size
    return num_blocks


def by_worth(running: Sequence[tuple[float, RunningFacts]], order: Order) -> list[str]:
    """Return the ids of running requests, the first victim last. running: (arrived_s, facts), at least one.

    The oldest request is never a victim: it ends some day, and so does every request after it. Otherwise two large ones could push each other out
    for ever.
    """
    _, oldest = min(running, key=lambda each: each[0])
    ranked = sorted((facts for _, facts in running), key=order, reverse=True)
    ranked.remove(oldest)
    return [oldest.request_id, *(facts.request_id for facts in ranked)]
