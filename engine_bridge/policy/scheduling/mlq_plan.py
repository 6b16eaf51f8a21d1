"""A decision of `Mlq` in the making: the room that is left, the chosen requests, and the next request in each lane. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import attrgetter

from engine_bridge.policy.scheduling.mlq_places import LaneQueue, Service
from engine_bridge.policy.scheduling.queue_policy import DeferReason, RoomLeft, Running, StepRoom, Waiting
from engine_bridge.policy.scheduling.quotas import Spare


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
        running: Mapping[str, Running],
        room: StepRoom,
        spare: Spare,
        service: Service,
        capacity: int,
        now: float,
    ) -> None:
        self.waiting, self.spare, self.now = waiting, spare, now
        self._capacity = capacity
        self.left = RoomLeft(room)
        self.chosen: dict[str, tuple[int, Waiting]] = {}
        self.deferred: dict[str, DeferReason] = {}
        self.bypassed: dict[str, str] = {}
        self.may_overtake = not room.adapters_take_turns
        self.num_overdue = 0
        """The number of overdue requests, which are the first of the chosen."""
        self.blocked: list[Waiting] = []
        """Heads that wait for memory."""
        self.is_full = False
        """Whether a head whose turn has come for the second time waits for the next step: no other request starts in this one."""
        self._service = service
        self._gives: dict[str, float] = {}
        self._running = running
        self._ends: list[Running] | None = None

    def ends(self) -> list[Running]:
        """Return all running requests, in order of their predicted ends."""
        if self._ends is None:
            self._ends = sorted(self._running.values(), key=attrgetter("predicted_end_s"))
        return self._ends

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

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all chosen requests in order.

        In each lane's places, warm requests come before others of the same priority; overdue ones stay where they are.
        """
        order = list(self.chosen.values())
        places: defaultdict[int, list[int]] = defaultdict(list)
        for at in range(self.num_overdue, len(order)):
            places[order[at][0]].append(at)
        ids = [facts.request_id for _, facts in order]
        for own in places.values():
            sorted_own = sorted(own, key=lambda at: (order[at][1].priority, not order[at][1].is_warm))
            for at, source in zip(own, sorted_own, strict=True):
                ids[at] = order[source][1].request_id
        return tuple(ids)


def share_tokens(facts: Waiting, tokens: int) -> float:
    """Return tokens over the tenant's weight. A preempted request was counted when it first started, so it counts 0."""
    return 0.0 if facts.is_swapped else tokens / facts.weight


def capped_tokens(facts: Waiting, num_tokens: int) -> int:
    """Return the tokens that a request is charged: no more than there are, so that the largest can run alone."""
    return max(min(facts.size_tokens, num_tokens), 0)
