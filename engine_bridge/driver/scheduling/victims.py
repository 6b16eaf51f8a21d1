"""Who loses its device memory when the next step's KV does not fit: vLLM takes the last that runs, so ours go last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine_bridge.policy.preemption import Order, RunningFacts


def by_worth(
    requests: Sequence[Any],
    facts_of: Callable[[Any], RunningFacts],
    arrived_s: Callable[[Any], float],
    order: Order,
) -> list[Any]:
    """Running requests, the first victim last.

    Who came first is nobody's victim: it ends some day, and so does everybody after it. Or two large ones could push each other out for ever.
    """
    oldest = min(requests, key=arrived_s)
    ranked = sorted(requests, key=lambda request: order(facts_of(request)), reverse=True)
    ranked.remove(oldest)
    return [oldest, *ranked]
