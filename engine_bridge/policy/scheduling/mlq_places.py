"""The queue of `Mlq`: lanes, in a lane tenants, of a tenant requests. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from engine_bridge.policy.scheduling.fairness import ByFairness
from engine_bridge.policy.scheduling.lanes import Lanes
from engine_bridge.policy.scheduling.queue_policy import Waiting, insert, remove

# Entries of a former placing that are freed whenever a request comes or leaves. Chosen: 1 µs.
NUM_FREED = 16


class QueuedRequest(Struct, frozen=True, gc=False):
    """A waiting request's facts at arrival, and the lane where it is kept."""

    facts: Waiting
    weighted_size: float
    lane: int


class Settled(Protocol):
    """The settled part of a decision while it is made."""

    @property
    def now(self) -> float:
        """The time of the decision."""

    @property
    def chosen(self) -> Collection[str]:
        """The ids of the requests that start."""
        ...

    @property
    def deferred(self) -> Collection[str]:
        """The ids of the requests that were looked at and cannot start."""
        ...

    @property
    def may_overtake(self) -> bool:
        """Whether requests may overtake: not while adapters take turns at the memory."""
        ...


class Ordered(Protocol):
    """One tenant's requests of one priority in one lane, and the order in which they start."""

    def __len__(self) -> int: ...

    def add(self, entry: QueuedRequest) -> None:
        """Add a waiting request."""

    def remove(self, entry: QueuedRequest, has_started: bool) -> None:
        """Remove a request. has_started: whether it starts, rather than leaves."""

    def lists(self) -> list[list[Any]]:
        """Return all lists that hold entries."""
        ...

    def order(self, deciding: Settled, aging_s: float) -> Iterator[str]:
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
        insert(self._small, self._key(entry))
        self._urgency.add(facts.request_id, facts.arrived_s, facts.size_tokens)

    def remove(self, entry: QueuedRequest, has_started: bool) -> None:
        """Remove a request. It does not matter whether it starts."""
        facts = entry.facts
        remove(self._small, self._key(entry))
        self._urgency.remove(facts.request_id, facts.arrived_s, facts.size_tokens)

    def lists(self) -> list[list[Any]]:
        """Return all lists that hold entries."""
        return [self._small, *self._urgency.lists()]

    def _key(self, entry: QueuedRequest) -> tuple[bool, float, float, str]:
        return (
            not entry.facts.is_swapped,
            entry.weighted_size,
            entry.facts.arrived_s,
            entry.facts.request_id,
        )

    def order(self, deciding: Settled, aging_s: float) -> Iterator[str]:
        """Yield the ids of all waiting requests, in the order in which they start."""
        given = set()
        for is_fresh, *_, request_id in self._small:
            if is_fresh:
                break
            given.add(request_id)
            yield request_id
        for request_id in self._urgency.order(deciding.now, aging_s):
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
            insert(self.order, (priority, given, tenant))
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
            insert(self.order, (priority, given, tenant))
            places[priority] = given


class Placing:
    """The waiting requests, placed in lanes."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.queues = [LaneQueue() for _ in range(lanes.num_lanes)]
        self.entries: dict[str, QueuedRequest] = {}

    def add(self, facts: Waiting, weighted_size: float, given: float) -> None:
        """Place a request. given: tokens over weight that its tenant was given."""
        entry = self.entries[facts.request_id] = QueuedRequest(
            facts, weighted_size, self.lanes.lane_of(weighted_size)
        )
        self.queues[entry.lane].add(entry, given)

    def remove(self, request_id: str) -> QueuedRequest:
        """Remove a request, and return its entry."""
        entry = self.entries.pop(request_id)
        self.queues[entry.lane].remove(entry)
        return entry

    def served(self, tenant: str, given: float) -> None:
        """Note in all lanes that the tenant has been given this much by now."""
        for queue in self.queues:
            queue.served(tenant, given)


class Refit:
    """A placing in the making. Arrivals and departures meanwhile are told to both placings."""

    def __init__(self, lanes: Lanes, quotas: Sequence[int], sizes: Mapping[str, float]) -> None:
        self.placing, self.quotas, self._sizes = Placing(lanes), quotas, sizes
        self.last = (-math.inf, "")
        """Every request up to this one, in order of arrival, has been placed."""

    def weighted_size(self, request_id: str, known: float) -> float:
        """Return the request's size on the new lanes' scale; `known` if there is none."""
        return self._sizes.get(request_id, known)


def letting_go(placing: Placing) -> Iterator[None]:
    """Free a placing that is not needed any more, some of it with each step: 10,000 requests at once take 4 ms (measured)."""
    while placing.entries:
        for _ in range(min(NUM_FREED, len(placing.entries))):
            placing.entries.popitem()
        yield
    for queue in placing.queues:
        while queue.flows:
            _, flow = queue.flows.popitem()
            for ordered in flow.lists():
                while ordered:
                    del ordered[-NUM_FREED:]
                    yield
