"""Chameleon's multi-level queue: lanes by size, each with a quota. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from msgspec import Struct

from engine_bridge.policy.scheduling.lane_queue import (
    LaneQueue,
    Plan,
    QueuedRequest,
    Service,
    Walk,
    capped_tokens,
    share_tokens,
)
from engine_bridge.policy.scheduling.lanes import ONE_LANE, Lanes
from engine_bridge.policy.scheduling.preemption import least_fair_first
from engine_bridge.policy.scheduling.queue_policy import (
    NUM_PASSED_OVER,
    Decision,
    DeferReason,
    QueuePolicy,
    Running,
    StepRoom,
    Waiting,
    refuse_twice,
    remove,
)
from engine_bridge.policy.scheduling.quotas import Ledger


class MlqSettings(Struct, frozen=True, kw_only=True):
    """Seconds and counts. All chosen, unless they name a source."""

    max_wait_s: float = 60.0
    """After this wait a request is head of all lanes, and none passes it. Under lasting overload this turns `Mlq` into `Fcfs`."""
    aging_s: float = 0.125
    """After this wait a request is ordered by waiting time over length, ahead of smaller ones that came later. Longer only made tails longer."""
    num_looked_at: int = 16
    """Number of requests behind a blocked head that are looked at for one that may pass."""
    max_bypassed: int = 16
    """Number of times that one head may be passed."""
    max_squashed: int = 1
    """Number of times that one request may be squashed; after that it passes no other."""
    squash_share: float = 0.05
    """The most squashes, as a share of admissions. Source: Chameleon §4.2, whose experiments have at most that share, without enforcing it."""


class Mlq(QueuePolicy):
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
    `num_looked_at` behind a head without memory. The cost depends neither on how many wait, nor on how many tenants they are of (bench/LOG.md,
    "The emulated node").

    Source: Chameleon §4.2, Algorithm 1 and "Bypassing Adapter Blocking". Departs in the bound, in priorities and tenants, in aging, in that lanes
    keep quota that a waiting head can use, in that heads that were passed come before other lanes' heads, in that a head that lacks blocks is
    bypassed, not a head that lacks adapter memory, and in that a late bypasser is squashed only when it helps a head, within a budget.
    """

    name = "mlq"
    victim_order = staticmethod(least_fair_first)
    charges_tokens = True
    minds_priority = True
    bounds_programs = True

    def __init__(self, num_tokens: int, settings: MlqSettings | None = None) -> None:
        """Start with an empty queue. num_tokens: tokens that requests may hold together; one lane has them until a refit."""
        self.settings = settings or MlqSettings()
        self.ledger = Ledger([num_tokens])
        self._placing = _Placing(ONE_LANE)
        self._refit: _Refit | None = None
        self._running: dict[str, QueuedRequest] = {}
        self._arrivals: list[tuple[float, str]] = []
        self._service = Service()
        self._squashes = _SquashBudget(self.settings.squash_share)

    # -- hooks

    def arrived(self, facts: Waiting, now: float) -> None:
        """Queue a request in its lane. Raises ValueError: its weight is not positive, or it waits or runs already."""
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
        insort(self._arrivals, (facts.arrived_s, facts.request_id))

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
        """Take new lanes and a quota for each, in tokens; `advance_refit` must follow. Until that is done, decisions use the old lanes.

        A refit that was not done yet is given up. weighted_sizes: of known requests on the new lanes' scale, by request id, also of requests that
        arrive before the refit is done; others keep theirs. They are looked up one by one, so a mapping may compute them on demand. Raises ValueError
        if there is not one quota for each lane.
        """
        if len(quotas) != lanes.num_lanes:
            raise ValueError("each lane has one quota")
        self._refit = _Refit(lanes, quotas, {} if weighted_sizes is None else weighted_sizes)

    def advance_refit(self, max_requests: int) -> bool:
        """Place up to `max_requests` more requests in the new lanes; return whether decisions use them now, or there are none.

        A request takes 4 µs (measured with 10,000 that wait): placing all in one step would keep every stream waiting.
        """
        refit = self._refit
        if refit is None:
            return True
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

    def _finish_refit(self, refit: _Refit) -> None:
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
        """Check the books. Raises AssertionError: requests are lost, doubled, or hold tokens that are not charged."""
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
        return _Deciding(
            waiting,
            running,
            room,
            now,
            placing=self._placing,
            arrivals=self._arrivals,
            ledger=self.ledger,
            service=self._service,
            num_squashes=self._squashes.num_left(),
            settings=self.settings,
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


class _Placing:
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


class _Refit:
    """A placing in the making. Arrivals and departures meanwhile are told to both placings."""

    def __init__(self, lanes: Lanes, quotas: Sequence[int], sizes: Mapping[str, float]) -> None:
        self.placing, self.quotas, self._sizes = _Placing(lanes), quotas, sizes
        self.last = (-math.inf, "")
        """Every request up to this one, in order of arrival, has been placed."""

    def weighted_size(self, request_id: str, known: float) -> float:
        """Return the request's size on the new lanes' scale; `known` if there is none."""
        return self._sizes.get(request_id, known)


class _Deciding(Plan):
    """One decision of `Mlq`. arrivals: (arrived_s, request_id) of all waiting requests, in that order."""

    def __init__(
        self,
        waiting: Mapping[str, Waiting],
        running: Mapping[str, Running],
        room: StepRoom,
        now: float,
        *,
        placing: _Placing,
        arrivals: Sequence[tuple[float, str]],
        ledger: Ledger,
        service: Service,
        num_squashes: int,
        settings: MlqSettings,
    ) -> None:
        spare = ledger.spare(room.num_tokens, room.overcharged_tokens)
        super().__init__(waiting, room, spare, service, min(room.num_tokens, ledger.num_tokens), now)
        self._running, self._placing, self._arrivals = running, placing, arrivals
        self._quotas, self._num_squashes, self._settings = ledger.quotas, num_squashes, settings
        self._bypassed: dict[str, str] = {}
        self._blocked: list[Waiting] = []  # heads that wait for memory
        # Whether a head whose turn has come for the second time waits for the next step: no other request starts in this one.
        self._is_full = False
        self._num_overdue = 0  # of the chosen requests, the first ones
        self._num_passed = 0
        self._ends: list[Running] | None = None

    def made(self) -> Decision:
        """Return the requests that start in this step, that are deferred, and that have to leave the device."""
        if self._admit_overdue():
            self._admit_lanes()
        otherwise: DeferReason = "no_slot" if self.left.slots < 1 else "behind_head"
        return Decision(self._ids(), self.deferred, self._bypassed, self._late_bypassers(), otherwise)

    def _running_by_end(self) -> list[Running]:
        if self._ends is None:
            self._ends = sorted(self._running.values(), key=attrgetter("predicted_end_s"))
        return self._ends

    def _ids(self) -> tuple[str, ...]:
        """Return the ids of all chosen requests in order.

        In each lane's places, warm requests come before others of the same priority; overdue ones stay where they are.
        """
        order = list(self.chosen.values())
        places: defaultdict[int, list[int]] = defaultdict(list)
        for at in range(self._num_overdue, len(order)):
            places[order[at][0]].append(at)
        ids = [facts.request_id for _, facts in order]
        for own in places.values():
            sorted_own = sorted(own, key=lambda at: (order[at][1].priority, not order[at][1].is_warm))
            for at, source in zip(own, sorted_own, strict=True):
                ids[at] = order[source][1].request_id
        return tuple(ids)

    def _admit_overdue(self) -> bool:
        """Start the requests that have waited too long, in order of arrival. Return False if one of them does not fit."""
        for arrived_s, request_id in self._arrivals:
            if self.now - arrived_s < self._settings.max_wait_s:
                break
            facts = self.waiting[request_id]
            tokens = self.tokens(facts)
            reason = self.left.refusal(facts)
            if reason is None and tokens > self.spare.num_free:
                reason = "lane_quota"
            if self._is_passed_over(facts, reason):
                continue
            if reason is not None:
                self._defer(facts, reason)
                return False
            self.choose(self._placing.entries[request_id].lane, facts, tokens)
            self._num_overdue += 1
        return True

    def _admit_lanes(self) -> None:
        walks = {
            lane: Walk(queue, self, self._settings.aging_s)
            for lane, queue in enumerate(self._placing.queues)
            if queue.num_waiting and self.left.slots > 0
        }
        lacking = self._phase(walks, self.spare.fits)
        kept = {lane for lane, walk in walks.items() if self._fits_quota(lane, walk.head)}
        pool = {lane: walk for lane, walk in walks.items() if lane in lacking}
        self._phase(pool, lambda lane, tokens: self.spare.fits_pool(lane, tokens, kept))
        self._bypass(walks)

    def _phase(self, walks: Mapping[int, Walk], fits: Callable[[int, int], bool]) -> set[int]:
        """Start heads as long as any lane's fits; return the lanes whose head lacks quota."""
        open_lanes = {lane: walk for lane, walk in walks.items() if walk.head is not None}
        lacking = set()
        while open_lanes and not self._is_full:
            lane = min(open_lanes, key=lambda lane: _rank(lane, open_lanes[lane].head))
            head = open_lanes[lane].head
            if head is None:
                del open_lanes[lane]
                continue
            tokens = self.tokens(head)
            reason = self.left.refusal(head)
            if reason is None and fits(lane, tokens):
                self.choose(lane, head, tokens)
                open_lanes[lane].advance()
                continue
            if self._is_passed_over(head, reason):
                open_lanes[lane].advance()
                continue
            if reason is None:
                lacking.add(lane)
            self._defer(head, reason or "lane_quota")
            del open_lanes[lane]
        return lacking

    def _is_passed_over(self, facts: Waiting, reason: DeferReason | None) -> bool:
        """Note a request whose adapter finds no memory, and return whether requests behind it may start."""
        if reason != "adapter_memory":
            return False
        self.deferred[facts.request_id] = reason
        self._num_passed += 1
        return self._num_passed <= NUM_PASSED_OVER

    def _fits_quota(self, lane: int, head: Waiting | None) -> bool:
        """Return whether the lane's head can start within the lane's own quota some day, so that the lane should not lend the unused part."""
        return head is not None and self.tokens(head) <= self._quotas[lane]

    def _defer(self, head: Waiting, reason: DeferReason) -> None:
        self.deferred[head.request_id] = reason
        # Otherwise small requests that keep coming would fill every step.
        self._is_full |= reason == "step_full" and head.times_deferred > 0
        if reason in ("no_blocks", "adapter_memory"):
            self._blocked.append(head)

    # -- bypass

    def _bypass(self, walks: Mapping[int, Walk]) -> None:
        """Let requests pass their lane's head while it waits for memory.

        None passes when a squash could no longer correct a wrong prediction.
        """
        if not self._blocked or self._is_full or self._num_squashes < 1:
            return
        blocked = {facts.request_id for facts in self._blocked}
        for lane, walk in walks.items():
            # Looking for followers is most of a decision's cost, and there is seldom room for one.
            free = (self.left.slots, self.left.blocks, self.spare.num_free, self.spare.lane_free[lane])
            if min(free) > 0 and walk.head is not None and walk.head.request_id in blocked:
                self._pass(lane, walk, walk.head, self._start_s(walk.head))

    def _start_s(self, head: Waiting) -> float:
        """Return when a blocked head could start, by the predicted ends of the running requests."""
        missing = head.num_blocks - self.left.blocks
        return earliest_start_s(missing, self._running_by_end(), self.now)

    def _pass(self, lane: int, walk: Walk, head: Waiting, start_s: float) -> None:
        """Start the requests behind one head that fit and are predicted to end before it could start."""
        passes_left = self._settings.max_bypassed - head.times_bypassed
        if passes_left < 1 or start_s <= self.now:
            return
        followers = walk.ahead(self._settings.num_looked_at)
        followers.sort(key=lambda facts: (facts.priority, not facts.is_warm))
        for facts in followers:
            tokens = self.tokens(facts)
            is_fit = self.left.refusal(facts) is None and self.spare.fits(lane, tokens)
            if passes_left > 0 and is_fit and self._may_pass(facts, start_s, self.now):
                self.choose(lane, facts, tokens)
                self._bypassed[facts.request_id] = head.request_id
                passes_left -= 1

    def _may_pass(self, facts: Waiting, start_s: float, now: float) -> bool:
        return now + facts.duration_s <= start_s and facts.times_squashed < self._settings.max_squashed

    def _late_bypassers(self) -> tuple[str, ...]:
        """Return the fewest late bypassers, the largest first, whose squash lets a blocked head start; none if all together do not suffice."""
        if not self._blocked or self._num_squashes < 1:
            return ()
        late = [each for each in self._running_by_end() if each.is_bypasser and each.due_s < self.now]
        late.sort(key=lambda each: (-each.num_blocks, each.predicted_end_s, each.request_id))
        late = late[: self._num_squashes]
        missing = min(head.num_blocks for head in self._blocked) - self.left.blocks
        squash: list[str] = []
        for each in late:
            if missing <= 0:
                break
            squash.append(each.request_id)
            missing -= each.num_blocks
        return tuple(squash) if missing <= 0 else ()


def earliest_start_s(missing: float, ends: Sequence[Running], now: float) -> float:
    """Return when `missing` more blocks are free, if all running requests end as predicted; late ones count as ending now.

    ends: in order of predicted_end_s. If all of them do not suffice, the result is the last end.
    """
    at_s = now
    for each in ends:
        if missing <= 0:
            break
        missing -= each.num_blocks
        at_s = max(each.predicted_end_s, now)
    return at_s


def _rank(lane: int, head: Waiting | None) -> tuple[int, bool, int]:
    """Return the sort key of a lane's head.

    Heads are ordered by priority; then heads that were passed before, so that no other takes the room that was freed for them; then the smallest.
    """
    if head is None:
        return (0, True, lane)
    return (head.priority, head.times_bypassed + head.times_deferred == 0, lane)
