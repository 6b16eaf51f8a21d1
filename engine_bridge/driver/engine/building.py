"""How vLLM's in-process engine is built from our settings."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_bridge.driver.corrections import cpu_steps, renderer, state_blocks
from engine_bridge.driver.engine.parser_plugins import load_plugins
from engine_bridge.driver.vllm_api.features import (
    EMBEDS_TOKEN,
    HALF_CHARACTERS,
    MODEL_CLASSES,
    NEW_BLOCKS,
    PICTURE_CACHE,
    TEXT_ALONE,
)
from engine_bridge.driver.vllm_api.start import Off
from engine_bridge.policy.limits.cores import cores_of_ranks
from engine_bridge.policy.limits.sampler_room import GPU_BAD_WORD_TOKENS, GPU_BAD_WORDS
from engine_bridge.settings.engine_arguments import named, without_effect
from engine_bridge.settings.engine_config import WHATEVER_FITS, EngineConfig

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers

log = logging.getLogger(__name__)
# One KV block of this many tokens on a CPU: vLLM's default there is 128, with which most of a chat turn would
# fall outside whole blocks and be computed again on the next turn. Its CPU attention takes multiples of 32 only.
CPU_BLOCK_SIZE_TOKENS = 32
# For pictures that were read, which come again with each turn of their conversation. Chosen: vLLM's own 4 GiB would come on top of the KV cache.
CPU_PICTURE_CACHE_GIB = 0.5


_OUTPUTS = "structured_outputs_config"
# Of vLLM's backends for structured outputs.
_GRAMMARS = "guidance"
# Variables without which the engine does not work here, whatever the user's environment says for a server of vLLM's own.
_NEEDED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # This process has threads; a fork of it could wait for ever for what they hold.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Its class is in `driver/apis/media.py`.
    "VLLM_MEDIA_CONNECTOR": "given",
}
_set: dict[str, str] = {}
"""The variables that were set here, for this engine or one before it."""


def configure_environment(config: EngineConfig) -> None:
    """Set the variables that vLLM and torch read from the environment. Call it before either is imported; the user's values stay where they can."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The gateway has its own periodic figures (/metrics); vLLM's log line every 10 s would only repeat them.
        "VLLM_LOG_STATS_INTERVAL": "86400",
        # vLLM's own bound of 16,384 choices would let one call stand before all others in the queue.
        "VLLM_MAX_N_SEQUENCES": str(config.sure_seqs),
        # The settings `max_stop_strings` and `max_bad_words` bound these. vLLM takes four stop strings, as OpenAI does; editors send a dozen.
        "VLLM_MAX_STOP_STRINGS": str(1 << 16),
        "VLLM_MAX_NUM_BAD_WORDS": str(1 << 16),
        "VLLM_MAX_IMAGE_PIXELS": str(int(1e6 * config.max_image_mpixels)),
        "HF_HUB_OFFLINE": "1" if config.is_all_here else "0",
        "TOKENIZERS_PARALLELISM": "false",
        # torch's C++ side warns at every start about memory policies that no user asked to change.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    num_ranks = config.tensor_parallel_size
    if config.device == "cpu":
        # numba's OpenMP would set the number of threads of the thread that calls it; see `compute_threads`.
        defaults["NUMBA_THREADING_LAYER"] = "workqueue"
        if num_ranks > 1:
            defaults |= cores_of_ranks(_cores(), num_ranks, config.cpu_threads)
        elif config.cpu_threads is not None:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, _cores()[-config.cpu_threads :]))
        if config.is_eager:
            # Measured: the first request for logprobs compiles a helper for 30 s inside a step, and every stream waits.
            defaults["TORCH_COMPILE_DISABLE"] = "1"
    else:
        defaults |= _of_gpu(config)
    for name, value in (defaults | _NEEDED).items():
        if name in _NEEDED or os.environ.get(name) in (None, _set.get(name)):
            os.environ[name] = _set[name] = value
    # vLLM loads Ray where it is installed, for executors that are not used here: that takes seconds. With this entry vLLM does not find it.
    sys.modules.setdefault("ray", None)  # type: ignore[arg-type]


def _of_gpu(config: EngineConfig) -> dict[str, str]:
    """Return the variables of a GPU's engine, and let it find what its packages have brought beside this Python."""
    # vLLM makes tables of this width for each request that a batch may hold.
    found = {
        "VLLM_MAX_NUM_BAD_WORDS": str(GPU_BAD_WORDS),
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": str(GPU_BAD_WORD_TOKENS),
    }
    if config.kernel_cache is not None:
        # Otherwise vLLM keeps them in a folder of the user's, and Triton in another where vLLM compiles nothing: a container loses both.
        found["TRITON_CACHE_DIR"] = str(config.kernel_cache)
    if shutil.which("ninja") is None:  # a server is started without its environment being activated
        places = os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join(places)
    if not _has_sampling_kernels():
        # vLLM samples by FlashInfer's kernels wherever it is installed, and without a compiler the start fails: they are compiled then.
        found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return found


def _has_sampling_kernels() -> bool:
    """Return whether FlashInfer's kernels are there, or can be compiled.

    Source: FlashInfer 0.7, `jit/cpp_ext.py`, and how vLLM 0.32 asks for its attention, `utils/flashinfer.py`.
    """
    if find_spec("flashinfer_jit_cache") is not None:
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    in_path = shutil.which("nvcc") if not home else None
    nvcc = in_path or shutil.which(f"{home or '/usr/local/cuda'}/bin/nvcc")
    return nvcc is not None and shutil.which("ninja") is not None


def logs_as_usual() -> bool:
    """Return whether the user has set no level for vLLM's log."""
    return os.environ.get("VLLM_LOGGING_LEVEL") == _set.get("VLLM_LOGGING_LEVEL")


def users_environment() -> dict[str, str]:
    """Return the environment without what was set here, for a process with an engine of its own."""
    return {name: value for name, value in os.environ.items() if _set.get(name) != value}


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@cache
def load_vllm() -> type:
    """Return the class of vLLM's engine; importing it takes seconds the first time. The environment must be set."""
    from engine_bridge.driver.vllm_api.start import importing_vllm

    with importing_vllm():
        from engine_bridge.driver.vllm_api import LLMEngine

    found: type = LLMEngine
    return found


def build_engine(config: EngineConfig, tiers: KvTiers | None, off: Off = frozenset()) -> Any:
    """Build an in-process `LLMEngine` in which our parts replace vLLM's, except for features that are off.

    Raises:
        SeamMoved: where vLLM's internals have moved. Errors of vLLM pass unchanged.
    """
    from engine_bridge.driver.engine import worker_parts
    from engine_bridge.driver.engine.thinking import reasoning_config
    from engine_bridge.driver.grammars import admission
    from engine_bridge.driver.in_process import runner_of
    from engine_bridge.driver.kv.kv_keys import hash_by_content
    from engine_bridge.driver.kv.kv_namespace import arguments_that_count
    from engine_bridge.driver.ranks import connection
    from engine_bridge.driver.vllm_api import LLMEngine, UsageContext, ensure_kv_transfer_shutdown

    if gc.get_freeze_count() == 0:
        # The end of an engine before this one has unfrozen a million objects that were imported, and each of the start's five collections would
        # look at them all. What a failed engine has left goes first.
        gc.collect()
        gc.freeze()
    on_cpu, has_ranks = config.device == "cpu", config.tensor_parallel_size > 1
    if not has_ranks:
        worker_parts.install(off, on_cpu=on_cpu, has_adapters=config.enable_lora)
    if HALF_CHARACTERS not in off:
        from engine_bridge.driver.corrections import detokenizing

        detokenizing.install()
    if config.enable_prompt_embeds and EMBEDS_TOKEN not in off:
        renderer.add_no_token()
    admission.install(config.grammar_bytes)
    load_plugins(config.parser_plugins)
    args = engine_args(config, tiers, off)
    args.reasoning_config = reasoning_config(args, config.reasoning_parser, config.chat_template)
    if tiers is not None:
        state_blocks.install()
        if TEXT_ALONE not in off:
            renderer.take_no_embeddings()
        tiers.arguments = arguments_that_count(args)
    # As `vllm serve` has it: by this vLLM chooses the sizes of batches that are not set. Those for an engine of one's own are a quarter on an H100.
    served = UsageContext.OPENAI_API_SERVER
    try:
        engine = LLMEngine.from_engine_args(args, usage_context=served, enable_multiprocessing=False)
    except BaseException:
        if tiers is not None:
            # vLLM keeps the connector of an engine that failed, and would give it to the next one, though that has no tiers.
            ensure_kv_transfer_shutdown()
        raise
    if PICTURE_CACHE not in off:
        renderer.send_pictures_whole(engine)
    core = engine.engine_core.engine_core
    if core.request_block_hasher is not None:  # None where vLLM reuses no KV
        core.request_block_hasher = hash_by_content(core.request_block_hasher)
    if has_ranks:
        connection.connect(engine, tiers)
    else:
        worker_parts.watch(runner_of(engine), off, on_cpu=on_cpu, has_adapters=config.enable_lora)
    if on_cpu and NEW_BLOCKS not in off:
        cpu_steps.empty_new_blocks(engine)
    return engine


def engine_args(config: EngineConfig, tiers: KvTiers | None, off: Off = frozenset()) -> Any:
    """Return vLLM's arguments for an engine with these settings, and forget what the environment says against them.

    tiers: host memory and disk for KV; None for none. off: features that are left out.
    """
    from engine_bridge.driver.engine.engine_arguments import typed
    from engine_bridge.driver.scheduling.seam import SCHEDULER
    from engine_bridge.driver.vllm_api import EngineArgs, StructuredOutputsConfig

    on_cpu = config.device == "cpu"
    options: dict[str, Any] = {
        "model": config.model,
        "served_model_name": config.served_model_name,
        "dtype": config.dtype,
        "max_num_seqs": config.batch_seqs,
        "enforce_eager": config.is_eager,
        # Where it is wished vLLM decides: it has none for some kinds of models.
        "enable_prefix_caching": None if config.enable_prefix_caching else False,
        "disable_log_stats": not config.log_stats,
        "seed": config.seed,
        "block_size": config.block_size or (CPU_BLOCK_SIZE_TOKENS if on_cpu else None),
        "max_model_len": WHATEVER_FITS if config.max_model_len == "auto" else config.max_model_len,
        "num_gpu_blocks_override": config.num_kv_blocks,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "use_tqdm_on_load": False,
        "scheduler_cls": SCHEDULER,
        # A model that may get none of a kind of media is loaded without the part that reads it.
        "limit_mm_per_prompt": {"image": config.max_images, "video": 0, "audio": 0},
        # A small model that may put white space between JSON tokens does little else until its tokens run out.
        _OUTPUTS: StructuredOutputsConfig(backend=_GRAMMARS, disable_any_whitespace=True),
    }
    options |= {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "trust_remote_code": config.trust_remote_code,
        "enable_prompt_embeds": config.enable_prompt_embeds,
        "revision": config.revision,
        "download_dir": str(config.download_dir) if config.download_dir is not None else None,
        "speculative_config": json.loads(config.speculative_config) if config.speculative_config else None,
    }
    options |= _on_cpu(config, off) if on_cpu else _on_gpu(config)
    if config.tensor_parallel_size > 1:
        options |= _of_ranks(config, off)
    if tiers is not None:
        has_ranks = config.tensor_parallel_size > 1
        options["kv_transfer_config"] = connector_config(tiers.name, by_layer=on_cpu, has_ranks=has_ranks)
    if config.enable_lora:
        options |= _of_adapters(config)
    given = named(config.engine_args)
    options |= typed({name: given[name] for name in given.keys() - without_effect(given, config.device)})
    _say_whose_grammars(options[_OUTPUTS].backend)
    options[_OUTPUTS] = replace(options[_OUTPUTS], backend=_GRAMMARS)
    return EngineArgs(**{name: value for name, value in options.items() if value is not None})


@cache
def _say_whose_grammars(backend: str) -> None:
    """Say once that structured outputs are not of the backend that was asked for. Why: see `grammars/`."""
    if backend not in ("auto", _GRAMMARS):
        log.warning(
            "structured outputs are llguidance's here, not %s's: its grammars are bounded in time and memory",
            backend,
        )


def _on_cpu(config: EngineConfig, off: Off) -> dict[str, Any]:
    """Return vLLM's arguments for a CPU alone, after what it reads elsewhere was set."""
    if MODEL_CLASSES not in off:
        from engine_bridge.driver.vllm_api import registry

        # vLLM asks a process that it starts for what a model's class says, which imports all of vLLM again: 9 s of a core. It does so to leave CUDA
        # alone, and the engine that is built next, in this process, imports the class anyway. Source: vLLM 0.32.
        registry._run_in_subprocess = lambda fn: fn()
    if config.kv_cache_gib is not None:
        # vLLM would take this, in whole GiB, in place of the size that it is told.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    # What reading the largest picture takes is of no use where KV has a size of its own, and finding it out takes half a minute.
    return {"skip_mm_profiling": True, "mm_processor_cache_gb": CPU_PICTURE_CACHE_GIB}


def _on_gpu(config: EngineConfig) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_sleep_mode": config.enable_sleep_mode,
    }


def _of_ranks(config: EngineConfig, off: Off) -> dict[str, Any]:
    """Return vLLM's arguments for a model that is split over several ranks, which leave out the same features."""
    options: dict[str, Any] = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_expert_parallel": config.enable_expert_parallel,
        "distributed_executor_backend": "mp",
        "worker_cls": f"engine_bridge.driver.ranks.{config.device}_worker.RankWorker",
    }
    if off:
        options["additional_config"] = {"without": sorted(feature.name for feature in off)}
    return options


def _of_adapters(config: EngineConfig) -> dict[str, Any]:
    # On a CPU adapters take the memory that they need, however many they are: the residency bounds it. Ranks have slots of one size.
    takes_any = config.device == "cpu" and config.tensor_parallel_size == 1
    return {
        "enable_lora": True,
        "max_loras": max(config.max_loras, config.sure_seqs) if takes_any else config.max_loras,
        "max_lora_rank": config.max_lora_rank,
    }


def connector_config(tiers: str, *, by_layer: bool = True, has_ranks: bool = False) -> Any:
    """Return the settings with which vLLM makes our connector, which finds these tiers by their name. by_layer: see `StepCopies`."""
    from engine_bridge.driver.vllm_api import KVTransferConfig

    name, module = "TieredConnector", "engine_bridge.driver.kv.kv_connector"
    if has_ranks:
        name, module = "RanksConnector", "engine_bridge.driver.ranks.connector"
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"tiers": tiers, "by_layer": by_layer},
    )
