"""Who loses its device memory when the next step's KV does not fit, in order."""

from __future__ import annotations

from collections.abc import Sequence

from engine_bridge.policy.preemption import Order, RunningFacts


def by_worth(running: Sequence[tuple[float, RunningFacts]], order: Order) -> list[str]:
    """Running requests, the first victim last. running: (arrived_s, facts), at least one.

    Who came first is nobody's victim: it ends some day, and so does everybody after it. Or two large ones could push each other out for ever.
    """
    _, oldest = min(running, key=lambda each: each[0])
    ranked = sorted((facts for _, facts in running), key=order, reverse=True)
    ranked.remove(oldest)
    return [oldest.request_id, *(facts.request_id for facts in ranked)]
