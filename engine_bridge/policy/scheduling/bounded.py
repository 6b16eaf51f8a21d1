"""Shortest first, but a request is overtaken no more once it would wait longer than P99 in order of arrival. The default. Pure."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from msgspec import Struct

from engine_bridge.policy.scheduling.guard import TINY_SHARE, Guard
from engine_bridge.policy.scheduling.lane_queue import (
    LaneQueue,
    Plan,
    QueuedRequest,
    Service,
    Walk,
    share_tokens,
)
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
from engine_bridge.policy.scheduling.quotas import Spare
from engine_bridge.policy.scheduling.wait_tree import Waits


class BoundedSettings(Struct, frozen=True, kw_only=True):
    """How much may overtake.

    Attributes:
        overtaking_share: the most of the started work that may have overtaken earlier requests. 0 is vLLM's own order. Picked by
            `python -m bench.emulated order`; docs/decisions/0033 has the figures.
    """

    overtaking_share: float = 0.15


# Guards are kept for this many tenants' priorities; the one unused for the longest time is forgotten first. Chosen: 20 MB.
NUM_GUARDS = 1024
# More than any program's beginning in seconds on the scheduler's clock, so that its turns count as shorter than all other requests.
FIRST = 1e12
# Number of the shortest requests, and of the earliest, that are tried until one may start. Chosen: 50 µs with 10,000 that wait.
NUM_TRIED = 16


class _Place(Struct, frozen=True, gc=False):
    """A waiting request.

    Attributes:
        place: by arrival.
        engine_s, work_s: seconds of the engine that it takes, as predicted, and as these have passed lately.
        length: the least is the shortest.
    """

    place: int
    engine_s: float
    work_s: float
    duration_s: float
    length: float

    @property
    def is_turn(self) -> bool:
        """Whether it continues a program."""
        return self.length < 0


class _Round:
    """One decision's way through a flow: the requests that are left, how long they wait, and what may still overtake.

    limits: of the seconds up to which the waits of earlier requests may be raised, for turns of programs and for others.
    tiny_s: the work that may overtake, within its share, however long earlier requests wait.
    """

    def __init__(
        self, waits: Waits, gone: set[str], owed_s: float, limits: tuple[float, float], tiny_s: float
    ) -> None:
        self.waits, self.gone, self.owed_s = waits, gone, owed_s
        self._turns, self._others = limits
        self._tiny_s = tiny_s

    def may_overtake(self, own: _Place) -> bool:
        """Return whether no earlier request would wait for too long because of this one."""
        if own.place < 0:
            return True
        if self.owed_s > 0 and not own.is_turn:
            return False
        if own.work_s <= self._tiny_s and not own.is_turn:
            return True
        limit = self._turns if own.is_turn else self._others
        return self.waits.are_within(limit - own.work_s, before=own.place)


class BoundedFlow:
    """One tenant's requests of one priority.

    A request's wait is the time since it came, the work that waits before it, and what running requests have still to do beyond the usual. The next
    request is the shortest one whose start keeps the waits of all earlier ones below the P99 of recent waits in order of arrival, as `Guard` has it,
    or whose work is tiny beside that P99.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._places: dict[str, _Place] = {}
        self._first: list[tuple[int, str]] = []
        self._short: list[tuple[float, int, str]] = []
        # Each without the time, which is the same for all: the work before a request, less the time when it came.
        self._waits = Waits()
        self._waiting_s = 0.0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, entry: QueuedRequest) -> None:
        """Queue a request."""
        facts, guard = entry.facts, self._guard
        if facts.is_swapped:
            # It has had its turn: it continues before all others, does not count as overtaking them, and is never overtaken.
            own = _Place(-1, 0.0, 0.0, 0.0, -math.inf)
        else:
            work_s = guard.came(facts.engine_s, facts.duration_s, self._waiting_s)
            place = self._waits.append(self._waiting_s - guard.now)
            length = facts.engine_s
            if facts.program_s is not None:
                # A turn of a program goes before all that begin, the earliest program first, as far as those before it can bear that.
                length = facts.program_s - FIRST
            own = _Place(place, facts.engine_s, work_s, facts.duration_s, length)
            self._waiting_s += own.work_s
        self._places[facts.request_id] = own
        insort(self._first, (own.place, facts.request_id))
        insort(self._short, (own.length, own.place, facts.request_id))

    def remove(self, entry: QueuedRequest, has_started: bool) -> None:
        """Take out a request. has_started: whether it overtakes the earlier ones by that."""
        request_id = entry.facts.request_id
        own = self._places.pop(request_id)
        is_first = own.is_turn or self._first[0][1] == request_id
        remove(self._first, (own.place, request_id))
        remove(self._short, (own.length, own.place, request_id))
        if own.place < 0:
            return
        self._waits.remove(own.place)
        self._waits.lower_after(own.place, own.work_s)
        self._waiting_s = self._waiting_s - own.work_s if self._places else 0.0
        if has_started:
            self._guard.started(request_id, own.engine_s, own.work_s, own.duration_s, is_first)
        else:
            self._guard.left()

    def order(self, plan: Plan, aging_s: float) -> Iterator[str]:
        """Yield the ids in the order in which they may start, as `Ordered.order`.

        A request that cannot start does not keep others from starting. While adapters take turns no request overtakes: short requests of many
        adapters would take the memory that one of them needs. (P50 TTFT +29% of vLLM's own with 50 adapters on 16 slots and lengths of a heavy
        tail.)
        """
        if plan.may_overtake:
            yield from self._overtaking(plan)
        started = plan.chosen
        yield from (
            request_id
            for _, request_id in self._first
            if request_id not in started and request_id not in plan.deferred
        )

    def _overtaking(self, plan: Plan) -> Iterator[str]:
        """Yield the next requests for as long as overtaking is allowed."""
        guard, most_s = self._guard, self._guard.most_waited_s()
        until_s = most_s - guard.delay_s(plan.now) - plan.now
        pays = guard.pays(most_s)
        limits = (until_s if guard.share else -math.inf, until_s if pays else -math.inf)
        gone = {request_id for request_id in plan.deferred if request_id in self._places}
        tiny_s = TINY_SHARE * most_s if pays else -math.inf
        now = _Round(self._waits.copy(), gone, guard.owed_s, limits, tiny_s)
        for request_id in gone:
            if self._places[request_id].place >= 0:
                now.waits.remove(self._places[request_id].place)
        for _ in range(len(self._places) - len(gone)):
            if not plan.may_overtake:
                return
            first = next(request_id for _, request_id in self._first if request_id not in gone)
            request_id = self._next(now, first)
            gone.add(request_id)
            yield request_id
            own = self._places[request_id]
            if own.place >= 0:
                now.waits.remove(own.place)
                if request_id in plan.chosen:
                    now.waits.raise_before(own.place, own.work_s)
                    now.owed_s = guard.owed(now.owed_s, own.work_s, own.is_turn or request_id == first)

    def _next(self, now: _Round, first: str) -> str:
        left = (request_id for *_, request_id in self._short if request_id not in now.gone)
        for request_id in itertools.islice(left, NUM_TRIED):
            if request_id == first or now.may_overtake(self._places[request_id]):
                return request_id
        left = (request_id for _, request_id in self._first if request_id not in now.gone)
        shortest = first
        for request_id in itertools.islice(left, 1, NUM_TRIED):
            own = self._places[request_id]
            if own.length < self._places[shortest].length and now.may_overtake(own):
                shortest = request_id
        return shortest


class Bounded(QueuePolicy):
    """Starts the shortest request, but none that would make another wait longer than P99 of the recent waits in order of arrival.

    The order is: the lowest `priority`; then the tenant that was given the fewest tokens for its weight; of one tenant the request that takes the
    fewest seconds of the engine.

    Bound: of one tenant and priority, an overtaken request is predicted to wait no longer than 99 of 100 recent requests would have waited in order
    of arrival; a request that would wait for longer there is overtaken by tiny ones only (`TINY_SHARE`), and these take no more than
    `overtaking_share` of the started work. A wait is predicted anew at each start, from the time that has passed,
    the work that waits before the request, and what running requests have still to do. A request without room for its KV stops all behind it, as with
    vLLM; one without room for its adapter is passed over, because `AdapterTurns` gives it its turn.

    Costs: those of `Waits`; `decide` looks up one request more than it starts. While adapters find no memory, twice `NUM_PASSED_OVER` more at most.

    Source: that of `Guard`.
    """

    name = "bounded"
    minds_priority = True
    bounds_programs = True

    def __init__(self, num_tokens: int, settings: BoundedSettings | None = None) -> None:
        """Start with an empty queue. num_tokens: tokens that requests may hold together; not used."""
        self.settings = settings or BoundedSettings()
        self._entries: dict[str, QueuedRequest] = {}
        self._by_adapter: dict[int, dict[str, None]] = {}
        """Ids of the waiting requests, in order of arrival."""
        self._guards: OrderedDict[tuple[int, str], Guard] = OrderedDict()
        self._running: dict[str, Guard] = {}
        self._queue = LaneQueue(self._flow)
        self._service = Service()

    def _flow(self, priority: int, tenant: str) -> BoundedFlow:
        """Return an empty flow that knows the waits of its tenant and priority."""
        return BoundedFlow(self._guard(priority, tenant))

    def _guard(self, priority: int, tenant: str) -> Guard:
        guard = self._guards.get((priority, tenant))
        if guard is None:
            guard = self._guards[priority, tenant] = Guard(self.settings.overtaking_share)
        self._guards.move_to_end((priority, tenant))
        while len(self._guards) > NUM_GUARDS:
            self._guards.popitem(last=False)
        return guard

    def arrived(self, facts: Waiting, now: float) -> None:
        """Queue a request. Raises ValueError: its weight is not positive, or it is known already."""
        if facts.weight <= 0:
            raise ValueError("a weight is positive")
        refuse_twice(facts, self._entries)
        self._service.waits(facts.tenant)
        self._guard(facts.priority, facts.tenant).tick(now)
        entry = self._entries[facts.request_id] = QueuedRequest(facts, facts.weighted_size, 0)
        self._queue.add(entry, self._service.of(facts.tenant))
        if facts.adapter_id is not None:
            self._by_adapter.setdefault(facts.adapter_id, {})[facts.request_id] = None

    def admitted(self, request_id: str, now: float) -> None:
        """Note that a request starts, and charge its tenant for its tokens."""
        entry = self._entries[request_id]
        facts = entry.facts
        guard = self._running[request_id] = self._guard(facts.priority, facts.tenant)
        guard.tick(now)
        self._leave(entry, has_started=True)
        self._service.serve(facts.tenant, share_tokens(facts, facts.size_tokens))
        self._queue.served(facts.tenant, self._service.of(facts.tenant))
        self._service.left(facts.tenant)

    def ended(self, request_id: str) -> None:
        """Take a request that ended out of the queue, or note that it runs no more."""
        guard = self._running.pop(request_id, None)
        if guard is not None:
            guard.running.ended(request_id)
        entry = self._entries.get(request_id)
        if entry is not None:
            self._leave(entry, has_started=False)
            self._service.left(entry.facts.tenant)

    def _leave(self, entry: QueuedRequest, has_started: bool) -> None:
        facts = entry.facts
        del self._entries[facts.request_id]
        self._queue.remove(entry, has_started)
        if facts.adapter_id is not None:
            del self._by_adapter[facts.adapter_id][facts.request_id]
            if not self._by_adapter[facts.adapter_id]:
                del self._by_adapter[facts.adapter_id]

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        """Start requests in the order of the policy until one finds no room for its KV."""
        if not self._entries:
            return Decision()
        if room.num_slots < 1:
            return Decision(otherwise="no_slot")
        plan = Plan(waiting, room, Spare([0], 0), self._service, room.num_tokens, now)
        without = self._without_adapter(plan, room)
        plan.deferred.update(without)
        plan.may_overtake &= not without
        walk = Walk(self._queue, plan, 0.0)
        num_passed = 0
        while walk.head is not None:
            reason = plan.left.refusal(walk.head)
            if reason is None:
                plan.choose(0, walk.head, plan.tokens(walk.head))
                if plan.left.slots < 1:
                    return Decision(tuple(plan.chosen), plan.deferred, otherwise="no_slot")
            else:
                plan.deferred[walk.head.request_id] = reason
                plan.may_overtake = False
                num_passed += 1
                if reason != "adapter_memory" or num_passed >= NUM_PASSED_OVER:
                    break
            walk.advance()
        return Decision(tuple(plan.chosen), plan.deferred)

    def _without_adapter(self, plan: Plan, room: StepRoom) -> dict[str, DeferReason]:
        """Return the requests whose adapter finds no memory now, of at most NUM_PASSED_OVER adapters. They are left out of the order."""
        if room.adapter_bytes is None:
            return {}
        found: dict[str, DeferReason] = {}
        for ids in itertools.islice(self._by_adapter.values(), NUM_PASSED_OVER):
            if len(found) < NUM_PASSED_OVER and plan.left.lacks_adapter_bytes(plan.waiting[next(iter(ids))]):
                found |= dict.fromkeys(ids, "adapter_memory")
        return found
