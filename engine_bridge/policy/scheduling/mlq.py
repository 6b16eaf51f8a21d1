"""Chameleon's multi-level queue: lanes by size, each with a quota. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from engine_bridge.policy.scheduling.lanes import ONE_LANE, Lanes
from engine_bridge.policy.scheduling.mlq_decision import Deciding, MlqSettings
from engine_bridge.policy.scheduling.mlq_places import Entry, Placing, Refit, Service, letting_go
from engine_bridge.policy.scheduling.mlq_plan import Plan, capped_tokens, share_tokens
from engine_bridge.policy.scheduling.preemption import least_fair_first
from engine_bridge.policy.scheduling.queue_policy import (
    Decision,
    LanedPolicy,
    Room,
    Running,
    Waiting,
    insert,
    refuse_twice,
    remove,
)
from engine_bridge.policy.scheduling.quotas import Ledger


class Mlq(LanedPolicy):
    """Lanes by size, each with a quota of tokens; nobody waits without bound.

    1. Requests that have waited for `max_wait_s` start in order of arrival. While one of them does not fit, nothing else starts.
    2. Each lane, that of the smallest first, starts requests within its quota.
    3. What is left is pooled and offered from the top lane down. A lane whose head waits, and would fit the lane's own quota, keeps
       what it has left of it: otherwise smaller requests could borrow it again and again. (The paper pools it all.)

    In a lane: lower `priority` first, then the tenant who was given the fewest tokens for its weight, then, of one tenant, those who waited for
    `aging_s` by waiting time over length (AdaptiveLLM), then the smallest. Whoever lacks memory for its adapter alone is passed over, because
    `AdapterTurns` sees to its turn. Another head that does not fit stops its lane. If it lacks blocks (not quota), one behind it may pass if it is
    predicted to end before the head could start; those whose prefix is warm are asked first. A bypasser that runs on past its prediction is squashed
    if that lets a blocked head start. Of those that start in one step, warm ones go first in their lane: all start, so it costs nobody, and their
    cached blocks are held before another could take them.

    Bound: let a request have waited for max_wait_s, and let D be the longest that a started request really runs, g the number of groups that
    those who came before it and still wait, and itself, make if one fills the room with them in order of arrival (g <= their number + 1). It
    starts within max_wait_s + g · D, and a step's length for each group: nothing passes it, so after D all that ran has ended, and with each
    further D another group has. Room means blocks, slots, and tokens by the larger of guess and truth. If the engine preempts for lack of blocks,
    or a bypasser is squashed, those who run come back into the queue: then it is max_wait_s + (n + m) · D, n those before it and m those who ran,
    as long as somebody of those who run is nobody's victim until it ends: with vLLM's victims the one that started first, with ours
    the one that came first. So two never throw each other out in turns. Who becomes ready late (its adapter
    was loading) counts among those before by when it came. Predictions do not appear in the bound.
    The bound does not hold for whoever lacks memory for its adapter; `AdapterTurns` has that one's.

    Costs: `arrived`, `admitted`, `ended` a few binary searches. `decide` looks up those it starts, a head for each lane, `num_looked_at` behind a
    head without memory. It does not depend on how many wait, nor on how many tenants they are of (`python -m bench.emulated exact`).

    Source: Chameleon §4.2, Algorithm 1 and "Bypassing Adapter Blocking". Departs in the bound, in priorities and tenants, in aging, in that lanes
    keep what a waiting head can use, in that heads that were passed go before other lanes' heads, in that it is lack of blocks that is bypassed, not
    lack of adapter memory, and in that a late bypasser is squashed only when it helps a head, within a budget.
    """

    name = "mlq"
    victim_order = staticmethod(least_fair_first)
    charges_tokens = True
    has_lanes = True
    minds_priority = True
    is_timeless = False

    def __init__(self, num_tokens: int, settings: MlqSettings | None = None) -> None:
        """num_tokens: all that requests may hold together; one lane has them until `refit`."""
        self.settings = settings or MlqSettings()
        self.ledger = Ledger([num_tokens])
        self._placing = Placing(ONE_LANE)
        self._refit: Refit | None = None
        self._leftovers: Iterator[None] = iter(())
        self._running: dict[str, Entry] = {}
        self._arrivals: list[tuple[float, str]] = []
        self._service = Service()
        self._squashes = _SquashBudget(self.settings.squash_share)

    # -- hooks

    def arrived(self, facts: Waiting, now: float) -> None:
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
        entry = self._running[request_id] = self._dequeue(request_id)
        tokens = capped_tokens(entry.facts, self.ledger.num_tokens)
        self.ledger.charge(request_id, entry.lane, tokens)
        self._serve(entry.facts.tenant, share_tokens(entry.facts, tokens))
        self._service.left(entry.facts.tenant)
        self._squashes.admitted()

    def outgrew(self, request_id: str, size_tokens: int) -> None:
        entry = self._running.get(request_id)
        if entry is not None:
            # The tenant pays for it, too.
            more = self.ledger.correct(request_id, min(size_tokens, self.ledger.num_tokens))
            self._serve(entry.facts.tenant, more / entry.facts.weight)

    def ended(self, request_id: str) -> None:
        if request_id in self._placing.entries:
            self._service.left(self._dequeue(request_id).facts.tenant)
        elif self._running.pop(request_id, None) is not None:
            self.ledger.refund(request_id)

    def squashed(self, request_id: str) -> None:
        self._squashes.squashed()

    # -- lanes

    @property
    def lanes(self) -> Lanes:
        """By which decisions are made."""
        return self._placing.lanes

    def begin_refit(
        self, lanes: Lanes, quotas: Sequence[int], weighted_sizes: Mapping[str, float] | None = None
    ) -> None:
        if len(quotas) != lanes.num_lanes:
            raise ValueError("each lane has one quota")
        self._refit = Refit(lanes, quotas, {} if weighted_sizes is None else weighted_sizes)

    def advance_refit(self, max_requests: int) -> bool:
        """4 µs for each (measured with 10,000 that wait): all of them in one step would keep every stream waiting."""
        refit = self._refit
        if refit is None:
            return True
        for _ in itertools.islice(self._leftovers, max_requests):
            pass  # those of the refit before are gone before this one leaves its own
        waiting, placed = self._placing.entries, refit.placing.entries
        # By arrival, because that order goes on being right while some come and others leave.
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
            self._running[request_id] = Entry(entry.facts, weighted_size, self.lanes.lane_of(weighted_size))
        self.ledger.resize(
            refit.quotas, {request_id: entry.lane for request_id, entry in self._running.items()}
        )

    def num_waiting(self) -> tuple[int, ...]:
        """In each lane."""
        return tuple(queue.num_waiting for queue in self._placing.queues)

    def lane_of(self, request_id: str) -> int | None:
        """The lane of a request that waits or runs."""
        entry = self._placing.entries.get(request_id) or self._running.get(request_id)
        return None if entry is None else entry.lane

    def check_invariants(self) -> None:
        """Raises AssertionError if requests are lost, doubled, or hold what is not charged."""
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

    def _dequeue(self, request_id: str) -> Entry:
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
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
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
    """Squashes against admissions, of the last thousand or two."""

    def __init__(self, squash_share: float) -> None:
        self._share = squash_share
        self._num_admitted = 0
        self._num_squashed = 0

    def num_left(self) -> int:
        """Squashes that are within the share. At first none, so that nobody passes either, until there is something to share."""
        return int(self._share * self._num_admitted) - self._num_squashed

    def admitted(self) -> None:
        self._num_admitted += 1
        if self._num_admitted >= 2000:
            self._num_admitted //= 2
            self._num_squashed //= 2

    def squashed(self) -> None:
        self._num_squashed += 1
