"""Who loses its device memory when the next step's KV does not fit, in order."""

from __future__ import annotations

from collections.abc import Sequence

from engine_bridge.core.scheduling.pacer import Progress
from engine_bridge.policy.scheduling.preemption import Order, RunningFacts


def most_new_blocks(running: Sequence[Progress], step_tokens: int, block_size: int) -> int:
    """Blocks that a step may have to find for those who run: nobody is preempted while so many are free.

    step_tokens: that it computes at most. Each request computes all that it has, and a token at least.
    """
    num_blocks = 0
    for _, num_tokens, num_computed in running:
        num_new = min(max(num_tokens - num_computed, 1), step_tokens)
        num_blocks += -(-(num_computed + num_new) // block_size) + -num_computed // block_size
    return num_blocks


def by_worth(running: Sequence[tuple[float, RunningFacts]], order: Order) -> list[str]:
    """Running requests, the first victim last. running: (arrived_s, facts), at least one.

    Who came first is nobody's victim: it ends some day, and so does everybody after it. Or two large ones could push each other out for ever.
    """
    _, oldest = min(running, key=lambda each: each[0])
    ranked = sorted((facts for _, facts in running), key=order, reverse=True)
    ranked.remove(oldest)
    return [oldest.request_id, *(facts.request_id for facts in ranked)]
