"""Shortest first, but a request is overtaken no more once it would wait for as many tokens as the longest recent wait. The default. Pure."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct

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
    """The bounds on overtaking.

    Attributes:
        peak_share: a request may be overtaken until the tokens that it waits for reach this share of the most that waited before any recent
            request. 0 is vLLM's own order. Picked by `python -m bench.emulated order`; docs/decisions/0020 has the figures.
        peak_fades_over: once the tokens of this many longest queues have left, the longest queue is forgotten.
    """

    peak_share: float = 0.9
    peak_fades_over: float = 30.0


# Longest queues are kept for this many tenants' priorities; the one unused for the longest time is forgotten first. Chosen: 100 kB.
NUM_PEAKS = 1024
# More than any program's beginning in seconds on the scheduler's clock, so that its turns count as shorter than all other requests.
FIRST = 1e12
# Number of the shortest requests, and of the earliest, that are tried until one may start. Chosen: 50 µs with 10,000 that wait.
NUM_TRIED = 16


class Peak:
    """The most tokens that recently waited before a request when it came. fades_over: as in `BoundedSettings`."""

    def __init__(self, fades_over: float) -> None:
        self.tokens = 0.0
        self._fades_over = fades_over

    def waited(self, tokens: float) -> None:
        """Note that a request came behind this many tokens."""
        self.tokens = max(self.tokens, tokens)

    def left(self, tokens: float) -> None:
        """Note that a request of this many tokens has started."""
        self.tokens = max(self.tokens - tokens / self._fades_over, 0.0)


class _Place(Struct, frozen=True, gc=False):
    """A waiting request. place: by arrival. length: tokens times the seconds that they are held; the least is the shortest."""

    place: int
    tokens: int
    length: float


class BoundedFlow:
    """One tenant's requests of one priority.

    A request's wait is the tokens queued ahead of it on arrival plus the tokens that have overtaken it since. In order of arrival the longest wait
    is the peak itself. The next request is the shortest one whose start keeps the waits of all earlier ones below their share of the peak.
    """

    def __init__(self, peak: Peak, peak_share: float) -> None:
        self._peak, self._peak_share = peak, peak_share
        self._places: dict[str, _Place] = {}
        self._first: list[tuple[int, str]] = []
        self._short: list[tuple[float, int, str]] = []
        self._waits = Waits()
        self._waiting_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, entry: QueuedRequest) -> None:
        """Queue a request."""
        facts = entry.facts
        if facts.is_swapped:
            # It has had its turn: it continues before all others, does not count as overtaking them, and is never overtaken.
            own = _Place(-1, 0, -math.inf)
        else:
            place = self._waits.append(self._waiting_tokens)
            self._peak.waited(self._waiting_tokens)
            length = facts.size_tokens * facts.duration_s
            if facts.program_s is not None:
                # A turn of a program goes before all that begin, the earliest program first, as far as those before it can bear that.
                length = facts.program_s - FIRST
            own = _Place(place, facts.size_tokens, length)
            self._waiting_tokens += own.tokens
        self._places[facts.request_id] = own
        insort(self._first, (own.place, facts.request_id))
        insort(self._short, (own.length, own.place, facts.request_id))

    def remove(self, entry: QueuedRequest, has_started: bool) -> None:
        """Take out a request. has_started: whether it overtakes the earlier ones by that."""
        request_id = entry.facts.request_id
        own = self._places.pop(request_id)
        remove(self._first, (own.place, request_id))
        remove(self._short, (own.length, own.place, request_id))
        if own.place < 0:
            return
        self._waiting_tokens -= own.tokens
        self._waits.remove(own.place)
        if has_started:
            self._waits.raise_before(own.place, own.tokens)
            self._peak.left(own.tokens)
        else:
            self._waits.lower_after(own.place, own.tokens)

    def order(self, plan: Plan, aging_s: float) -> Iterator[str]:
        """Yield the ids in the order in which they may start, as `Ordered.order`; the time does not matter.

        A request that cannot start does not keep others from starting. While adapters take turns no request overtakes: short requests of many
        adapters would take the memory that one of them needs. (P50 TTFT +29% of vLLM's own with 50 adapters on 16 slots and lengths of a heavy
        tail.)
        """
        limit = self._peak_share * self._peak.tokens if plan.may_overtake else 0.0
        if limit:
            yield from self._overtaking(plan, limit)
        started = plan.chosen
        yield from (
            request_id
            for _, request_id in self._first
            if request_id not in started and request_id not in plan.deferred
        )

    def _overtaking(self, plan: Plan, limit: float) -> Iterator[str]:
        """Yield the next requests for as long as overtaking is allowed."""
        gone = {request_id for request_id in plan.deferred if request_id in self._places}
        waits = self._waits.copy()
        for request_id in gone:
            if self._places[request_id].place >= 0:
                waits.remove(self._places[request_id].place)
        for _ in range(len(self._places) - len(gone)):
            if not plan.may_overtake:
                return
            request_id = self._next(waits, gone, limit)
            gone.add(request_id)
            yield request_id
            own = self._places[request_id]
            if own.place >= 0:
                waits.remove(own.place)
                if request_id in plan.chosen:
                    waits.raise_before(own.place, own.tokens)

    def _next(self, waits: Waits, gone: Collection[str], limit: float) -> str:
        left = (request_id for *_, request_id in self._short if request_id not in gone)
        for request_id in itertools.islice(left, NUM_TRIED):
            own = self._places[request_id]
            if own.place < 0 or waits.are_within(limit - own.tokens, before=own.place):
                return request_id
        left = (request_id for _, request_id in self._first if request_id not in gone)
        first = list(itertools.islice(left, NUM_TRIED))
        shortest = first[0]
        for request_id in first[1:]:
            own = self._places[request_id]
            is_shorter = own.length < self._places[shortest].length
            if is_shorter and waits.are_within(limit - own.tokens, before=own.place):
                shortest = request_id
        return shortest


class Bounded(QueuePolicy):
    """Starts the shortest request, but none that would make another wait for as many tokens as the longest recent queue had.

    The order is: the lowest `priority`; then the tenant that was given the fewest tokens for its weight; of one tenant the request that holds the
    fewest tokens times seconds.

    Bound: of one tenant and priority, an overtaken request waits for no more tokens than `peak_share` times the most that recently waited before a
    request; a request that came behind more than that is not overtaken. So the longest waits equal those of the order of arrival. A request without
    room for its KV stops all behind it, as with vLLM; one without room for its adapter is passed over, because `AdapterTurns` gives it its turn.

    Costs: those of `Waits`; `decide` looks up one request more than it starts. While adapters find no memory, twice `NUM_PASSED_OVER` more at most.

    Source: ours. Waiting in tokens rather than seconds is start-time fair queueing's (Goyal et al., SIGCOMM 1996); the order of arrival takes the
    place of the tenants' shares there.
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
        self._peaks: OrderedDict[tuple[int, str], Peak] = OrderedDict()
        self._queue = LaneQueue(self._flow)
        self._service = Service()

    def _flow(self, priority: int, tenant: str) -> BoundedFlow:
        """Return an empty flow that knows the longest queue of its tenant and priority."""
        peak = self._peaks.setdefault((priority, tenant), Peak(self.settings.peak_fades_over))
        self._peaks.move_to_end((priority, tenant))
        while len(self._peaks) > NUM_PEAKS:
            self._peaks.popitem(last=False)
        return BoundedFlow(peak, self.settings.peak_share)

    def arrived(self, facts: Waiting, now: float) -> None:
        """Queue a request.

        Raises:
            ValueError: its weight is not positive, or it is known already.
        """
        if facts.weight <= 0:
            raise ValueError("a weight is positive")
        refuse_twice(facts, self._entries)
        self._service.waits(facts.tenant)
        entry = self._entries[facts.request_id] = QueuedRequest(facts, facts.weighted_size, 0)
        self._queue.add(entry, self._service.of(facts.tenant))
        if facts.adapter_id is not None:
            self._by_adapter.setdefault(facts.adapter_id, {})[facts.request_id] = None

    def admitted(self, request_id: str, now: float) -> None:
        """Note that a request starts, and charge its tenant for its tokens."""
        entry = self._entries[request_id]
        facts = entry.facts
        self._leave(entry, has_started=True)
        self._service.serve(facts.tenant, share_tokens(facts, facts.size_tokens))
        self._queue.served(facts.tenant, self._service.of(facts.tenant))
        self._service.left(facts.tenant)

    def ended(self, request_id: str) -> None:
        """Take a request that ended out of the queue, if it waits."""
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
