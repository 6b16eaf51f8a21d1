"""Which of vLLM's engine arguments a user may set by `--engine-arg NAME=VALUE`, and which of them not, with the reason.

An argument with a setting of the server's is refused, so that it has one source. Arguments that contradict the way in which this server uses the
engine are refused by name. All others go to vLLM as they are: it knows their types and combinations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ONE_MACHINE = "one engine is split over the devices of one machine by --tensor-parallel-size alone"
_TIERS = "KV that leaves the device goes to the server's own tiers, which take the place of vLLM's connectors: see --kv-host-gib and --kv-disk-gib"
_STEPS = "the server cuts long prompts into parts by how long a step takes: see --max-step-ms"
_ADAPTERS = "the server keeps adapters itself: see --max-loras, --max-lora-rank and --adapter-host-gib"
_TEXT = "the model generates text, from conversations that the server renders and tokenises; one for embeddings comes beside it: --embedding-model"
_KV_SIZE = "the size of the KV cache is set by --kv-cache-gib, or by --gpu-memory-utilization on a GPU"
_OWN = "the server sets it: its scheduling and its figures stand on it"
# By vLLM's names (EngineArgs of 0.32).
RULED_OUT: Mapping[str, str] = {
    name: why
    for names, why in (
        (
            "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size data_parallel_size "
            "data_parallel_size_local data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port "
            "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
            "distributed_executor_backend nnodes node_rank master_addr master_port worker_cls worker_extension_cls",
            f"{_ONE_MACHINE}. For several engines give --nodes N, each with devices of its own",
        ),
        (
            "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config prefix_caching_hash_algo",
            _TIERS,
        ),
        ("long_prefill_token_threshold long_prefill_token_threshold_adaptive", _STEPS),
        (
            "max_cpu_loras fully_sharded_loras default_mm_loras lora_dtype specialize_active_lora enable_lora",
            _ADAPTERS,
        ),
        ("runner convert pooler_config skip_tokenizer_init tokens_only", _TEXT),
        (
            "scheduler_cls disable_log_stats structured_outputs_config use_tqdm_on_load kv_events_config",
            _OWN,
        ),
        ("num_gpu_blocks_override kv_cache_memory_bytes", _KV_SIZE),
        (
            "allowed_local_media_path enable_mm_embeds",
            "pictures come in the request itself, or from a host that --allow-image-host names",
        ),
        (
            "reasoning_parser_plugin",
            "parsers are chosen among those that vLLM brings: see --reasoning-parser",
        ),
    )
    for name in names.split()
}

# Of a model for embeddings or scores, beside what is ruled out above.
_BESIDE: Mapping[str, str] = {
    "model": "--embedding-model and --rerank-model name the model",
    "served_model_name": "--embedding-model-name and --rerank-model-name are its name",
    "runner": "such a model generates nothing",
    "scheduling_policy": _OWN,
    "tensor_parallel_size": "such a model has one device",
}

# By name, arguments that change nothing on a CPU, with the reason.
_NOTHING_ON_CPU: Mapping[str, str] = {
    "async_scheduling": "vLLM schedules each step on a CPU when the step before it has ended",
}


def without_effect(names: Iterable[str], device: str) -> dict[str, str]:
    """Return those of the given arguments that change nothing on this device ("cpu" or another), with the reason. vLLM does not get them."""
    return {name: _NOTHING_ON_CPU[name] for name in names if device == "cpu" and name in _NOTHING_ON_CPU}


def named(pairs: Iterable[str]) -> dict[str, str]:
    """Return name -> value of each "NAME=VALUE", with vLLM's underscores in the names.

    Raises ValueError, with a text for the operator, for another form and a name given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, is_given, value = pair.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not is_given or not name:
            raise ValueError(f"expected NAME=VALUE, such as cpu_offload_gb=4, got {pair!r}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value.strip()
    return found


def parse(pairs: Iterable[str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return what `named` does, of a user's arguments for the chat model. settings: by name, the flag of each setting of our own.

    Raises ValueError as `named` does, and for a name that has its own setting or is ruled out.
    """
    found = named(pairs)
    for name in found:
        if name in settings:
            raise ValueError(f"{name} has a setting of its own: {settings[name]}")
        if name in RULED_OUT:
            raise ValueError(f"{name} cannot be set here: {RULED_OUT[name]}")
    return found


def parse_beside(pairs: Iterable[str]) -> dict[str, str]:
    """Return what `named` does, of a user's arguments for a model for embeddings or scores. Raises ValueError as `parse` does."""
    found = named(pairs)
    for name in found:
        why = _BESIDE.get(name) or RULED_OUT.get(name)
        if why is not None and why is not _TEXT:
            raise ValueError(f"{name} cannot be set here: {why}")
    return found
