"""Which of vLLM's engine arguments a user may set by `--engine-arg NAME=VALUE`, which change nothing here, and which are refused, with the reasons.

An argument with a setting of the server's is refused, so that it has one source. One that another mechanism of the server's takes the place of is
left out, and the server says so at its start; only where it asks for another kind of server it is refused. All others go to vLLM as they are: it
knows their types and combinations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ONE_MACHINE = (
    "one engine is split over the devices of one machine by --tensor-parallel-size alone. "
    "For several engines give --nodes N, each with devices of its own"
)
_TIERS = "KV that leaves the device goes to the server's own tiers, which take the place of vLLM's connectors: see --kv-host-gib and --kv-disk-gib"
_STEPS = "the server cuts long prompts into parts by how long a step takes: see --max-step-ms"
_ADAPTERS = "the server keeps adapters itself: see --max-loras, --max-lora-rank and --adapter-host-gib"
_TEXT = "the model generates text; one for embeddings or scores comes beside it: --embedding-model, --rerank-model"
_OWN = "the server sets it: its scheduling and its figures stand on it"


def _each(*rows: tuple[str, str]) -> Mapping[str, str]:
    """Return name -> why of rows that have several names, with spaces between them."""
    return {name: why for names, why in rows for name in names.split()}


# By vLLM's names (EngineArgs of 0.32), what an engine of this server's is built without.
LEFT_OUT = _each(
    (
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size data_parallel_size "
        "data_parallel_size_local data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port "
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
        "distributed_executor_backend nnodes node_rank master_addr master_port worker_cls worker_extension_cls",
        _ONE_MACHINE,
    ),
    (
        "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config prefix_caching_hash_algo",
        _TIERS,
    ),
    ("long_prefill_token_threshold long_prefill_token_threshold_adaptive", _STEPS),
    ("max_cpu_loras fully_sharded_loras default_mm_loras lora_dtype specialize_active_lora", _ADAPTERS),
    ("enable_lora", "adapters are served wherever the model can have them: see --adapters"),
    ("kv_cache_memory_bytes", "the size of the KV cache is set by --kv-cache-gib"),
    ("pooler_config", _TEXT),
    ("skip_tokenizer_init", "the server renders conversations itself, and splits them into tokens"),
    ("scheduler_cls disable_log_stats kv_events_config", _OWN),
    (
        "max_num_queued_reqs max_num_queued_tokens",
        "each key has bounds of its own: see --max-concurrent-requests",
    ),
    ("logging_config log_config_file", "the log is the server's own: see --log-level and --log-format"),
    ("aggregate_engine_logging", "the log has no periodic figures; /metrics has them"),
    ("profiler_config", "there is no /start_profile; `overture profile` measures the engine"),
    ("use_tqdm_on_load", "the log says how far the start has come"),
    (
        "allowed_local_media_path enable_mm_embeds",
        "pictures come in the request itself, or from a host that --allow-image-host names",
    ),
)
# What asks for another kind of server.
RULED_OUT = _each(("runner convert mm_encoder_only", _TEXT))
_KINDS_OF_TEXT = {
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "mm_encoder_only": ("false",),
}
# Values with which what is left out is as it is anyway.
_SO_ANYWAY: Mapping[str, tuple[str, ...]] = {
    "distributed_executor_backend": ("uni", "mp"),
    "worker_cls": ("auto",),
    "enable_lora": ("true",),
    "lora_dtype": ("auto",),
    "long_prefill_token_threshold": ("0",),
} | {name: ("1",) for name in LEFT_OUT if name.endswith("_parallel_size") or name == "nnodes"}

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


def without_effect(given: Mapping[str, str], device: str) -> dict[str, str]:
    """Return those of the given arguments that vLLM does not get on this device ("cpu" or another), each with the reason.

    The reason is "" where the value says only what is so anyway.
    """
    rules = {**LEFT_OUT, **(_NOTHING_ON_CPU if device == "cpu" else {})}
    return {
        name: "" if value.lower() in _SO_ANYWAY.get(name, ("false",)) and name in LEFT_OUT else rules[name]
        for name, value in given.items()
        if name in rules
    }


def named(pairs: Iterable[str]) -> dict[str, str]:
    """Return name -> value of each "NAME=VALUE", with vLLM's underscores in the names. Of several values the last one counts, as in vLLM.

    Raises ValueError, with a text for the operator, for another form.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, is_given, value = pair.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not is_given or not name:
            raise ValueError(f"expected NAME=VALUE, such as cpu_offload_gb=4, got {pair!r}")
        found[name] = value.strip()
    return found


def parse(pairs: Iterable[str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return what `named` does, of a user's arguments for the chat model. settings: by name, the flag of each setting of our own.

    Raises ValueError as `named` does, and for a name that has its own setting or is ruled out.
    """
    found = named(pairs)
    for name, value in found.items():
        if name in settings:
            raise ValueError(f"{name} has a setting of its own: {settings[name]}")
        if name in RULED_OUT and value not in _KINDS_OF_TEXT.get(name, ()):
            raise ValueError(f"{name} cannot be set here: {RULED_OUT[name]}")
    return found


def parse_beside(pairs: Iterable[str]) -> dict[str, str]:
    """Return what `named` does, of a user's arguments for a model for embeddings or scores. Raises ValueError as `parse` does."""
    found = named(pairs)
    for name in found:
        why = _BESIDE.get(name) or LEFT_OUT.get(name) or RULED_OUT.get(name)
        if why is not None and why is not _TEXT:
            raise ValueError(f"{name} cannot be set here: {why}")
    return found
