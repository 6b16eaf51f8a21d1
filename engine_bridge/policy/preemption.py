"""Who gives up device memory when the next step's KV does not fit, how each gets it back, and who starts when there is room. Pure.

`Preemption` puts together an order (who goes first) and a choice of way (swap or recompute); `POLICIES` has the paper's and the baselines. A
`StartRule` chooses between the swapped and the waiting.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from engine_bridge.policy.costs import Way


def fair_priority(waited_s: float, num_tokens: int, weight: float = 1.0) -> float:
    """Seconds per token since the request first came; higher goes first. Short ones rise fast, and everyone rises while waiting.

    Source: AdaptiveLLM §3.5. Departs in the weight, a tenant's; 1 is the paper's.
    """
    return weight * max(waited_s, 0.0) / max(num_tokens, 1)


# -- who is preempted --------------------------------------------------------------------------------------------------


class RunningFacts(Struct, frozen=True, kw_only=True):
    """A request on the device.

    urgency: the client's `priority` as vLLM has it: lower is more urgent. fairness: `fair_priority`. started_s: when it last began to run.
    num_blocks: that come free if it goes, without those that others share. swap_s, split_s, recompute_s: to have its KV back, None where a way
    is not possible; `costs.SwapOrRecompute` predicts them. num_host_blocks: that swapping it takes in host memory beyond what is saved.
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


# -- who starts --------------------------------------------------------------------------------------------------------


class Queued(Struct, frozen=True, kw_only=True):
    """A request that was swapped out, or waits for a prefill. num_blocks: that it needs free on the device to run.

    urgency and fairness as in `RunningFacts`.
    """

    request_id: str
    fairness: float
    num_blocks: int
    urgency: int = 0


class Source(enum.Enum):
    SWAPPED = "swapped"
    WAITING = "waiting"
    NOBODY = "nobody"


class StartDecision(Struct, frozen=True):
    """Who starts, the first to start first. The means are those of the sets that fit, 0 for an empty one, as in the paper."""

    source: Source
    request_ids: tuple[str, ...]
    swapped_priority: float
    waiting_priority: float
    reason: str


class StartRule(Protocol):
    def choose(
        self, swapped: Sequence[Queued], waiting: Sequence[Queued], num_free_blocks: int, num_free_slots: int
    ) -> StartDecision:
        """Which of the two sets goes on the device now; slots are how many more may run."""
        ...


@dataclass(frozen=True, slots=True)
class MeanPriority:
    """The set that fits and has the higher mean priority starts; with equal ones the swapped, which need no prefill.

    A set takes the first in line as long as they fit, and stops at the first that does not: passing it by would let small ones keep a large one
    out. Source: AdaptiveLLM Algorithm 2, which does not say how a set is filled.
    """

    def choose(
        self, swapped: Sequence[Queued], waiting: Sequence[Queued], num_free_blocks: int, num_free_slots: int
    ) -> StartDecision:
        fit_swapped = fitting(swapped, num_free_blocks, num_free_slots)
        fit_waiting = fitting(waiting, num_free_blocks, num_free_slots)
        swapped_mean, waiting_mean = _mean(fit_swapped), _mean(fit_waiting)
        if fit_swapped and (swapped_mean >= waiting_mean or not fit_waiting):
            ids, source = fit_swapped, Source.SWAPPED
        else:
            ids, source = fit_waiting, Source.WAITING if fit_waiting else Source.NOBODY
        reason = "higher mean priority" if ids else "nothing fits" if swapped or waiting else "nobody waits"
        return StartDecision(source, tuple(r.request_id for r in ids), swapped_mean, waiting_mean, reason)


@dataclass(frozen=True, slots=True)
class KeepsRoom:
    """Like `MeanPriority`, but room is kept for the first swapped one that does not fit, once its priority is above what would start instead.

    Without that, waiting small requests can fill every gap for as long as they keep coming, since what does not fit counts for nothing in the
    comparison. Ours.
    """

    rule: StartRule = MeanPriority()

    def choose(
        self, swapped: Sequence[Queued], waiting: Sequence[Queued], num_free_blocks: int, num_free_slots: int
    ) -> StartDecision:
        decision = self.rule.choose(swapped, waiting, num_free_blocks, num_free_slots)
        if decision.source is not Source.WAITING or not swapped:
            return decision
        first = min(swapped, key=_place)
        is_stuck = not fitting([first], num_free_blocks, num_free_slots)
        if not is_stuck or first.fairness <= decision.waiting_priority:
            return decision
        reason = f"room is kept for {first.request_id}"
        return StartDecision(Source.NOBODY, (), first.fairness, decision.waiting_priority, reason)


def fitting(queued: Sequence[Queued], num_free_blocks: int, num_free_slots: int) -> list[Queued]:
    """The first in line that fit together, most urgent first, then by priority."""
    found: list[Queued] = []
    for request in sorted(queued, key=_place):
        if len(found) >= num_free_slots or request.num_blocks > num_free_blocks:
            break
        num_free_blocks -= request.num_blocks
        found.append(request)
    return found


def _place(request: Queued) -> tuple[int, float, str]:
    return (request.urgency, -request.fairness, request.request_id)


def _mean(queued: Sequence[Queued]) -> float:
    return sum(request.fairness for request in queued) / len(queued) if queued else 0.0
