"""The engine itself: how it is built, stepped and fed, and its outputs."""

from engine_bridge.driver.vllm_api.features import (
    BAD_WORDS,
    ENGINE,
    ENVIRONMENT,
    HALF_CHARACTERS,
    KV_TIERS,
    LORA,
    PROFILING,
    PROMOTION,
    REPORT,
    ROTARY,
)
from engine_bridge.driver.vllm_api.uses import (
    builds,
    calls,
    looks_up,
    overrides,
    owner,
    reads,
    replaces,
    tags,
    writes,
)

OWNERS = (
    owner(
        "vllm.v1.engine.llm_engine:LLMEngine",
        ENGINE,
        calls(
            "from_engine_args(engine_args, *, enable_multiprocessing)",
            "add_request(request_id, prompt, params, *, prompt_text, lora_request)",
            "abort_request(request_ids, *, internal)",
            "reset_prefix_cache(reset_running_requests, reset_connector)",
            "get_supported_tasks()",
            "step()",
        ),
        reads("engine_core input_processor model_config renderer vllm_config"),
        reads("output_processor", REPORT),
    ),
    owner(
        "vllm.v1.engine.core_client:InprocClient",
        ENGINE,
        calls("shutdown()"),
        reads("engine_core"),
        at="engine_core",
    ),
    owner(
        "vllm.v1.engine.core:EngineCore",
        ENGINE,
        reads("model_executor scheduler"),
        reads("request_block_hasher", PROMOTION),
        writes("request_block_hasher", KV_TIERS),
        looks_up("preprocess_add_request", "request_block_hasher", KV_TIERS),
        at="engine_core.engine_core",
    ),
    owner(
        "vllm.v1.executor.uniproc_executor:UniProcExecutor",
        KV_TIERS,
        reads("driver_worker"),
        at="engine_core.engine_core.model_executor",
    ),
    owner(
        "vllm.v1.worker.worker_base:WorkerWrapperBase",
        KV_TIERS,
        reads("worker"),
        at="engine_core.engine_core.model_executor.driver_worker",
    ),
    owner(
        "vllm.v1.worker.gpu_worker:Worker",
        KV_TIERS,
        reads("model_runner"),
        at="engine_core.engine_core.model_executor.driver_worker.worker",
    ),
    owner(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        KV_TIERS,
        reads("kv_caches"),
        at="engine_core.engine_core.model_executor.driver_worker.worker.model_runner",
    ),
    owner(
        "vllm.v1.engine.input_processor:InputProcessor",
        ENGINE,
        calls(
            "process_inputs(request_id, prompt, params, supported_tasks, *, lora_request, session_id, priority, tokenization_kwargs)"
        ),
        at="input_processor",
    ),
    owner(
        "vllm.v1.engine:EngineCoreRequest",
        ENGINE,
        reads("lora_request mm_features params sampling_params"),
        writes("cache_salt prompt_token_ids reasoning_ended reasoning_parser_kwargs"),
    ),
    owner(
        "vllm.v1.engine.output_processor:OutputProcessor",
        REPORT,
        reads("request_states"),
        at="output_processor",
    ),
    owner("vllm.v1.engine.output_processor:RequestState", REPORT, reads("external_req_id parent_req")),
    owner("vllm.v1.engine.parallel_sampling:ParentRequest", REPORT, reads("external_req_id")),
    owner(
        "vllm.v1.engine.output_processor:RequestOutputCollector",
        ENGINE,
        builds("output_kind, request_id"),
        calls("put(output)", "get()", "get_nowait()"),
    ),
    owner(
        "vllm.v1.request:Request",
        ENGINE,
        builds(
            "request_id, prompt_token_ids, sampling_params, pooling_params, *, lora_request, cache_salt, block_hasher"
        ),
        reads(
            "arrival_time block_hashes cache_salt lora_request max_tokens num_computed_tokens num_output_tokens"
        ),
        reads(
            "num_preemptions num_prompt_tokens num_tokens priority request_id sampling_params session_id status"
        ),
        reads("structured_output_request"),
        reads("skip_reading_prefix_cache", KV_TIERS),
        writes("lora_request", KV_TIERS),
    ),
    owner(
        "vllm.outputs:RequestOutput",
        ENGINE,
        builds("*, request_id, prompt, prompt_token_ids, prompt_logprobs, outputs, finished"),
        reads("finished num_cached_tokens outputs prompt_logprobs request_id"),
        tags("failure kv_sources"),
    ),
    owner(
        "vllm.outputs:CompletionOutput",
        ENGINE,
        builds("index, text, token_ids, cumulative_logprob, logprobs"),
        reads("finish_reason index logprobs stop_reason text token_ids"),
    ),
    owner(
        "vllm.sampling_params:SamplingParams",
        ENGINE,
        builds("*, max_tokens, temperature, ignore_eos, detokenize, structured_outputs"),
        reads(
            "ignore_eos logprobs max_tokens prompt_logprobs stop stop_token_ids structured_outputs temperature"
        ),
        writes(
            "_bad_words_token_ids bad_words extra_args max_tokens output_kind stream_interval thinking_token_budget"
        ),
    ),
    owner("vllm.sampling_params:RequestOutputKind", ENGINE, reads("DELTA FINAL_ONLY")),
    owner(
        "vllm.lora.request:LoRARequest",
        ENGINE,
        builds("*, lora_name, lora_int_id, lora_path"),
        reads("lora_name lora_path"),
        writes("lora_int_id load_inplace"),
    ),
    owner(
        "vllm.config:VllmConfig",
        ENGINE,
        reads(
            "cache_config device_config kv_transfer_config model_config scheduler_config structured_outputs_config"
        ),
        reads("speculative_config", KV_TIERS),
        at="vllm_config",
    ),
    owner("vllm.config:SpeculativeConfig", KV_TIERS, reads("draft_model_config")),
    owner(
        "vllm.config:CacheConfig",
        ENGINE,
        reads("block_size"),
        reads("enable_prefix_caching prefix_caching_hash_algo", KV_TIERS),
        at="vllm_config.cache_config",
    ),
    owner(
        "vllm.config:ModelConfig",
        ENGINE,
        reads("max_model_len"),
        reads("dtype hf_config hf_text_config model model_weights quantization", KV_TIERS),
        calls("get_vocab_size()"),
        at="vllm_config.model_config",
    ),
    owner("vllm.config:DeviceConfig", PROFILING, reads("device"), at="vllm_config.device_config"),
    owner(
        "vllm.config:StructuredOutputsConfig",
        ENGINE,
        builds("*, backend, disable_any_whitespace"),
        reads("disable_additional_properties"),
    ),
    owner(
        "vllm.config:KVTransferConfig",
        KV_TIERS,
        builds(
            "*, kv_connector, kv_connector_module_path, kv_role, kv_load_failure_policy, kv_connector_extra_config"
        ),
    ),
    owner(
        "vllm.engine.arg_utils:EngineArgs",
        ENGINE,
        builds(
            "*, model, served_model_name, dtype, max_num_seqs, enforce_eager, enable_prefix_caching, disable_log_stats, seed, block_size,"
            " max_model_len, num_gpu_blocks_override, kv_cache_memory_bytes, use_tqdm_on_load, scheduler_cls,"
            " structured_outputs_config, gpu_memory_utilization, max_num_batched_tokens, quantization, kv_cache_dtype,"
            " trust_remote_code, revision, download_dir, speculative_config"
        ),
        calls("add_cli_args(parser)"),
        reads("kv_transfer_config", KV_TIERS),
        reads("enable_lora max_loras max_lora_rank", LORA),
    ),
    owner(
        "vllm.v1.engine.detokenizer",
        HALF_CHARACTERS,
        replaces("FastIncrementalDetokenizer", "SlowIncrementalDetokenizer"),
    ),
    owner(
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer",
        HALF_CHARACTERS,
        looks_up("from_new_request", "FastIncrementalDetokenizer SlowIncrementalDetokenizer"),
    ),
    owner(
        "vllm.v1.engine.detokenizer:FastIncrementalDetokenizer",
        HALF_CHARACTERS,
        builds("tokenizer, request"),
        overrides("decode_next(next_token_id)"),
        reads("tokenizer skip_special_tokens"),
    ),
    owner(
        "vllm.v1.engine.detokenizer:SlowIncrementalDetokenizer",
        HALF_CHARACTERS,
        builds("tokenizer, request"),
        overrides("decode_next(next_token_id)"),
        reads("tokenizer tokens skip_special_tokens spaces_between_special_tokens"),
        writes("prefix_offset read_offset"),
    ),
    owner(
        "vllm.tokenizers.detokenizer_utils",
        HALF_CHARACTERS,
        calls(
            "_convert_tokens_to_string_with_added_encoders(tokenizer, output_tokens, skip_special_tokens,"
            " spaces_between_special_tokens)"
        ),
    ),
    owner("vllm.v1.sample.sampler", BAD_WORDS, replaces("apply_bad_words")),
    owner("vllm._custom_ops", ROTARY, replaces("rotary_embedding")),
    owner("vllm.utils.argparse_utils:FlexibleArgumentParser", ENGINE),
    owner("vllm.platforms:current_platform", ENGINE),
    owner("vllm.platforms.interface:Platform", ENGINE, calls("is_cpu()")),
    owner(
        "vllm.envs",
        ENVIRONMENT,
        reads("VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL VLLM_LOG_STATS_INTERVAL"),
        reads("VLLM_MAX_N_SEQUENCES VLLM_NO_USAGE_STATS VLLM_CPU_OMP_THREADS_BIND"),
    ),
)
