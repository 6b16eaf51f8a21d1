"""vLLM's in-process engine behind the bridge's `Driver` methods. Everything in this package runs on, or is about, that one engine."""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from engine_bridge.errors import SeamMoved

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreRequest

    from engine_bridge.driver.kv_tiers import KvTiers
    from engine_bridge.driver.promoter import Hashes, OnChange, Promoter
    from engine_bridge.node import Advisory

log = logging.getLogger(__name__)


class EngineConfig(Struct, frozen=True, kw_only=True):
    """What an engine is built from. Memory in GiB; lengths in tokens."""

    model: str
    served_model_name: str
    device: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    block_size: int | None = None
    kv_cache_gib: float = 1.0
    num_kv_blocks: int | None = None
    """Blocks of KV on the device, whatever memory there is; None: as many as fit."""
    cpu_threads: int | None = None
    """Cores that a CPU engine computes on, the last ones that this process may use; None: all."""
    gpu_memory_utilization: float = 0.9
    enable_lora: bool = True
    max_loras: int = 8
    max_lora_rank: int = 128
    max_cpu_loras: int = 64
    seed: int = 0
    enforce_eager: bool | None = None
    """None: on a CPU yes (vLLM compiles nothing there once LoRA is on), on CUDA no."""
    kv_host_gib: float = 0.0
    """Host memory for KV that leaves the device; 0: none, and no disk tier either."""
    kv_disk_gib: float = 0.0
    kv_dir: str | None = None
    log_stats: bool = True

    @property
    def is_eager(self) -> bool:
        return self.device == "cpu" if self.enforce_eager is None else self.enforce_eager


# One KV block of this many tokens on a CPU: vLLM's default there is 128, with which most of a chat turn would
# fall outside whole blocks and be computed again on the next turn. Its CPU attention takes multiples of 32 only.
CPU_BLOCK_SIZE_TOKENS = 32


# Begins the id of a request that only computes KV ahead of one that may come.
BACKGROUND_PREFIX = "background-"
# Of the warm-up's requests: one to load what is lazy, one long enough to measure prefill by.
WARM_UP_TOKENS = (32, 512)


def configure_environment(config: EngineConfig) -> None:
    """Set what vLLM and torch read from the environment. Must run before either is imported; what the user has set stays."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The gateway has its own periodic figures (/metrics); vLLM's log line every 10 s would only repeat them.
        "VLLM_LOG_STATS_INTERVAL": "86400",
        # vLLM's own bound of 16,384 choices would let one call stand before everybody else in the queue.
        "VLLM_MAX_N_SEQUENCES": str(config.max_num_seqs),
        "HF_HUB_OFFLINE": "1" if Path(config.model).exists() else "0",
        "TOKENIZERS_PARALLELISM": "false",
        # Its C++ side warns at every start about memory policies that nobody asked to change.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if config.device == "cpu":
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(config.kv_cache_gib)))
        if config.cpu_threads is not None:
            cores = sorted(os.sched_getaffinity(0))[-config.cpu_threads :]
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        if config.is_eager:
            # Measured: the first request for logprobs compiles a helper for 30 s inside a step, and every stream waits.
            defaults["TORCH_COMPILE_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@dataclass(slots=True)
class EngineCounts:
    """A snapshot of the scheduler: requests and KV blocks."""

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    block_size: int


class VllmDriver:
    """One `LLMEngine`, built, stepped and closed on the engine thread.

    Args:
        config: what to build.
        lora_requests: adapters to put back after a rebuild; one that no longer loads is left out with a warning.
        report: called with a phrase at each stage of the start.
        tiers: where KV goes that leaves the device; the caller owns them, and they outlive this engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        lora_requests: Iterable[LoRARequest] = (),
        report: Callable[[str], None] = lambda stage: None,
        tiers: KvTiers | None = None,
    ) -> None:
        configure_environment(config)
        self._tiers = tiers
        report("importing vLLM")
        from vllm.v1.engine.llm_engine import LLMEngine

        mends_lora = config.device == "cpu" and config.enable_lora
        if mends_lora:
            from engine_bridge.driver import lora

            lora.install()
        report(f"loading {Path(config.model).name}")
        self.engine = LLMEngine.from_engine_args(_engine_args(config, tiers), enable_multiprocessing=False)
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is None or not hasattr(core, "scheduler"):
            raise SeamMoved(
                "LLMEngine no longer runs its core in this process (engine_core.engine_core.scheduler is gone)"
            )
        if mends_lora:
            lora.check_engine(self.engine)
        self._scheduler = core.scheduler
        self._block_pool = core.scheduler.kv_cache_manager.block_pool
        self._block_size = self.engine.vllm_config.cache_config.block_size
        self._internal_ids: dict[str, str] = {}
        self._silent: set[str] = set()  # requests that have given no output yet
        self._background: deque[tuple[str, EngineCoreRequest]] = deque()
        self.promoter = self._make_promoter(core.scheduler)
        for request in lora_requests:
            try:
                self.engine.add_lora(request)
            except Exception:
                log.exception("adapter %s could not be put back", request.lora_name)
        report("warming up")
        self._warm_up()

    # -- the bridge's side -------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        # Not has_unfinished_requests(): the scheduler also has finished ids to flush.
        return self._scheduler.has_requests() or bool(self._background) or self._promoter_has_work()

    def is_stuck(self) -> bool:
        return self._scheduler.get_request_counts()[0] == 0 and not self._promoter_has_work()

    def wait_s(self) -> float | None:
        return self.promoter.wait_s() if self.promoter is not None else None

    def step(self) -> list[RequestOutput]:
        if self._background and not sum(self._scheduler.get_request_counts()):
            self.add(*self._background.popleft(), None)
        outputs = self._step_engine() if self._scheduler.has_requests() else []
        if self.promoter is not None:
            self.promoter.safely(self.promoter.advance)
        return outputs

    def _step_engine(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        if self._tiers is not None and self._silent:
            self._note_sources(outputs)
        for output in outputs:
            if output.finished:
                self._internal_ids.pop(output.request_id, None)
        return outputs

    def _note_sources(self, outputs: list[RequestOutput]) -> None:
        """Write on each request's first output where its prompt's KV came from."""
        connector = self._tiers.scheduler_side if self._tiers is not None else None
        for output in outputs:
            internal_id = self._internal_ids.get(output.request_id)
            if connector is not None and internal_id is not None and output.request_id in self._silent:
                output.kv_sources = connector.take_sources(internal_id)

    def is_urgent(self, outputs: list[RequestOutput]) -> bool:
        is_urgent = any(output.finished for output in outputs)
        if self._silent:
            speaking = self._silent.intersection(output.request_id for output in outputs)
            self._silent -= speaking
            is_urgent = is_urgent or bool(speaking)
        return is_urgent

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        if self._tiers is not None:
            self._tiers.detach()
        del self.engine, self._scheduler, self._block_pool
        gc.collect()

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request_id: str, request: EngineCoreRequest, prompt_text: str | None) -> None:
        """Queue a validated request under our own id, which must be unique."""
        self._silent.add(request_id)
        self._internal_ids[request_id] = self.engine.add_request(
            request_id, request, request.params, prompt_text=prompt_text
        )

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown or finished ids are no error. No output follows."""
        self._silent.discard(request_id)
        self._background = deque(item for item in self._background if item[0] != request_id)
        internal_id = self._internal_ids.pop(request_id, None)
        if internal_id is not None:
            # By internal id: aborting by the external one leaks the parent record of n > 1.
            self.engine.abort_request([internal_id], internal=True)

    def remembers(self, session_id: str, salt: str | None) -> bool:
        """Whether the prefix of a session's next prompt is known, for the tenant and adapter of this salt."""
        return self.promoter is not None and self.promoter.remembers(session_id, salt)

    def advise(self, advisory: Advisory, hashes: Hashes, salt: str | None, on_change: OnChange) -> None:
        if self.promoter is not None:
            self.promoter.advise(advisory, hashes, salt, on_change)

    def retract(self, advisory_id: str, is_expired: bool) -> None:
        if self.promoter is not None:
            self.promoter.retract(advisory_id, is_expired=is_expired)

    def add_background(self, request_id: str, request: EngineCoreRequest) -> None:
        """Queue a request that runs when no other one runs or waits."""
        self._background.append((request_id, request))

    def counts(self) -> EngineCounts:
        num_running, num_waiting = self._scheduler.get_request_counts()
        return EngineCounts(
            num_running=num_running,
            num_waiting=num_waiting,
            num_kv_blocks=self._block_pool.num_gpu_blocks,
            num_free_kv_blocks=self._block_pool.get_num_free_blocks(),
            block_size=self._block_size,
        )

    def _make_promoter(self, scheduler: Any) -> Promoter | None:
        """None where there are no tiers to bring KV from."""
        from engine_bridge.driver.promoter import Promoter

        if self._tiers is None or self._tiers.store is None:
            return None
        self._tiers.promoter = Promoter(
            self._block_pool, self._tiers, self._block_size, scheduler.get_request_counts
        )
        return self._tiers.promoter

    def _promoter_has_work(self) -> bool:
        return self.promoter is not None and self.promoter.has_work()

    def _warm_up(self) -> None:
        """Run two requests and forget their KV: the first user pays for no lazy set-up, and the speed of prefill is known."""
        from vllm import SamplingParams

        limit = self.engine.vllm_config.model_config.max_model_len
        if self._tiers is not None:
            self._tiers.is_paused = True
        for num_tokens in WARM_UP_TOKENS:
            prompt: Any = {"prompt_token_ids": [1] * min(num_tokens, limit - 2)}
            self.engine.add_request(
                f"warm-up-{num_tokens}", prompt, SamplingParams(max_tokens=2, ignore_eos=True)
            )
            while self._scheduler.has_requests():
                self.engine.step()
        self.engine.reset_prefix_cache()
        if self._tiers is not None:
            self._tiers.is_paused = False


def _engine_args(config: EngineConfig, tiers: KvTiers | None) -> Any:
    from vllm.config import KVTransferConfig, StructuredOutputsConfig
    from vllm.engine.arg_utils import EngineArgs

    on_cpu = config.device == "cpu"
    options: dict[str, Any] = {
        "model": config.model,
        "served_model_name": config.served_model_name,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.is_eager,
        "enable_prefix_caching": True,
        "disable_log_stats": not config.log_stats,
        "seed": config.seed,
        "block_size": config.block_size or (CPU_BLOCK_SIZE_TOKENS if on_cpu else None),
        "max_model_len": config.max_model_len,
        "num_gpu_blocks_override": config.num_kv_blocks,
        "use_tqdm_on_load": False,
        # A small model that may put white space between JSON tokens does little else until its tokens run out.
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True),
    }
    if not on_cpu:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    if tiers is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="TieredConnector",
            kv_connector_module_path="engine_bridge.driver.kv_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"tiers": tiers.name},
        )
    if config.enable_lora:
        options |= {
            "enable_lora": True,
            "max_loras": config.max_loras,
            "max_lora_rank": config.max_lora_rank,
            "max_cpu_loras": max(config.max_cpu_loras, config.max_loras),
        }
    return EngineArgs(**{name: value for name, value in options.items() if value is not None})
