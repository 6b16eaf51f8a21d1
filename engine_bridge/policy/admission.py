"""Who starts now, who waits and why, and who makes room. Pure: facts in, decision out, for one engine step.

A policy keeps the order of what waits by its hooks, and looks facts up only for the few requests that it considers, so that a decision costs next
to nothing however many wait. `decide` changes no state: what the caller does of it, it tells by the hooks, and the same calls give the same
decisions again.

`Fcfs`, `Sjf`, `Priority` and `Fair` are baselines: one order, and whoever does not fit blocks all behind. `Mlq` is the default.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, Protocol

from msgspec import Struct

from .lanes import ONE_LANE, Lanes
from .quotas import Ledger, Spare

DeferReason = Literal["lane_quota", "no_blocks", "adapter_memory", "behind_head", "no_slot", "step_full"]


class Waiting(Struct, frozen=True, kw_only=True, gc=False):
    """A request that could start if there were room: its adapter is in host memory or on the device, its grammar is compiled.

    arrived_s: when it first came, also for one that was preempted or squashed. wrs: on the lanes' scale. size_tokens: input + predicted output +
    adapter in token units. num_blocks: what starting takes from `Room.free_blocks`: new ones, and its own cached ones that nobody holds. Together
    with adapter_blocks they must fit an empty device: the caller refuses what never can. duration_s: predicted, from start to end. priority:
    lower first, as in vLLM. weight: its tenant's share against others'. adapter_blocks: device memory that its adapter still needs; requests of
    one adapter_id need it once. adapter_bytes: the same where adapters have memory of their own. num_prefill_tokens: to be computed before its first
    token. is_warm: its prefix is on the device. is_swapped: it ran before, and its KV waits in host memory. times_bypassed, times_squashed: as the
    caller counts them from `Decision.bypassed` and `Decision.squash`. times_deferred: decisions in which a step was too full for it.
    """

    request_id: str
    arrived_s: float
    wrs: float
    size_tokens: int
    num_blocks: int
    duration_s: float
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    adapter_id: int | None = None
    adapter_blocks: int = 0
    adapter_bytes: int = 0
    num_prefill_tokens: int = 0
    is_warm: bool = False
    is_swapped: bool = False
    times_bypassed: int = 0
    times_squashed: int = 0
    times_deferred: int = 0


class Running(Struct, frozen=True, kw_only=True, gc=False):
    """A request that holds device memory. num_blocks: what its end would give back. predicted_end_s: as predicted when it started.

    adapter_bytes: of its adapter, where adapters have memory of their own.
    """

    request_id: str
    lane: int
    charged_tokens: int
    num_blocks: int
    started_s: float
    predicted_end_s: float
    is_bypasser: bool = False
    adapter_bytes: int = 0


class Room(Struct, frozen=True, kw_only=True, gc=False):
    """What is there in this step. num_slots: how many more requests may run. num_tokens: the capacity for tokens, used or not.

    prefill_tokens: of prompts that this step may begin to compute; None: any number. is_prefilling: prompts are under way. adapter_bytes: free for
    the adapters of further requests; None: they take blocks, or nothing. overcharged_tokens: by how much what runs is charged more than it will hold
    at any one time (`quotas.overcharged_tokens`).
    """

    free_blocks: int
    num_slots: int
    num_tokens: int
    prefill_tokens: int | None = None
    is_prefilling: bool = False
    adapter_bytes: int | None = None
    overcharged_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do in this step.

    request_ids: to start, in this order. deferred: why those that were considered wait; otherwise: why all others do. bypassed: of those that
    start, the ones that pass a head, with that head. squash: running bypassers to preempt, for a head that can start then.
    """

    request_ids: tuple[str, ...] = ()
    deferred: Mapping[str, DeferReason] = field(default_factory=dict)
    bypassed: Mapping[str, str] = field(default_factory=dict)
    squash: tuple[str, ...] = ()
    otherwise: DeferReason = "behind_head"

    def reason(self, request_id: str) -> DeferReason:
        """Why a request that waits and does not start now waits."""
        return self.deferred.get(request_id, self.otherwise)


class QueuePolicy(Protocol):
    """Who starts next. One caller, in order of time; requests are told apart by `request_id`."""

    @property
    def name(self) -> str:
        """As in `POLICIES`."""
        ...

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
        """Who starts now. Changes no state.

        waiting: facts as of now for all that arrived and were not admitted; only those considered are looked up, so a mapping may work
        them out on demand. What is fixed at arrival (arrived_s, wrs, size_tokens, duration_s, priority, tenant) is taken from there.
        """
        ...

    def arrived(self, facts: Waiting, now: float) -> None:
        """It may start from now on. Again for one that was preempted or squashed, after `ended`. Raises ValueError if it waits already."""
        ...

    def admitted(self, request_id: str, now: float) -> None:
        """It has started. Raises KeyError if it does not wait."""
        ...

    def outgrew(self, request_id: str, size_tokens: int) -> None:
        """A running request is larger than predicted, and is predicted to reach this size now. Unknown ones are ignored."""
        ...

    def squashed(self, request_id: str) -> None:
        """It is being squashed, as `Decision.squash` said. `ended` and `arrived` follow."""
        ...

    def ended(self, request_id: str) -> None:
        """It left: finished, aborted (waiting or running), preempted or squashed. Unknown ones are ignored."""
        ...


class _Left:
    """What is left of the room while a decision takes from it."""

    def __init__(self, room: Room) -> None:
        self.blocks, self.slots = room.free_blocks, room.num_slots
        self.adapter_bytes = math.inf if room.adapter_bytes is None else room.adapter_bytes
        self._prefill_tokens = math.inf if room.prefill_tokens is None else room.prefill_tokens
        self._may_overrun = not room.is_prefilling
        self._adapters: set[int | None] = set()

    def refusal(self, facts: Waiting) -> DeferReason | None:
        """Why it cannot start, None if it can."""
        if self.slots < 1:
            return "no_slot"
        if facts.num_blocks > self.blocks:
            return "no_blocks"
        if self.needed(facts) > self.blocks or self.needed_bytes(facts) > self.adapter_bytes:
            return "adapter_memory"
        return None if self._has_time(facts) else "step_full"

    def needed(self, facts: Waiting) -> int:
        """Blocks. An adapter that another start of this step brings costs nothing more."""
        return facts.num_blocks + (0 if self._is_brought(facts) else facts.adapter_blocks)

    def needed_bytes(self, facts: Waiting) -> int:
        """For its adapter, likewise."""
        return 0 if self._is_brought(facts) else facts.adapter_bytes

    def take(self, facts: Waiting) -> None:
        self.blocks -= self.needed(facts)
        self.adapter_bytes -= self.needed_bytes(facts)
        self.slots -= 1
        self._adapters.add(facts.adapter_id)
        self._prefill_tokens -= facts.num_prefill_tokens
        self._may_overrun = False

    def _has_time(self, facts: Waiting) -> bool:
        """A prompt that is too long for any step begins when no other one is computed, and takes several."""
        return facts.num_prefill_tokens <= self._prefill_tokens or (
            self._may_overrun and self._prefill_tokens > 0
        )

    def _is_brought(self, facts: Waiting) -> bool:
        return facts.adapter_id is not None and facts.adapter_id in self._adapters


def _insert(ordered: list[Any], entry: Any) -> None:
    insort(ordered, entry)


def _remove(ordered: list[Any], entry: Any) -> None:
    del ordered[bisect_left(ordered, entry)]


# -- baselines: one order ----------------------------------------------------------------------------------------------


class _OneOrder:
    """Starts requests in the order of a key that is fixed at arrival; the first that does not fit blocks all behind.

    Costs: `arrived`, `admitted` and `ended` a binary search and a shift; `decide` as many look-ups as it starts requests, and one.
    """

    name = ""

    def __init__(self) -> None:
        self._order: list[tuple[Any, ...]] = []
        self._keys: dict[str, tuple[Any, ...]] = {}

    def _key(self, facts: Waiting) -> tuple[float, ...]:
        raise NotImplementedError

    def arrived(self, facts: Waiting, now: float) -> None:
        _refuse_twice(facts, self._keys)
        key = self._keys[facts.request_id] = (*self._key(facts), facts.arrived_s, facts.request_id)
        _insert(self._order, key)

    def admitted(self, request_id: str, now: float) -> None:
        _remove(self._order, self._keys.pop(request_id))

    def outgrew(self, request_id: str, size_tokens: int) -> None: ...

    def squashed(self, request_id: str) -> None: ...

    def ended(self, request_id: str) -> None:
        if request_id in self._keys:
            _remove(self._order, self._keys.pop(request_id))

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
        chosen, deferred = _in_order((key[-1] for key in self._order), waiting, _Left(room))
        return Decision(tuple(facts.request_id for facts in chosen), deferred)


def _refuse_twice(facts: Waiting, known: Mapping[str, Any]) -> None:
    if facts.request_id in known:
        raise ValueError("the request waits already")


def _in_order(
    order: Iterator[str], waiting: Mapping[str, Waiting], left: _Left
) -> tuple[list[Waiting], dict[str, DeferReason]]:
    """Those of the order that fit until one does not, and why that one does not."""
    chosen: list[Waiting] = []
    for request_id in order:
        facts = waiting[request_id]
        refusal = left.refusal(facts)
        if refusal is not None:
            return chosen, {request_id: refusal}
        left.take(facts)
        chosen.append(facts)
    return chosen, {}


class Fcfs(_OneOrder):
    """Who came first. vLLM's default, and S-LoRA's."""

    name = "fcfs"

    def _key(self, facts: Waiting) -> tuple[float, ...]:
        return ()


class Sjf(_OneOrder):
    """The shortest by prediction. Source: μServe (Qiu et al., 2024), as in Chameleon §5.3. It starves the long, and is here to be compared with."""

    name = "sjf"

    def _key(self, facts: Waiting) -> tuple[float, ...]:
        return (facts.duration_s,)


class Priority(_OneOrder):
    """The lowest `priority`, then who came first. vLLM's other policy."""

    name = "priority"

    def _key(self, facts: Waiting) -> tuple[float, ...]:
        return (facts.priority,)


# -- AdaptiveLLM: waiting time over length -----------------------------------------------------------------------------


class _Urgency:
    """Requests by waiting time over length, the highest first.

    That order changes as time passes, so it is not kept as one: requests are kept by arrival in one list for each power of two of
    length, and the lists' heads are compared. The order is exact between lists; within one, lengths less than a factor of two apart go by arrival.
    At most some 30 lists.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[tuple[float, str, int]]] = {}

    def add(self, request_id: str, arrived_s: float, size_tokens: int) -> None:
        _insert(self._lists.setdefault(size_tokens.bit_length(), []), (arrived_s, request_id, size_tokens))

    def remove(self, request_id: str, arrived_s: float, size_tokens: int) -> None:
        bucket = size_tokens.bit_length()
        _remove(self._lists[bucket], (arrived_s, request_id, size_tokens))
        if not self._lists[bucket]:
            del self._lists[bucket]

    def lists(self) -> list[list[Any]]:
        return list(self._lists.values())

    def order(self, now: float, min_wait_s: float = -math.inf) -> Iterator[str]:
        """Those that have waited for as long, the most urgent first."""
        heads: list[tuple[float, float, str, int, int]] = []
        for bucket in self._lists:
            self._push(heads, bucket, 0, now, min_wait_s)
        while heads:
            *_, request_id, bucket, at = heapq.heappop(heads)
            yield request_id
            self._push(heads, bucket, at + 1, now, min_wait_s)

    def _push(
        self,
        heads: list[tuple[float, float, str, int, int]],
        bucket: int,
        at: int,
        now: float,
        min_wait_s: float,
    ) -> None:
        entries = self._lists[bucket]
        if at < len(entries) and now - entries[at][0] >= min_wait_s:
            arrived_s, request_id, size_tokens = entries[at]
            heapq.heappush(heads, (-urgency(now - arrived_s, size_tokens), arrived_s, request_id, bucket, at))


def urgency(waited_s: float, size_tokens: int) -> float:
    """Seconds per token. Source: AdaptiveLLM §3.5, its priority; there the length is that of the sequence so far, here with what is predicted."""
    return max(waited_s, 0.0) / max(size_tokens, 1)


def starts_swapped(swapped: Sequence[float], waiting: Sequence[float]) -> bool:
    """Whether the swapped set starts rather than the waiting one, by their mean urgency; the swapped one at a tie. An empty set never does.

    Source: AdaptiveLLM Algorithm 2, line 8.
    """
    if not swapped or not waiting:
        return bool(swapped)
    return math.fsum(waiting) / len(waiting) <= math.fsum(swapped) / len(swapped)


class Fair:
    """The highest waiting time over length first; of those swapped out or of the others, whichever set that fits is the more urgent on average.

    Source: AdaptiveLLM §3.5 and Algorithm 2. "As many as possible" is taken as in order of urgency until one does not fit: by skipping that
    one, smaller ones could keep it out for ever. No bound on waiting: under lasting overload short requests always catch up with long ones.
    """

    name = "fair"

    def __init__(self) -> None:
        self._sets = {True: _Urgency(), False: _Urgency()}  # by is_swapped
        self._facts: dict[str, Waiting] = {}

    def arrived(self, facts: Waiting, now: float) -> None:
        _refuse_twice(facts, self._facts)
        self._facts[facts.request_id] = facts
        self._sets[facts.is_swapped].add(facts.request_id, facts.arrived_s, facts.size_tokens)

    def admitted(self, request_id: str, now: float) -> None:
        facts = self._facts.pop(request_id)
        self._sets[facts.is_swapped].remove(request_id, facts.arrived_s, facts.size_tokens)

    def outgrew(self, request_id: str, size_tokens: int) -> None: ...

    def squashed(self, request_id: str) -> None: ...

    def ended(self, request_id: str) -> None:
        if request_id in self._facts:
            self.admitted(request_id, 0.0)

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
        swapped, why_swapped = _in_order(self._sets[True].order(now), waiting, _Left(room))
        fresh, why_fresh = _in_order(self._sets[False].order(now), waiting, _Left(room))
        is_swapped = starts_swapped(_urgencies(swapped, now), _urgencies(fresh, now))
        chosen = swapped if is_swapped else fresh
        return Decision(tuple(facts.request_id for facts in chosen), why_swapped | why_fresh)


def _urgencies(chosen: Sequence[Waiting], now: float) -> list[float]:
    return [urgency(now - facts.arrived_s, facts.size_tokens) for facts in chosen]


# -- the multi-level queue ---------------------------------------------------------------------------------------------


# Entries of a former placing that are freed whenever a request comes or leaves. Chosen: 1 µs.
NUM_FREED = 16


class MlqSettings(Struct, frozen=True, kw_only=True):
    """Seconds and counts. All chosen, unless they name a source."""

    max_wait_s: float = 60.0
    """Then a request is head of all lanes, and nothing passes it. Under lasting overload this is what turns `Mlq` into `Fcfs`."""
    aging_s: float = 0.125
    """Then a request goes by waiting time over length, ahead of smaller ones that came later. Longer than this only made tails longer."""
    num_looked_at: int = 16
    """Requests behind a blocked head that are looked at for one that may pass."""
    max_bypassed: int = 16
    """Times that one head may be passed."""
    max_squashed: int = 1
    """Times that one request may be squashed; after that it passes nobody."""
    squash_share: float = 0.05
    """Of requests admitted, at most. Source: Chameleon §4.2, which sees at most so many in its experiments, without enforcing it."""


class _Entry(Struct, frozen=True, gc=False):
    """What was fixed at arrival, and where it is kept."""

    facts: Waiting
    wrs: float
    lane: int


class _Flow:
    """One tenant's requests of one priority in one lane.

    First those that were swapped out (somebody has half an answer), then those that have waited for `aging_s`, by urgency, then smallest first.
    """

    def __init__(self) -> None:
        self._small: list[tuple[bool, float, float, str]] = []
        self._urgency = _Urgency()

    def __len__(self) -> int:
        return len(self._small)

    def add(self, entry: _Entry) -> None:
        facts = entry.facts
        _insert(self._small, self._key(entry))
        self._urgency.add(facts.request_id, facts.arrived_s, facts.size_tokens)

    def remove(self, entry: _Entry) -> None:
        facts = entry.facts
        _remove(self._small, self._key(entry))
        self._urgency.remove(facts.request_id, facts.arrived_s, facts.size_tokens)

    def lists(self) -> list[list[Any]]:
        """All that holds entries."""
        return [self._small, *self._urgency.lists()]

    def _key(self, entry: _Entry) -> tuple[bool, float, float, str]:
        return (not entry.facts.is_swapped, entry.wrs, entry.facts.arrived_s, entry.facts.request_id)

    def order(self, now: float, aging_s: float) -> Iterator[str]:
        given = set()
        for is_fresh, *_, request_id in self._small:
            if is_fresh:
                break
            given.add(request_id)
            yield request_id
        for request_id in self._urgency.order(now, aging_s):
            if request_id not in given:
                given.add(request_id)
                yield request_id
        for *_, request_id in self._small:
            if request_id not in given:
                yield request_id


class _Service:
    """Tokens that each tenant was given, over its weight; the one with the least comes first.

    A tenant that comes back starts at the level of who was served last, so that idling saves nothing up. Of one that waits nothing is taken:
    what it has been given only grows.
    Source: start-time fair queueing (Goyal et al., SIGCOMM 1996) with tokens, as VTC (Sheng et al., OSDI 2024).
    """

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()
        self._level = 0.0

    def waits(self, tenant: str) -> None:
        self._num_waiting[tenant] += 1
        if self._num_waiting[tenant] == 1:
            self._given[tenant] = max(self._given.get(tenant, 0.0), self._level)

    def left(self, tenant: str) -> None:
        """One that waited waits no more. A tenant that is behind the level then is forgotten: it would start there anyway."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._forget_idle()

    def serve(self, tenant: str, share_tokens: float) -> None:
        """share_tokens: tokens over the tenant's weight."""
        given = self.of(tenant)
        self._level = max(self._level, given)
        self._given[tenant] = given + share_tokens

    def of(self, tenant: str) -> float:
        return self._given.get(tenant, self._level)

    def _forget_idle(self) -> None:
        """Keeps the table to twice the tenants that wait, and some; those who are furthest ahead stay."""
        if len(self._given) <= 2 * len(self._num_waiting) + 1024:
            return
        idle = [tenant for tenant in self._given if tenant not in self._num_waiting]
        idle.sort(key=lambda tenant: (self._given[tenant], tenant))
        for tenant in idle[: len(idle) - 512]:
            del self._given[tenant]


class _Lane:
    """What waits in a lane, by (priority, tenant).

    `order`: the flows' (priority, what the tenant was given, tenant), rising.
    """

    def __init__(self) -> None:
        self.flows: dict[tuple[int, str], _Flow] = {}
        self.order: list[tuple[int, float, str]] = []
        self.num_waiting = 0
        self._places: dict[str, dict[int, float]] = {}  # by tenant and priority: what `order` has as given

    def add(self, entry: _Entry, given: float) -> None:
        priority, tenant = entry.facts.priority, entry.facts.tenant
        flow = self.flows.get((priority, tenant))
        if flow is None:
            flow = self.flows[priority, tenant] = _Flow()
            self._places.setdefault(tenant, {})[priority] = given
            _insert(self.order, (priority, given, tenant))
        flow.add(entry)
        self.num_waiting += 1

    def remove(self, entry: _Entry) -> None:
        priority, tenant = entry.facts.priority, entry.facts.tenant
        flow = self.flows[priority, tenant]
        flow.remove(entry)
        self.num_waiting -= 1
        if not flow:
            del self.flows[priority, tenant]
            places = self._places[tenant]
            _remove(self.order, (priority, places.pop(priority), tenant))
            if not places:
                del self._places[tenant]

    def served(self, tenant: str, given: float) -> None:
        """So much has the tenant been given by now."""
        places = self._places.get(tenant, {})
        for priority, before in places.items():
            _remove(self.order, (priority, before, tenant))
            _insert(self.order, (priority, given, tenant))
            places[priority] = given


class _Placing:
    """All that waits, placed in lanes."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.queues = [_Lane() for _ in range(lanes.num_lanes)]
        self.entries: dict[str, _Entry] = {}

    def add(self, facts: Waiting, wrs: float, given: float) -> None:
        entry = self.entries[facts.request_id] = _Entry(facts, wrs, self.lanes.lane_of(wrs))
        self.queues[entry.lane].add(entry, given)

    def remove(self, request_id: str) -> _Entry:
        entry = self.entries.pop(request_id)
        self.queues[entry.lane].remove(entry)
        return entry

    def served(self, tenant: str, given: float) -> None:
        for queue in self.queues:
            queue.served(tenant, given)


class _Refit:
    """A placing in the making. What arrives and leaves meanwhile is told to both."""

    def __init__(self, lanes: Lanes, quotas: Sequence[int], sizes: Mapping[str, float]) -> None:
        self.placing, self.quotas, self._sizes = _Placing(lanes), quotas, sizes
        self.last = (-math.inf, "")
        """All that came before it, in order of arrival, has been placed."""

    def wrs(self, request_id: str, known: float) -> float:
        return self._sizes.get(request_id, known)


def _letting_go(placing: _Placing) -> Iterator[None]:
    """Frees a placing that is not needed any more, some of it with each step: 10,000 requests at once take 4 ms (measured)."""
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


class _Walk:
    """A lane's requests in the order in which a decision considers them, those left out that it has chosen already.

    Lowest priority number first; then the tenant who was given least, counting what this decision gives; then the flow's own order.
    """

    def __init__(self, lane: _Lane, plan: _Plan, aging_s: float) -> None:
        self._plan, self._lane, self._aging_s = plan, lane, aging_s
        # As many as tenants wait, and few of them are ever asked: taken from the lane's order one by one, as their turn comes.
        self._flows: list[tuple[int, float, str]] = []
        self._num_taken = 0
        self._orders: dict[tuple[int, str], Iterator[str]] = {}
        self.head: Waiting | None = None
        self.advance()

    def advance(self) -> None:
        self.head = next(iter(self.ahead(1)), None)

    def ahead(self, num: int) -> list[Waiting]:
        """The next so many, behind the head. They are not come back to."""
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
        """Take flows until the first of those taken comes before all others. False if there are none."""
        order, flows = self._lane.order, self._flows
        while self._num_taken < len(order) and (not flows or order[self._num_taken] < flows[0]):
            heapq.heappush(flows, order[self._num_taken])
            self._num_taken += 1
        return bool(flows)

    def _order(self, priority: int, tenant: str) -> Iterator[str]:
        flow = (priority, tenant)
        if flow not in self._orders:
            self._orders[flow] = self._lane.flows[flow].order(self._plan.now, self._aging_s)
        return self._orders[flow]


class _Plan:
    """A decision in the making: what is left, and what was decided."""

    def __init__(
        self,
        waiting: Mapping[str, Waiting],
        running: Mapping[str, Running],
        room: Room,
        spare: Spare,
        service: _Service,
        now: float,
    ) -> None:
        self.waiting, self.spare, self.now = waiting, spare, now
        self.left = _Left(room)
        self.chosen: dict[str, tuple[int, Waiting]] = {}
        self.deferred: dict[str, DeferReason] = {}
        self.bypassed: dict[str, str] = {}
        self.num_overdue = 0
        """Of the chosen, the first so many."""
        self.blocked: list[Waiting] = []
        """Heads that wait for memory."""
        self.is_full = False
        """A head whose turn has come for the second time waits for the next step: nobody else starts in this one."""
        self._service = service
        self._gives: dict[str, float] = {}
        self._running = running
        self._ends: list[Running] | None = None

    def ends(self) -> list[Running]:
        """All that runs, who is predicted to end first first."""
        if self._ends is None:
            self._ends = sorted(self._running.values(), key=attrgetter("predicted_end_s"))
        return self._ends

    def given(self, tenant: str) -> float:
        return self._service.of(tenant) + self._gives.get(tenant, 0.0)

    def choose(self, lane: int, facts: Waiting, tokens: int) -> None:
        self.left.take(facts)
        self.spare.take(lane, tokens)
        self._gives[facts.tenant] = self._gives.get(facts.tenant, 0.0) + _share_tokens(facts, tokens)
        self.chosen[facts.request_id] = (lane, facts)
        self.deferred.pop(facts.request_id, None)

    def ids(self) -> tuple[str, ...]:
        """All chosen in order, but in each lane's places warm ones before others of the same priority; those overdue stay where they are."""
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


def _share_tokens(facts: Waiting, tokens: int) -> float:
    """Tokens over the tenant's weight. What was preempted has been counted when it first started."""
    return 0.0 if facts.is_swapped else tokens / facts.weight


class Mlq:
    """Lanes by size, each with a quota of tokens; nobody waits without bound.

    1. Requests that have waited for `max_wait_s` start in order of arrival. While one of them does not fit, nothing else starts.
    2. Each lane, that of the smallest first, starts requests within its quota.
    3. What is left is pooled and offered from the top lane down. A lane whose head waits, and would fit the lane's own quota, keeps
       what it has left of it: otherwise smaller requests could borrow it again and again. (The paper pools it all.)

    In a lane: lower `priority` first, then the tenant who was given the fewest tokens for its weight, then, of one tenant, those who waited for
    `aging_s` by waiting time over length (AdaptiveLLM), then the smallest. A lane's head that does not fit stops its lane. If it lacks memory
    (not quota), one behind it may pass if it is predicted to end before the head could start; those whose prefix is warm are asked first. A
    bypasser that runs on past its prediction is squashed if that lets a blocked head start. Of those that start in one step, warm ones go first in
    their lane: all start, so it costs nobody, and their cached blocks are held before another could take them.

    Bound: let a request have waited for max_wait_s, and let D be the longest that a started request really runs, g the number of groups that
    those who came before it and still wait, and itself, make if one fills the room with them in order of arrival (g <= their number + 1). It
    starts within max_wait_s + g · D, and a step's length for each group: nothing passes it, so after D all that ran has ended, and with each
    further D another group has. Room means blocks, slots, and tokens by the larger of guess and truth. If the engine preempts for lack of blocks,
    or a bypasser is squashed, those who run come back into the queue: then it is max_wait_s + (n + m) · D, n those before it and m those who ran,
    as long as somebody of those who run is nobody's victim until it ends: with vLLM's victims the one that started first, with ours
    (`driver/scheduling/victims.py`) the one that came first. So two never throw each other out in turns. Who becomes ready late (its adapter
    was loading) counts among those before by when it came. Predictions do not appear in the bound.
    What it takes for granted is that the engine starts what was decided: vLLM passes over a request whose adapter would be one more than it
    computes with in a step (`max_loras`), and the bound does not hold for that one.

    Costs: `arrived`, `admitted`, `ended` a few binary searches. `decide` looks up those it starts, a head for each lane, `num_looked_at` behind a
    head without memory. It does not depend on how many wait, nor on how many tenants they are of (`python -m bench.sim.decisions`).

    Source: Chameleon §4.2, Algorithm 1 and "Bypassing Adapter Blocking". Departs in the bound, in priorities and tenants, in aging, in that lanes
    keep what a waiting head can use, in that heads that were passed go before other lanes' heads, in that lack of blocks counts as lack of
    adapter memory, and in that a late bypasser is squashed only when it helps a head, within a budget.
    """

    name = "mlq"

    def __init__(self, num_tokens: int, settings: MlqSettings | None = None) -> None:
        """num_tokens: all that requests may hold together; one lane has them until `refit`."""
        self.settings = settings or MlqSettings()
        self.ledger = Ledger([num_tokens])
        self._placing = _Placing(ONE_LANE)
        self._refit: _Refit | None = None
        self._leftovers: Iterator[None] = iter(())
        self._running: dict[str, _Entry] = {}
        self._arrivals: list[tuple[float, str]] = []
        self._service = _Service()
        self._squashes = _SquashBudget(self.settings.squash_share)

    # -- hooks

    def arrived(self, facts: Waiting, now: float) -> None:
        if facts.weight <= 0 or facts.request_id in self._running:
            raise ValueError("a weight is positive, and a request that runs does not wait")
        _refuse_twice(facts, self._placing.entries)
        self._service.waits(facts.tenant)
        given = self._service.of(facts.tenant)
        self._placing.add(facts, facts.wrs, given)
        if self._refit is not None:
            self._refit.placing.add(facts, self._refit.wrs(facts.request_id, facts.wrs), given)
        _insert(self._arrivals, (facts.arrived_s, facts.request_id))
        next(self._leftovers, None)

    def admitted(self, request_id: str, now: float) -> None:
        entry = self._running[request_id] = self._dequeue(request_id)
        tokens = self._capped(entry.facts, self.ledger.num_tokens)
        self.ledger.charge(request_id, entry.lane, tokens)
        self._serve(entry.facts.tenant, _share_tokens(entry.facts, tokens))
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

    def refit(self, lanes: Lanes, quotas: Sequence[int], wrs: Mapping[str, float] | None = None) -> None:
        """New lanes and a quota for each, at once: `begin_refit` and all of `advance_refit`."""
        self.begin_refit(lanes, quotas, wrs)
        self.advance_refit(len(self._placing.entries))

    def begin_refit(
        self, lanes: Lanes, quotas: Sequence[int], wrs: Mapping[str, float] | None = None
    ) -> None:
        """New lanes and a quota for each; `advance_refit` must follow. Until that is done, decisions are those of the old lanes.

        wrs: sizes of known requests on the new lanes' scale, also of those that arrive before it is done; others keep theirs. Looked up one by
        one, so a mapping may work them out on demand. A refit that was not done yet is given up. Raises ValueError if quotas are not as many as
        lanes.
        """
        if len(quotas) != lanes.num_lanes:
            raise ValueError("each lane has one quota")
        self._refit = _Refit(lanes, quotas, {} if wrs is None else wrs)

    def advance_refit(self, max_requests: int) -> bool:
        """Place so many of those that wait in the new lanes. True once the new lanes are those that decisions go by, or if there are none.

        4 µs for each (measured with 10,000 that wait): all of them in one step would keep every stream waiting.
        """
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
                refit.placing.add(entry.facts, refit.wrs(key[1], entry.wrs), given)
        if len(placed) < len(waiting):
            return False
        self._finish_refit(refit)
        return True

    def _finish_refit(self, refit: _Refit) -> None:
        self._leftovers = _letting_go(self._placing)
        self._refit, self._placing = None, refit.placing
        for request_id, entry in self._running.items():
            wrs = refit.wrs(request_id, entry.wrs)
            self._running[request_id] = _Entry(entry.facts, wrs, self.lanes.lane_of(wrs))
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

    def _dequeue(self, request_id: str) -> _Entry:
        next(self._leftovers, None)
        entry = self._placing.remove(request_id)
        if self._refit is not None and request_id in self._refit.placing.entries:
            self._refit.placing.remove(request_id)
        _remove(self._arrivals, (entry.facts.arrived_s, request_id))
        return entry

    def _serve(self, tenant: str, share_tokens: float) -> None:
        self._service.serve(tenant, share_tokens)
        given = self._service.of(tenant)
        self._placing.served(tenant, given)
        if self._refit is not None:
            self._refit.placing.served(tenant, given)

    def _capped(self, facts: Waiting, num_tokens: int) -> int:
        """What it is charged: no more than there is, so that the largest can run alone."""
        return max(min(facts.size_tokens, num_tokens), 0)

    # -- the decision

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
        if not self._placing.entries:
            return Decision()
        spare = self.ledger.spare(room.num_tokens, room.overcharged_tokens)
        plan = _Plan(waiting, running, room, spare, self._service, now)
        capacity = min(room.num_tokens, self.ledger.num_tokens)
        if self._admit_overdue(plan, capacity):
            self._admit_lanes(plan, capacity)
        return Decision(
            plan.ids(),
            plan.deferred,
            plan.bypassed,
            self._late_bypassers(plan),
            "no_slot" if plan.left.slots < 1 else "behind_head",
        )

    def _admit_overdue(self, plan: _Plan, capacity: int) -> bool:
        """Those that have waited too long, in order of arrival. False if one of them does not fit."""
        for arrived_s, request_id in self._arrivals:
            if plan.now - arrived_s < self.settings.max_wait_s:
                break
            facts = plan.waiting[request_id]
            tokens = self._capped(facts, capacity)
            reason = plan.left.refusal(facts)
            if reason is None and tokens > plan.spare.num_free:
                reason = "lane_quota"
            if reason is not None:
                self._defer(plan, facts, reason)
                return False
            plan.choose(self._placing.entries[request_id].lane, facts, tokens)
            plan.num_overdue += 1
        return True

    def _admit_lanes(self, plan: _Plan, capacity: int) -> None:
        walks = {
            lane: _Walk(queue, plan, self.settings.aging_s)
            for lane, queue in enumerate(self._placing.queues)
            if queue.num_waiting and plan.left.slots > 0
        }
        lacking = self._phase(plan, walks, capacity, plan.spare.fits)
        kept = {lane for lane, walk in walks.items() if self._fits_quota(lane, walk.head, capacity)}
        pool = {lane: walk for lane, walk in walks.items() if lane in lacking}
        self._phase(plan, pool, capacity, lambda lane, tokens: plan.spare.fits_pool(lane, tokens, kept))
        self._bypass(plan, walks, capacity)

    def _phase(
        self, plan: _Plan, walks: Mapping[int, _Walk], capacity: int, fits: Callable[[int, int], bool]
    ) -> set[int]:
        """Starts heads as long as any lane's fits; returns the lanes whose head lacks quota."""
        open_lanes = {lane: walk for lane, walk in walks.items() if walk.head is not None}
        lacking = set()
        while open_lanes and not plan.is_full:
            lane = min(open_lanes, key=lambda lane: _rank(lane, open_lanes[lane].head))
            head = open_lanes[lane].head
            if head is None:
                del open_lanes[lane]
                continue
            tokens = self._capped(head, capacity)
            reason = plan.left.refusal(head)
            if reason is None and fits(lane, tokens):
                plan.choose(lane, head, tokens)
                open_lanes[lane].advance()
                continue
            if reason is None:
                lacking.add(lane)
            self._defer(plan, head, reason or "lane_quota")
            del open_lanes[lane]
        return lacking

    def _fits_quota(self, lane: int, head: Waiting | None, capacity: int) -> bool:
        """Whether the lane's head can start within the lane's own quota some day, so that the lane had better not lend what it has of it."""
        return head is not None and self._capped(head, capacity) <= self.ledger.quotas[lane]

    def _defer(self, plan: _Plan, head: Waiting, reason: DeferReason) -> None:
        plan.deferred[head.request_id] = reason
        # Small ones that come and come would fill every step.
        plan.is_full |= reason == "step_full" and head.times_deferred > 0
        if reason in ("no_blocks", "adapter_memory"):
            plan.blocked.append(head)

    # -- bypass

    def _bypass(self, plan: _Plan, walks: Mapping[int, _Walk], capacity: int) -> None:
        """Lets requests pass their lane's head while it waits for memory. Not when a wrong prediction could no longer be mended by a squash."""
        if not plan.blocked or plan.is_full or self._squashes.num_left() < 1:
            return
        blocked = {facts.request_id for facts in plan.blocked}
        for lane, walk in walks.items():
            # Looking for followers is most of a decision's cost, and seldom is anything left for one.
            is_room = (
                min(plan.left.slots, plan.left.blocks, plan.spare.num_free, plan.spare.lane_free[lane]) > 0
            )
            if is_room and walk.head is not None and walk.head.request_id in blocked:
                self._pass(plan, lane, walk, walk.head, self._start_s(plan, walk.head), capacity)

    def _start_s(self, plan: _Plan, head: Waiting) -> float:
        """When a blocked head could start, by the predicted ends of what runs."""
        missing_bytes = plan.left.needed_bytes(head) - plan.left.adapter_bytes
        return max(
            earliest_start_s(plan.left.needed(head) - plan.left.blocks, plan.ends(), plan.now),
            earliest_start_s(missing_bytes, plan.ends(), plan.now, lambda each: each.adapter_bytes),
        )

    def _pass(
        self, plan: _Plan, lane: int, walk: _Walk, head: Waiting, start_s: float, capacity: int
    ) -> None:
        """Starts those behind one head that fit and are predicted to be gone before it could start."""
        passes_left = self.settings.max_bypassed - head.times_bypassed
        if passes_left < 1 or start_s <= plan.now:
            return
        followers = walk.ahead(self.settings.num_looked_at)
        followers.sort(key=lambda facts: (facts.priority, not facts.is_warm))
        for facts in followers:
            tokens = self._capped(facts, capacity)
            is_fit = plan.left.refusal(facts) is None and plan.spare.fits(lane, tokens)
            if passes_left > 0 and is_fit and self._may_pass(facts, start_s, plan.now):
                plan.choose(lane, facts, tokens)
                plan.bypassed[facts.request_id] = head.request_id
                passes_left -= 1

    def _may_pass(self, facts: Waiting, start_s: float, now: float) -> bool:
        return now + facts.duration_s <= start_s and facts.times_squashed < self.settings.max_squashed

    def _late_bypassers(self, plan: _Plan) -> tuple[str, ...]:
        """The fewest that let a blocked head start, of those that should be gone; the largest first. Nothing if they do not suffice."""
        if not plan.blocked or self._squashes.num_left() < 1:
            return ()
        late = [each for each in plan.ends() if each.is_bypasser and each.predicted_end_s < plan.now]
        late.sort(key=lambda each: (-each.num_blocks, each.predicted_end_s, each.request_id))
        late = late[: self._squashes.num_left()]
        missing = min(plan.left.needed(head) for head in plan.blocked) - plan.left.blocks
        squash: list[str] = []
        for each in late:
            if missing <= 0:
                break
            squash.append(each.request_id)
            missing -= each.num_blocks
        return tuple(squash) if missing <= 0 else ()


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


def earliest_start_s(
    missing: float, ends: Sequence[Running], now: float, held: Callable[[Running], int] | None = None
) -> float:
    """When so much more is free, if all that runs ends as predicted; those that should have ended count as ending now.

    held: what each gives back, by default its blocks. ends: in order of predicted_end_s. If all of them do not suffice, the last end. Adapters that
    several share count for each of them; those in blocks that leave with their requests are not counted.
    """
    at_s = now
    for each in ends:
        if missing <= 0:
            break
        missing -= each.num_blocks if held is None else held(each)
        at_s = max(each.predicted_end_s, now)
    return at_s


def _rank(lane: int, head: Waiting | None) -> tuple[int, bool, int]:
    """Lanes' heads by priority; then those that were passed before, so that nobody takes what was freed for them; then the smallest."""
    if head is None:
        return (0, True, lane)
    return (head.priority, head.times_bypassed + head.times_deferred == 0, lane)


# -- by name -----------------------------------------------------------------------------------------------------------


POLICIES: dict[str, Callable[[int], QueuePolicy]] = {
    "fcfs": lambda num_tokens: Fcfs(),
    "sjf": lambda num_tokens: Sjf(),
    "priority": lambda num_tokens: Priority(),
    "fair": lambda num_tokens: Fair(),
    "mlq": Mlq,
}
"""By name; each takes the number of tokens that requests may hold together."""
