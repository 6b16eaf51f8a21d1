"""Which request gives up device memory when the next step's KV does not fit, and whether the way back chosen for it is still right. Pure.

The engine preempts one request at a time, in a policy's `victim_order`. `restore_method.SwapOrRecompute` chooses how each gets its KV back, and
that choice holds at its restart if `is_still_right`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from engine_bridge.policy.kv.restore_method import LossDecision, Way

# A way that was chosen when a request was preempted is given up once another is predicted to be this many times faster. Chosen: a change between
# the two must be more than the noise of predicting, which is a fifth.
MAX_REGRET = 1.5


class RunningFacts(Struct, frozen=True, kw_only=True):
    """A request on the device.

    Attributes:
        urgency: the client's `priority` as in vLLM: lower is more urgent.
        fairness: `fairness.fair_priority`.
        started_s: when it last began to run.
    """

    request_id: str
    fairness: float
    started_s: float
    urgency: int = 0


Order = Callable[[RunningFacts], tuple[float, ...]]
"""A sort key: the least is preempted first."""


def least_fair_first(request: RunningFacts) -> tuple[float, ...]:
    """Order requests by least urgent, then lowest priority. Source: AdaptiveLLM Algorithm 1, line 1; urgency before it is ours."""
    return (-request.urgency, request.fairness, -request.started_s)


def is_still_right(way: Way, now: LossDecision) -> bool:
    """Return whether a way that was chosen at the preemption still holds, by the predictions at the restart."""
    seconds = {Way.RECOMPUTE: now.recompute_s, Way.SWAP: now.swap_s}[way]
    return seconds <= MAX_REGRET * min(now.swap_s, now.recompute_s)
