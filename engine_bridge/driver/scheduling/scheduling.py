"""The link between vLLM's scheduler and the dispatcher: tells it which requests came and left, and makes vLLM do what it decides.

Everything here runs on the engine thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_bridge.core.scheduling.dispatcher import Arrival, Dispatcher, StepView
from engine_bridge.core.scheduling.pacer import Progress
from engine_bridge.core.scheduling.pauses import Pauses
from engine_bridge.core.scheduling.refits import REFIT_EVERY_S, Refits, Run
from engine_bridge.core.scheduling.victims import most_new_blocks
from engine_bridge.driver.adapters.residency import lora_ids
from engine_bridge.driver.background import is_background
from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.scheduling.fit_thread import FitThread
from engine_bridge.driver.scheduling.pace import Pace
from engine_bridge.driver.scheduling.queue import PolicyQueue
from engine_bridge.driver.scheduling.record import LogWriter
from engine_bridge.driver.scheduling.requests import Requests, waits_for
from engine_bridge.driver.vllm_api import RequestStatus
from engine_bridge.policy.scheduling.decision_log import Recorded
from engine_bridge.policy.scheduling.lanes import RULES
from engine_bridge.policy.scheduling.policies import MakePolicy
from engine_bridge.predict.length import LengthFeatures, LengthPredictor, OnlineLengths
from kvtiers.closing import going_on

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency


class Scheduling:
    """The dispatcher of one engine.

    Args:
        make_policy: one of `engine_bridge.policy.scheduling.policies.POLICIES`, or a bench's own policy.
        num_tokens: the most tokens that requests may hold together.
        block_size: tokens in a block.
        is_ready: returns whether a waiting request may start as far as its adapter and its grammar are concerned.
        num_cached_tokens: returns how many leading tokens of a waiting request need not be computed.
        block_pool: vLLM's, where requests that begin alike share blocks; None: each request is charged all that it holds.
        adapters: adapters whose memory is bounded, too; None: requests use none.
        ways: returns counts of the planned and the taken ways by which preempted requests get their KV back. None: they compute it again.
        pace: keeps steps short; None: they are as long as vLLM makes them.
        pauses: pauses other requests for urgent ones; None: no request is paused.
        predictor: predicts the lengths of answers; None: a new one that learns from answers.
        decision_log: records what the policy is told and decides. Closed with this object.
        clock: the clock of requests' times, in seconds.
        stopwatch: measures the time that our own work takes, in seconds.
        run_fit: runs the fitting of lanes and the predictor; None: a separate thread, closed with this object.
        refit_every_s: the least time between two fittings.
        lane_rule: a name in `engine_bridge.policy.scheduling.lanes.RULES`.
    """

    def __init__(
        self,
        make_policy: MakePolicy,
        *,
        num_tokens: int,
        block_size: int,
        is_ready: Callable[[Any], bool],
        num_cached_tokens: Callable[[Any], int] = lambda request: 0,
        block_pool: Any = None,
        adapters: Residency | None = None,
        ways: Callable[[], Mapping[str, int]] | None = None,
        pace: Pace | None = None,
        pauses: Pauses | None = None,
        predictor: LengthPredictor | None = None,
        decision_log: LogWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] = time.perf_counter,
        run_fit: Run | None = None,
        refit_every_s: float = REFIT_EVERY_S,
        lane_rule: str = "knee",
    ) -> None:
        self.predictor = predictor or OnlineLengths()
        self.pace = pace
        self.queue = PolicyQueue(self)
        self.step_s = 0.0
        """Seconds of our own work in all steps."""
        self._block_size, self._num_blocks, self._block_pool = (
            block_size,
            num_tokens // block_size,
            block_pool,
        )
        self._adapters = adapters
        self._ways = ways or dict
        self._log = decision_log
        self._clock, self._stopwatch = clock, stopwatch
        self._thread = None
        if run_fit is None:
            run_fit = self._thread = FitThread()
        self._requests = Requests(num_tokens, block_size, is_ready, num_cached_tokens, adapters, block_pool)
        self._features: dict[str, LengthFeatures] = {}
        made = make_policy(num_tokens)
        self.dispatcher = Dispatcher(
            made if decision_log is None else Recorded(made, num_tokens, decision_log.write),
            self._requests,
            Refits(
                run_fit,
                lambda: self.predictor.refit(),
                now=clock(),
                every_s=refit_every_s,
                rule=RULES[lane_rule],
            ),
            num_tokens=num_tokens,
            are_copied_back=ways is not None,
            pacer=pace.pacer if pace is not None else None,
            pauses=pauses,
            prefill_s=pace.prefill_s if pace is not None else lambda num_tokens: 0.0,
            stopwatch=stopwatch,
        )

    # -- life of a request, as the queue and the scheduler tell it -----------------------------------------------------

    def on_arrival(self, request: Any) -> None:
        """Tell the dispatcher of a new request, with a prediction of its answer's length."""
        facts = facts_of(request)
        features = facts.features or LengthFeatures(
            num_prompt_tokens=request.num_prompt_tokens, max_tokens=request.max_tokens
        )
        arrival = Arrival(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            guess=facts.guess or self.predictor.predict(features),
            priority=request.priority,
            tenant=facts.context.tenant,
            weight=facts.context.weight,
            adapter_id=request.lora_request.lora_int_id if request.lora_request is not None else None,
            rank=facts.rank,
            waits_for=waits_for(request),
            is_background=is_background(request.request_id),
            # There are no adapter_tokens: adapters in use lie in separate slots, beside KV. Charged as tokens, they would keep KV memory empty.
        )
        self._requests.add(request)
        self._features[request.request_id] = features
        self.dispatcher.arrived(arrival, self._clock())

    def preempted(self, request: Any) -> None:
        """Tell the dispatcher that a running request was put back into the queue."""
        self.dispatcher.preempted(request.request_id)

    def ended(self, request: Any) -> None:
        """Tell the dispatcher that a request has left, from the queue or from running; the predictor learns from its answer."""
        request_id = request.request_id
        features = self._features.pop(request_id, None)
        if features is None:
            return
        is_finished = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        num_output = request.num_output_tokens
        if is_finished and not is_background(request_id):
            self.predictor.observe(features, num_output)
        self.dispatcher.ended(request_id, num_output, is_finished, self._clock())
        self._requests.remove(request_id)

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduler: Any) -> None:
        """Decide which requests start, and stop or pause running ones for them. Called before vLLM schedules."""
        started_s = self._stopwatch()
        now = self._clock()
        running = _progress(scheduler.running)
        running_adapters = self._requests.running_adapters = lora_ids(scheduler.running)
        view = StepView(
            running=running,
            free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            num_slots=scheduler.max_num_running_reqs - len(scheduler.running),
            adapter_bytes=self._adapters.free_room(running_adapters) if self._adapters is not None else None,
            adapters_take_turns=self._adapters is not None and self._adapters.take_turns,
            shared_tokens=self._shared_tokens(scheduler),
        )
        plan = self.dispatcher.begin_step(view, now)
        for request_id in plan.squash:
            self.squash(scheduler, request_id)
        for request_id in plan.pause:
            self._preempt(scheduler, self._requests[request_id])
        self.queue.begin_step(plan.request_ids)
        if self.pace is not None and plan.bounds is not None:
            self.pace.set_bounds(plan.bounds)
        if self.dispatcher.policy.victim_order is not None:
            self._arrange_victims(
                scheduler, _progress(scheduler.running) if plan.squash or plan.pause else running, now
            )
        self.step_s += self._stopwatch() - started_s

    def end_step(self) -> None:
        """Tell the dispatcher which requests have really started."""
        started_s = self._stopwatch()
        self.dispatcher.end_step(self.queue.end_step(), self._clock())
        self.step_s += self._stopwatch() - started_s

    def _shared_tokens(self, scheduler: Any) -> int:
        """Return by how many tokens the running requests, each counted by itself, hold more than there are in used blocks."""
        if self._block_pool is None or not self.dispatcher.policy.charges_tokens:
            return 0
        num_held = sum(-(-each.num_computed_tokens // self._block_size) for each in scheduler.running)
        num_used = self._num_blocks - self._block_pool.get_num_free_blocks()
        return max(num_held - num_used, 0) * self._block_size

    def squash(self, scheduler: Any, request_id: str) -> None:
        """Take a running request off the device again, to start later. Without effect for a request that has ended."""
        request = self._requests[request_id]
        if request in scheduler.running:
            self.dispatcher.squashed(request_id)
            self._preempt(scheduler, request)

    def _preempt(self, scheduler: Any, request: Any) -> None:
        """Preempt a request as vLLM does outside of a step (`reset_prefix_cache`)."""
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)

    def _arrange_victims(self, scheduler: Any, progress: Sequence[Progress], now: float) -> None:
        """Order the running requests so that vLLM preempts the requests that the policy can spare, in a step that may lack memory.

        vLLM preempts the last request of the list.
        """
        num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        most_tokens, block_size = scheduler.max_num_scheduled_tokens, self._block_size
        # A step takes at most a block more for each request, and the blocks that its prompts fill. Free memory is seldom so short that the exact
        # number is needed.
        if num_free >= len(progress) + most_tokens // block_size:
            return
        if num_free >= most_new_blocks(progress, most_tokens, block_size):
            return
        order = self.dispatcher.victims(progress, now)
        if order is not None:
            running = scheduler.running
            others = [request for request in running if self.dispatcher.known(request.request_id) is None]
            running[:] = others + [self._requests[request_id] for request_id in order]

    # -- to look at ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time of the clock for requests' times, in seconds."""
        return self._clock()

    def all_counts(self) -> dict[str, int]:
        """Return counts of decisions, of the ways back of preempted requests, and of the decision log. From any thread."""
        counts = {**self.dispatcher.counts, **self._ways()}
        if self._log is not None:
            counts["log_bytes"] = self._log.num_bytes
            if self._log.cut is not None:
                counts[f"log_cut:{self._log.cut}"] = 1
        return counts

    def seconds(self) -> dict[str, float]:
        """Return the seconds that decisions, and all of our work in steps, have taken. From any thread."""
        return {"decide": self.dispatcher.decide_s, "step": self.step_s}

    def state(self) -> dict[str, Any]:
        """Return the dispatcher's state, for people and benches."""
        own = self.dispatcher
        found: dict[str, Any] = {
            "policy": own.policy.name,
            "num_waiting": own.num_waiting,
            "num_running": own.num_running,
            "num_paused": len(own.pauses),
            "reasons": dict(Counter(map(own.reason, own.waiting_ids()))),
            "counts": dict(own.counts),
            "token_s": own.token_s,
        }
        if own.laned is not None:
            found["lanes"] = {
                "boundaries": own.laned.lanes.boundaries,
                "num_waiting": own.laned.num_waiting(),
                "quota_tokens": own.laned.ledger.quotas,
                "used_tokens": own.laned.ledger.used,
            }
        return found

    def close(self) -> None:
        """Close the thread that fits lanes, and the decision log."""
        if self._thread is not None:
            with going_on("the thread that fits lanes"):
                self._thread.close()
        if self._log is not None:
            with going_on("the decision log"):
                self._log.close()


def _progress(running: list[Any]) -> list[Progress]:
    return [(each.request_id, each.num_tokens, each.num_computed_tokens) for each in running]
