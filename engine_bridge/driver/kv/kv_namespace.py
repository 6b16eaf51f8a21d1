"""The facts that must be equal for an engine to use stored KV as its own.

These are the weights, the model as resolved from its configuration with all overrides, the layout, and every setting not known to leave KV unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from engine_bridge.driver.in_process import revision_of
from engine_bridge.driver.kv.layer_groups import LayerFacts
from engine_bridge.policy.kv.kv_layout import KvLayout
from engine_bridge.settings.engine_config import WHATEVER_FITS
from kvtiers.keys import BlockShape, Namespace
from kvtiers.weights import folder_revision

# Engine arguments (of vLLM 0.32) that change no KV, or whose effect a namespace already names. Any other argument makes other keys.
HARMLESS_ARGUMENTS = frozenset(
    # Their effect is named already: weights, types, block size, longest context.
    """
    model model_weights revision trust_remote_code dtype quantization kv_cache_dtype block_size max_model_len
    """
    # Names, tokens and texts: keys are made of token ids.
    """
    served_model_name tokenizer tokenizer_mode tokenizer_revision hf_token download_dir allowed_local_media_path allowed_media_domains
    limit_mm_per_prompt mm_processor_cache_gb mm_processor_cache_type renderer_num_workers enable_prompt_embeds
    """
    # Which token is chosen.
    """
    seed max_logprobs logprobs_mode structured_outputs_config reasoning_parser reasoning_config generation_config override_generation_config
    logits_processors watermark_config
    """
    # How many requests, in which order, in which steps.
    """
    max_num_seqs max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold long_prefill_token_threshold_adaptive scheduling_policy scheduler_cls async_scheduling stream_interval
    watermark scheduler_reserve_full_isl prefill_schedule_interval
    """
    # Memory, and how weights come to it.
    """
    gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override cpu_offload_gb max_parallel_loading_workers safetensors_load_strategy
    safetensors_prefetch_num_threads safetensors_prefetch_block_size use_tqdm_on_load skip_mm_profiling device_ids numa_bind numa_bind_nodes
    numa_bind_cpus enable_sleep_mode
    """
    # KV and adapters are already told apart by separate keys.
    """
    enable_prefix_caching prefix_caching_hash_algo kv_transfer_config kv_events_config enable_lora max_loras max_lora_rank max_cpu_loras
    """
    # Logs and measurements.
    """
    disable_log_stats aggregate_engine_logging logging_config log_level log_config_file show_hidden_metrics_for_version otlp_traces_endpoint
    collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets
    cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details enable_mm_processor_stats
    jit_monitor_mode jit_monitor_verbose profiler_config shutdown_timeout
    """.split()
)
# The same for vLLM's environment: any other vLLM variable that is set makes other keys. The last three are set by vLLM while it builds an engine, so
# a node that was started from a process with an engine has them; a layout is named by its strides. The longest context is counted separately.
HARMLESS_VARIABLES = frozenset(
    """
    VLLM_ALLOW_LONG_MAX_MODEL_LEN
    VLLM_API_KEY VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_AUDIO_FETCH_TIMEOUT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
    VLLM_CACHE_ROOT VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT VLLM_CPU_CI_ENV VLLM_CPU_KVCACHE_SPACE
    VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DISABLE_COMPILE_CACHE
    VLLM_DISABLE_LOG_LOGO VLLM_DIST_IDENT VLLM_DOCKER_BUILD_CONTEXT VLLM_DO_NOT_TRACK VLLM_ENABLE_RESPONSES_API_STORE
    VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_GC_DEBUG VLLM_HOST_IP
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT VLLM_IMAGE_TAG VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_LOGGING_COLOR
    VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
    VLLM_LOG_STATS_INTERVAL VLLM_LOOPBACK_IP VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_IMAGE_PIXELS
    VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_USE_FLASHINFER_SAMPLER
    VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS
    VLLM_MEDIA_CONNECTOR VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
    VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_NO_USAGE_STATS VLLM_PORT
    VLLM_PROCESS_NAME_PREFIX VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_RPC_BASE_PATH VLLM_SERVER_DEV_MODE
    VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
    VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_VIDEO_FETCH_TIMEOUT VLLM_WORKER_MULTIPROC_METHOD
    VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_XGRAMMAR_CACHE_MB VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
    VLLM_SSM_CONV_STATE_LAYOUT
    """.split()
)
# The variables in which a container service tells every container where other services are: for a service called `vllm-web`, VLLM_WEB_SERVICE_HOST,
# VLLM_WEB_PORT_80_TCP_ADDR and so on. They change with each deployment of that service.
PLACES_OF_SERVICES = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)
# Variables of the libraries below vLLM: they set how exactly float32 values are multiplied.
VARIABLES_BELOW = ("ONEDNN_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
# The environment as the process got it: vLLM sets variables itself while it builds an engine.
ENVIRONMENT: Mapping[str, str] = dict(os.environ)
# The parts of the driver, folders and files, that take part in what a model computes: corrections of vLLM's kernels, and how adapters are applied.
OWN_PARTS = (
    "corrections",
    "lora",
    "assist",
    "adapters/weights.py",
    "engine/worker_parts.py",
    "ranks/rank_adapters.py",
)
# Entries of a model's configuration that only say which software wrote it.
CONFIG_NOTES = frozenset(("transformers_version",))


def arguments_that_count(args: Any, environ: Mapping[str, str] = ENVIRONMENT) -> dict[str, Any]:
    """Return the settings, of vLLM's engine arguments and its environment, that may change KV: plain values, by name.

    A setting counts if it is set and not known to leave KV unchanged. Call this before an engine is built from the arguments: building fills them in.
    """
    found = {}
    for each in dataclasses.fields(args):
        value, default = _plain(getattr(args, each.name)), _plain(_default_of(each))
        # Layers that choose their positions by the longest context do so before it is fitted to the memory.
        is_fitted = each.name == "max_model_len" and value == WHATEVER_FITS
        if value != default and (is_fitted or each.name not in HARMLESS_ARGUMENTS):
            found[each.name] = value
    return found | {name: value for name, value in environ.items() if _is_counted(name)}


def _is_counted(variable: str) -> bool:
    if not variable.startswith("VLLM_"):
        return variable in VARIABLES_BELOW
    return variable not in HARMLESS_VARIABLES and not PLACES_OF_SERVICES.search(variable)


def namespace_of(
    layers: LayerFacts, layout: KvLayout, num_ranks: int, vllm_config: Any, arguments: Mapping[str, Any]
) -> Namespace:
    """Return the namespace of a built engine's KV. The layout names the CPU's instruction set where attention packs keys for it.

    layers: how each rank keeps the KV. layout: what a prefix needs of the layers. num_ranks: how many processes share the engine's model; each has
    its part of a block. arguments: see `arguments_that_count`.
    """
    import torch

    from engine_bridge.driver.vllm_api import get_none_hash_seed, vllm_version

    model, cache = vllm_config.model_config, vllm_config.cache_config
    described = f"{layers.shape} strides {layers.strides} vllm {vllm_version()}"
    if len(layout.groups) > 1 or layout.state_groups:
        groups = msgspec.json.encode((layout, layers.plan))
        described += f" groups {hashlib.sha256(groups).hexdigest()[:32]}"
    if num_ranks > 1:
        described += f" tp {num_ranks}"
    if layers.device_type == "cpu":
        described += f" {torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    # Quantising weights or KV changes the bytes in the blocks.
    made = [str(part) for part in (model.quantization, cache.cache_dtype) if part not in (None, "auto")]
    return Namespace(
        model=Path(model.model).name,
        revision=revision_of(model),
        computation=_computation(vllm_config, arguments),
        dtype=" ".join([f"{model.dtype} {layers.dtype}", *made]),
        block_size_tokens=layout.unit_tokens,
        layout=described,
        hash_algorithm=_hash_algorithm(vllm_config),
        hash_seed=hashlib.sha256(get_none_hash_seed().encode()).hexdigest()[:16],
        shape=BlockShape(layers.num_regions, num_ranks * layers.region_bytes),
    )


def _hash_algorithm(vllm_config: Any) -> str:
    """Return how keys are made of tokens. From vLLM 0.33 on a key covers tokens behind its block, too, where a model drafts with its own layers."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    ahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    return f"{algorithm} and {ahead} tokens ahead" if ahead else algorithm


def _computation(vllm_config: Any, arguments: Mapping[str, Any]) -> str:
    """Return a digest of how KV is computed from weights and tokens. It covers the longest context: some models choose their positions by it."""
    model, speculation = vllm_config.model_config, vllm_config.speculative_config
    draft = speculation.draft_model_config if speculation is not None else None
    facts = {
        "config": _plain(model.hf_config.to_dict()),
        "text_config": _plain(model.hf_text_config.to_dict()),
        "max_model_len": model.max_model_len,
        "arguments": dict(arguments),
        "code": _code(model),
        "own_code": _own_code(),
        # The draft model's layers have KV in the same blocks.
        "draft": revision_of(draft) if draft is not None else "",
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]


def _code(model: Any) -> str:
    """Return the versions of the libraries beside vLLM that have a part in a model's KV; "" for none."""
    names = []
    if model.using_transformers_backend():  # its code runs the models for which vLLM has no class
        names = ["transformers"]
    if model.is_multimodal_model:  # they make a model's input of a picture
        names = ["transformers", "torchvision", "pillow"]
    return " ".join(f"{name} {_version(name)}" for name in names)


def _own_code() -> str:
    """Return a digest of OWN_PARTS: a version of this server that computes otherwise, or rightly, is to find nothing of what others have kept."""
    driver = Path(__file__).parents[1]
    return " ".join(folder_revision(driver / part) for part in OWN_PARTS)


def _version(name: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return ""


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _plain(value: Any) -> Any:
    """Turn a value into parts that JSON knows, equal for values that compute the same.

    A value of an unknown type becomes its text. If that text contains an address it equals no other, and its KV is shared with no other engine.
    """
    match value:
        case None | bool() | int() | float():
            return value
        case enum.Enum():
            return _plain(value.value)
        case str():
            return _content_of(value) if os.path.isabs(value) else value
        case os.PathLike():
            return _plain(os.fspath(value))
        case Mapping():
            names = (name for name in value if not str(name).startswith("_") and name not in CONFIG_NOTES)
            return {str(name): _plain(value[name]) for name in names}
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            return sorted((_plain(each) for each in value), key=str)
        case type():
            return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return _plain({each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)})
    return str(value)


def _content_of(path: str) -> str:
    """Return a digest of a file's or folder's content, because its path differs between machines; the path itself where there is no such file."""
    return folder_revision(Path(path)) if os.path.exists(path) else path
