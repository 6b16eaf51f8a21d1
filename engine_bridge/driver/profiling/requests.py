"""Requests made to order on an engine without other requests: with a given context that was never computed, and given tokens to compute.

The KV of their context is made up: free blocks are registered under the hashes of the prompt, so that vLLM's prefix cache finds them. The content of
these blocks does not change how long attention takes; computing it would take most of a profile's time. `fill_kv` makes sure that all blocks lie in
separate memory and hold numbers.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.kv.layer_groups import register
from engine_bridge.driver.scheduling.step_work import work_of
from engine_bridge.predict.steps import StepSample

# The first tokens of a made-up context are drawn, this many, so that no two are equal; the others only have to exist.
NUM_DRAWN_TOKENS = 16
FILL_SPREAD = 0.5


class CraftedRequests:
    """Adds requests, runs steps and times them. On the engine's thread; use it as a context manager around all steps.

    Attributes:
        num_seqs, num_batched_tokens, num_kv_tokens, max_model_len: bounds of a step and of a request.
    """

    def __init__(self, driver: VllmDriver) -> None:
        self.driver = driver
        self.engine: Any = driver.engine
        config = self.engine.vllm_config
        core = self.engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._layout = driver.layout
        self.block_size = self._layout.unit_tokens
        self.num_seqs: int = config.scheduler_config.max_num_seqs
        self.num_batched_tokens: int = config.scheduler_config.max_num_batched_tokens
        self.num_kv_tokens = self._layout.sure_tokens(self._pool.num_gpu_blocks - 1)
        self.max_model_len: int = config.model_config.max_model_len
        self._vocab_size: int = config.model_config.get_vocab_size()
        self._chance = random.Random(0)
        self._ids = itertools.count()
        self._live: dict[str, tuple[str, int | None]] = {}  # internal id -> our name, adapter
        self._last_output: Any = None

    def __enter__(self) -> CraftedRequests:
        schedule = self._scheduler.schedule

        def noting(*args: Any, **kwargs: Any) -> Any:
            """Schedule a step and keep its output."""
            self._last_output = schedule(*args, **kwargs)
            return self._last_output

        self._scheduler.schedule = noting  # set on this object only: `del` gives the class's own back
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clear()
        del self._scheduler.schedule

    def add(
        self, num_context_tokens: int, num_new_tokens: int, max_tokens: int, adapter: Any | None = None
    ) -> None:
        """Add a request of which a part of the prompt, its context, has made-up KV.

        num_context_tokens: rounded down to whole blocks. num_new_tokens: of the prompt that are to be computed. max_tokens: of its answer. adapter: a
        LoRARequest; None: the base model.
        """
        from engine_bridge.driver.vllm_api import SamplingParams

        num_blocks = num_context_tokens // self.block_size
        token_ids = self._token_ids(num_blocks * self.block_size, num_new_tokens)
        name = f"profile-{next(self._ids)}"
        if adapter is not None:
            self.driver.adapters.requested(name, adapter.lora_int_id)
        internal_id = self.engine.add_request(
            name,
            {"prompt_token_ids": token_ids},
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            lora_request=adapter,
        )
        self._live[internal_id] = name, adapter.lora_int_id if adapter is not None else None
        if num_blocks:
            self._make_up(self._scheduler.requests[internal_id], num_blocks * self.block_size)

    def step(self) -> StepSample:
        """Run one step; returns its work, and how long vLLM took from scheduling to outputs."""
        self._last_output = None
        started_s = time.perf_counter()
        self.engine.step()
        elapsed_s = time.perf_counter() - started_s
        work = work_of(self._last_output) if self._last_output is not None else (0, 0, 0)
        return StepSample(*work, elapsed_s)

    def clear(self) -> None:
        """End all requests."""
        self.engine.abort_request(list(self._live), internal=True)
        for name, adapter_id in self._live.values():
            if adapter_id is not None:
                self.driver.adapters.released(name, adapter_id)
        self._live.clear()

    def _token_ids(self, num_context: int, num_new: int) -> list[int]:
        num_drawn = min(num_context, NUM_DRAWN_TOKENS)
        draw = self._chance.randrange
        front = [draw(self._vocab_size) for _ in range(num_drawn)]
        return [*front, *[0] * (num_context - num_drawn), *(draw(self._vocab_size) for _ in range(num_new))]

    def _make_up(self, request: Any, num_tokens: int) -> None:
        entries = self._layout.entries(request.block_hashes, self._layout.needed(0, num_tokens))
        blocks = self._pool.get_new_blocks(len(entries))
        register(self._pool, entries, blocks)
        self._pool.free_blocks(reversed(blocks))


def fill_kv(kv_caches: Sequence[Any]) -> None:
    """Write numbers into the whole KV cache, a tensor for each layer.

    Memory that was never written is one page of zeros many times over, which is read too fast.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    for layer in kv_caches:
        if layer.dtype.itemsize > 1:
            pattern = torch.rand(layer.shape[1:], generator=generator).sub_(FILL_SPREAD)
            layer.copy_(pattern.to(layer.device, layer.dtype).expand_as(layer))
        else:
            layer.zero_()  # random bytes may be NaN in an 8-bit type
