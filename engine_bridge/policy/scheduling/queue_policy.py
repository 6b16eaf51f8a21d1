"""What a policy of the queue is told, decides and says of itself. Pure: facts in, decision out, for one engine step.

A policy keeps the order of what waits by its hooks, and looks facts up only for the few requests that it considers, so that a decision costs next
to nothing however many wait. `decide` changes no state: what the caller does of it, it tells by the hooks, and the same calls give the same
decisions again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

from msgspec import Struct

from engine_bridge.policy.scheduling.lanes import Lanes
from engine_bridge.policy.scheduling.preemption import Order
from engine_bridge.policy.scheduling.quotas import Ledger

DeferReason = Literal[
    "lane_quota", "no_blocks", "adapter_memory", "behind_head", "no_slot", "step_full", "paused"
]


class Waiting(Struct, frozen=True, kw_only=True, gc=False):
    """A request that could start if there were room: its adapter is in host memory or on the device, its grammar is compiled.

    arrived_s: when it first came, also for one that was preempted or squashed. weighted_size: on the lanes' scale (Chameleon's WRS). size_tokens:
    input + predicted output + adapter in token units. shared_tokens: of these, what requests that run hold already. num_blocks: what starting takes
    from `Room.free_blocks`: new ones, and its own cached ones that no request holds. Together with adapter_blocks they must fit an empty device:
    the caller refuses what never can. duration_s: predicted, from start to end. priority: lower first, as in vLLM. weight: its tenant's share
    against others'. adapter_blocks: device memory that its adapter still needs; requests of one adapter_id need it once. adapter_bytes: the same
    where adapters have memory of their own. num_prefill_tokens: to be computed before its first token. is_warm: its prefix is on the device.
    is_swapped: it ran before, and its KV waits in host memory. is_away: its adapter has left since, and is on its way back.
    times_bypassed, times_squashed: as the caller counts them from `Decision.bypassed` and `Decision.squash`. times_deferred: decisions in which a
    step was too full for it.
    """

    request_id: str
    arrived_s: float
    weighted_size: float
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
    shared_tokens: int = 0
    is_swapped: bool = False
    is_away: bool = False
    times_bypassed: int = 0
    times_squashed: int = 0
    times_deferred: int = 0


class Running(Struct, frozen=True, kw_only=True, gc=False):
    """A request that holds device memory. num_blocks: what its end would give back. predicted_end_s: as predicted by now.

    promised_end_s: as predicted when it started; None: the same.
    """

    request_id: str
    num_blocks: int
    predicted_end_s: float
    is_bypasser: bool = False
    promised_end_s: float | None = None

    @property
    def due_s(self) -> float:
        """When it was to have ended, by what was predicted when it started."""
        return self.predicted_end_s if self.promised_end_s is None else self.promised_end_s


class Room(Struct, frozen=True, kw_only=True, gc=False):
    """What is there in this step. num_slots: how many more requests may run. num_tokens: the capacity for tokens, used or not.

    prefill_tokens: of prompts that this step may begin to compute; None: any number. is_prefilling: prompts are under way. adapter_bytes: free for
    the adapters of further requests; None: they take blocks, or nothing. overcharged_tokens: by how much what runs is charged more than it will hold
    at any one time (`quotas.overcharged_tokens`). adapters_take_turns: one waits for memory, and others make room for it.
    """

    free_blocks: int
    num_slots: int
    num_tokens: int
    prefill_tokens: int | None = None
    is_prefilling: bool = False
    adapter_bytes: int | None = None
    overcharged_tokens: int = 0
    adapters_take_turns: bool = False


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

    def without(self, paused: Collection[str]) -> Decision:
        """The same, but that these do not start: they wait for urgent requests."""
        if not paused:
            return self
        return replace(
            self,
            request_ids=tuple(each for each in self.request_ids if each not in paused),
            deferred={**self.deferred, **dict.fromkeys(paused, "paused")},
            bypassed={each: head for each, head in self.bypassed.items() if each not in paused},
        )

    def reason(self, request_id: str) -> DeferReason:
        """Why a request that waits and does not start now waits."""
        return self.deferred.get(request_id, self.otherwise)


class QueuePolicy(Protocol):
    """Who starts next. One caller, in order of time; requests are told apart by `request_id`."""

    name: str
    """As in `registry.POLICIES`."""
    victim_order: Order | None = None
    """Who loses its device memory first when a step's KV does not fit; None: vLLM's own order, who started last."""
    charges_tokens: bool = False
    """It wants to know `Room.overcharged_tokens`: working that out costs something."""
    has_lanes: bool = False
    """It is a `LanedPolicy`."""
    minds_priority: bool = False
    """It looks at `Waiting.priority` or at `RunningFacts.urgency`: others may be paused for urgent requests."""
    is_timeless: bool = True
    """It decides the same for the same facts, whatever the time: it needs no asking while nothing has changed."""

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
        """Who starts now. Changes no state.

        waiting: facts as of now for all that arrived and were not admitted; only those considered are looked up, so a mapping may work
        them out on demand. What is fixed at arrival (arrived_s, weighted_size, size_tokens, duration_s, priority, tenant) is taken from there.
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
        return

    def squashed(self, request_id: str) -> None:
        """It is being squashed, as `Decision.squash` said. `ended` and `arrived` follow."""
        return

    def ended(self, request_id: str) -> None:
        """It left: finished, aborted (waiting or running), preempted or squashed. Unknown ones are ignored."""
        ...


class LanedPolicy(QueuePolicy, Protocol):
    """One that keeps what waits in lanes, which are fitted anew from time to time."""

    ledger: Ledger
    """What the lanes may hold, and what they do. To look at only."""

    @property
    def lanes(self) -> Lanes:
        """By which decisions are made."""
        ...

    def num_waiting(self) -> tuple[int, ...]:
        """In each lane."""
        ...

    def lane_of(self, request_id: str) -> int | None:
        """The lane of a request that waits or runs."""
        ...

    def begin_refit(
        self, lanes: Lanes, quotas: Sequence[int], weighted_sizes: Mapping[str, float] | None = None
    ) -> None:
        """New lanes and a quota for each; `advance_refit` must follow. Until that is done, decisions are those of the old lanes.

        weighted_sizes: those of known requests on the new lanes' scale, by request id, also of those that arrive before the refit is done; others
        keep theirs. They are looked up one by one, so a mapping may compute them on demand. A refit that was not done yet is given up.

        Raises:
            ValueError: there is not one quota for each lane.
        """
        ...

    def advance_refit(self, max_requests: int) -> bool:
        """Place so many of those that wait in the new lanes. True once the new lanes are those that decisions go by, or if there are none."""
        ...


def with_lanes(policy: QueuePolicy) -> LanedPolicy:
    """The same. Raises TypeError for a policy without lanes."""
    if not policy.has_lanes:
        raise TypeError(f"{policy.name} has no lanes")
    return cast(LanedPolicy, policy)


# Requests that one decision passes over because their adapter finds no memory. vLLM passes over all of them; with 16, half of what could run waited
# (P50 TTFT 3 to 4 times vLLM's own, 50 adapters on 16 slots at 1.2 of the capacity).
NUM_PASSED_OVER = 256


class Left:
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
        if self.needed(facts) > self.blocks or self.lacks_adapter_bytes(facts):
            return "adapter_memory"
        return None if self._has_time(facts) else "step_full"

    def needed(self, facts: Waiting) -> int:
        """Blocks. An adapter that another start of this step brings costs nothing more."""
        return facts.num_blocks + (0 if self._is_brought(facts) else facts.adapter_blocks)

    def needed_bytes(self, facts: Waiting) -> int:
        """For its adapter, likewise."""
        return 0 if self._is_brought(facts) else facts.adapter_bytes

    def lacks_adapter_bytes(self, facts: Waiting) -> bool:
        """Whoever does is passed over, as in vLLM's queue: `AdapterTurns` sees to its turn, and others of adapters that run take nothing from it."""
        return facts.is_away or self.needed_bytes(facts) > self.adapter_bytes

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


def in_order(
    order: Iterator[str], waiting: Mapping[str, Waiting], left: Left
) -> tuple[list[Waiting], dict[str, DeferReason]]:
    """Those of the order that fit until one does not, and why that one does not. Those whose adapter is away are passed over."""
    chosen: list[Waiting] = []
    deferred: dict[str, DeferReason] = {}
    for request_id in order:
        facts = waiting[request_id]
        refusal = left.refusal(facts)
        if refusal is not None:
            deferred[request_id] = refusal
            if facts.is_away and len(deferred) <= NUM_PASSED_OVER:
                continue
            break
        left.take(facts)
        chosen.append(facts)
    return chosen, deferred


def refuse_twice(facts: Waiting, known: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a request that waits already."""
    if facts.request_id in known:
        raise ValueError("the request waits already")


def insert(ordered: list[Any], entry: Any) -> None:
    """Puts an entry at its place in a list that is in order."""
    insort(ordered, entry)


def remove(ordered: list[Any], entry: Any) -> None:
    del ordered[bisect_left(ordered, entry)]
