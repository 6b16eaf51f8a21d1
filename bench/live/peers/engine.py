"""What every engine under test has in common: settings, environment, and the commands that do not depend on whose engine it is."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Twice what any engine here needs beyond its blocks; vLLM wants whole GiB.
KV_SPACE_GIB = 1
MEMCPY_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The same for all engines of a run. `folder` is the engine's own, for what it keeps on disk."""

    model: str
    dtype: str
    folder: str
    num_blocks: int
    block_size: int = 32
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    host_gib: float = 2.0
    disk_gib: float = 8.0
    port: int = 0
    """Of the peer's cache server, where it has one; the one above it serves its HTTP side."""


def configure_environment(settings: Settings) -> None:
    """Must run before vllm or torch is imported."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_COMPILE_DISABLE": "1",
    }.items():
        os.environ.setdefault(name, value)


def greedy(max_tokens: int) -> Any:
    """vLLM's `SamplingParams` for so many tokens, each an output of its own, whatever they are."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


class Engine(ABC):
    """Commands that need only the `LLMEngine`, `self.llm`, and the caller's thread to be the engine's."""

    llm: Any
    settings: Settings
    sources: tuple[str, ...] = ("recompute", "device")
    """Where `place` can put a history's KV."""

    def describe(self) -> dict[str, Any]:
        import torch

        config = self.llm.vllm_config
        return {
            "sources": self.sources,
            "num_blocks": self.block_pool.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "threads": torch.get_num_threads(),
        }

    # -- the engine's inside -----------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        return self.llm.engine_core.engine_core.scheduler

    @property
    def block_pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def layers(self) -> list[Any]:
        """Each layer's KV tensor, blocks first."""
        runner = self.llm.model_executor.driver_worker.worker.model_runner
        layers = runner.compilation_config.static_forward_context.values()
        return [layer.kv_cache for layer in layers if hasattr(getattr(layer, "kv_cache", None), "fill_")]

    def forget_device(self) -> None:
        """Empty the prefix cache and overwrite its memory, so that what comes back can only come from another tier."""
        while self.scheduler.has_requests():
            self.llm.step()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is still in use")
        for layer in self.layers():
            layer.fill_(7.0)

    # -- commands ----------------------------------------------------------------------------------------------------

    def memcpy(self, repeats: int) -> list[float]:
        """Bytes per second of plain copies of memory: the better of one numpy thread and torch's threads, per repeat."""
        import numpy as np
        import torch

        source, target = (torch.full((MEMCPY_BYTES,), fill, dtype=torch.uint8) for fill in (1, 2))
        flat_source, flat_target = source.numpy(), target.numpy()
        rates = []
        for _ in range(repeats):
            times = []
            for copy in (lambda: np.copyto(flat_target, flat_source), lambda: target.copy_(source)) * 2:
                started = time.perf_counter()
                copy()
                times.append(time.perf_counter() - started)
            rates.append(MEMCPY_BYTES / min(times))
        return rates

    def cpu_s(self) -> float:
        """CPU seconds that this process has used so far."""
        return time.process_time()

    def kv_files(self) -> list[str]:
        """The files that hold KV."""
        return [str(path) for path in sorted(Path(self.settings.folder).rglob("*")) if path.is_file()]

    def settle(self) -> None:  # noqa: B027  (most engines write nothing behind)
        """Return once nothing is being written any more."""

    @abstractmethod
    def place(self, source: str) -> None:
        """See to it that a history's KV is in `source` and in nothing faster."""

    @abstractmethod
    def turn(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        """Run one request alone: TTFT in seconds, token ids, and how many prompt tokens were not computed."""

    @abstractmethod
    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Run requests together: the rate at which tokens come once each has its first."""

    @abstractmethod
    def close(self) -> None: ...


def drop_page_cache(paths: Sequence[str | Path], *, is_written: bool = False) -> None:
    """Write the files out, unless that was done before, and have the kernel forget their pages: the next read is the disk's."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if not is_written:
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class DecodeClock:
    """Counts a batch's tokens from the moment when every request has its first one."""

    def __init__(self, num_requests: int) -> None:
        self._waiting = num_requests
        self._seen: set[str] = set()
        self._started_s = time.perf_counter()
        self._decoding_s = 0.0
        self._num_tokens = 0

    def count(self, request_id: str, num_new_tokens: int) -> None:
        if request_id not in self._seen and num_new_tokens:
            self._seen.add(request_id)
            if len(self._seen) == self._waiting:
                self._decoding_s = time.perf_counter()
        elif self._decoding_s:
            self._num_tokens += num_new_tokens

    def result(self) -> dict[str, Any]:
        now_s = time.perf_counter()
        return {
            "decode_tokens_per_s": self._num_tokens / (now_s - self._decoding_s),
            "elapsed_s": now_s - self._started_s,
        }
