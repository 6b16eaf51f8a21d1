"""Chameleon's multi-level queue: lanes by size, each with a quota. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from engine_bridge.policy.scheduling.lanes import ONE_LANE, Lanes
from engine_bridge.policy.scheduling.mlq_decision import Deciding, MlqSettings
from engine_bridge.policy.scheduling.mlq_places import Placing, QueuedRequest, Refit, Service, letting_go
from engine_bridge.policy.scheduling.mlq_plan import Plan, capped_tokens, share_tokens
from engine_bridge.policy.scheduling.preemption import least_fair_first
from engine_bridge.policy.scheduling.queue_policy import (
    Decision,
    LanedPolicy,
    Running,
    StepRoom,
    Waiting,
    insert,
    refuse_twice,
    remove,
)
from engine_bridge.policy.scheduling.quotas import Ledger


class Mlq(LanedPolicy):
    """Lanes by size, each with a quota of tokens; every request's wait is bounded.

    1. Requests that have waited for `max_wait_s` start in order of arrival. While one of them does not fit, no other request starts.
    2. Each lane, starting with the smallest requests' lane, starts requests within its quota.
    3. The unused quota is pooled and offered from the top lane down. A lane whose head waits, and would fit the lane's own quota, keeps
       its unused part: otherwise smaller requests could borrow it again and again. (The paper pools it all.)

    In a lane: lower `priority` first, then the tenant that was given the fewest tokens for its weight, then, of one tenant, requests that waited
    for `aging_s` by waiting time over length (AdaptiveLLM), then the smallest. A request that lacks memory for its adapter alone is passed over,
    because `AdapterTurns` gives it its turn. Another head that does not fit stops its lane. If it lacks blocks (not quota), a request behind it may
    pass if it is predicted to end before the head could start; requests with a warm prefix are asked first. A bypasser that runs on past its
    prediction is squashed if that lets a blocked head start. Of the requests that start in one step, warm ones are first in their lane: all start,
    so it delays none, and their cached blocks are held before another could take them.

    Bound: let a request have waited for max_wait_s, and let D be the longest that a started request really runs. Take the requests that came before
    it and still wait, and itself, and fill the room with them in order of arrival; g is the number of groups that they make (g <= their number +
    1). It starts within max_wait_s + g · D, and a step's length for each group: no request passes it, so after D all that ran has ended, and with
    each further D another group has. Room means blocks, slots, and tokens by the larger of guess and truth. If the engine preempts for lack of
    blocks, or a bypasser is squashed, running requests come back into the queue: then it is max_wait_s + (n + m) · D, with n requests before it and
    m that ran, as long as one of the running requests is never a victim until it ends: with vLLM's victims the request that started first, with
    ours the request that arrived first. So two never throw each other out in turns. A request that becomes ready late (its adapter was loading)
    counts among the earlier ones by its arrival. Predictions do not appear in the bound. The bound does not hold for a request that lacks memory
    for its adapter; `AdapterTurns` bounds that wait.

    Costs: `arrived`, `admitted`, `ended` a few binary searches. `decide` looks up the requests that it starts, a head for each lane,
    `num_looked_at` behind a head without memory. The cost depends neither on how many wait, nor on how many tenants they are of (`python -m
    bench.emulated exact`).

    Source: Chameleon §4.2, Algorithm 1 and "Bypassing Adapter Blocking". Departs in the bound, in priorities and tenants, in aging, in that lanes
    keep quota that a waiting head can use, in that heads that were passed come before other lanes' heads, in that a head that lacks blocks is
    bypassed, not a head that lacks adapter memory, and in that a late bypasser is squashed only when it helps a head, within a budget.
    """

    name = "mlq"
    victim_order = staticmethod(least_fair_first)
    charges_tokens = True
    has_lanes = True
    minds_priority = True
    is_timeless = False

    def __init__(self, num_tokens: int, settings: MlqSettings | None = None) -> None:
        """Start with an empty queue. num_tokens: tokens that requests may hold together; one lane has them until a refit."""
        self.settings = settings or MlqSettings()
        self.ledger = Ledger([num_tokens])
        self._placing = Placing(ONE_LANE)
        self._refit: Refit | None = None
        self._leftovers: Iterator[None] = iter(())
        self._running: dict[str, QueuedRequest] = {}
        self._arrivals: list[tuple[float, str]] = []
        self._service = Service()
        self._squashes = _SquashBudget(self.settings.squash_share)

    # -- hooks

    def arrived(self, facts: Waiting, now: float) -> None:
        """Queue a request in its lane.

        Raises:
            ValueError: its weight is not positive, or it waits or runs already.
        """
        if facts.weight <= 0 or facts.request_id in self._running:
            raise ValueError("a weight is positive, and a request that runs does not wait")
        refuse_twice(facts, self._placing.entries)
        self._service.waits(facts.tenant)
        given = self._service.of(facts.tenant)
        self._placing.add(facts, facts.weighted_size, given)
        if self._refit is not None:
            self._refit.placing.add(
                facts, self._refit.weighted_size(facts.request_id, facts.weighted_size), given
            )
        insert(self._arrivals, (facts.arrived_s, facts.request_id))
        next(self._leftovers, None)

    def admitted(self, request_id: str, now: float) -> None:
        """Note that a request starts, and charge its lane and its tenant for its tokens."""
        entry = self._running[request_id] = self._dequeue(request_id)
        tokens = capped_tokens(entry.facts, self.ledger.num_tokens)
        self.ledger.charge(request_id, entry.lane, tokens)
        self._serve(entry.facts.tenant, share_tokens(entry.facts, tokens))
        self._service.left(entry.facts.tenant)
        self._squashes.admitted()

    def outgrew(self, request_id: str, size_tokens: int) -> None:
        """Charge a running request for more tokens. An unknown one is ignored."""
        entry = self._running.get(request_id)
        if entry is not None:
            # Its tenant is charged as well.
            more = self.ledger.correct(request_id, min(size_tokens, self.ledger.num_tokens))
            self._serve(entry.facts.tenant, more / entry.facts.weight)

    def ended(self, request_id: str) -> None:
        """Take a request out of the queue, or refund the tokens of a running one. An unknown one is ignored."""
        if request_id in self._placing.entries:
            self._service.left(self._dequeue(request_id).facts.tenant)
        elif self._running.pop(request_id, None) is not None:
            self.ledger.refund(request_id)

    def squashed(self, request_id: str) -> None:
        """Count a squash against the budget."""
        self._squashes.squashed()

    # -- lanes

    @property
    def lanes(self) -> Lanes:
        """The lanes by which decisions are made."""
        return self._placing.lanes

    def begin_refit(
        self, lanes: Lanes, quotas: Sequence[int], weighted_sizes: Mapping[str, float] | None = None
    ) -> None:
        """Begin to place the waiting requests in new lanes. Raises ValueError if there is not one quota for each lane."""
        if len(quotas) != lanes.num_lanes:
            raise ValueError("each lane has one quota")
        self._refit = Refit(lanes, quotas, {} if weighted_sizes is None else weighted_sizes)

    def advance_refit(self, max_requests: int) -> bool:
        """Place up to `max_requests` more requests in the new lanes; return whether decisions use them now, or there are none.

        A request takes 4 µs (measured with 10,000 that wait): placing all in one step would keep every stream waiting.
        """
        refit = self._refit
        if refit is None:
            return True
        for _ in itertools.islice(self._leftovers, max_requests):
            pass  # leftovers of the previous refit are freed before this one adds its leftovers
        waiting, placed = self._placing.entries, refit.placing.entries
        # By arrival, because that order stays right while some requests come and others leave.
        first = bisect_right(self._arrivals, refit.last)
        for key in self._arrivals[first : first + max_requests]:
            refit.last = key
            if key[1] not in placed:
                entry = waiting[key[1]]
                given = self._service.of(entry.facts.tenant)
                refit.placing.add(entry.facts, refit.weighted_size(key[1], entry.weighted_size), given)
        if len(placed) < len(waiting):
            return False
        self._finish_refit(refit)
        return True

    def _finish_refit(self, refit: Refit) -> None:
        self._leftovers = letting_go(self._placing)
        self._refit, self._placing = None, refit.placing
        for request_id, entry in self._running.items():
            weighted_size = refit.weighted_size(request_id, entry.weighted_size)
            self._running[request_id] = QueuedRequest(
                entry.facts, weighted_size, self.lanes.lane_of(weighted_size)
            )
        self.ledger.resize(
            refit.quotas, {request_id: entry.lane for request_id, entry in self._running.items()}
        )

    def num_waiting(self) -> tuple[int, ...]:
        """Return the number of waiting requests in each lane."""
        return tuple(queue.num_waiting for queue in self._placing.queues)

    def lane_of(self, request_id: str) -> int | None:
        """Return the lane of a request that waits or runs; None for an unknown one."""
        entry = self._placing.entries.get(request_id) or self._running.get(request_id)
        return None if entry is None else entry.lane

    def check_invariants(self) -> None:
        """Check the books.

        Raises:
            AssertionError: requests are lost, doubled, or hold tokens that are not charged.
        """
        self.ledger.check_invariants()
        waiting = self._placing.entries
        assert sum(self.num_waiting()) == len(waiting) == len(self._arrivals), "lost or doubled"
        assert not waiting.keys() & self._running.keys(), "waits and runs"
        assert len(self.ledger) == len(self._running), "charged without running, or the reverse"
        assert all(request_id in self.ledger for request_id in self._running), "runs without a charge"
        for placing in (self._placing, *([self._refit.placing] if self._refit else ())):
            assert placing.entries.keys() <= waiting.keys(), "placed without waiting"
            for queue in placing.queues:
                flows = [(priority, self._service.of(tenant), tenant) for priority, tenant in queue.flows]
                assert queue.order == sorted(flows), "tenants out of order"

    def _dequeue(self, request_id: str) -> QueuedRequest:
        """Take a waiting request out of all places where it is kept."""
        next(self._leftovers, None)
        entry = self._placing.remove(request_id)
        if self._refit is not None and request_id in self._refit.placing.entries:
            self._refit.placing.remove(request_id)
        remove(self._arrivals, (entry.facts.arrived_s, request_id))
        return entry

    def _serve(self, tenant: str, share_tokens: float) -> None:
        self._service.serve(tenant, share_tokens)
        given = self._service.of(tenant)
        self._placing.served(tenant, given)
        if self._refit is not None:
            self._refit.placing.served(tenant, given)

    # -- the decision

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        """Return the requests that start, the ones that wait and why, and the ones to squash."""
        if not self._placing.entries:
            return Decision()
        spare = self.ledger.spare(room.num_tokens, room.overcharged_tokens)
        capacity = min(room.num_tokens, self.ledger.num_tokens)
        plan = Plan(waiting, running, room, spare, self._service, capacity, now)
        num_squashes = self._squashes.num_left()
        return Deciding(
            plan, self._placing, self._arrivals, self.ledger.quotas, num_squashes, self.settings
        ).made()


class _SquashBudget:
    """Counts squashes against admissions, of the last thousand or two."""

    def __init__(self, squash_share: float) -> None:
        self._share = squash_share
        self._num_admitted = 0
        self._num_squashed = 0

    def num_left(self) -> int:
        """Return the squashes within the share. At first there are none, so that no request passes either, until enough have been admitted."""
        return int(self._share * self._num_admitted) - self._num_squashed

    def admitted(self) -> None:
        """Count an admission."""
        self._num_admitted += 1
        if self._num_admitted >= 2000:
            self._num_admitted //= 2
            self._num_squashed //= 2

    def squashed(self) -> None:
        """Count a squash."""
        self._num_squashed += 1
