"""A request's life in the queue: asks a policy once per step which requests start, and tells it what became of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from engine_bridge.core.scheduling.guess_errors import GuessErrors
from engine_bridge.core.scheduling.load import Counted, LoadTracker
from engine_bridge.core.scheduling.pacer import Pacer, Progress, StepBounds
from engine_bridge.core.scheduling.pauses import Pauses, Stint
from engine_bridge.core.scheduling.programs import Programs
from engine_bridge.core.scheduling.refits import Refits, Sizes
from engine_bridge.core.scheduling.unready import Unready
from engine_bridge.core.scheduling.victims import by_worth
from engine_bridge.policy.scheduling.engine_work import AnswerMeans, EngineWork
from engine_bridge.policy.scheduling.fairness import fair_priority
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.policy.scheduling.pacing import StepPace
from engine_bridge.policy.scheduling.pausing import DecodeSeconds
from engine_bridge.policy.scheduling.preemption import RunningFacts
from engine_bridge.policy.scheduling.queue_policy import (
    Decision,
    DeferReason,
    QueuePolicy,
    Running,
    StepRoom,
    Waiting,
)
from engine_bridge.policy.scheduling.quotas import overcharged_tokens
from engine_bridge.policy.scheduling.sizes import Scale, WeightedSize
from engine_bridge.protocol.urgency import is_urgent

# Seconds per token before any were measured, and the weight of a new measurement. Chosen.
PRIOR_TOKEN_S, SMOOTHING = 0.02, 0.1
# Seconds for which the known cached part of a waiting prompt is believed. Chosen: looking takes 0.1 ms for 256 blocks.
CACHED_FOR_S = 1.0
# Most requests handled in one step. Chosen: this many requests that became ready together (an adapter has come) take the policy 1 ms, and this many
# of a refit 0.2 ms (measured).
MAX_READY, MAX_PLACED = 128, 32

Facts = TypeVar("Facts")
replace = msgspec.structs.replace


class StepView(Struct, frozen=True, kw_only=True):
    """The engine before a step. running: all requests that hold device memory, in the engine's order. num_slots: how many more may run.

    adapter_bytes: free for the adapters of further requests; None: no bound. adapters_take_turns: as in `StepRoom`. shared_tokens: by how much the
    sum of the running requests' tokens is more than they hold together, because some begin alike.
    """

    running: Sequence[Progress]
    free_blocks: int
    num_slots: int
    adapter_bytes: int | None = None
    adapters_take_turns: bool = False
    shared_tokens: int = 0


class StepPlan(Struct, frozen=True, kw_only=True):
    """The decisions for a step. request_ids: to start, in this order. squash, pause: to preempt first.

    Tell `squashed` and then `preempted` of each in `squash`, and `preempted` of each in `pause`. bounds: of the step; None: the engine's.
    """

    request_ids: tuple[str, ...] = ()
    squash: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    bounds: StepBounds | None = None


class RequestCosts(Protocol):
    """The facts that only the engine knows of a request, asked of the few that a decision considers. Changes nothing."""

    def is_ready(self, request_id: str) -> bool:
        """Return whether its adapter and its grammar are there, whether or not it is the adapter's turn (`is_held_back`)."""

    def num_tokens(self, request_id: str) -> int:
        """Return the number of tokens of the prompt and of the answer so far."""

    def start_blocks(self, request_id: str) -> int:
        """Return the number of free blocks that starting takes: new blocks, and cached blocks that no running request holds."""

    def shared_tokens(self, request_id: str) -> int:
        """Return a waiting request's leading tokens that running requests hold already: starting it takes no memory for them."""

    def held_blocks(self, request_id: str) -> int:
        """Return the number of blocks that its end would give back."""

    def num_cached_tokens(self, request_id: str) -> int:
        """Return a waiting request's leading tokens that need not be computed. May take long: asked once a second at most."""

    def is_held_back(self, adapter_id: int) -> bool:
        """Return whether the adapter's requests wait for another adapter's turn."""

    def missing_adapter_bytes(self, adapter_id: int) -> int:
        """Return the adapter memory that the adapter still needs to be computed with; 0 where that memory has no bound."""


@dataclass(slots=True)
class Known:
    """One request from its arrival to its end. For reading only. facts: as the policy has them.

    charged_tokens: prompt, and answer as predicted by now. next_look_tokens: the number of tokens at which something has changed: it has
    begun to answer, or has outgrown its guess. first_s, first_tokens: when it first had tokens of its answer after its start, and how many.
    """

    facts: Waiting
    sizes: Sizes
    charged_tokens: int
    num_tokens: int
    next_look_tokens: int
    started_s: float | None = None
    first_s: float | None = None
    first_tokens: int = 0
    promised_end_s: float = 0.0
    predicted_end_s: float = 0.0
    is_bypasser: bool = False
    looked_up_s: float = -math.inf

    @property
    def counted(self) -> Counted | None:
        """The facts that lanes are fitted on, or `None` for background work."""
        facts = self.facts
        if facts.is_background:
            return None  # background work makes way for all other requests
        return Counted(
            facts.request_id,
            facts.rank,
            self.num_tokens,
            facts.num_prefill_tokens or self.num_tokens,  # before the first look
            self.charged_tokens,
            is_urgent(facts.priority),
        )

    def num_left(self, num_tokens: int) -> int:
        """Return the number of tokens left of its answer, as predicted by now."""
        num_done = num_tokens - self.facts.num_prompt_tokens
        return self.facts.guess.bound(num_done) - num_done

    def lost_its_kv(self, is_swapped: bool) -> None:
        """Note a preemption: the request waits again, and its KV is on the host (`is_swapped`) or has to be computed again."""
        self.facts = replace(self.facts, is_swapped=is_swapped, size_tokens=self.charged_tokens)
        self.started_s, self.is_bypasser = None, False
        self.looked_up_s = -math.inf  # its answer so far has to be computed, too

    @property
    def stint(self) -> Stint:
        """Priority, arrival and start, by which running requests are compared."""
        return Stint(self.facts.priority, self.facts.arrived_s, self.started_s)

    def for_preemption(self, num_tokens: int, now: float) -> RunningFacts:
        """Return the facts by which a request to preempt is chosen, for a request of this many tokens."""
        facts = self.facts
        return RunningFacts(
            request_id=facts.request_id,
            fairness=fair_priority(now - facts.arrived_s, num_tokens, facts.weight),
            started_s=self.started_s or now,
            urgency=facts.priority,
        )


class _OnDemand(Mapping[str, Facts]):
    """Facts of known requests, worked out only when they are looked up."""

    def __init__(self, known: Mapping[str, Known], work_out: Callable[[Known], Facts]) -> None:
        self._known, self._work_out = known, work_out

    def __getitem__(self, request_id: str) -> Facts:
        return self._work_out(self._known[request_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Dispatcher:
    """Knows each request from `arrived` to `ended`.

    One caller, in order of time: in each step `begin_step`, `squashed` and `preempted`, `end_step`.

    Args:
        policy: has been told nothing yet; is told everything through this object.
        num_host_tokens: what host memory holds besides.
        are_copied_back: whether preempted requests find their KV in host memory.
        pacer: keeps steps short; None: they are as long as the engine makes them.
        prefill_s: returns the predicted seconds to compute this many tokens of a prompt.
        decode_s: returns the predicted seconds of a step in which this many requests with this many tokens in all decode.
    """

    def __init__(
        self,
        policy: QueuePolicy,
        engine: RequestCosts,
        refits: Refits,
        *,
        num_tokens: int,
        num_host_tokens: int = 0,
        are_copied_back: bool = False,
        pacer: Pacer | None = None,
        pauses: Pauses | None = None,
        prefill_s: Callable[[int], float] = lambda num_tokens: 0.0,
        decode_s: DecodeSeconds = lambda num, num_tokens: PRIOR_TOKEN_S,
        stopwatch: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.policy = policy
        self.laned = policy if isinstance(policy, Mlq) else None
        """The same policy, where it has lanes."""
        self.refits = refits
        self.last = Decision()
        self.counts: Counter[str] = Counter()
        self.decide_s = 0.0
        self.guess_errors = GuessErrors()
        self.load = LoadTracker()
        self.token_s = PRIOR_TOKEN_S
        self.unready = Unready()
        self.programs = Programs(
            num_tokens if policy.bounds_programs else math.inf, num_host_tokens, engine.shared_tokens
        )
        self.pauses = pauses if pauses is not None and policy.minds_priority else Pauses()
        self.sizes = WeightedSize()
        self._engine, self._pacer, self._stopwatch = engine, pacer, stopwatch
        self._prefill_s = prefill_s
        self._work, self._answers = EngineWork(num_tokens, prefill_s, decode_s), AnswerMeans()
        self._num_tokens, self._are_copied_back = num_tokens, are_copied_back
        self._known: dict[str, Known] = {}
        self._running: dict[str, Known] = {}
        self._squashing: set[str] = set()
        self._scale: Scale | None = None  # of the lanes; until they are fitted, the largest sizes so far
        self._fitted_scale: Scale | None = None  # while the policy takes over the lanes fitted on it
        self._now = 0.0
        self._waiting_facts = _OnDemand(self._known, self._facts_of_waiting)
        self.running_facts = _OnDemand(self._running, self._facts_of_running)

    # -- life of a request -------------------------------------------------------------------------------------------

    def arrived(self, request: Waiting, now: float) -> None:
        """Note that a request waits; the fields that are the dispatcher's own are filled in here. Raises ValueError if it is known already."""
        if request.request_id in self._known:
            raise ValueError("the request is known already")
        num_prompt, guess = request.num_prompt_tokens, request.guess
        sizes = (float(num_prompt), float(guess.p50), float(request.rank))
        tokens = num_prompt + guess.p50
        duration_s = guess.p50 * self.token_s + self._prefill_s(num_prompt)
        if not request.is_background:
            self.sizes.seen(*sizes)
            self.refits.arrived(request.request_id, sizes, tokens, duration_s, now)
        facts = replace(
            self.programs.came(request, now),
            arrived_s=now,
            weighted_size=self._weighted_size(sizes),
            size_tokens=tokens,
            duration_s=duration_s,
        )
        known = self._known[request.request_id] = Known(facts, sizes, tokens, num_prompt, num_prompt + 1)
        self.load.waits(known.counted)
        self.pauses.arrived(request.request_id, request.priority)
        self.unready.add(request.request_id, self.programs.waits_for(request))

    def squashed(self, request_id: str) -> None:
        """Note that it is about to be preempted so that a head can start. A request that is unknown or does not run is ignored."""
        known = self._running.get(request_id)
        if known is None:
            return
        self.counts["squashed"] += 1
        self.policy.squashed(request_id)
        known.facts = replace(known.facts, times_squashed=known.facts.times_squashed + 1)
        self._squashing.add(request_id)

    def preempted(self, request_id: str) -> None:
        """Have a request wait again, ahead of requests of its kind that have not begun. A request that does not run is ignored."""
        known = self._running.pop(request_id, None)
        if known is None:
            return
        self.policy.ended(request_id)
        is_paused = self.pauses.preempted(request_id, known.stint, known.num_tokens, self._now)
        # A squashed request made room for a head: it must not start before that head now.
        is_swapped = request_id not in self._squashing
        self._squashing.discard(request_id)
        known.lost_its_kv(is_swapped)
        if is_paused:
            self.counts["paused"] += 1
        else:
            self.unready.add(request_id, known.facts.waits_for)
        self.counts["preempted"] += 1
        self.load.waits(known.counted)

    def ended(self, request_id: str, num_output_tokens: int, is_finished: bool, now: float) -> None:
        """Note that a request left, from the queue or from running. is_finished: by itself or by its bound. An unknown one is ignored."""
        known = self._known.pop(request_id, None)
        if known is None:
            return
        self.unready.remove(request_id)
        self.pauses.ended(request_id)
        self._running.pop(request_id, None)
        self._squashing.discard(request_id)
        self.programs.ended(request_id, known.facts.num_prompt_tokens + num_output_tokens, now)
        self.policy.ended(request_id)
        self.load.ended(request_id, num_output_tokens if is_finished else None)
        if is_finished and not known.facts.is_background:
            self._learn(known, num_output_tokens, now)
        else:
            self.refits.left(request_id)

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, view: StepView, now: float) -> StepPlan:
        """Decide which requests start, and how long the step may be."""
        self._now = now
        self.advance_refits(now)
        pause = self._pause(view.running, now) if self.pauses.is_on else ()
        self._welcome(now)
        self._note_growth(view.running, now)
        pacer = self._pacer
        step = pacer.look(view.running, self.pauses.bound_s) if pacer is not None else None
        decision = Decision()
        if self.num_waiting > len(self.unready) + len(self.pauses):
            decision = self._decide(view, step, now)
        squash = tuple(each for each in decision.squash if each not in pause)
        # Squashed requests make room for a head in the next step: their blocks are free only then.
        self.last = Decision(deferred=decision.deferred) if decision.squash else decision
        bounds = None
        if pacer is not None and step is not None:
            known = self._known
            starting = sum(known[each].facts.num_prefill_tokens for each in self.last.request_ids)
            bounds = pacer.bounds(step, len(view.running) - len(squash) - len(pause), starting)
        return StepPlan(request_ids=self.last.request_ids, squash=squash, pause=pause, bounds=bounds)

    def end_step(self, started: Iterable[str], now: float) -> None:
        """Note which requests really started, in order. Unknown ones are ignored."""
        for request_id in started:
            known = self._known.get(request_id)
            if known is None:
                continue
            self.policy.admitted(request_id, now)
            known.started_s, known.first_s = now, None
            known.promised_end_s = known.predicted_end_s = now + known.facts.duration_s
            known.num_tokens = self._engine.num_tokens(request_id)
            known.next_look_tokens = known.num_tokens + 1
            known.is_bypasser = request_id in self.last.bypassed
            self._running[request_id] = known
            self.pauses.started(request_id, now)
            self.load.runs(known.counted)
            self.counts["admitted"] += 1
            if known.is_bypasser:
                self._note_bypass(self.last.bypassed[request_id])

    def victims(self, running: Iterable[Progress], now: float) -> list[str] | None:
        """Return the running requests that are known here, the first victim last; None: use the engine's order, or only one runs."""
        order = self.policy.victim_order
        if order is None:
            return None
        found = []
        for request_id, num_tokens, _ in running:
            known = self._known.get(request_id)
            if known is not None:
                found.append((known.facts.arrived_s, known.for_preemption(num_tokens, now)))
        return by_worth(found, order) if len(found) > 1 else None

    def _pause(self, running: Sequence[Progress], now: float) -> tuple[str, ...]:
        """Return the requests to pause for urgent ones from now on. Resumed requests may start in this step."""
        decision = self.pauses.look(running, self._stint, now)
        for request_id in decision.resume:
            self.unready.add(request_id, self._known[request_id].facts.waits_for)
        self.counts["resumed"] += len(decision.resume)
        return decision.pause

    def _stint(self, request_id: str) -> Stint | None:
        known = self._known.get(request_id)
        return known.stint if known is not None else None

    def _welcome(self, now: float) -> None:
        """Tell the policy of the requests that may start from now on."""

        def is_ready(request_id: str) -> bool:
            """Return whether a request's adapter and grammar are there, and its program may have it started now."""
            return self._engine.is_ready(request_id) and self.programs.may_start(request_id, now)

        for request_id in self.unready.take_ready(is_ready, MAX_READY):
            known = self._known[request_id]
            # Lanes may have been fitted since it came.
            known.facts = replace(known.facts, weighted_size=self._weighted_size(known.sizes))
            self.policy.arrived(self._facts_of_waiting(known), now)

    def _decide(self, view: StepView, step: StepPace | None, now: float) -> Decision:
        room = StepRoom(
            free_blocks=view.free_blocks,
            num_slots=view.num_slots,
            num_tokens=self._num_tokens,
            prefill_tokens=step.starting_tokens if step is not None else None,
            is_prefilling=step is not None and bool(step.under_way),
            adapter_bytes=view.adapter_bytes,
            adapters_take_turns=view.adapters_take_turns,
            overcharged_tokens=view.shared_tokens
            + _overcharged(self.policy, self._running, self._are_copied_back),
        )
        started_s = self._stopwatch()
        decision = self.policy.decide(self._waiting_facts, self.running_facts, room, now)
        self.decide_s += self._stopwatch() - started_s
        self.counts["decisions"] += 1
        for request_id, reason in decision.deferred.items():
            if reason == "step_full":
                known = self._known[request_id]
                known.facts = replace(known.facts, times_deferred=known.facts.times_deferred + 1)
        if decision.request_ids and self.pauses.is_on:
            size_of = self._engine.num_tokens
            return decision.without(self.pauses.kept_back(decision.request_ids, self._stint, size_of, now))
        return decision

    def _note_growth(self, running: Sequence[Progress], now: float) -> None:
        own = self._running
        for request_id, num_tokens, _ in running:
            known = own.get(request_id)
            if known is None:
                continue
            known.num_tokens = num_tokens
            if num_tokens >= known.next_look_tokens:
                self._look_at(known, now)

    def _look_at(self, known: Known, now: float) -> None:
        """Correct the charge and the end of a request that begins to answer, or has outgrown its guess."""
        num_tokens, num_prompt = known.num_tokens, known.facts.num_prompt_tokens
        if known.first_s is None:
            known.first_s, known.first_tokens = now, num_tokens
        num_done = num_tokens - num_prompt
        bound = known.facts.guess.bound(num_done)
        known.next_look_tokens = max(num_prompt + bound, num_tokens + 1)
        if num_done >= known.facts.guess.p50:
            known.predicted_end_s = now + (bound - num_done) * self.token_s
        size = num_prompt + bound
        if size > known.charged_tokens:
            known.charged_tokens = size
            self.load.runs(known.counted)
            self.policy.outgrew(known.facts.request_id, size)

    def _note_bypass(self, head_id: str) -> None:
        self.counts["bypassed"] += 1
        head = self._known.get(head_id)
        if head is not None:
            head.facts = replace(head.facts, times_bypassed=head.facts.times_bypassed + 1)

    # -- facts -------------------------------------------------------------------------------------------------------

    def _facts_of_waiting(self, known: Known) -> Waiting:
        engine, request_id = self._engine, known.facts.request_id
        # The number of blocks changes only for a request that was preempted with tokens under way.
        num_blocks = engine.start_blocks(request_id)
        if num_blocks != known.facts.num_blocks or self._now - known.looked_up_s >= CACHED_FOR_S:
            known.looked_up_s = self._now
            num_tokens, num_cached = engine.num_tokens(request_id), engine.num_cached_tokens(request_id)
            num_prefill = max(num_tokens - num_cached, 1)
            known.facts = replace(
                known.facts,
                num_blocks=num_blocks,
                shared_tokens=engine.shared_tokens(request_id),
                duration_s=self._duration_s(known, num_tokens, num_prefill),
                engine_s=self._work.seconds(num_tokens, num_prefill, self._num_expected(known, num_tokens)),
                num_prefill_tokens=num_prefill,
                is_warm=2 * num_cached >= num_tokens,
            )
            self.load.waits(known.counted)
        adapter_id = known.facts.adapter_id
        if adapter_id is not None:
            missing = engine.missing_adapter_bytes(adapter_id)
            is_away = engine.is_held_back(adapter_id) or not engine.is_ready(request_id)
            if (missing, is_away) != (known.facts.adapter_bytes, known.facts.is_away):
                known.facts = replace(known.facts, adapter_bytes=missing, is_away=is_away)
        return known.facts

    def _facts_of_running(self, known: Known) -> Running:
        request_id = known.facts.request_id
        return Running(
            request_id=request_id,
            num_blocks=self._engine.held_blocks(request_id),
            predicted_end_s=known.predicted_end_s,
            promised_end_s=known.promised_end_s,
            is_bypasser=known.is_bypasser,
        )

    def _duration_s(self, known: Known, num_tokens: int, num_prefill_tokens: int) -> float:
        """Return the seconds from start to end: for the uncomputed part of its prompt and its answer. Its adapter is there before it starts."""
        return self._prefill_s(num_prefill_tokens) + known.num_left(num_tokens) * self.token_s

    def _num_expected(self, known: Known, num_tokens: int) -> float:
        """Return the tokens of its answer that are expected to be left."""
        num_done = num_tokens - known.facts.num_prompt_tokens
        return max(self._answers.mean(known.facts.guess) - num_done, 1.0)

    def _learn(self, known: Known, num_output_tokens: int, now: float) -> None:
        self.guess_errors.saw(known.facts.tenant, known.facts.guess, num_output_tokens)
        self._answers.saw(known.facts.guess, num_output_tokens)
        num_tokens = known.facts.num_prompt_tokens + num_output_tokens
        if known.first_s is not None and num_tokens > known.first_tokens:
            token_s = (now - known.first_s) / (num_tokens - known.first_tokens)
            self.token_s += SMOOTHING * (token_s - self.token_s)
        took_s = now - known.started_s if known.started_s is not None else 0.0
        self.refits.ended(known.facts.request_id, num_tokens, took_s)

    def _weighted_size(self, sizes: Sizes) -> float:
        return (self._scale or self.sizes.scale).weighted_size(*sizes)

    # -- lanes -------------------------------------------------------------------------------------------------------

    def advance_refits(self, now: float) -> None:
        """Take over newly fitted lanes, some of them in each step, and have the next fit begin when its time has come."""
        if self.laned is not None:
            if self._fitted_scale is None and (fitted := self.refits.take()) is not None:
                self._fitted_scale = scale = fitted.scale
                sizes = _OnDemand(self._known, lambda known: scale.weighted_size(*known.sizes))
                self.laned.begin_refit(fitted.lanes, fitted.quotas, sizes)
            if self._fitted_scale is not None and self.laned.advance_refit(MAX_PLACED):
                self._scale, self._fitted_scale = self._fitted_scale, None
                self.counts["refits"] += 1
        self.refits.start_if_due(now, self.sizes.scale, self._num_tokens, self.laned is not None)

    @property
    def num_waiting(self) -> int:
        """Requests that have come and not started."""
        return len(self._known) - len(self._running)

    @property
    def num_running(self) -> int:
        """Requests that have started and not ended."""
        return len(self._running)

    def waiting_ids(self) -> list[str]:
        """Return the ids of the requests that have not started, in the order of their arrival."""
        return [request_id for request_id in self._known if request_id not in self._running]

    def known(self, request_id: str) -> Known | None:
        """Return the record of a request that waits or runs; None if it is unknown."""
        return self._known.get(request_id)

    def reason(self, request_id: str) -> DeferReason | Literal["not_ready", "behind_programs"]:
        """Return why a waiting request waits, after the last step."""
        if request_id in self.programs:
            return "behind_programs"
        if request_id in self.pauses:
            return "paused"
        return "not_ready" if request_id in self.unready else self.last.reason(request_id)

    def check_invariants(self) -> None:
        """Raise AssertionError if a request is lost, or waits and runs."""
        assert self._running.keys() <= self._known.keys(), "runs and is not known"
        assert not any(request_id in self.unready for request_id in self._running), "not ready, and runs"
        assert all(self._known[each] is known for each, known in self._running.items()), "doubled"
        assert self._squashing <= self._running.keys(), "squashed and does not run"
        assert not any(each in self.pauses for each in self._running), "paused, and runs"
        self.pauses.check_invariants()
        self.load.check_invariants()


def _overcharged(policy: QueuePolicy, running: Mapping[str, Known], are_copied_back: bool) -> int:
    held = []
    for known in running.values() if policy.charges_tokens else ():
        charged = known.charged_tokens
        left = charged - known.num_tokens
        held.append((charged, left if left > 0 else 0))
    return overcharged_tokens(held, are_copied_back)
