"""How vLLM's in-process engine is built from our settings."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_bridge.driver.vllm_api.features import (
    BAD_WORDS,
    EMBEDS_TOKEN,
    HALF_CHARACTERS,
    MAMBA2,
    ROTARY,
    SEEDS,
)
from engine_bridge.settings.engine_arguments import named, without_effect
from engine_bridge.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers
    from engine_bridge.driver.vllm_api.start import Off

# One KV block of this many tokens on a CPU: vLLM's default there is 128, with which most of a chat turn would
# fall outside whole blocks and be computed again on the next turn. Its CPU attention takes multiples of 32 only.
CPU_BLOCK_SIZE_TOKENS = 32
# For pictures that were read, which come again with each turn of their conversation. Chosen: vLLM's own 4 GiB would come on top of the KV cache.
CPU_PICTURE_CACHE_GIB = 0.5


def configure_environment(config: EngineConfig) -> None:
    """Set the variables that vLLM and torch read from the environment. Call it before either is imported; the user's values stay."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The gateway has its own periodic figures (/metrics); vLLM's log line every 10 s would only repeat them.
        "VLLM_LOG_STATS_INTERVAL": "86400",
        # vLLM's own bound of 16,384 choices would let one call stand before all others in the queue.
        "VLLM_MAX_N_SEQUENCES": str(config.max_num_seqs),
        # Its class is in `driver/apis/media.py`.
        "VLLM_MEDIA_CONNECTOR": "given",
        "VLLM_MAX_IMAGE_PIXELS": str(int(1e6 * config.max_image_mpixels)),
        "HF_HUB_OFFLINE": "1" if Path(config.model).exists() else "0",
        "TOKENIZERS_PARALLELISM": "false",
        # torch's C++ side warns at every start about memory policies that no user asked to change.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if config.device == "cpu":
        # numba's OpenMP would set the number of threads of the thread that calls it; see `compute_threads`.
        defaults["NUMBA_THREADING_LAYER"] = "workqueue"
        if config.cpu_threads is not None:
            cores = sorted(os.sched_getaffinity(0))[-config.cpu_threads :]
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        if config.is_eager:
            # Measured: the first request for logprobs compiles a helper for 30 s inside a step, and every stream waits.
            defaults["TORCH_COMPILE_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # vLLM loads Ray where it is installed, for executors that are not used here: that takes seconds. With this entry vLLM does not find it.
    sys.modules.setdefault("ray", None)  # type: ignore[arg-type]


def load_vllm() -> type:
    """Return the class of vLLM's engine; importing it takes seconds the first time. The environment must be set."""
    from engine_bridge.driver.vllm_api import LLMEngine

    found: type = LLMEngine
    return found


def build_engine(config: EngineConfig, tiers: KvTiers | None, off: Off = frozenset()) -> Any:
    """Build an in-process `LLMEngine` in which our parts replace vLLM's, except for features that are off.

    Raises:
        SeamMoved: where vLLM's internals have moved. Errors of vLLM pass unchanged.
    """
    from engine_bridge.driver.grammars import admission
    from engine_bridge.driver.kv.kv_keys import hash_by_content
    from engine_bridge.driver.kv.kv_namespace import arguments_that_count
    from engine_bridge.driver.vllm_api import LLMEngine

    if gc.get_freeze_count() == 0:
        # The end of an engine before this one has unfrozen a million objects that were imported, and each of the start's five collections would
        # look at them all. What a failed engine has left goes first.
        gc.collect()
        gc.freeze()
    mends_lora = config.device == "cpu" and config.enable_lora
    if mends_lora:
        from engine_bridge.driver.lora import experts, lora

        lora.install()
        experts.install()
    if config.enable_lora:
        from engine_bridge.driver.adapters import seam

        seam.install()
    admission.install(config.grammar_bytes)
    _correct(config, off)
    args = engine_args(config, tiers)
    if tiers is not None:
        from engine_bridge.driver.corrections import state_blocks

        state_blocks.install()
        tiers.arguments = arguments_that_count(args)
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
    core = engine.engine_core.engine_core
    if core.request_block_hasher is not None:  # None where vLLM reuses no KV
        core.request_block_hasher = hash_by_content(core.request_block_hasher)
    if config.device == "cpu" and SEEDS not in off:
        from engine_bridge.driver.corrections import seeds

        seeds.watch(engine)
    if config.enable_lora:
        from engine_bridge.driver.corrections import logits_rows

        logits_rows.watch(engine)
    if mends_lora:
        lora.check_engine(engine)
    return engine


def _correct(config: EngineConfig, off: Off) -> None:
    """Put what corrects faults of vLLM's in place, except for features that are off."""
    if HALF_CHARACTERS not in off:
        from engine_bridge.driver.corrections import detokenizing

        detokenizing.install()
    if BAD_WORDS not in off:
        from engine_bridge.driver.corrections import bad_words

        bad_words.install()
    if config.enable_prompt_embeds and EMBEDS_TOKEN not in off:
        from engine_bridge.driver.corrections import embeds_token

        embeds_token.install()
    if config.device == "cpu" and ROTARY not in off:
        from engine_bridge.driver.corrections import rotary

        rotary.install()
    if config.device == "cpu" and MAMBA2 not in off:
        from engine_bridge.driver.corrections import mamba2

        mamba2.install()


def engine_args(config: EngineConfig, tiers: KvTiers | None) -> Any:
    """Return vLLM's arguments for an engine with these settings; `tiers` adds host memory and disk for KV."""
    from engine_bridge.driver.engine.engine_arguments import typed
    from engine_bridge.driver.scheduling.seam import SCHEDULER
    from engine_bridge.driver.vllm_api import EngineArgs, StructuredOutputsConfig

    on_cpu = config.device == "cpu"
    options: dict[str, Any] = {
        "model": config.model,
        "served_model_name": config.served_model_name,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.is_eager,
        # Where it is wished vLLM decides: it has none for some kinds of models.
        "enable_prefix_caching": None if config.enable_prefix_caching else False,
        "disable_log_stats": not config.log_stats,
        "seed": config.seed,
        "block_size": config.block_size or (CPU_BLOCK_SIZE_TOKENS if on_cpu else None),
        "max_model_len": config.max_model_len,
        "num_gpu_blocks_override": config.num_kv_blocks,
        # Also on a CPU, in place of VLLM_CPU_KVCACHE_SPACE, which takes whole GiB only.
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "use_tqdm_on_load": False,
        "scheduler_cls": SCHEDULER,
        # A model that may get none of a kind of media is loaded without the part that reads it.
        "limit_mm_per_prompt": {"image": config.max_images, "video": 0, "audio": 0},
        # A small model that may put white space between JSON tokens does little else until its tokens run out.
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True),
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
    if on_cpu:
        # What reading the largest picture takes is of no use where KV has a size of its own, and finding it out takes half a minute.
        options |= {"skip_mm_profiling": True, "mm_processor_cache_gb": CPU_PICTURE_CACHE_GIB}
    else:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
        options["enable_sleep_mode"] = config.enable_sleep_mode
    if tiers is not None:
        options["kv_transfer_config"] = connector_config(tiers.name)
    if config.enable_lora:
        options |= {
            "enable_lora": True,
            # On a CPU adapters take the memory that they need, however many they are: the residency bounds it.
            "max_loras": max(config.max_loras, config.max_num_seqs) if on_cpu else config.max_loras,
            "max_lora_rank": config.max_lora_rank,
        }
    given = named(config.engine_args)
    options |= typed({name: given[name] for name in given.keys() - without_effect(given, config.device)})
    return EngineArgs(**{name: value for name, value in options.items() if value is not None})


def connector_config(tiers: str) -> Any:
    """Return the settings with which vLLM makes our connector, which finds these tiers by their name."""
    from engine_bridge.driver.vllm_api import KVTransferConfig

    return KVTransferConfig(
        kv_connector="TieredConnector",
        kv_connector_module_path="engine_bridge.driver.kv.kv_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"tiers": tiers},
    )
