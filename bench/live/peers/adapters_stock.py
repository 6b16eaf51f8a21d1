"""vLLM's own handling of adapters: least recently used go first, by count; a step loads what it lacks.

On our LoRA wrapper it is the fair peer; on vLLM's own CPU wrapper a step with adapters takes seconds.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

from bench.live.peers.adapters import (
    AdapterSettings,
    Answer,
    Ask,
    StepLog,
    account,
    as_dicts,
    asks_of,
    forget_files,
    warm_up_asks,
)
from bench.live.peers.engine import configure_environment, greedy
from bench.live.peers.stock import StockEngine


class StockAdapters(StockEngine):
    """`has_our_wrapper`: compute with our LoRA wrapper, not with vLLM's."""

    settings: AdapterSettings

    def __init__(self, settings: AdapterSettings, has_our_wrapper: bool) -> None:
        configure_environment(settings)
        if has_our_wrapper:
            from engine_bridge.driver.lora import lora

            lora.install()
        self._folders = dict(settings.adapters)
        self._ids = {name: number for number, (name, _) in enumerate(settings.adapters, 1)}
        super().__init__(settings)
        if has_our_wrapper and settings.adapters:
            lora.check_engine(self.llm)
        self._log = StepLog(self.scheduler)
        self._num_preemptions = 0
        self._count_preemptions()
        self._num_asked = 0
        self._found: Counter[str] = Counter()
        self._num_loads = self._num_load_bytes = 0
        if settings.adapters:
            self._count_loads()
        self._play(warm_up_asks())

    def connector(self) -> dict[str, Any]:
        """Engine arguments beyond those of every stock engine."""
        if not self._folders:
            return {}
        return {
            "enable_lora": True,
            "max_loras": self.settings.max_loras,
            "max_lora_rank": self.settings.max_lora_rank,
            "max_cpu_loras": self.settings.max_cpu_loras,
        }

    # -- commands ----------------------------------------------------------------------------------------------------

    def play(self, requests: list[dict[str, Any]], one_by_one: bool = False) -> list[dict[str, Any]]:
        """Answer requests at their times, or each when the one before it is done."""
        asks = asks_of(requests)
        if one_by_one:
            return as_dicts([self._play([ask])[0] for ask in asks])
        return as_dicts(self._play(asks))

    def put(self, adapters: list[str], place: str) -> None:
        """Have adapters in this place and no nearer one: in a `slot`, in `host` memory, on `disk` (and in no page cache)."""
        for name in adapters:
            if place == "disk":
                self._worker_manager.remove_adapter(self._ids[name])
            else:
                self.llm.add_lora(self._request(name))
            if place == "host":
                self._manager.deactivate_adapter(self._ids[name])
        if place == "disk":
            forget_files(self._folders[name] for name in adapters)
        for name in adapters:
            if self._place(self._ids[name]) != place:
                raise RuntimeError(f"{name} is not in {place}")

    def empty(self) -> None:
        """Nothing but the disk holds an adapter; the prefix cache holds nothing."""
        if self._folders:
            self._worker_manager.remove_all_adapters()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is still in use")

    def use(self, policy: str) -> None:
        """From now on vLLM's "fcfs" or "priority" decides who starts. As the scheduler's own constructor sets it."""
        from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

        scheduler = self.scheduler
        if sum(scheduler.get_request_counts()):
            raise RuntimeError("requests are left")
        scheduler.policy = SchedulingPolicy(policy)
        scheduler.waiting = create_request_queue(scheduler.policy)

    def preemptions(self) -> dict[str, int]:
        """Since the start: all."""
        return {"all": self._num_preemptions}

    def adapter_account(self) -> dict[str, Any]:
        """Since the start."""
        return account(self._found, self._num_loads, self._num_load_bytes)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _play(self, asks: list[Ask]) -> list[Answer]:
        answers = [Answer() for _ in asks]
        waiting = deque(sorted(range(len(asks)), key=lambda n: asks[n].at_s))
        running: dict[str, int] = {}
        started_s = time.perf_counter()
        while waiting or any(not asks[number].is_background for number in running.values()):
            now_s = time.perf_counter() - started_s
            while waiting and asks[waiting[0]].at_s <= now_s:
                number = waiting.popleft()
                running[self._ask(asks[number])] = number
            if not running:
                time.sleep(max(asks[waiting[0]].at_s - now_s, 0))
                continue
            outputs = self._log.step(self.step)
            for output in outputs:
                number = running[output.request_id]
                self._answer(asks[number], answers[number], output, time.perf_counter() - started_s)
                if output.finished:
                    del running[output.request_id]
                    self._log.take(output.request_id, answers[number], started_s)
        if running:
            self.llm.abort_request(list(running))
        for request_id, number in running.items():
            self._log.take(request_id, answers[number], started_s)
        return answers

    def _answer(self, ask: Ask, answer: Answer, output: Any, now_s: float) -> None:
        answer.ttft_s = answer.ttft_s or now_s - ask.at_s
        answer.token_ids += output.outputs[0].token_ids

    def _ask(self, ask: Ask) -> str:
        self._num_asked += 1
        request_id = f"a{self._num_asked}"
        # A salt of its own: no request finds another one's prefix.
        prompt = {"prompt_token_ids": ask.prompt, "cache_salt": request_id}
        if ask.adapter is not None:
            self._found[self._place(self._ids[ask.adapter])] += 1
        lora_request = self._request(ask.adapter) if ask.adapter is not None else None
        self.llm.add_request(
            request_id, prompt, greedy(ask.max_tokens), lora_request=lora_request, priority=ask.priority
        )
        return request_id

    # -- vLLM's inside -----------------------------------------------------------------------------------------------

    @property
    def _worker_manager(self) -> Any:
        return self.llm.model_executor.driver_worker.worker.model_runner.lora_manager

    @property
    def _manager(self) -> Any:
        return self._worker_manager._adapter_manager

    def _place(self, adapter_id: int) -> str:
        if adapter_id in self._manager.lora_index_to_id:
            return "slot"
        return "host" if adapter_id in self._worker_manager.list_adapters() else "disk"

    def _request(self, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, self._ids[name], self._folders[name])

    def _count_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> None:
            self._num_preemptions += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = count

    def _count_loads(self) -> None:
        load = self._worker_manager._load_adapter

        def count(lora_request: Any) -> Any:
            model = load(lora_request)
            self._num_loads += 1
            tensors = [part for lora in model.loras.values() for part in (lora.lora_a, lora.lora_b)]
            self._num_load_bytes += sum(part.numel() * part.element_size() for part in tensors)
            return model

        self._worker_manager._load_adapter = count
