"""The interface of queue policies: their facts, decisions and properties. Pure: facts in, decision out, for one engine step.

A policy keeps the order of waiting requests by its hooks, and looks facts up only for the few requests that it considers, so that a decision costs
next to nothing however many wait. `decide` changes no state: the caller tells by the hooks which of its decisions were carried out, and the same
calls give the same decisions again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from msgspec import Struct

from engine_bridge.policy.scheduling.preemption import Order
from engine_bridge.protocol.engine_request import LengthGuess

DeferReason = Literal[
    "lane_quota", "no_blocks", "adapter_memory", "behind_head", "no_slot", "step_full", "paused"
]


class Waiting(Struct, frozen=True, kw_only=True, gc=False):
    """A request from its arrival in the queue to its start, as the scheduler brings it and the policy sees it.

    The policy sees it once it could start if there were room: its adapter is in host memory or on the device, its grammar is compiled. The dispatcher
    fills in and renews the fields from `arrived_s` on; all others stay as they came.

    Attributes:
        priority: lower first, as in vLLM.
        weight: its tenant's share against others'.
        adapter_id: the version of its adapter; None for the base model.
        program: the program that it belongs to or begins, for a request with tools; "" for any other.
        continues: whether it brings tools' results.
        caller: the program that its program works for; "" for none.
        program_s: of a request that continues a program, or begins a helper of one: when that program began; None for any other.
        waits_for: requests that wait for the same adapter or grammar become ready together, and in their order.
        is_background: whether it computes KV ahead, and its one token is not read: it says nothing of lengths, lanes or speed.
        arrived_s: when it first came, even if it was preempted or squashed since.
        weighted_size: its size on the lanes' scale (Chameleon's WRS).
        size_tokens: input + predicted output; `shared_tokens`: the part of these that running requests hold already.
        num_blocks: blocks that starting takes from `StepRoom.free_blocks`: new blocks, and its cached blocks that no request holds. They must fit
            an empty device: the caller refuses a request that never can.
        duration_s: predicted seconds from start to end; `engine_s`: those of the whole engine that it takes (`EngineWork`).
        adapter_bytes: device memory that its adapter still needs; requests of one `adapter_id` need it once.
        num_prefill_tokens: tokens to be computed before its first output token.
        is_swapped: whether it ran before, and its KV waits in host memory.
        is_away: whether its adapter has left since and is on its way back, or waits for another adapter's turn.
        times_bypassed, times_squashed: as the caller counts them from `Decision.bypassed` and `Decision.squash`.
        times_deferred: number of decisions in which a step was too full for it.
    """

    request_id: str
    num_prompt_tokens: int
    guess: LengthGuess
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    adapter_id: int | None = None
    rank: int = 0
    program: str = ""
    continues: bool = False
    caller: str = ""
    program_s: float | None = None
    waits_for: Hashable = None
    is_background: bool = False
    arrived_s: float = 0.0
    weighted_size: float = 0.0
    size_tokens: int = 0
    num_blocks: int = 0
    duration_s: float = 0.0
    engine_s: float = 0.0
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
    """A request that holds device memory. promised_end_s: as predicted when it started; None: the same."""

    request_id: str
    num_blocks: int
    predicted_end_s: float
    is_bypasser: bool = False
    promised_end_s: float | None = None

    @property
    def due_s(self) -> float:
        """The time at which it should have ended, by the prediction when it started."""
        return self.predicted_end_s if self.promised_end_s is None else self.promised_end_s


class StepRoom(Struct, frozen=True, kw_only=True, gc=False):
    """The room in this step.

    Attributes:
        num_slots: how many more requests may run.
        num_tokens: the capacity for tokens, used or not.
        prefill_tokens: tokens of prompts that this step may begin to compute; None: any number.
        is_prefilling: prompts are under way.
        adapter_bytes: free for the adapters of further requests; None: they take nothing.
        overcharged_tokens: how many more tokens running requests are charged than they will hold at any one time
            (`quotas.overcharged_tokens`).
        adapters_take_turns: one adapter waits for memory, and others make room for it.
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
    """The decision for this step.

    Attributes:
        deferred: why the considered requests wait; otherwise: why all others do.
        bypassed: started requests that pass a head, with that head.
        squash: running bypassers to preempt, for a head that can start then.
    """

    request_ids: tuple[str, ...] = ()
    deferred: Mapping[str, DeferReason] = field(default_factory=dict)
    bypassed: Mapping[str, str] = field(default_factory=dict)
    squash: tuple[str, ...] = ()
    otherwise: DeferReason = "behind_head"

    def without(self, paused: Collection[str]) -> Decision:
        """Return the decision without starts of these requests: they wait for urgent ones."""
        if not paused:
            return self
        return replace(
            self,
            request_ids=tuple(each for each in self.request_ids if each not in paused),
            deferred={**self.deferred, **dict.fromkeys(paused, "paused")},
            bypassed={each: head for each, head in self.bypassed.items() if each not in paused},
        )

    def reason(self, request_id: str) -> DeferReason:
        """Return why a request that does not start now waits."""
        return self.deferred.get(request_id, self.otherwise)


class QueuePolicy(Protocol):
    """Decides which request starts next. One caller, in order of time; requests are identified by `request_id`."""

    name: str
    """The policy's name in `policies.POLICIES`."""
    victim_order: Order | None = None
    """The order in which requests lose their device memory when a step's KV does not fit; None: vLLM's own, the last started first."""
    charges_tokens: bool = False
    """Whether it needs `StepRoom.overcharged_tokens`, which costs something to work out."""
    minds_priority: bool = False
    """Whether it uses `Waiting.priority` or `RunningFacts.urgency`: others may be paused for urgent requests."""

    bounds_programs: bool = False
    """Whether new programs of agents wait while those under way fill the device (`core/scheduling/programs.py`)."""

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        """Return which requests start now. Changes no state. waiting, running: facts as of now; running: of all that hold device memory.

        waiting: of all that arrived and were not admitted; only the considered ones are looked up, so a mapping may work them out on demand. Facts
        fixed at arrival (arrived_s, weighted_size, size_tokens, duration_s, priority, tenant) are the ones given to `arrived`.
        """
        ...

    def arrived(self, facts: Waiting, now: float) -> None:
        """Note that a request may start from now on. A preempted or squashed one arrives again, after `ended`.

        Raises:
            ValueError: it waits already.
        """
        ...

    def admitted(self, request_id: str, now: float) -> None:
        """Note that a request has started. Raises KeyError if it does not wait."""
        ...

    def outgrew(self, request_id: str, size_tokens: int) -> None:
        """Note that a running request has outgrown its prediction, and is predicted to reach this size now. An unknown one is ignored."""
        return

    def squashed(self, request_id: str) -> None:
        """Note that a request is being squashed, as `Decision.squash` said. `ended` and `arrived` follow."""
        return

    def ended(self, request_id: str) -> None:
        """Note that a request left: finished, aborted (waiting or running), preempted or squashed. An unknown one is ignored."""
        ...


# Requests that one decision passes over because their adapter finds no memory. vLLM passes over all of them; with 16, half of the requests that
# could run waited (P50 TTFT 3 to 4 times vLLM's own, 50 adapters on 16 slots at 1.2 of the capacity).
NUM_PASSED_OVER = 256


class RoomLeft:
    """The part of the room that is left while a decision takes from it."""

    def __init__(self, room: StepRoom) -> None:
        self.blocks, self.slots = room.free_blocks, room.num_slots
        self.adapter_bytes = math.inf if room.adapter_bytes is None else room.adapter_bytes
        self._prefill_tokens = math.inf if room.prefill_tokens is None else room.prefill_tokens
        self._may_overrun = not room.is_prefilling
        self._adapters: set[int | None] = set()

    def refusal(self, facts: Waiting) -> DeferReason | None:
        """Return why a request cannot start; None if it can."""
        if self.slots < 1:
            return "no_slot"
        if facts.num_blocks > self.blocks:
            return "no_blocks"
        if self.lacks_adapter_bytes(facts):
            return "adapter_memory"
        return None if self._has_time(facts) else "step_full"

    def lacks_adapter_bytes(self, facts: Waiting) -> bool:
        """Return whether a request lacks memory for its adapter alone.

        It is then passed over, as in vLLM's queue: `AdapterTurns` gives it its turn, and requests of adapters that run take nothing from it.
        """
        return facts.is_away or self._needed_bytes(facts) > self.adapter_bytes

    def take(self, facts: Waiting) -> None:
        """Take the room of a request that starts."""
        self.blocks -= facts.num_blocks
        self.adapter_bytes -= self._needed_bytes(facts)
        self.slots -= 1
        self._adapters.add(facts.adapter_id)
        self._prefill_tokens -= facts.num_prefill_tokens
        self._may_overrun = False

    def _has_time(self, facts: Waiting) -> bool:
        """Return whether the step has time for its prompt.

        A prompt that is too long for any step begins when no other one is being computed, and takes several steps.
        """
        return facts.num_prefill_tokens <= self._prefill_tokens or (
            self._may_overrun and self._prefill_tokens > 0
        )

    def _needed_bytes(self, facts: Waiting) -> int:
        """Return the memory that its adapter needs. An adapter that another start of this step brings costs nothing more."""
        return 0 if facts.adapter_id in self._adapters else facts.adapter_bytes


def in_order(
    order: Iterator[str], waiting: Mapping[str, Waiting], left: RoomLeft
) -> tuple[list[Waiting], dict[str, DeferReason]]:
    """Return the requests of the order that fit until one does not, and why that one does not.

    Requests whose adapter is away are passed over.
    """
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
    """Raise `ValueError` for a request that waits already."""
    if facts.request_id in known:
        raise ValueError("the request waits already")


def remove(ordered: list[Any], entry: Any) -> None:
    """Remove an entry from a sorted list."""
    del ordered[bisect_left(ordered, entry)]
