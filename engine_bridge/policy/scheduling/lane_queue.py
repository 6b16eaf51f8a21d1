"""Waiting requests in order of starting: lanes, in a lane tenants, of a tenant requests; and one decision's way through them. Pure."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from msgspec import Struct

from engine_bridge.policy.scheduling.fairness import ByFairness
from engine_bridge.policy.scheduling.queue_policy import (
    DeferReason,
    RoomLeft,
    StepRoom,
    Waiting,
    remove,
)
from engine_bridge.policy.scheduling.quotas import Spare


class QueuedRequest(Struct, frozen=True, gc=False):
    """A waiting request's facts at arrival, and the lane where it is kept."""

    facts: Waiting
    weighted_size: float
    lane: int


class Ordered(Protocol):
    """One tenant's requests of one priority in one lane, and the order in which they start."""

    def __len__(self) -> int: ...

    def add(self, entry: QueuedRequest) -> None:
        """Add a waiting request."""

    def remove(self, entry: QueuedRequest, has_started: bool) -> None:
        """Remove a request. has_started: whether it starts, rather than leaves."""

    def order(self, plan: Plan, aging_s: float) -> Iterator[str]:
        """Yield the ids of all waiting requests, in the order in which they start. Changes nothing.

        Requests that were deferred before the first id is asked for may be left out.
        """
        ...


class Flow:
    """One tenant's requests of one priority in one lane.

    First the requests that were swapped out (a user has half an answer), then the ones that have waited for `aging_s`, by urgency, then the
    smallest.
    """

    def __init__(self) -> None:
        self._small: list[tuple[bool, float, float, str]] = []
        self._urgency = ByFairness()

    def __len__(self) -> int:
        return len(self._small)

    def add(self, entry: QueuedRequest) -> None:
        """Add a waiting request."""
        facts = entry.facts
        insort(self._small, self._key(entry))
        self._urgency.add(facts.request_id, facts.arrived_s, facts.size_tokens)

    def remove(self, entry: QueuedRequest, has_started: bool) -> None:
        """Remove a request. It does not matter whether it starts."""
        facts = entry.facts
        remove(self._small, self._key(entry))
        self._urgency.remove(facts.request_id, facts.arrived_s, facts.size_tokens)

    def _key(self, entry: QueuedRequest) -> tuple[bool, float, float, str]:
        return (
            not entry.facts.is_swapped,
            entry.weighted_size,
            entry.facts.arrived_s,
            entry.facts.request_id,
        )

    def order(self, plan: Plan, aging_s: float) -> Iterator[str]:
        """Yield the ids of all waiting requests, in the order in which they start."""
        given = set()
        for is_fresh, *_, request_id in self._small:
            if is_fresh:
                break
            given.add(request_id)
            yield request_id
        for request_id in self._urgency.order(plan.now, aging_s):
            if request_id not in given:
                given.add(request_id)
                yield request_id
        for *_, request_id in self._small:
            if request_id not in given:
                yield request_id


class Service:
    """Tokens that each tenant was given, over its weight; the tenant with the least is next.

    A tenant that comes back starts at the level of the tenant served last, so that idling saves nothing up. A waiting tenant's count never falls.
    Source: start-time fair queueing (Goyal et al., SIGCOMM 1996) with tokens, as VTC (Sheng et al., OSDI 2024).
    """

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()
        self._level = 0.0

    def waits(self, tenant: str) -> None:
        """Note that one more request of this tenant waits."""
        self._num_waiting[tenant] += 1
        if self._num_waiting[tenant] == 1:
            self._given[tenant] = max(self._given.get(tenant, 0.0), self._level)

    def left(self, tenant: str) -> None:
        """Note that a request of this tenant no longer waits.

        A tenant that is then behind the level is forgotten: it would start there anyway.
        """
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._forget_idle()

    def serve(self, tenant: str, share_tokens: float) -> None:
        """Note that a tenant is given tokens. share_tokens: tokens over the tenant's weight."""
        given = self.of(tenant)
        self._level = max(self._level, given)
        self._given[tenant] = given + share_tokens

    def of(self, tenant: str) -> float:
        """Return the tokens over weight that the tenant was given; the level for an unknown one."""
        return self._given.get(tenant, self._level)

    def _forget_idle(self) -> None:
        """Keep the table to twice the tenants that wait, and some; the tenants that were given the most stay."""
        if len(self._given) <= 2 * len(self._num_waiting) + 1024:
            return
        idle = [tenant for tenant in self._given if tenant not in self._num_waiting]
        idle.sort(key=lambda tenant: (self._given[tenant], tenant))
        for tenant in idle[: len(idle) - 512]:
            del self._given[tenant]


class LaneQueue:
    """A lane's waiting requests, by (priority, tenant), each in a flow that `make_flow` makes of these two.

    `order`: the flows' (priority, tokens given to the tenant, tenant), rising.
    """

    def __init__(self, make_flow: Callable[[int, str], Ordered] = lambda priority, tenant: Flow()) -> None:
        self._make_flow = make_flow
        self.flows: dict[tuple[int, str], Ordered] = {}
        self.order: list[tuple[int, float, str]] = []
        self.num_waiting = 0
        # by tenant and priority: the tokens given, as in `order`
        self._places: dict[str, dict[int, float]] = {}

    def add(self, entry: QueuedRequest, given: float) -> None:
        """Add a waiting request. given: tokens over weight that its tenant was given."""
        priority, tenant = entry.facts.priority, entry.facts.tenant
        flow = self.flows.get((priority, tenant))
        if flow is None:
            flow = self.flows[priority, tenant] = self._make_flow(priority, tenant)
            self._places.setdefault(tenant, {})[priority] = given
            insort(self.order, (priority, given, tenant))
        flow.add(entry)
        self.num_waiting += 1

    def remove(self, entry: QueuedRequest, has_started: bool = False) -> None:
        """Remove a request. has_started: whether it starts, rather than leaves."""
        priority, tenant = entry.facts.priority, entry.facts.tenant
        flow = self.flows[priority, tenant]
        flow.remove(entry, has_started)
        self.num_waiting -= 1
        if not flow:
            del self.flows[priority, tenant]
            places = self._places[tenant]
            remove(self.order, (priority, places.pop(priority), tenant))
            if not places:
                del self._places[tenant]

    def served(self, tenant: str, given: float) -> None:
        """Note that the tenant has been given this much by now."""
        places = self._places.get(tenant, {})
        for priority, before in places.items():
            remove(self.order, (priority, before, tenant))
            insort(self.order, (priority, given, tenant))
            places[priority] = given


class Walk:
    """A lane's requests in the order in which a decision considers them, without the ones that it has chosen already.

    Lowest priority number first; then the tenant that was given least, counting the tokens that this decision gives; then the flow's order.
    """

    def __init__(self, lane: LaneQueue, plan: Plan, aging_s: float) -> None:
        self._plan, self._lane, self._aging_s = plan, lane, aging_s
        # Each waiting tenant has a flow, and few are ever asked: they are taken from the lane's order one by one, as their turn comes.
        self._flows: list[tuple[int, float, str]] = []
        self._num_taken = 0
        self._orders: dict[tuple[int, str], Iterator[str]] = {}
        self.head: Waiting | None = None
        self.advance()

    def advance(self) -> None:
        """Move the head to the next request; None after the last one."""
        self.head = next(iter(self.ahead(1)), None)

    def ahead(self, num: int) -> list[Waiting]:
        """Return the next `num` requests behind the head. The walk does not come back to them."""
        found: list[Waiting] = []
        while self._take():
            priority, given, tenant = self._flows[0]
            now_given = self._plan.given(tenant)
            if now_given > given:
                heapq.heapreplace(self._flows, (priority, now_given, tenant))
                continue
            for request_id in self._order(priority, tenant):
                if request_id not in self._plan.chosen:
                    found.append(self._plan.waiting[request_id])
                    if len(found) == num:
                        return found
            heapq.heappop(self._flows)
        return found

    def _take(self) -> bool:
        """Take flows until the first of the taken ones precedes all others. Return False if there are none."""
        order, flows = self._lane.order, self._flows
        while self._num_taken < len(order) and (not flows or order[self._num_taken] < flows[0]):
            heapq.heappush(flows, order[self._num_taken])
            self._num_taken += 1
        return bool(flows)

    def _order(self, priority: int, tenant: str) -> Iterator[str]:
        flow = (priority, tenant)
        if flow not in self._orders:
            self._orders[flow] = self._lane.flows[flow].order(self._plan, self._aging_s)
        return self._orders[flow]


class Plan:
    """A decision in the making: the room that is left, and the decided requests."""

    def __init__(
        self,
        waiting: Mapping[str, Waiting],
        room: StepRoom,
        spare: Spare,
        service: Service,
        capacity: int,
        now: float,
    ) -> None:
        self.waiting, self.spare, self.now = waiting, spare, now
        self.left = RoomLeft(room)
        self.chosen: dict[str, tuple[int, Waiting]] = {}
        self.deferred: dict[str, DeferReason] = {}
        """Why the requests that were looked at cannot start."""
        self.may_overtake = not room.adapters_take_turns
        """Whether requests may overtake: not while adapters take turns at the memory."""
        self._service, self._capacity = service, capacity
        self._gives: dict[str, float] = {}

    def given(self, tenant: str) -> float:
        """Return the service that the tenant has received, with the tokens that this plan would add."""
        return self._service.of(tenant) + self._gives.get(tenant, 0.0)

    def tokens(self, facts: Waiting) -> int:
        """Return the tokens that its start takes, without the ones that it shares with running requests."""
        return max(capped_tokens(facts, self._capacity) - facts.shared_tokens, 0)

    def choose(self, lane: int, facts: Waiting, tokens: int) -> None:
        """Start a request in this step, and take its room."""
        self.left.take(facts)
        self.spare.take(lane, tokens)
        self._gives[facts.tenant] = self._gives.get(facts.tenant, 0.0) + share_tokens(
            facts, capped_tokens(facts, self._capacity)
        )
        self.chosen[facts.request_id] = (lane, facts)
        self.deferred.pop(facts.request_id, None)


def share_tokens(facts: Waiting, tokens: int) -> float:
    """Return tokens over the tenant's weight. A preempted request was counted when it first started, so it counts 0."""
    return 0.0 if facts.is_swapped else tokens / facts.weight


def capped_tokens(facts: Waiting, num_tokens: int) -> int:
    """Return the tokens that a request is charged: no more than there are, so that the largest can run alone."""
    return max(min(facts.size_tokens, num_tokens), 0)
