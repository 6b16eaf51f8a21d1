"""The scheduler's account of itself: figures for any thread at any time, and each request for the engine thread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engine_bridge.core.scheduling.guess_errors import GuessErrors
from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.scheduling.scheduling import Scheduling
from engine_bridge.driver.vllm_api import RequestStatus
from engine_bridge.protocol.figures import LengthErrors, RequestState, SchedulingStats, WaitReason

Places = Mapping[int, str]


@dataclass(eq=False, slots=True)
class SchedulingReport:
    """A view of the scheduler that changes nothing.

    `stats` reads the engine thread's plain objects as they are, so a scrape waits for no step; its figures may be a step apart.

    Args:
        scheduling: None where vLLM's own queue decides.
        outputs: vLLM's output processor, which knows requests by the ids that they came with.
        places: returns where adapters are, by id.
        blocks: vLLM's pool of KV blocks, of block_size tokens each.
        knows_why: False where vLLM's internals have moved, so that the reasons of waiting are unknown: then every waiting request is just queued.
    """

    _scheduler: Any
    _scheduling: Scheduling | None
    _outputs: Any
    _places: Callable[[], Places]
    _blocks: Any
    _block_size: int
    _knows_why: bool = True

    def stats(self) -> SchedulingStats:
        """Return the figures of the scheduler. From any thread."""
        own = self._scheduling
        running, waiting = copy_of(self._scheduler.running), self._waiting()
        reasons = self._reasons()
        under_way = sum(each.num_output_tokens for each in running + waiting)
        return SchedulingStats(
            policy=own.dispatcher.policy.name if own is not None else "vllm",
            num_running=len(running),
            num_waiting=len(waiting),
            num_by_reason=dict(Counter(map(reasons.of, waiting))),
            lanes=own.lanes() if own is not None else None,
            counts=own.all_counts() if own is not None else {"preempted": self._scheduler.num_preempted},
            seconds=own.seconds() if own is not None else {},
            length_errors=_length_errors(own.dispatcher.guess_errors) if own is not None else None,
            length_calibration=own.dispatcher.guess_errors.calibration.copy() if own is not None else {},
            num_answer_tokens=self._scheduler.num_ended_tokens + under_way,
            num_kv_blocks=self._blocks.num_gpu_blocks,
            num_free_kv_blocks=self._blocks.get_num_free_blocks(),
            block_size=self._block_size,
        )

    def requests(self, tenant: str, limit: int) -> tuple[list[RequestState], list[RequestState], int, int]:
        """Return a tenant's waiting and running requests, the first `limit` of each, and how many wait and run in all. On the engine thread."""
        own = self._scheduling
        waiting = [each for each in self._waiting() if facts_of(each).tenant == tenant]
        running = [each for each in self._scheduler.running if facts_of(each).tenant == tenant]
        reasons = self._reasons()
        now = own.now() if own is not None else time.time()
        return (
            [self._describe(each, now, reasons.of(each)) for each in waiting[:limit]],
            [self._describe(each, now, None) for each in running[:limit]],
            len(waiting),
            len(running),
        )

    def reasons(self) -> list[tuple[str, WaitReason]]:
        """Return the requests that wait, by the ids that they came with, each with the reason. On the engine thread."""
        why, states = self._reasons(), self._outputs.request_states
        return [
            (state.external_req_id, why.of(each))
            for each in self._waiting()
            if (state := states.get(each.request_id)) is not None
        ]

    def _waiting(self) -> list[Any]:
        beside = copy_of(self._scheduler.kv_holding_waiting) if self._knows_why else []
        return copy_of(self._scheduler.waiting) + beside

    def _reasons(self) -> _Reasons | _NoReasons:
        if not self._knows_why:
            return _NoReasons()
        return _Reasons(self._scheduler, self._scheduling, self._places)

    def _describe(self, request: Any, now: float, reason: WaitReason | None) -> RequestState:
        known = (
            self._scheduling.dispatcher.known(request.request_id) if self._scheduling is not None else None
        )
        named = {
            "request_id": self._client_id(request.request_id),
            "priority": request.priority,
            "defer_reason": reason,
            "num_output_tokens": request.num_output_tokens,
            "times_preempted": request.num_preemptions,
        }
        if known is None or self._scheduling is None:
            waited_s = max(now - request.arrival_time, 0.0) if reason is not None else None
            return RequestState(**named, waited_s=waited_s, size_tokens=request.num_tokens)
        until_s = known.started_s if known.started_s is not None else now
        laned = self._scheduling.dispatcher.laned
        return RequestState(
            **named,
            lane=laned.lane_of(request.request_id) if laned is not None else None,
            waited_s=max(until_s - known.facts.arrived_s, 0.0),
            ran_s=now - known.started_s if known.started_s is not None else None,
            size_tokens=known.charged_tokens,
            times_bypassed=known.facts.times_bypassed,
            times_squashed=known.facts.times_squashed,
            is_bypasser=known.is_bypasser,
        )

    def _client_id(self, request_id: str) -> str:
        """Return the id that the request came with: without our sequence number and vLLM's random part."""
        state = self._outputs.request_states.get(request_id) if self._knows_why else None
        if state is None:
            return request_id
        unique_id: str = (state.parent_req or state).external_req_id
        return unique_id.rpartition("-")[0]


class _NoReasons:
    """Used when vLLM's internals have moved: every waiting request is reported as `queued`."""

    def of(self, request: Any) -> WaitReason:
        """Return "queued"."""
        return "queued"


class _Reasons:
    """Reasons why requests wait, as of the last step.

    It calls nothing that could change anything: the engine thread may be in the middle of a step.
    """

    def __init__(self, scheduler: Any, scheduling: Scheduling | None, places: Callable[[], Places]) -> None:
        self._scheduler, self._scheduling = scheduler, scheduling
        self._decided = (
            frozenset(scheduling.dispatcher.last.request_ids) if scheduling is not None else frozenset()
        )
        self._places = places()

    def of(self, request: Any) -> WaitReason:
        """Return why a request waits."""
        if self._scheduling is None:
            return self._why_queued(request)
        if request.request_id in self._decided:
            return self._why_passed_over(request) or "step_full"
        reason = self._scheduling.dispatcher.reason(request.request_id)
        if reason != "not_ready":
            return reason
        if _is_compiling(request):
            return "grammar_compiling"
        if self._lacks_room(request):
            return "adapter_memory"
        return "adapter_on_its_way" if request.lora_request is not None else "just_came"

    def _why_queued(self, request: Any) -> WaitReason:
        if _is_compiling(request):
            return "grammar_compiling"
        if self._is_on_disk(request.lora_request):
            return "adapter_on_its_way"
        return self._why_passed_over(request) or "queued"

    def _is_on_disk(self, adapter: Any) -> bool:
        return adapter is not None and self._places.get(adapter.lora_int_id, "disk") == "disk"

    def _why_passed_over(self, request: Any) -> WaitReason | None:
        """Return why vLLM, which was offered the request in the last step, did not start it; None: it was not passed over."""
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return "kv_on_its_way"
        if request not in self._scheduler.deferred_waiting:
            return None
        if self._is_on_disk(request.lora_request):
            return "adapter_on_its_way"
        if self._lacks_slot(request):
            return "adapter_slots"
        return "adapter_memory" if self._lacks_room(request) else "kv_on_its_way"

    def _lacks_room(self, request: Any) -> bool:
        """Return whether the request's adapter is at hand, but running ones leave it no memory or it is another adapter's turn."""
        adapter, residency = request.lora_request, self._scheduler.residency
        if adapter is None or residency is None or self._is_on_disk(adapter):
            return False
        return not residency.has_room(adapter.lora_int_id)

    def _lacks_slot(self, request: Any) -> bool:
        config = self._scheduler.lora_config
        if config is None or request.lora_request is None:
            return False
        running = {
            each.lora_request.lora_int_id for each in list(self._scheduler.running) if each.lora_request
        }
        return len(running) >= config.max_loras and request.lora_request.lora_int_id not in running


def copy_of(queue: Iterable[Any]) -> list[Any]:
    """Copy a queue of the engine thread, from any thread."""
    while True:
        try:
            return list(queue)
        except RuntimeError:  # the queue changed between the making of its iterator and the iterator's end: very rare, and then not twice
            continue


def _is_compiling(request: Any) -> bool:
    if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return False
    structured = request.structured_output_request
    # The property `grammar` is not used here: it also takes the result over.
    grammar = structured._grammar if structured is not None else None
    return grammar is None or (isinstance(grammar, Future) and not grammar.done())


def _length_errors(errors: GuessErrors) -> LengthErrors:
    return LengthErrors(
        num_answers=errors.num_answers,
        sum_tokens=errors.sum_tokens,
        num_within_p90=errors.num_within_p90,
        num_within=errors.num_within,
    )
