"""vLLM's own engine in this process (`LLMEngine`, no server between), with its own handling of adapters.

Least recently used adapters go first, by count; a step loads what it lacks. With adapters it computes with our LoRA wrapper, which makes it the fair
peer: on vLLM's own CPU wrapper a step with adapters takes seconds.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from bench.live.peers.engine import (
    Engine,
    Settings,
    configure_environment,
    forget_files,
    greedy,
    reset_prefix_cache,
)
from bench.live.peers.play import Ask, StepLog
from engine_bridge.driver.in_process import runner_of, scheduler_of

T = TypeVar("T")


class Stock(Engine):
    """vLLM with its prefix cache. Statistics and detokenisation are off: its best settings here."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        configure_environment(settings.device)
        on_cpu = settings.device == "cpu"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from engine_bridge.driver.lora import lora

        arguments: dict[str, Any] = {
            "model": settings.model,
            "dtype": settings.dtype,
            "block_size": settings.block_size,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "num_gpu_blocks_override": settings.num_blocks,
            "enable_prefix_caching": True,
            "enforce_eager": on_cpu,
            "load_format": "auto" if settings.has_weights else "dummy",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if settings.offload_gib:
            arguments["kv_offloading_size"] = settings.offload_gib
        if settings.adapters:
            if on_cpu:
                lora.install()
            arguments |= {
                "enable_lora": True,
                "max_loras": settings.max_loras,
                "max_lora_rank": settings.max_lora_rank,
                "max_cpu_loras": settings.max_cpu_loras,
            }
        # vLLM chooses unset arguments as `vllm serve` does.
        given = EngineArgs(**{name: value for name, value in arguments.items() if value is not None})
        served = UsageContext.OPENAI_API_SERVER
        self.llm = LLMEngine.from_engine_args(given, served, enable_multiprocessing=False)
        if settings.adapters and on_cpu:
            lora.check_runner(runner_of(self.llm))
        self.log = StepLog(scheduler_of(self.llm))
        self._ids = {name: number for number, name in enumerate(self.folders, 1)}
        self._found: Counter[str] = Counter()
        self._num_preemptions = 0
        self._count_preemptions()
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.warm_up()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on this thread, which is the engine's, too."""
        return self.loop.run_until_complete(coroutine)

    def with_vllm(self, run: Callable[[Any], T]) -> T:
        """Call `run` at once: no step is under way."""
        return run(self.llm)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def outputs(self, request_id: str, ask: Ask, salt: str) -> AsyncGenerator[Sequence[int], None]:
        """Ask, and yield token ids as steps give them."""
        prompt = {"prompt_token_ids": ask.prompt} | ({"cache_salt": salt} if salt else {})
        lora_request = None
        if ask.adapter is not None:
            self._found[self._place(ask.adapter)] += 1
            lora_request = self._lora_request(ask.adapter)
        queue = self._queues[request_id] = asyncio.Queue()
        self.llm.add_request(request_id, prompt, greedy(ask.max_tokens), lora_request=lora_request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        is_finished = False
        try:
            while not is_finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                is_finished = output.finished
                yield output.outputs[0].token_ids
        finally:
            del self._queues[request_id]
            if not is_finished:
                self.llm.abort_request([request_id])

    async def _step(self) -> None:
        try:
            while self.llm.has_unfinished_requests():
                for output in self.log.step(self.llm.step):
                    self._queues[output.request_id].put_nowait(output)
                # Whatever waits for these outputs or has become due meanwhile asks before the next step.
                for _ in range(3):
                    await asyncio.sleep(0)
        except Exception as error:
            for queue in self._queues.values():
                queue.put_nowait(error)

    # -- adapters ----------------------------------------------------------------------------------------------------

    def put(self, adapters: list[str], place: str) -> None:
        """Have adapters in this place; see `Engine`."""
        for name in adapters:
            if place == "disk":
                self._worker_manager.remove_adapter(self._ids[name])
            else:
                self.llm.add_lora(self._lora_request(name))
            if place == "host":
                self._worker_manager._adapter_manager.deactivate_adapter(self._ids[name])
        if place == "disk":
            forget_files(self.folders[name] for name in adapters)
        wrong = {name: self._place(name) for name in adapters if self._place(name) != place}
        if wrong:
            raise RuntimeError(f"adapters are not in {place}: {wrong}")

    def empty(self) -> None:
        """Leave adapters on disk only, and empty the prefix cache."""
        if self.folders:
            self._worker_manager.remove_all_adapters()
        reset_prefix_cache(self.llm)

    def found(self) -> dict[str, int]:
        """Return how many requests found their adapter in each place."""
        return dict(self._found)

    def preemptions(self) -> dict[str, int]:
        """Return all preemptions since the start."""
        return {"all": self._num_preemptions}

    def close(self) -> None:
        """End the engine and free its memory."""
        self.llm.engine_core.shutdown()
        del self.llm
        gc.collect()

    # -- vLLM's inside -----------------------------------------------------------------------------------------------

    @property
    def _worker_manager(self) -> Any:
        return runner_of(self.llm).lora_manager

    def _place(self, name: str) -> str:
        manager, number = self._worker_manager, self._ids[name]
        if number in manager._adapter_manager.lora_index_to_id:
            return "slot"
        return "host" if number in manager.list_adapters() else "disk"

    def _lora_request(self, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, self._ids[name], self.folders[name])

    def _count_preemptions(self) -> None:
        scheduler = scheduler_of(self.llm)
        preempt = scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> None:
            """Count a preemption and do it."""
            self._num_preemptions += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = count
