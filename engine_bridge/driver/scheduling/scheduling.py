"""Asks a policy once per step who starts, and tells it what became of that.

Everything here runs on the engine thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.v1.request import RequestStatus

from engine_bridge.driver.scheduling.facts import facts_of
from engine_bridge.driver.scheduling.queue import PolicyQueue
from engine_bridge.driver.scheduling.refits import Refits
from engine_bridge.policy.admission import POLICIES, Decision, Mlq, QueuePolicy, Room, Running, Waiting
from engine_bridge.policy.quotas import SeenRequest
from engine_bridge.policy.sizes import Scale, WeightedSize
from engine_bridge.predict.length import LengthFeatures, LengthGuess, LengthPredictor, OnlineLengths

# Seconds of a token before any was measured. Chosen.
PRIOR_TOKEN_S, SMOOTHING = 0.02, 0.1


@dataclass(slots=True)
class _Known:
    """One request from its arrival to its end. `base`: what is fixed at arrival."""

    request: Any
    features: LengthFeatures
    guess: LengthGuess
    base: Waiting
    charged_tokens: int
    scale_sizes: tuple[float, float, float]
    started_s: float | None = None
    is_bypasser: bool = False
    reserved: int = field(default=0)


class _Sizes(Mapping[str, Waiting]):
    """What waits, with the blocks that it needs by now."""

    def __init__(self, known: Mapping[str, _Known], block_size: int, num_blocks: int) -> None:
        self._known, self._block_size, self._num_blocks = known, block_size, num_blocks

    def __getitem__(self, request_id: str) -> Waiting:
        known = self._known[request_id]
        # All of the prompt: what of it is cached and in nobody's use is among the free blocks, too.
        num_blocks = known.request.num_tokens // self._block_size + 1
        return msgspec.structs.replace(known.base, num_blocks=min(num_blocks, self._num_blocks))

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Scheduling:
    """Asks the policy and tells it what became of its decisions.

    Args:
        policy: a name in `engine_bridge.policy.admission.POLICIES`.
        num_tokens: that requests may hold together.
        kv_bytes_per_token: turns an adapter's bytes into tokens.
        is_ready: may a waiting request start as far as its adapter and its grammar are concerned?
    """

    def __init__(
        self,
        policy: str,
        *,
        num_tokens: int,
        block_size: int,
        kv_bytes_per_token: int,
        is_ready: Callable[[Any], bool],
        predictor: LengthPredictor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy: QueuePolicy = POLICIES[policy](num_tokens)
        self.queue = PolicyQueue(self)
        self.predictor = predictor or OnlineLengths()
        self.last = Decision()
        self.counts: Counter[str] = Counter()
        self._num_tokens, self._block_size = num_tokens, block_size
        self._kv_bytes_per_token = kv_bytes_per_token
        self._is_ready = is_ready
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._unready: dict[str, _Known] = {}
        self._running: dict[str, _Known] = {}
        self._sizes = WeightedSize()
        self._scale = Scale()
        self._token_s = PRIOR_TOKEN_S
        self._refits = Refits(clock())

    # -- life of a request -------------------------------------------------------------------------------------------

    def came(self, request: Any) -> None:
        facts = facts_of(request)
        features = LengthFeatures(
            num_prompt_tokens=request.num_prompt_tokens,
            adapter=facts.adapter,
            session=facts.session,
            tenant=facts.tenant,
            max_tokens=request.max_tokens,
        )
        guess = self.predictor.predict(features)
        sizes = (float(request.num_prompt_tokens), float(guess.p50), float(facts.rank))
        self._sizes.seen(*sizes)
        tokens = request.num_prompt_tokens + guess.p50 + facts.adapter_bytes // self._kv_bytes_per_token
        base = Waiting(
            request_id=request.request_id,
            arrived_s=self._clock(),
            wrs=self._scale.wrs(*sizes),
            size_tokens=tokens,
            num_blocks=0,
            duration_s=guess.p50 * self._token_s,
            priority=request.priority,
            tenant=facts.tenant,
            weight=facts.weight,
        )
        known = _Known(request, features, guess, base, tokens, sizes)
        self._known[request.request_id] = self._unready[request.request_id] = known

    def preempted(self, request: Any) -> None:
        """It waits again, ahead of those of its kind that have not begun."""
        known = self._running.pop(request.request_id, None)
        if known is None:
            return
        self.policy.ended(request.request_id)
        known.base = msgspec.structs.replace(known.base, is_swapped=True)
        known.started_s, known.is_bypasser = None, False
        self._unready[request.request_id] = known
        self.counts["preempted"] += 1

    def ended(self, request: Any) -> None:
        """It left, from the queue or from running."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return
        self._unready.pop(request.request_id, None)
        self._running.pop(request.request_id, None)
        self.policy.ended(request.request_id)
        num_output = request.num_output_tokens
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            self.predictor.observe(known.features, num_output)
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
        now = self._clock()
        self._apply_refit(now)
        for request_id, known in list(self._unready.items()):
            if self._is_ready(known.request):
                del self._unready[request_id]
                self.policy.arrived(known.base, now)
        self._note_growth()
        self.last = Decision()
        if len(self.queue) > len(self._unready):
            self.last = self._decide(scheduler, now)
        self.queue.begin_step(self.last.request_ids)

    def _decide(self, scheduler: Any, now: float) -> Decision:
        num_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        room = Room(
            free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            num_slots=scheduler.max_num_running_reqs - len(scheduler.running),
            num_tokens=self._num_tokens,
        )
        waiting = _Sizes(self._known, self._block_size, num_blocks)
        decision = self.policy.decide(waiting, self._facts_of_running(), room, now)
        for request_id in decision.squash:
            self._squash(scheduler, request_id)
        # Who makes room for a head in this step makes it for the next one: its blocks are free only then.
        return Decision(deferred=decision.deferred) if decision.squash else decision

    def _facts_of_running(self) -> dict[str, Running]:
        return {
            request_id: Running(
                request_id=request_id,
                lane=0,
                charged_tokens=known.charged_tokens,
                num_blocks=known.request.num_tokens // self._block_size + 1,
                started_s=known.started_s or 0.0,
                predicted_end_s=(known.started_s or 0.0) + known.base.duration_s,
                is_bypasser=known.is_bypasser,
            )
            for request_id, known in self._running.items()
        }

    def _squash(self, scheduler: Any, request_id: str) -> None:
        """As vLLM preempts outside of a step (`reset_prefix_cache`)."""
        known = self._running.get(request_id)
        if known is None or known.request not in scheduler.running:
            return
        self.counts["squashed"] += 1
        self.policy.squashed(request_id)
        known.base = msgspec.structs.replace(known.base, times_squashed=known.base.times_squashed + 1)
        scheduler.running.remove(known.request)
        scheduler._preempt_request(known.request, time.monotonic(), drop_stale_output=True)

    def end_step(self) -> None:
        """Tell the policy who really started."""
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
                more = known.guess.bound(num_done) - known.guess.p50
                size = known.base.size_tokens + more
                if size > known.charged_tokens:
                    known.charged_tokens = size
                    self.policy.outgrew(request_id, size)

    # -- lanes -------------------------------------------------------------------------------------------------------

    def _apply_refit(self, now: float) -> None:
        if not isinstance(self.policy, Mlq):
            return
        fitted = self._refits.take()
        if fitted is not None:
            lanes, quotas, self._scale = fitted
            sizes = {i: self._scale.wrs(*known.scale_sizes) for i, known in self._known.items()}
            self.policy.refit(lanes, quotas, sizes)
            self.counts["refits"] += 1
        self._refits.start_if_due(now, self._sizes.scale, self._num_tokens, self.predictor)

    def reason(self, request_id: str) -> str:
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
        if isinstance(self.policy, Mlq):
            found["lanes"] = {
                "boundaries": self.policy.lanes.boundaries,
                "num_waiting": self.policy.num_waiting(),
                "quota_tokens": self.policy.ledger.quotas,
                "used_tokens": self.policy.ledger.used,
            }
        return found

    def close(self) -> None:
        self._refits.close()
