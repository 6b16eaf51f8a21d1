"""The scheduler classes that vLLM builds by name: its own classes, with our gate and our order of starting. No code of `schedule()` is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_bridge.driver.scheduling.scheduling import Scheduling
from engine_bridge.driver.vllm_api import AsyncScheduler, RequestStatus, Scheduler

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency


class _Gate:
    """Passes over waiting requests whose adapter cannot be computed with yet; they keep their place in the queue."""

    residency: Residency | None = None

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        is_ready: bool = super()._handle_blocked_waiting_request(request)
        if self.residency is None or request.lora_request is None:
            return is_ready
        return is_ready and self.residency.may_start(request.lora_request.lora_int_id)

    def has_adapter(self, request: Any) -> bool:
        """Return whether a step could compute with the request's adapter, if it has a slot's room and its turn."""
        if self.residency is None or request.lora_request is None:
            return True
        return self.residency.is_at_hand(request.lora_request.lora_int_id)


class _Planned:
    """Starts requests as `scheduling` decides; as vLLM does while it is None."""

    scheduling: Scheduling | None = None
    enters_adapters = False
    """Whether the residency hears of a step's adapters here; else the worker tells it, inside the step."""
    num_preempted = 0
    num_ended_tokens = 0
    """Tokens generated for requests that have ended."""

    def use(self, scheduling: Scheduling) -> None:
        """Let `scheduling` decide from now on; no request may wait yet."""
        self.scheduling, self.waiting = scheduling, scheduling.queue

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step: vLLM's own, with the requests that were chosen before it."""
        output = self._schedule(*args, **kwargs)
        if self.enters_adapters:
            self.residency.enter(self._adapters_of(output))  # type: ignore[attr-defined]
        return output

    def _adapters_of(self, output: Any) -> set[int]:
        requests = (self.requests[name] for name in output.num_scheduled_tokens)  # type: ignore[attr-defined]
        return {each.lora_request.lora_int_id for each in requests if each.lora_request is not None}

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.scheduling is None:
            return super().schedule(*args, **kwargs)
        self.scheduling.begin_step(self)
        try:
            output: Any = super().schedule(*args, **kwargs)
        finally:
            self.scheduling.end_step()
        if self.scheduling.pace is not None:
            self.scheduling.pace.scheduled(output, self.scheduling.dispatcher.load.running)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take over a step's results, and note that it has ended."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.scheduling is not None and self.scheduling.pace is not None:
            self.scheduling.pace.ended(scheduler_output)
        return outputs

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Have every request compute again what a load has not brought.

        Of requests that share such a block vLLM has the first one compute it again, and counts on it for the others, which would go on with wrong KV
        if the first one ended, lost its place, or came later than they.
        """
        affected: set[str] = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        for request in self.running:  # type: ignore[attr-defined]
            if request.request_id in affected:
                (block_ids,) = self.kv_cache_manager.get_block_ids(request.request_id)  # type: ignore[attr-defined]
                first = next(at for at, block_id in enumerate(block_ids) if block_id in invalid_block_ids)
                request.num_computed_tokens = min(request.num_computed_tokens, first * self.block_size)  # type: ignore[attr-defined]
        return affected

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_ended_tokens += request.num_output_tokens
        if self.scheduling is not None:
            self.scheduling.ended(request)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_preempted += 1
        if self.connector is not None:  # type: ignore[attr-defined]
            self.connector.preempted(request)  # type: ignore[attr-defined]
        return super()._preempt_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget all KV of the prefix cache, once no copy holds blocks of it. Returns whether nothing else does."""
        if self.connector is not None:  # type: ignore[attr-defined]
            self.connector.finish_copies()  # type: ignore[attr-defined]
        is_reset: bool = super().reset_prefix_cache(*args, **kwargs)
        return is_reset

    def is_ready(self, request: Any) -> bool:
        """Return whether a request may start, apart from room and from its adapter's turn."""
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            grammar = request.structured_output_request
            if grammar is None or grammar.grammar is None:
                return False
        return self.has_adapter(request)  # type: ignore[attr-defined]


class GatedScheduler(_Planned, _Gate, Scheduler):
    """The scheduler for engines that wait for each step's result before they schedule the next one, as all do on a CPU, and some on a GPU.

    `AsyncScheduler` would work there, too, until a KV load fails: it continues to count an output that will not come, and the request is never
    scheduled again (measured).
    """


class GatedAsyncScheduler(_Planned, _Gate, AsyncScheduler):
    """The scheduler for engines that schedule ahead."""


def make_scheduler(vllm_config: Any, **options: Any) -> GatedScheduler | GatedAsyncScheduler:
    """Return a scheduler of the kind that this engine needs. vLLM calls it with keywords, by its name, where it would make an object of a class.

    vLLM has decided by then whether the engine schedules ahead: never on a CPU, and on a GPU not with each kind of drafts and of executor.
    """
    settings = vllm_config.scheduler_config
    if not settings.enable_chunked_prefill and settings.max_num_scheduled_tokens is not None:
        # Where prompts are computed whole, a step holds as many tokens as the longest. With drafted tokens vLLM has noted before how many a step
        # holds, and a prompt of more would wait for ever, and all behind it.
        settings.max_num_scheduled_tokens = max(
            settings.max_num_scheduled_tokens, settings.max_num_batched_tokens
        )
    schedules_ahead = settings.async_scheduling
    scheduler = GatedAsyncScheduler if schedules_ahead else GatedScheduler
    return scheduler(vllm_config=vllm_config, **options)


SCHEDULER = f"{__name__}.{make_scheduler.__name__}"
"""The value of vLLM's `scheduler_cls`."""
