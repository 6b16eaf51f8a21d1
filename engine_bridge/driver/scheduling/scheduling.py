"""The link between vLLM's scheduler and the dispatcher: tells it which requests came and left, and makes vLLM do what it decides.

Everything here runs on the engine thread.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from engine_bridge.core.scheduling.dispatcher import PRIOR_TOKEN_S, Dispatcher, StepView
from engine_bridge.core.scheduling.pacer import Progress
from engine_bridge.core.scheduling.pauses import Pauses
from engine_bridge.core.scheduling.refits import REFIT_EVERY_S, Refits, Run
from engine_bridge.core.scheduling.victims import most_new_blocks
from engine_bridge.driver.adapters.residency import lora_ids
from engine_bridge.driver.background import is_background
from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.scheduling.pace import Pace
from engine_bridge.driver.vllm_api import RequestQueue, RequestStatus
from engine_bridge.policy.kv.kv_layout import KvLayout
from engine_bridge.policy.scheduling.lanes import RULES
from engine_bridge.policy.scheduling.policies import MakePolicy
from engine_bridge.policy.scheduling.queue_policy import Waiting
from engine_bridge.predict.length import LengthPredictor, OnlineLengths
from engine_bridge.protocol.engine_request import EngineRequest, session_key
from engine_bridge.protocol.figures import LaneStats

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency

log = logging.getLogger(__name__)


class PolicyQueue(RequestQueue):
    """Takes the place of the scheduler's `waiting`.

    `bool()` says whether a request is to start in this step; `len()` is the number of all waiting requests. Source: vllm-project/vllm,
    `Scheduler.schedule`, for which questions a queue is asked, and when.

    Args:
        listener: is told of requests that come, before they can be chosen, that are preempted, and that leave without starting.
    """

    def __init__(self, listener: Scheduling) -> None:
        self._listener = listener
        self._requests: dict[str, Any] = {}
        self._plan: deque[str] = deque()
        self._popped: dict[str, Any] = {}

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, request_ids: Iterable[str]) -> None:
        """Hand out these requests in the step that begins, in this order."""
        self._plan = deque(request_ids)

    def end_step(self) -> list[str]:
        """Return the requests that were taken from the queue in this step and not put back: they run."""
        self._plan.clear()
        admitted, self._popped = list(self._popped), {}
        return admitted

    # -- what vLLM asks ----------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Add a new request."""
        self._requests[request.request_id] = request
        self._listener.on_arrival(request)

    def peek_request(self) -> Any:
        """Return the request that starts next. Raises IndexError if none is to start."""
        return self._requests[self._plan[0]]

    def pop_request(self) -> Any:
        """Take out the request that starts next. Raises IndexError if none is to start."""
        request = self._requests.pop(self._plan.popleft())
        self._popped[request.request_id] = request
        return request

    def prepend_request(self, request: Any) -> None:
        """Put back a running request that was preempted."""
        self._requests[request.request_id] = request
        self._listener.preempted(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Put back requests that could not start in this step after all."""
        for request in requests:
            self._popped.pop(request.request_id, None)
            self._requests[request.request_id] = request

    def remove_request(self, request: Any) -> None:
        """Remove a request that has ended; it is ignored if it does not wait here."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove requests that have ended; requests that do not wait here are ignored."""
        for request in requests:
            if self._requests.pop(request.request_id, None) is not None:
                self._listener.ended(request)

    def __bool__(self) -> bool:
        return bool(self._plan)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests.values())


class Scheduling:
    """The dispatcher of one engine, and that engine's requests in the form in which the dispatcher asks for them (`core.dispatcher.Engine`).

    Args:
        make_policy: one of `engine_bridge.policy.scheduling.policies.POLICIES`, or a bench's own policy.
        num_host_tokens: tokens whose KV host memory holds; 0 without one.
        layout: says how many of them a request of a given length holds.
        is_ready: returns whether a waiting request's adapter and its grammar are there.
        num_cached_tokens: returns how many leading tokens of a waiting request need not be computed.
        block_pool: vLLM's, where requests that begin alike share blocks; None: each request is charged all that it holds.
        adapters: adapters whose memory is bounded, too; None: requests use none.
        ways: returns counts of the planned and the taken ways by which preempted requests get their KV back. None: they compute it again.
        predictor: predicts the lengths of answers; None: a new predictor, which learns from answers.
        run_fit: runs the fitting of lanes and the predictor; None: a separate thread, closed with this object.
        refit_every_s: the least time between two fittings.
        lane_rule: a name in `engine_bridge.policy.scheduling.lanes.RULES`.
    """

    def __init__(
        self,
        make_policy: MakePolicy,
        *,
        num_tokens: int,
        num_blocks: int,
        num_host_tokens: int = 0,
        layout: KvLayout,
        is_ready: Callable[[Any], bool],
        num_cached_tokens: Callable[[Any], int] = lambda request: 0,
        block_pool: Any = None,
        adapters: Residency | None = None,
        ways: Callable[[], Mapping[str, int]] | None = None,
        pace: Pace | None = None,
        pauses: Pauses | None = None,
        predictor: LengthPredictor | None = None,
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
        self._layout, self._num_blocks, self._block_pool = layout, num_blocks, block_pool
        self._is_ready, self._num_cached_tokens = is_ready, num_cached_tokens
        self._adapters = adapters
        self._ways = ways or dict
        self._clock, self._stopwatch = clock, stopwatch
        self._fits = ThreadPoolExecutor(1, "refit")  # starts no thread before it has work
        self._requests: dict[str, Any] = {}
        self._running_adapters: Collection[int] = ()
        """Ids of the running requests' adapters, as of the step that is decided. Collected once, as hundreds of waiting requests are looked at."""
        self._facts: dict[str, EngineRequest] = {}
        self.dispatcher = Dispatcher(
            make_policy(num_tokens),
            self,
            Refits(
                run_fit or self._fit_beside,
                lambda: self.predictor.refit(),
                now=clock(),
                every_s=refit_every_s,
                rule=RULES[lane_rule],
            ),
            num_tokens=num_tokens,
            num_host_tokens=num_host_tokens,
            are_copied_back=ways is not None,
            pacer=pace.pacer if pace is not None else None,
            pauses=pauses,
            prefill_s=pace.prefill_s if pace is not None else lambda num_tokens: 0.0,
            decode_s=pace.decode_s if pace is not None else lambda num_requests, num_tokens: PRIOR_TOKEN_S,
            stopwatch=stopwatch,
        )

    # -- life of a request, as the queue and the scheduler tell it -----------------------------------------------------

    def on_arrival(self, request: Any) -> None:
        """Tell the dispatcher of a new request, with a prediction of its answer's length."""
        facts = facts_of(request)
        if not facts.num_prompt_tokens:
            facts = msgspec.structs.replace(
                facts, num_prompt_tokens=request.num_prompt_tokens, max_tokens=request.max_tokens
            )
        waiting = Waiting(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            guess=facts.guess or self.predictor.predict(facts),
            priority=request.priority,
            tenant=facts.tenant,
            weight=facts.weight,
            adapter_id=request.lora_request.lora_int_id if request.lora_request is not None else None,
            rank=facts.rank,
            program=facts.session if facts.turn else "",
            continues=facts.turn == "continues",
            caller=session_key(facts.tenant, facts.caller),
            waits_for=_waits_for(request),
            is_background=is_background(request.request_id),
            # Adapters are not charged as tokens: those in use lie in separate slots, beside KV, and would keep KV memory empty.
        )
        self._requests[request.request_id] = request
        self._facts[request.request_id] = facts
        self.dispatcher.arrived(waiting, self._clock())

    def preempted(self, request: Any) -> None:
        """Tell the dispatcher that a running request was put back into the queue."""
        self.dispatcher.preempted(request.request_id)

    def ended(self, request: Any) -> None:
        """Tell the dispatcher that a request has left, from the queue or from running; the predictor learns from its answer."""
        request_id = request.request_id
        facts = self._facts.pop(request_id, None)
        if facts is None:
            return
        is_finished = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        num_output = request.num_output_tokens
        if is_finished and not is_background(request_id):
            self.predictor.observe(facts, num_output)
        self.dispatcher.ended(request_id, num_output, is_finished, self._clock())
        self._requests.pop(request_id, None)

    def announced(self, program: str, lifetime_s: float, probability: float) -> None:
        """Note that a program comes back within this time, if at all, with this probability: see `Programs.announced`."""
        now = self._clock()
        self.dispatcher.programs.announced(program, now + lifetime_s, now, probability)

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduler: Any) -> None:
        """Decide which requests start, and stop or pause running ones for them. Called before vLLM schedules."""
        started_s = self._stopwatch()
        now = self._clock()
        running = _progress(scheduler.running)
        running_adapters = self._running_adapters = lora_ids(scheduler.running)
        view = StepView(
            running=running,
            free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            num_slots=scheduler.max_num_running_reqs - len(scheduler.running),
            adapter_bytes=self._adapters.core.free_room(running_adapters) if self._adapters else None,
            adapters_take_turns=bool(self._adapters and self._adapters.core.turns.last),
            shared_tokens=self._tokens_held_twice(scheduler),
        )
        plan = self.dispatcher.begin_step(view, now)
        for request_id in plan.squash:
            self.squash(scheduler, request_id)
        for request_id in plan.pause:
            self._preempt(scheduler, self._requests[request_id])
        self.queue.begin_step(plan.request_ids)
        if self.pace is not None and plan.bounds is not None:
            self.pace.set_bounds(plan.bounds, map(self._requests.__getitem__, plan.request_ids))
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

    def _tokens_held_twice(self, scheduler: Any) -> int:
        """Return by how many tokens the running requests, each counted by itself, hold more than there are in used blocks."""
        if self._block_pool is None or not self.dispatcher.policy.charges_tokens:
            return 0
        num_held = sum(self._layout.num_blocks(each.num_computed_tokens) for each in scheduler.running)
        num_used = self._num_blocks - self._block_pool.get_num_free_blocks()
        return int(max(num_held - num_used, 0) / self._layout.blocks_per_token)

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
        most_tokens, layout = scheduler.max_num_scheduled_tokens, self._layout
        smallest, num_groups = min(group.block_tokens for group in layout.groups), len(layout.groups)
        # A step takes at most a block more for each request, and the blocks that its prompts fill. Free memory is seldom so short that the exact
        # number is needed.
        if num_free >= (len(progress) + most_tokens // smallest) * num_groups:
            return
        if num_free >= most_new_blocks(progress, most_tokens, smallest) * num_groups:
            return
        order = self.dispatcher.victims(progress, now)
        if order is not None:
            running = scheduler.running
            others = [request for request in running if self.dispatcher.known(request.request_id) is None]
            running[:] = others + [self._requests[request_id] for request_id in order]

    # -- what the dispatcher asks ------------------------------------------------------------------------------------

    def is_ready(self, request_id: str) -> bool:
        """Return whether the request's adapter and its grammar are there."""
        return self._is_ready(self._requests[request_id])

    def is_held_back(self, adapter_id: int) -> bool:
        """Return whether the adapter's requests wait for another adapter's turn."""
        return self._adapters is not None and self._adapters.is_held_back(adapter_id)

    def num_tokens(self, request_id: str) -> int:
        """Return the request's tokens so far: its prompt's and its answer's."""
        num_tokens: int = self._requests[request_id].num_tokens
        return num_tokens

    def start_blocks(self, request_id: str) -> int:
        """Return the number of free blocks that starting this request would take: new blocks, and cached blocks that no running request holds."""
        # vLLM counts in the same way: cached blocks of the prompt that no request uses are among the free blocks, too.
        num_blocks = min(self._layout.num_blocks(self.num_tokens(request_id)), self._num_blocks)
        num_shared = self.shared_tokens(request_id) * self._layout.blocks_per_token
        return max(num_blocks - round(num_shared), 0)

    def shared_tokens(self, request_id: str) -> int:
        """Return how many of the request's first tokens lie in blocks that running requests hold."""
        number = self._layout.full_group
        if self._block_pool is None or number is None:
            return 0
        # A request that holds a block of full attention holds all blocks before it, so the last shared block is found by halving. The block of the
        # last token is always computed anew, because vLLM needs its output.
        request, group = self._requests[request_id], self._layout.groups[number]
        step = group.block_tokens // self._layout.hash_tokens
        last = (request.num_tokens - 1) // group.block_tokens
        hashes = request.block_hashes[step - 1 : last * step : step]
        num = bisect_left(hashes, True, key=lambda block_hash: not self._is_held(block_hash, number))
        return num * group.block_tokens

    def _is_held(self, block_hash: Any, group: int) -> bool:
        cached = self._block_pool.get_cached_block(block_hash, [group])
        return cached is not None and cached[0].ref_cnt > 0

    def held_blocks(self, request_id: str) -> int:
        """Return how many blocks the running request holds, counted by itself."""
        # Its next token takes one more where it begins a block.
        return self._layout.num_blocks(self.num_tokens(request_id) + 1)

    def num_cached_tokens(self, request_id: str) -> int:
        """Return how many of the request's first tokens need not be computed."""
        return self._num_cached_tokens(self._requests[request_id])

    def missing_adapter_bytes(self, adapter_id: int) -> int:
        """Return the room that the adapter would need beside the running ones; 0 where adapters are not bounded."""
        return self._adapters.core.needed_room(adapter_id, self._running_adapters) if self._adapters else 0

    # -- to look at ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time of the clock for requests' times, in seconds."""
        return self._clock()

    def lanes(self) -> LaneStats | None:
        """Return the figures of the policy's lanes; None where it has none."""
        policy = self.dispatcher.laned
        if policy is None:
            return None
        return LaneStats(
            boundaries=policy.lanes.boundaries,
            num_waiting=policy.num_waiting(),
            quota_tokens=policy.ledger.quotas,
            used_tokens=policy.ledger.used,
        )

    def all_counts(self) -> dict[str, int]:
        """Return counts of decisions and of the ways back of preempted requests. From any thread."""
        return {**self.dispatcher.counts, **self._ways()}

    def seconds(self) -> dict[str, float]:
        """Return the seconds that decisions, and all of our work in steps, have taken. From any thread."""
        return {"decide": self.dispatcher.decide_s, "step": self.step_s}

    def _fit_beside(self, work: Callable[[], None]) -> None:
        self._fits.submit(_safely, work)

    def close(self) -> None:
        """Drop the fits of lanes that have not begun, without waiting for the running one."""
        self._fits.shutdown(wait=False, cancel_futures=True)


def _safely(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        log.exception("lanes or the predictor could not be fitted; they stay as they are")


def _progress(running: list[Any]) -> list[Progress]:
    return [(each.request_id, each.num_tokens, each.num_computed_tokens) for each in running]


def _waits_for(request: Any) -> Hashable:
    """Return an id of the thing that a request waits for before it may start: its own grammar, its adapter, or None."""
    if request.structured_output_request is not None:
        return request.request_id
    return request.lora_request.lora_int_id if request.lora_request is not None else None
