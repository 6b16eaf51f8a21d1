"""Asks a policy once per step who starts, and tells it what became of that.

Everything here runs on the engine thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from vllm.v1.request import RequestStatus

from engine_bridge.driver.background import is_background
from engine_bridge.driver.scheduling.facts import facts_of
from engine_bridge.driver.scheduling.pace import Pace
from engine_bridge.driver.scheduling.queue import PolicyQueue
from engine_bridge.driver.scheduling.record import LogWriter
from engine_bridge.driver.scheduling.refits import Refits
from engine_bridge.driver.scheduling.report import GuessErrors
from engine_bridge.driver.scheduling.unready import Unready
from engine_bridge.driver.scheduling.victims import by_worth
from engine_bridge.policy.decision_log import Recorded
from engine_bridge.policy.fairness import fair_priority
from engine_bridge.policy.pacing import StepPace
from engine_bridge.policy.preemption import RunningFacts
from engine_bridge.policy.queue import (
    Decision,
    DeferReason,
    LanedPolicy,
    QueuePolicy,
    Room,
    Running,
    Waiting,
    with_lanes,
)
from engine_bridge.policy.quotas import SeenRequest, overcharged_tokens
from engine_bridge.policy.registry import POLICIES
from engine_bridge.policy.sizes import Scale, WeightedSize
from engine_bridge.predict.length import LengthFeatures, LengthGuess, LengthPredictor, OnlineLengths

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency

# Seconds of a token before any was measured. Chosen.
PRIOR_TOKEN_S, SMOOTHING = 0.02, 0.1
# How long what is known of a waiting prompt's cached part is believed. Chosen: looking takes 0.1 ms for 256 blocks.
CACHED_FOR_S = 1.0
# In one step. Chosen: so many requests that became ready together (an adapter has come) take the policy 1 ms, so many of a refit 0.2 ms (measured).
MAX_READY, MAX_PLACED = 128, 32


Facts = TypeVar("Facts")


@dataclass(slots=True)
class _Known:
    """One request from its arrival to its end.

    base: as the policy has it. charged_tokens: prompt and answer, as predicted by now. Its adapter has memory of its own.
    """

    request: Any
    features: LengthFeatures
    guess: LengthGuess
    base: Waiting
    charged_tokens: int
    scale_sizes: tuple[float, float, float]
    started_s: float | None = None
    is_bypasser: bool = False
    looked_up_s: float = -CACHED_FOR_S


class _OnDemand(Mapping[str, Facts]):
    """Facts of known requests, worked out for those that are looked up."""

    def __init__(self, known: Mapping[str, _Known], work_out: Callable[[_Known], Facts]) -> None:
        self._known, self._work_out = known, work_out

    def __getitem__(self, request_id: str) -> Facts:
        return self._work_out(self._known[request_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Scheduling:
    """Asks the policy and tells it what became of its decisions.

    Args:
        policy: a name in `engine_bridge.policy.registry.POLICIES`.
        num_tokens: that requests may hold together.
        is_ready: may a waiting request start as far as its adapter and its grammar are concerned?
        decision_log: where to write down what the policy is told and decides. Closed with this.
        num_cached_tokens: leading ones of a waiting request that need not be computed.
        adapters: whose memory is bounded, too; None: requests use none.
        ways: counts of how requests that are preempted are to get their KV back, and do. None: they compute it again.
        pace: keeps steps short; None: they are as long as vLLM makes them.
    """

    def __init__(
        self,
        policy: str,
        *,
        num_tokens: int,
        block_size: int,
        is_ready: Callable[[Any], bool],
        num_cached_tokens: Callable[[Any], int] = lambda request: 0,
        adapters: Residency | None = None,
        ways: Callable[[], Mapping[str, int]] | None = None,
        pace: Pace | None = None,
        predictor: LengthPredictor | None = None,
        decision_log: LogWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy: QueuePolicy = POLICIES[policy](num_tokens)
        self._log = decision_log
        if decision_log is not None:
            self.policy = Recorded(self.policy, num_tokens, decision_log.write)
        self.laned: LanedPolicy | None = with_lanes(self.policy) if self.policy.has_lanes else None
        """The same, where it has lanes."""
        self.queue = PolicyQueue(self)
        self.predictor = predictor or OnlineLengths()
        self.last = Decision()
        self.counts: Counter[str] = Counter()
        self.seconds = {"decide": 0.0, "step": 0.0}
        self.guess_errors = GuessErrors()
        self._num_tokens, self._block_size = num_tokens, block_size
        self._is_ready = is_ready
        self._num_cached_tokens = num_cached_tokens
        self._adapters = adapters
        self._ways = ways or dict
        self._are_copied_back = ways is not None
        self._victims = self.policy.victim_order
        self.pace = pace
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._unready = Unready()
        self._running: dict[str, _Known] = {}
        self._squashing: set[str] = set()
        self._sizes = WeightedSize()
        self._scale = Scale()
        self._token_s = PRIOR_TOKEN_S
        self._refits = Refits(clock())
        self._fitted_scale: Scale | None = None  # while the policy takes over the lanes that go with it

    # -- life of a request -------------------------------------------------------------------------------------------

    def came(self, request: Any) -> None:
        facts = facts_of(request)
        features = facts.features or LengthFeatures(
            num_prompt_tokens=request.num_prompt_tokens, max_tokens=request.max_tokens
        )
        guess = facts.guess or self.predictor.predict(features)
        sizes = (float(request.num_prompt_tokens), float(guess.p50), float(facts.rank))
        self._sizes.seen(*sizes)
        tokens = request.num_prompt_tokens + guess.p50
        base = Waiting(
            request_id=request.request_id,
            arrived_s=self._clock(),
            wrs=self._scale.wrs(*sizes),
            size_tokens=tokens,
            num_blocks=0,
            duration_s=guess.p50 * self._token_s,
            priority=request.priority,
            tenant=facts.context.tenant,
            weight=facts.context.weight,
            adapter_id=request.lora_request.lora_int_id if request.lora_request is not None else None,
        )
        self._known[request.request_id] = _Known(request, features, guess, base, tokens, sizes)
        self._unready.add(request)

    def preempted(self, request: Any) -> None:
        """It waits again, ahead of those of its kind that have not begun."""
        known = self._running.pop(request.request_id, None)
        if known is None:
            return
        self.policy.ended(request.request_id)
        # One that was squashed made room for a head: it must not go before that one now.
        is_swapped = request.request_id not in self._squashing
        known.base = msgspec.structs.replace(
            known.base, is_swapped=is_swapped, size_tokens=known.charged_tokens
        )
        known.started_s, known.is_bypasser = None, False
        self._unready.add(request)
        self.counts["preempted"] += 1

    def ended(self, request: Any) -> None:
        """It left, from the queue or from running."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return
        self._unready.remove(request.request_id)
        self._running.pop(request.request_id, None)
        self.policy.ended(request.request_id)
        num_output = request.num_output_tokens
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            if not is_background(request.request_id):  # those make a token that nobody reads
                self.predictor.observe(known.features, num_output)
                self.guess_errors.saw(known.guess, num_output)
            self._note_end(known, num_output)

    def _note_end(self, known: _Known, num_output: int) -> None:
        now = self._clock()
        took_s = now - known.started_s if known.started_s is not None else 0.0
        if num_output and took_s > 0:
            self._token_s += SMOOTHING * (took_s / num_output - self._token_s)
        self._refits.saw(
            SeenRequest(known.base.wrs, known.request.num_tokens, took_s), known.scale_sizes, now
        )

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduler: Any) -> None:
        """Decide who starts. Called before vLLM schedules."""
        started_s = time.perf_counter()
        now = self._clock()
        self._apply_refit(now)
        for request_id in self._unready.take_ready(self._is_ready, MAX_READY):
            known = self._known[request_id]
            # Lanes may have been fitted since it came.
            known.base = msgspec.structs.replace(known.base, wrs=self._scale.wrs(*known.scale_sizes))
            self.policy.arrived(self._facts_of_waiting(known), now)
        self._note_growth()
        self.last = Decision()
        step = self.pace.look() if self.pace is not None else None
        if len(self.queue) > len(self._unready):
            self.last = self._decide(scheduler, step, now)
        self.queue.begin_step(self.last.request_ids)
        if self.pace is not None:
            started = [self._known[request_id].base for request_id in self.last.request_ids]
            self.pace.set_bounds(step, sum(facts.num_prefill_tokens for facts in started))
        self.arrange_victims(scheduler)
        self.seconds["step"] += time.perf_counter() - started_s

    def _decide(self, scheduler: Any, step: StepPace | None, now: float) -> Decision:
        room = Room(
            free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            num_slots=scheduler.max_num_running_reqs - len(scheduler.running),
            num_tokens=self._num_tokens,
            prefill_tokens=step.starting_tokens if step is not None else None,
            is_prefilling=step is not None and step.num_prefilling > 0,
            adapter_bytes=self._adapters.free_room() if self._adapters is not None else None,
            overcharged_tokens=self._overcharged_tokens() if self.policy.charges_tokens else 0,
        )
        waiting = _OnDemand(self._known, self._facts_of_waiting)
        running = _OnDemand(self._running, self._facts_of_running)
        started_s = time.perf_counter()
        decision = self.policy.decide(waiting, running, room, now)
        self.seconds["decide"] += time.perf_counter() - started_s
        self.counts["decisions"] += 1
        for request_id in decision.squash:
            self._squash(scheduler, request_id)
        for request_id, reason in decision.deferred.items():
            if reason == "step_full":
                known = self._known[request_id]
                known.base = msgspec.structs.replace(known.base, times_deferred=known.base.times_deferred + 1)
        # Who makes room for a head in this step makes it for the next one: its blocks are free only then.
        return Decision(deferred=decision.deferred) if decision.squash else decision

    def _overcharged_tokens(self) -> int:
        held = (
            (known.charged_tokens, max(known.charged_tokens - known.request.num_tokens, 0))
            for known in self._running.values()
        )
        return overcharged_tokens(held, self._are_copied_back)

    def _facts_of_waiting(self, known: _Known) -> Waiting:
        # All of the prompt: what of it is cached and in nobody's use is among the free blocks, too. It changes only for what was preempted
        # with tokens under way.
        num_tokens = known.request.num_tokens
        num_blocks = min(num_tokens // self._block_size + 1, self._num_tokens // self._block_size)
        now = self._clock()
        if num_blocks != known.base.num_blocks or now - known.looked_up_s >= CACHED_FOR_S:
            known.looked_up_s = now
            num_cached = self._num_cached_tokens(known.request)
            known.base = msgspec.structs.replace(
                known.base,
                num_blocks=num_blocks,
                num_prefill_tokens=max(num_tokens - num_cached, 1),
                is_warm=2 * num_cached >= num_tokens,
            )
        adapter_id = known.base.adapter_id
        if self._adapters is not None and adapter_id is not None:
            needed = self._adapters.needed_room(adapter_id)
            if needed != known.base.adapter_bytes:
                known.base = msgspec.structs.replace(known.base, adapter_bytes=needed)
        return known.base

    def _facts_of_running(self, known: _Known) -> Running:
        started_s = known.started_s or 0.0
        return Running(
            request_id=known.request.request_id,
            lane=0,
            charged_tokens=known.charged_tokens,
            num_blocks=known.request.num_tokens // self._block_size + 1,
            started_s=started_s,
            predicted_end_s=started_s + known.base.duration_s,
            is_bypasser=known.is_bypasser,
            adapter_bytes=self._room_of_adapter(known),
        )

    def _room_of_adapter(self, known: _Known) -> int:
        adapter_id = known.base.adapter_id
        return (
            self._adapters.room_of(adapter_id) if self._adapters is not None and adapter_id is not None else 0
        )

    def arrange_victims(self, scheduler: Any) -> None:
        """Have vLLM preempt whom the policy can spare, in a step that may lack memory."""
        running, block_pool = scheduler.running, scheduler.kv_cache_manager.block_pool
        # A step takes at most a block more for each request, and what its prompts fill.
        num_new = len(running) + scheduler.max_num_scheduled_tokens // self._block_size
        if self._victims is None or len(running) < 2 or block_pool.get_num_free_blocks() >= num_new:
            return
        now = self._clock()

        def facts_of(request: Any) -> RunningFacts:
            known = self._known[request.request_id]
            waited_s = now - known.base.arrived_s
            return RunningFacts(
                request_id=request.request_id,
                fairness=fair_priority(waited_s, request.num_tokens, known.base.weight),
                started_s=known.started_s or now,
                num_blocks=request.num_tokens // self._block_size + 1,
                recompute_s=self._recompute_s(request.num_computed_tokens),
                urgency=request.priority,
            )

        known = [request for request in running if request.request_id in self._known]
        others = [request for request in running if request.request_id not in self._known]
        if len(known) > 1:
            arrived_s = lambda request: self._known[request.request_id].base.arrived_s  # noqa: E731
            scheduler.running[:] = others + by_worth(known, facts_of, arrived_s, self._victims)

    def _recompute_s(self, num_tokens: int) -> float:
        if self.pace is None:
            return num_tokens * self._token_s
        return self.pace.table.step_s(num_tokens, 0, 0)

    def _squash(self, scheduler: Any, request_id: str) -> None:
        """As vLLM preempts outside of a step (`reset_prefix_cache`)."""
        known = self._running.get(request_id)
        if known is None or known.request not in scheduler.running:
            return
        self.counts["squashed"] += 1
        self.policy.squashed(request_id)
        known.base = msgspec.structs.replace(known.base, times_squashed=known.base.times_squashed + 1)
        scheduler.running.remove(known.request)
        self._squashing.add(request_id)
        scheduler._preempt_request(known.request, time.monotonic(), drop_stale_output=True)
        self._squashing.remove(request_id)

    def end_step(self) -> None:
        """Tell the policy who really started."""
        started_s = time.perf_counter()
        now = self._clock()
        for request_id in self.queue.end_step():
            known = self._known.get(request_id)
            if known is None:
                continue
            self.policy.admitted(request_id, now)
            known.started_s = now
            known.is_bypasser = request_id in self.last.bypassed
            self._running[request_id] = known
            self.counts["admitted"] += 1
            if known.is_bypasser:
                self._note_bypass(self.last.bypassed[request_id])
        self.seconds["step"] += time.perf_counter() - started_s

    def _note_bypass(self, head_id: str) -> None:
        self.counts["bypassed"] += 1
        head = self._known.get(head_id)
        if head is not None:
            head.base = msgspec.structs.replace(head.base, times_bypassed=head.base.times_bypassed + 1)

    def _note_growth(self) -> None:
        """Correct the charge of requests that have outgrown their guess."""
        for request_id, known in self._running.items():
            num_done = known.request.num_output_tokens
            if num_done >= known.guess.p50:
                size = known.request.num_prompt_tokens + known.guess.bound(num_done)
                if size > known.charged_tokens:
                    known.charged_tokens = size
                    self.policy.outgrew(request_id, size)

    # -- lanes -------------------------------------------------------------------------------------------------------

    def _apply_refit(self, now: float) -> None:
        if self.laned is None:
            # Without lanes there is still a predictor that learns.
            self._refits.take()
            self._refits.start_if_due(now, self._sizes.scale, self._num_tokens, self.predictor)
            return
        if self._fitted_scale is None and (fitted := self._refits.take()) is not None:
            lanes, quotas, scale = fitted
            self._fitted_scale = scale
            sizes = _OnDemand(self._known, lambda known: scale.wrs(*known.scale_sizes))
            self.laned.begin_refit(lanes, quotas, sizes)
        if self._fitted_scale is not None and self.laned.advance_refit(MAX_PLACED):
            self._scale, self._fitted_scale = self._fitted_scale, None
            self.counts["refits"] += 1
        self._refits.start_if_due(now, self._sizes.scale, self._num_tokens, self.predictor)

    def now(self) -> float:
        """On the clock that requests' times are told by, in seconds."""
        return self._clock()

    def known(self, request_id: str) -> _Known | None:
        """What is kept of a request that waits or runs. To look at only."""
        return self._known.get(request_id)

    def all_counts(self) -> dict[str, int]:
        """`counts`, how preempted requests came back, and how the decision log does. From any thread."""
        counts = {**self.counts, **self._ways()}
        if self._log is not None:
            counts["log_bytes"] = self._log.num_bytes
            if self._log.cut is not None:
                counts[f"log_cut:{self._log.cut}"] = 1
        return counts

    def reason(self, request_id: str) -> DeferReason | Literal["not_ready"]:
        """Why a waiting request waits, after the last step."""
        return "not_ready" if request_id in self._unready else self.last.reason(request_id)

    def state(self) -> dict[str, Any]:
        """For people and dashboards."""
        waiting = [i for i in self._known if i not in self._running]
        found: dict[str, Any] = {
            "policy": self.policy.name,
            "num_waiting": len(waiting),
            "num_running": len(self._running),
            "reasons": dict(Counter(self.reason(request_id) for request_id in waiting)),
            "counts": dict(self.counts),
            "token_s": self._token_s,
        }
        if self.laned is not None:
            found["lanes"] = {
                "boundaries": self.laned.lanes.boundaries,
                "num_waiting": self.laned.num_waiting(),
                "quota_tokens": self.laned.ledger.quotas,
                "used_tokens": self.laned.ledger.used,
            }
        return found

    def close(self) -> None:
        self._refits.close()
        if self._log is not None:
            self._log.close()
