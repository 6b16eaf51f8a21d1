"""Who gives up device memory when the next step's KV does not fit, and how each gets it back. Pure.

`Preemption` puts together an order (who goes first) and a choice of way (swap or recompute); `POLICIES` has the paper's and the baselines. The engine
preempts one at a time, in such an order; each one's way is that of `ways_back.SwapOrRecompute`, and at its restart too if `is_still_right`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from engine_bridge.policy.ways_back import LossDecision, Way

# A way that was chosen when a request was preempted is left once another is predicted to take so many times less. Chosen: what changes between
# the two must be more than the noise of predicting, which is a fifth.
MAX_REGRET = 1.5

# -- who is preempted --------------------------------------------------------------------------------------------------


class RunningFacts(Struct, frozen=True, kw_only=True):
    """A request on the device.

    urgency: the client's `priority` as vLLM has it: lower is more urgent. fairness: `fairness.fair_priority`. started_s: when it last began to run.
    num_blocks: that come free if it goes, without those that others share. swap_s, split_s, recompute_s: to have its KV back, None where a way
    is not possible; `ways_back.SwapOrRecompute` predicts them. num_host_blocks: that swapping it takes in host memory beyond what is saved.
    """

    request_id: str
    fairness: float
    started_s: float
    num_blocks: int
    recompute_s: float
    swap_s: float | None = None
    split_s: float | None = None
    num_host_blocks: int = 0
    urgency: int = 0


class Victim(Struct, frozen=True):
    """expected_s: what the chosen way is predicted to take."""

    request_id: str
    way: Way
    num_blocks: int
    num_host_blocks: int
    expected_s: float


class PreemptionPlan(Struct, frozen=True):
    """Victims in the order to preempt them. None at all if not even everyone would suffice (`is_enough` is False): nothing is to be done then."""

    victims: tuple[Victim, ...]
    num_freed_blocks: int
    expected_s: float
    is_enough: bool


Order = Callable[[RunningFacts], tuple[float, ...]]
"""A sort key: the least goes first."""
Choice = Callable[[RunningFacts, int], Way]
"""The way for a request, given the free blocks of host memory."""


def least_fair_first(request: RunningFacts) -> tuple[float, ...]:
    """Least urgent, then lowest priority. Source: AdaptiveLLM Algorithm 1, line 1; urgency before it is ours."""
    return (-request.urgency, request.fairness, -request.started_s)


def last_in_first_out(request: RunningFacts) -> tuple[float, ...]:
    """vLLM's first-come-first-served order: who began last goes first."""
    return (-request.started_s,)


def cheapest_per_block(request: RunningFacts) -> tuple[float, ...]:
    """Least urgent, then whose KV costs least to have back per block it frees; requests without a block to free last. Ours."""
    ways = [s for s in (request.swap_s, request.split_s, request.recompute_s) if s is not None]
    per_block = min(ways) / request.num_blocks if request.num_blocks > 0 else float("inf")
    return (-request.urgency, per_block, request.fairness)


def cheaper(request: RunningFacts, num_host_blocks: int) -> Way:
    """Swap if host memory has room and it is faster, else recompute. Source: AdaptiveLLM Algorithm 1, lines 4 to 14; a split (E2) as well."""
    if request.num_host_blocks > num_host_blocks:
        return Way.RECOMPUTE
    ways = ((Way.RECOMPUTE, request.recompute_s), (Way.SWAP, request.swap_s), (Way.SPLIT, request.split_s))
    return min(((way, s) for way, s in ways if s is not None), key=lambda item: item[1])[0]


def always_recompute(request: RunningFacts, num_host_blocks: int) -> Way:
    """What vLLM does."""
    return Way.RECOMPUTE


def always_swap(request: RunningFacts, num_host_blocks: int) -> Way:
    """While host memory has room. Source: AdaptiveLLM §4.3, "vLLM_s"."""
    is_possible = request.swap_s is not None and request.num_host_blocks <= num_host_blocks
    return Way.SWAP if is_possible else Way.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Preemption:
    """Victims until the next step fits.

    Source: AdaptiveLLM Algorithm 1. Departs in that nobody goes for nothing: where a later victim makes an earlier one spare, that one stays.
    """

    order: Order
    choose: Choice

    def plan(
        self, running: Sequence[RunningFacts], num_needed_blocks: int, num_host_blocks: int
    ) -> PreemptionPlan:
        """Who goes, so that `num_needed_blocks` more come free.

        Args:
            running: who may be preempted; whoever must stay is left out by the caller.
            num_host_blocks: free in host memory for what is not saved there yet.
        """
        chosen = self._chosen(running, num_needed_blocks)
        if chosen is None:
            return PreemptionPlan((), 0, 0.0, False)
        victims = []
        for request in chosen:
            way = self.choose(request, num_host_blocks)
            num_taken = 0 if way is Way.RECOMPUTE else request.num_host_blocks
            num_host_blocks -= num_taken
            victims.append(
                Victim(request.request_id, way, request.num_blocks, num_taken, _seconds(request, way))
            )
        return PreemptionPlan(
            tuple(victims),
            sum(victim.num_blocks for victim in victims),
            sum(victim.expected_s for victim in victims),
            True,
        )

    def _chosen(self, running: Sequence[RunningFacts], num_needed: int) -> list[RunningFacts] | None:
        """Those that are needed, first victim first; None if all together do not suffice."""
        chosen, num_freed = [], 0
        # The id makes it one order, whatever that of the list.
        for request in sorted(running, key=lambda r: (self.order(r), r.request_id)):
            if num_freed >= num_needed:
                break
            chosen.append(request)
            num_freed += request.num_blocks
        if num_freed < num_needed:
            return None
        return _needed(chosen, num_freed - num_needed)


def _needed(chosen: list[RunningFacts], num_spare: int) -> list[RunningFacts]:
    """Without those that a large victim made spare; of these the one that would go last is let off first."""
    needed = []
    for request in reversed(chosen):
        if request.num_blocks <= num_spare:
            num_spare -= request.num_blocks
        else:
            needed.append(request)
    return needed[::-1]


def _seconds(request: RunningFacts, way: Way) -> float:
    seconds = {Way.RECOMPUTE: request.recompute_s, Way.SWAP: request.swap_s, Way.SPLIT: request.split_s}[way]
    assert seconds is not None, "a way that is not possible was chosen"
    return seconds


POLICIES: dict[str, Preemption] = {
    "cost_aware": Preemption(least_fair_first, cheaper),
    "cheapest": Preemption(cheapest_per_block, cheaper),
    "fair_recompute": Preemption(least_fair_first, always_recompute),
    "fair_swap": Preemption(least_fair_first, always_swap),
    "vllm": Preemption(last_in_first_out, always_recompute),
    "vllm_swap": Preemption(last_in_first_out, always_swap),
}


# -- how one of them comes back ----------------------------------------------------------------------------------------


def is_still_right(way: Way, now: LossDecision) -> bool:
    """Whether a way that was chosen at the preemption is to be gone, by what is predicted at the restart."""
    seconds = {Way.RECOMPUTE: now.recompute_s, Way.SWAP: now.swap_s, Way.SPLIT: now.split_s}[way]
    return seconds is not None and seconds <= MAX_REGRET * now.expected_s
