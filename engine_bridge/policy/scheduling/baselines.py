"""Policies to compare with: one fixed order, in which the first request that does not fit blocks all behind it. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence

from engine_bridge.policy.scheduling.fairness import ByFairness, fair_priority, starts_swapped
from engine_bridge.policy.scheduling.preemption import least_fair_first
from engine_bridge.policy.scheduling.queue_policy import (
    Decision,
    QueuePolicy,
    RoomLeft,
    Running,
    StepRoom,
    Waiting,
    in_order,
    refuse_twice,
    remove,
)


class OneOrder(QueuePolicy):
    """Starts requests in the order of a key that is fixed at arrival; the first that does not fit blocks all behind it.

    Costs: `arrived`, `admitted` and `ended` a binary search and a shift; `decide` one look-up more than the requests that it starts.

    Args:
        key: the least starts first; of equal ones, the request that came earlier.
        minds_priority: whether the key looks at the priority.
    """

    def __init__(self, name: str, key: Callable[[Waiting], float], *, minds_priority: bool = False) -> None:
        self.name, self.minds_priority, self._key = name, minds_priority, key
        self._order: list[tuple[float, float, str]] = []
        self._keys: dict[str, tuple[float, float, str]] = {}

    def arrived(self, facts: Waiting, now: float) -> None:
        """Queue a request. Raises ValueError if it is known."""
        refuse_twice(facts, self._keys)
        key = self._keys[facts.request_id] = (self._key(facts), facts.arrived_s, facts.request_id)
        insort(self._order, key)

    def admitted(self, request_id: str, now: float) -> None:
        """Take a request that starts out of the queue."""
        remove(self._order, self._keys.pop(request_id))

    def ended(self, request_id: str) -> None:
        """Take a request that ended out of the queue, if it waits."""
        if request_id in self._keys:
            self.admitted(request_id, 0.0)

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        """Start the first requests of the order, up to the first that does not fit."""
        chosen, deferred = in_order((key[-1] for key in self._order), waiting, RoomLeft(room))
        return Decision(tuple(facts.request_id for facts in chosen), deferred)


class Fair(QueuePolicy):
    """The highest waiting time over length first, among swapped-out requests or among the others: the set that is more urgent on average.

    Each set holds the requests that fit.

    Source: AdaptiveLLM §3.5 and Algorithm 2. Its choice of "as many as possible" is taken as the order of urgency until a request does not fit: if
    that request were skipped, smaller ones could keep it out for ever. No bound on waiting: under lasting overload short requests always catch up
    with long ones.
    """

    name = "fair"
    victim_order = staticmethod(least_fair_first)
    minds_priority = True

    def __init__(self) -> None:
        self._sets = {True: ByFairness(), False: ByFairness()}  # by is_swapped
        self._facts: dict[str, Waiting] = {}

    def arrived(self, facts: Waiting, now: float) -> None:
        """Queue a request. Raises ValueError if it is known."""
        refuse_twice(facts, self._facts)
        self._facts[facts.request_id] = facts
        self._sets[facts.is_swapped].add(facts.request_id, facts.arrived_s, facts.size_tokens)

    def admitted(self, request_id: str, now: float) -> None:
        """Take a request that starts out of its set."""
        facts = self._facts.pop(request_id)
        self._sets[facts.is_swapped].remove(request_id, facts.arrived_s, facts.size_tokens)

    def ended(self, request_id: str) -> None:
        """Take a request that ended out of its set, if it waits."""
        if request_id in self._facts:
            self.admitted(request_id, 0.0)

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        """Start the requests of the more urgent set."""
        swapped, why_swapped = in_order(self._sets[True].order(now), waiting, RoomLeft(room))
        fresh, why_fresh = in_order(self._sets[False].order(now), waiting, RoomLeft(room))
        is_swapped = starts_swapped(_urgencies(swapped, now), _urgencies(fresh, now))
        chosen = swapped if is_swapped else fresh
        return Decision(tuple(facts.request_id for facts in chosen), why_swapped | why_fresh)


def _urgencies(chosen: Sequence[Waiting], now: float) -> list[float]:
    return [fair_priority(now - facts.arrived_s, facts.size_tokens) for facts in chosen]
