"""Every name of vLLM's that this project uses, as data: `uses.py` says how it is read, `check.py` finds what has moved. Source: vLLM 0.32."""

from engine_bridge.driver.vllm_api.inventory_beside import BENCH_SIDE, EMBEDDING_SIDE, SAMPLER_SIDE
from engine_bridge.driver.vllm_api.uses import owners

# The names that an engine needs.
ENGINE_SIDE = owners("""
# -- the engine: how it is built, stepped and fed, and its outputs -----------------------------------------------------
vllm.v1.engine.llm_engine:LLMEngine ENGINE
    call from_engine_args(engine_args, *, usage_context, enable_multiprocessing) add_request(request_id, prompt, params, *, prompt_text, lora_request)
        abort_request(request_ids, *, internal) reset_prefix_cache(reset_running_requests, reset_connector) get_supported_tasks() step()
        reset_mm_cache() reset_encoder_cache()
    read engine_core input_processor model_config renderer vllm_config
    RANKS: tag ranks
    REPORT: read output_processor
vllm.usage.usage_lib:UsageContext ENGINE
    read OPENAI_API_SERVER
vllm.v1.engine.core_client:InprocClient ENGINE at engine_core
    call shutdown()
    read engine_core
vllm.v1.engine.core:EngineCore ENGINE at engine_core.engine_core
    read model_executor scheduler
    PROMOTION: read request_block_hasher
    KV_TIERS: write request_block_hasher
    KV_TIERS: look up in preprocess_add_request: request_block_hasher
vllm.v1.executor.uniproc_executor:UniProcExecutor KV_TIERS
    read driver_worker
    ENGINE: call sleep(level) wake_up()
vllm.v1.worker.worker_base:WorkerWrapperBase KV_TIERS at engine_core.engine_core.model_executor.driver_worker
    read worker
vllm.v1.worker.gpu_worker:Worker KV_TIERS at engine_core.engine_core.model_executor.driver_worker.worker
    read model_runner
    RANKS: override init_device() load_model(*, load_dummy_weights) shutdown()
    RANKS: read rank vllm_config
vllm.v1.worker.cpu_worker:CPUWorker CPU_RANKS
vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator CPU_RANKS
    replace _all_group_ranks_share_shm_group_name()
    look up in __init__: _all_group_ranks_share_shm_group_name
vllm.v1.executor.multiproc_executor:MultiprocExecutor RANKS
    call collective_rpc(method, *, timeout, args, non_block) register_failure_callback(callback)
    read is_failed
vllm.v1.executor.multiproc_executor:WorkerProc RANKS
    replace make_worker_process(vllm_config, *args, **kwargs) worker_main(*args, **kwargs)
vllm.config:LoggingConfig RANKS
    write log_level configure_logging
vllm.distributed.kv_transfer KV_TIERS
    call get_kv_transfer_group() ensure_kv_transfer_shutdown()
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata RANKS
    override aggregate(other)
vllm.config:ParallelConfig RANKS at vllm_config.parallel_config
    read world_size
vllm.v1.worker.gpu_model_runner:GPUModelRunner KV_TIERS at engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    read kv_caches model
    DRAFT_GROUPS: look up in __init__: drafter
    DRAFT_GROUPS: replace _build_attention_metadata(num_tokens, num_reqs, *rest, slot_mappings=None, **options)
    SEEDS: read input_batch discard_request_mask
    SEEDS: replace sample_tokens(grammar_output)
vllm.v1.engine.input_processor:InputProcessor ENGINE at input_processor
    call process_inputs(request_id, prompt, params, supported_tasks, *, lora_request, session_id, priority, tokenization_kwargs)
    APIS: look up in _validate_model_input: validate_token_ids
vllm.v1.engine:EngineCoreRequest ENGINE
    read lora_request mm_features params sampling_params
    write cache_salt prompt_token_ids reasoning_ended reasoning_parser_kwargs
vllm.v1.engine.output_processor:OutputProcessor REPORT at output_processor
    read request_states
vllm.v1.engine.output_processor:RequestState REPORT
    read external_req_id parent_req
vllm.v1.engine.parallel_sampling:ParentRequest REPORT
    read external_req_id
vllm.v1.engine.output_processor:RequestOutputCollector ENGINE
    call __init__(output_kind, request_id) put(output) get() get_nowait()
vllm.v1.request:Request ENGINE
    call __init__(request_id, prompt_token_ids, sampling_params, pooling_params, *, mm_features, lora_request, cache_salt, block_hasher)
    read arrival_time block_hashes cache_salt lora_request max_tokens num_computed_tokens num_output_tokens num_preemptions num_prompt_tokens
        num_tokens priority request_id sampling_params session_id status structured_output_request
    PACE: read mm_features spec_token_ids
    KV_TIERS: read skip_reading_prefix_cache
    KV_TIERS: write lora_request
vllm.multimodal.inputs:MultiModalFeatureSpec ENGINE
    call __init__(data, modality, identifier, mm_position)
    read identifier mm_hash mm_position
    write identifier
vllm.multimodal.inputs:PlaceholderRange ENGINE
    call __init__(offset, length)
    read length offset
vllm.outputs:RequestOutput ENGINE
    call __init__(*, request_id, prompt, prompt_token_ids, prompt_logprobs, outputs, finished)
    read finished num_cached_tokens outputs prompt_logprobs request_id
    tag failure kv_sources
vllm.outputs:CompletionOutput ENGINE
    call __init__(index, text, token_ids, cumulative_logprob, logprobs)
    read finish_reason index logprobs stop_reason text token_ids
vllm.sampling_params:SamplingParams ENGINE
    call __init__(*, max_tokens, temperature, ignore_eos, detokenize, structured_outputs)
    read ignore_eos logprobs max_tokens prompt_logprobs stop stop_token_ids structured_outputs temperature
    write _bad_words_token_ids bad_words extra_args logit_bias max_tokens output_kind stream_interval thinking_token_budget
vllm.sampling_params:RequestOutputKind ENGINE
    read DELTA FINAL_ONLY
vllm.lora.request:LoRARequest ENGINE
    call __init__(*, lora_name, lora_int_id, lora_path)
    read lora_name lora_path
    write lora_int_id load_inplace
vllm.config:VllmConfig ENGINE at vllm_config
    read cache_config device_config kv_transfer_config model_config reasoning_config scheduler_config structured_outputs_config
    KV_TIERS: read speculative_config
    TEXT_ALONE: replace _resolve_mm_embedding_inputs()
    TEXT_ALONE: look up in __post_init__: _resolve_mm_embedding_inputs
    RANKS: write logging_config
vllm.config:SpeculativeConfig KV_TIERS
    read draft_model_config
vllm.config:CacheConfig ENGINE at vllm_config.cache_config
    read block_size
    KV_TIERS: read enable_prefix_caching prefix_caching_hash_algo
vllm.config:ModelConfig ENGINE at vllm_config.model_config
    read max_model_len
    KV_TIERS: read dtype hf_config hf_text_config model model_weights quantization
    MODEL_FACTS: read is_attention_free is_encoder_decoder is_hybrid runner_type
    call get_vocab_size()
vllm.model_executor.model_loader.utils MODEL_FACTS
    call get_model_architecture(model_config)
vllm.model_executor.models.registry MODEL_CLASSES
    replace _run_in_subprocess(fn)
vllm.model_executor.models.registry:_LazyRegisteredModel MODEL_CLASSES
    look up in inspect_model_cls: _run_in_subprocess
vllm.model_executor.models.interfaces MODEL_FACTS
    call supports_lora(model)
vllm.config:DeviceConfig PROFILING at vllm_config.device_config
    MODEL_FACTS: read device_type
    read device
vllm.config:StructuredOutputsConfig ENGINE
    call __init__(*, backend, disable_any_whitespace)
    read disable_additional_properties
vllm.config:ReasoningConfig ENGINE
    call __init__(*, reasoning_parser) initialize_token_ids(model_config)
    read enabled
vllm.tokenizers ENGINE
    call cached_tokenizer_from_config(model_config)
vllm.config:KVTransferConfig KV_TIERS
    call __init__(*, kv_connector, kv_connector_module_path, kv_role, kv_load_failure_policy, kv_connector_extra_config)
vllm.engine.arg_utils:EngineArgs ENGINE
    call __init__(*, model, served_model_name, dtype, max_num_seqs, enforce_eager, enable_prefix_caching, disable_log_stats, seed, block_size,
        max_model_len, num_gpu_blocks_override, kv_cache_memory_bytes, use_tqdm_on_load, scheduler_cls, structured_outputs_config,
        gpu_memory_utilization, max_num_batched_tokens, quantization, kv_cache_dtype, trust_remote_code, revision, download_dir, speculative_config,
        limit_mm_per_prompt, skip_mm_profiling, mm_processor_cache_gb) add_cli_args(parser)
    call create_model_config()
    write reasoning_config
    MODEL_FACTS: call create_engine_config()
    KV_TIERS: read kv_transfer_config
    LORA: read enable_lora max_loras max_lora_rank
vllm.v1.engine.detokenizer HALF_CHARACTERS
    replace FastIncrementalDetokenizer SlowIncrementalDetokenizer
vllm.v1.engine.detokenizer:IncrementalDetokenizer HALF_CHARACTERS
    look up in from_new_request: FastIncrementalDetokenizer SlowIncrementalDetokenizer
vllm.v1.engine.detokenizer:FastIncrementalDetokenizer HALF_CHARACTERS
    call __init__(tokenizer, request)
    override decode_next(next_token_id)
    read tokenizer skip_special_tokens
vllm.v1.engine.detokenizer:SlowIncrementalDetokenizer HALF_CHARACTERS
    call __init__(tokenizer, request)
    override decode_next(next_token_id)
    read tokenizer tokens skip_special_tokens spaces_between_special_tokens
    write prefix_offset read_offset
vllm.tokenizers.detokenizer_utils HALF_CHARACTERS
    call _convert_tokens_to_string_with_added_encoders(tokenizer, output_tokens, skip_special_tokens, spaces_between_special_tokens)
vllm.v1.sample.sampler BAD_WORDS
    replace apply_bad_words
vllm.renderers.hf EMBEDS_TOKEN
    replace _ensure_prompt_embeds_placeholder_token
    APIS: read HfRenderer
    APIS: call resolve_chat_template(tokenizer, chat_template, tools, *, model_config)
vllm.v1.spec_decode.draft_model:DraftModelProposer DRAFT_GROUPS
    read kv_cache_gid
vllm.v1.sample.rejection_sampler DRAFT_SETTINGS
    replace expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0)
    look up in apply_sampling_constraints: expand_batch_to_tokens
vllm._custom_ops ROTARY
    replace rotary_embedding
    CUDA_COPIES: call swap_blocks_batch(src_ptrs, dst_ptrs, sizes)
    GATED_DELTA: replace causal_conv1d_fwd_cpu(x, *args, **kwargs)
vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2 MAMBA2
    replace get_kv_cache_spec(vllm_config)
vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter EXPERT_ROUTING
    replace __init__(top_k, global_num_experts, use_grouped_topk=False, num_expert_group=None, topk_group=None, renormalize=True,
        scoring_func="softmax", routed_scaling_factor=1.0, e_score_correction_bias=None, custom_routing_function=None, hash_indices_table=None,
        eplb_state=None)
vllm.model_executor.models.mistral:MistralAttention QUERY_SCALES
    replace __init__(config, *rest, **options)
vllm.model_executor.model_loader.default_loader:DefaultModelLoader MISSING_WEIGHTS
    replace track_weights_loading(model, loaded_weights, *rest, **options)
vllm.utils.argparse_utils:FlexibleArgumentParser ENGINE
vllm.platforms:current_platform ENGINE
vllm.platforms.interface:Platform ENGINE
    call is_cpu()
vllm.envs ENVIRONMENT
    read VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL VLLM_LOG_STATS_INTERVAL VLLM_MAX_N_SEQUENCES VLLM_MAX_IMAGE_PIXELS VLLM_NO_USAGE_STATS
        VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MEDIA_CONNECTOR VLLM_CPU_OMP_THREADS_BIND VLLM_USE_FLASHINFER_SAMPLER
# -- the order of starting: vLLM's scheduler under our order, and the content of a step --------------------------------
vllm.v1.core.sched.scheduler:Scheduler ENGINE at engine_core.engine_core.scheduler
    call has_requests() get_request_counts()
    override schedule(*args, **kwargs)
    SCHEDULING: override _free_request(request, *args, **kwargs) _preempt_request(request, *args, **kwargs)
    KV_TIERS: override reset_prefix_cache(*args, **kwargs) _handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
    PACE: override update_from_output(scheduler_output, model_runner_output)
    LORA: override _handle_blocked_waiting_request(request)
    SCHEDULING: call _preempt_request(request, timestamp, *, drop_stale_output)
    LORA: look up in schedule: _handle_blocked_waiting_request
    SCHEDULING: look up in schedule: _preempt_request waiting peek_request pop_request prepend_requests
    SCHEDULING: look up in _preempt_request: prepend_request
    KV_TIERS: look up in schedule: has_pending_block_frees
    KV_TIERS: look up in update_from_output: _handle_invalid_blocks
    SCHEDULING: look up in finish_requests: remove_requests _free_request
    SCHEDULING: look up in get_request_counts: waiting running
    read block_size connector kv_cache_manager max_num_running_reqs max_num_scheduled_tokens running scheduler_config
    SCHEDULING: write waiting
    PACE: write adaptive_long_prefill_threshold max_num_scheduled_tokens
    PACE: read need_mamba_block_aligned_split cache_config num_spec_tokens
    PACE: look up in schedule: max_num_scheduled_tokens long_prefill_token_threshold adaptive_long_prefill_threshold
    REPORT: read deferred_waiting kv_holding_waiting lora_config
    PROFILING: read requests
vllm.v1.core.sched.async_scheduler:AsyncScheduler ENGINE
    read schedule
vllm.config:SchedulerConfig PACE at vllm_config.scheduler_config
    ENGINE: read async_scheduling enable_chunked_prefill max_num_batched_tokens max_num_seqs
    ENGINE: write max_num_scheduled_tokens
    read disable_chunked_mm_input
    write long_prefill_token_threshold
vllm.v1.core.sched.request_queue:RequestQueue SCHEDULING
    implement __bool__ __len__ __iter__
    override add_request(request) prepend_request(request) prepend_requests(requests) pop_request() peek_request() remove_request(request)
        remove_requests(requests)
vllm.v1.request:RequestStatus SCHEDULING
    read FINISHED_LENGTH_CAPPED FINISHED_STOPPED WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    REPORT: read WAITING_FOR_REMOTE_KVS
vllm.v1.structured_output.request:StructuredOutputRequest SCHEDULING
    read grammar
    REPORT: read _grammar
vllm.v1.core.sched.output:SchedulerOutput PACE
    read num_scheduled_tokens scheduled_cached_reqs scheduled_new_reqs scheduled_spec_decode_tokens total_num_scheduled_tokens
    KV_TIERS: read kv_connector_block_state
vllm.v1.core.sched.output:KVConnectorBlockState KV_TIERS
    read boundary_state_offloads
vllm.v1.core.sched.output:CachedRequestData PACE
    read num_computed_tokens num_output_tokens req_ids
vllm.v1.core.sched.output:NewRequestData PACE
    read num_computed_tokens
vllm.config:LoRAConfig REPORT
    read max_loras
# -- KV blocks: where they are, how they leave the device and come back, and what else may lie in them -----------------
vllm.v1.core.kv_cache_manager:KVCacheManager ENGINE at engine_core.engine_core.scheduler.kv_cache_manager
    read block_pool
    KV_TIERS: call get_block_ids(request_id) evict_blocks(block_ids)
vllm.v1.core.kv_cache_manager:KVCacheBlocks KV_TIERS
    call get_block_ids()
vllm.v1.core.block_pool:BlockPool ENGINE at engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    read num_gpu_blocks
    PROMOTION: read hash_block_size
    call get_num_free_blocks()
    SCHEDULING: call get_cached_block(block_hash, kv_cache_group_ids)
    KV_TIERS: call touch(blocks) free_blocks(ordered_blocks)
    KV_TIERS: read blocks free_block_queue
    PROMOTION: call get_new_blocks(num_blocks)
        cache_full_blocks(*, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)
    # A promotion has only hashes to give in place of a request.
    PROMOTION: look up in cache_full_blocks: block_hashes
    NEW_BLOCKS: replace get_new_blocks(num_blocks)
    ADAPTERS_IN_KV: replace get_new_blocks(num_blocks)
    ADAPTERS_IN_KV: call unpin_blocks(blocks, on_reuse)
    ADAPTERS_IN_KV: look up in get_new_blocks: _notify_reuse
    ADAPTERS_IN_KV: read free_block_queue
vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue ADAPTERS_IN_KV at engine_core.engine_core.scheduler.kv_cache_manager.block_pool.free_block_queue
    call remove(block) append_n(blocks) prepend_n(blocks) iter_blocks_after(cursor)
    KV_TIERS: call iter_blocks_after(cursor)
    KV_TIERS: read fake_free_list_tail
vllm.v1.core.kv_cache_utils:KVCacheBlock ADAPTERS_IN_KV
    read block_hash
    KV_TIERS: read ref_cnt prev_free_block
    PROMOTION: read block_id
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1 KV_TIERS
    override __init__(vllm_config, role, kv_cache_config) requires_kv_delivery requires_piecewise_for_cudagraph(extra_config) on_new_request(request)
        get_num_new_matched_tokens(request, num_computed_tokens) update_state_after_alloc(request, blocks, num_external_tokens)
        build_connector_meta(scheduler_output) update_connector_output(connector_output) request_finished(request, block_ids)
        has_pending_block_frees() register_kv_caches(kv_caches) bind_connector_metadata(connector_metadata) start_load_kv(forward_context, **kwargs)
        wait_for_layer_load(layer_name) save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs) wait_for_save() get_block_ids_with_load_errors()
    read _kv_cache_manager _vllm_config
    RANKS: override build_connector_worker_meta()
vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA KV_TIERS
    override request_finished_all_groups(request, block_ids)
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata KV_TIERS
vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole KV_TIERS
    read SCHEDULER
vllm.v1.outputs:KVConnectorOutput KV_TIERS
    read invalid_block_ids
    RANKS: read kv_connector_worker_meta
vllm.v1.kv_cache_interface:KVCacheConfig ENGINE
    read kv_cache_groups num_blocks
vllm.v1.kv_cache_interface:KVCacheGroupSpec KV_TIERS
    read kv_cache_spec layer_names
vllm.v1.kv_cache_interface:FullAttentionSpec KV_TIERS
    read block_size
vllm.v1.kv_cache_interface:MLAAttentionSpec KV_TIERS
vllm.v1.kv_cache_interface:SlidingWindowSpec KV_TIERS
    read sliding_window extra_retained_tokens
vllm.v1.kv_cache_interface:SlidingWindowMLASpec KV_TIERS
vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec KV_TIERS
    read attention_chunk_size
vllm.v1.core.single_type_kv_cache_manager:MambaManager KV_TIERS
    replace get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, *args, **kwargs)
vllm.v1.kv_cache_interface:MambaSpec KV_TIERS
    read mamba_cache_mode num_speculative_blocks page_size_bytes shapes dtypes num_prefill_checkpoint_blocks prefill_checkpoint_alignment
vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs KV_TIERS
    read kv_cache_specs
vllm.distributed.device_communicators.cuda_wrapper:CudaRTLibrary CUDA_COPIES
    call __init__() cudaHostRegister(ptr, size) cudaHostUnregister(ptr) cudaGetLastError()
vllm.v1.core.kv_cache_utils KV_TIERS
    call get_none_hash_seed() resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
vllm KV_TIERS
    read __version__
# -- adapters: loading -----------------------------------------------------------------------------------------------
vllm.v1.worker.lora_model_runner_mixin LORA
    replace LRUCacheWorkerLoRAManager
vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin LORA
    look up in load_lora_model: LRUCacheWorkerLoRAManager
    read lora_manager
vllm.lora.worker_manager:LRUCacheWorkerLoRAManager LORA
    override _apply_adapters(lora_requests) _manager_cls
    look up in set_active_adapters: _apply_adapters
    look up in create_lora_manager: _manager_cls
    call add_dummy_lora(lora_request, rank) get_dummy_lora_warmup_rank(default_rank) remove_all_adapters()
    read _adapter_manager lora_config vocab_size
    # vLLM's own reading of an adapter's files, which we repeat.
    look up in _load_adapter: hf_to_vllm_mapper get_rename_mapper lora_skip_prefixes
vllm.lora.model_manager:LRUCacheLoRAModelManager LORA
    override lora_slots capacity set_adapter_mapping(mapping)
    CPU_LORA: override _create_lora_modules()
    CPU_LORA: write supported_lora_modules
    write _last_mapping lora_index_to_id
    read device lora_config model modules packed_modules packed_modules_mapping punica_wrapper_mapping supported_lora_modules
    read supports_mm
    call _create_merged_loras_inplace(lora_model) remove_all_adapters()
# -- adapters: experts on a CPU ----------------------------------------------------------------------------------------
vllm.model_executor.layers.fused_moe.layer CPU_LORA
    replace FusedMoEConfig
    look up in FusedMoEFactory: FusedMoEConfig
vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner CPU_LORA
vllm.lora.layers:LoRAMapping LORA
    read index_mapping prompt_mapping
    call __init__(index_mapping, prompt_mapping, *, is_prefill)
# -- adapters: which adapter computes which logits ---------------------------------------------------------------------
vllm.lora.layers:LoRAMappingType LORA
    read LANGUAGE
vllm.v1.worker.gpu_model_runner:GPUModelRunner LORA at engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    replace _set_active_loras(prompt_lora_mapping, token_lora_mapping, lora_requests, mapping_type=None)
        _get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
    look up in execute_model: compute_logits
    look up in _get_prompt_logprobs_dict: compute_logits
    look up in set_active_loras: _set_active_loras
# The newer model runner, by its subclass: the older one has the same name.
vllm.v1.worker.cpu.model_runner:CPUModelRunner CUDA_LORA
    replace sample(hidden_states, input_batch, grammar_output) sample_tokens(grammar_output)
vllm.v1.worker.gpu.input_batch:InputBatch CUDA_LORA
    read cu_num_logits_np
vllm.config:LoRAConfig LORA
    read lora_dtype max_loras max_lora_rank
vllm.lora.lora_model:LoRAModel LORA
    call from_lora_tensors(lora_model_id, tensors, peft_helper, *, device, dtype, model_vocab_size, weights_mapper, skip_prefixes)
    read loras
vllm.lora.lora_weights:LoRALayerWeights LORA
    read lora_a lora_b
vllm.lora.peft_helper:PEFTHelper LORA
    call from_dict(config_dict) _validate_features() get_rank_and_scaling(module_name)
vllm.lora.utils LORA
    call parse_fine_tuned_lora_name(name, weights_mapper)
vllm.model_executor.layers.attention.mla_attention:MLAAttention LORA
    read kv_b_proj
vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding LORA
vllm.model_executor.models.utils:WeightsMapper LORA
    call get_rename_mapper()
    read orig_to_new_stacked
# -- adapters: computing ------------------------------------------------------------------------------------------------
vllm.lora.layers.base:BaseLayerWithLoRA LORA
    call set_lora(index, lora_a, lora_b) reset_lora(index)
    CPU_LORA: replace set_mapping(punica_wrapper)
vllm.lora.layers.base_linear CPU_LORA
    replace _get_lora_device
vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA LORA
    call set_lora(index, lora_a, lora_b) reset_lora(index)
    read lora_a_stacked lora_b_stacked tp_size
    CPU_LORA: look up in _apply_lora_to_output: add_lora_linear
    CUDA_LORA: replace _apply_lora_to_output(x, output)
vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA LORA
    call set_lora(index, lora_a, lora_b) reset_lora(index)
vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA LORA
    call set_lora(index, lora_a, lora_b) reset_lora(index)
    CPU_LORA: look up in _get_logits: add_lora_logits
vllm.lora.layers.vocab_parallel_embedding:VocabParallelEmbeddingWithLoRA LORA
    call set_lora(index, lora_a, lora_b) reset_lora(index)
    CPU_LORA: look up in forward: add_lora_embedding
# -- adapters: our arithmetic on a CPU ----------------------------------------------------------------------------------
vllm.lora.model_manager CPU_LORA
    replace get_punica_wrapper
vllm.lora.model_manager:LoRAModelManager CPU_LORA
    look up in _init_punica_wrapper: get_punica_wrapper
    look up in _create_lora_modules: set_mapping
    look up in activate_adapter: set_lora reset_lora
    look up in _set_adapter_mapping: update_metadata
vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU CPU_LORA
    override __init__(max_num_batched_tokens, max_batches, device, **kwargs)
        update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs)
        add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs)
        add_lora_embedding(y, x, lora_b_stacked, add_inputs=True, **kwargs)
# -- adapters: rows of adapters that are still on their way to a GPU ----------------------------------------------------
vllm.utils.torch_utils LORA
    call direct_register_custom_op(*, op_name, op_func, mutates_args, fake_impl)
# -- structured output: the guidance backend, of which each step is bounded (`driver/grammars/running.py`) -------------
vllm.v1.structured_output GRAMMARS
    replace GuidanceBackend
vllm.v1.structured_output:StructuredOutputManager GRAMMARS
    look up in grammar_init: GuidanceBackend _create_grammar
    replace _create_grammar(request)
    read backend
    write reasoner_cls
vllm.v1.structured_output.backend_guidance GRAMMARS
    call serialize_guidance_grammar(request_type, grammar_spec, disable_any_whitespace, disable_additional_properties)
    replace validate_guidance_grammar(sampling_params, tokenizer=None)
vllm.v1.structured_output.backend_guidance:GuidanceBackend GRAMMARS
    override __post_init__()
    read disable_additional_properties disable_any_whitespace ll_tokenizer vocab_size
vllm.v1.structured_output.backend_guidance:GuidanceGrammar GRAMMARS
    call __init__(ll_matcher, ll_tokenizer, vocab_size)
    override fill_bitmask(bitmask, idx) accept_tokens(request_id, tokens) validate_tokens(tokens) rollback(num_tokens)
    read rollback_lag
    write ll_matcher printed_error
vllm.v1.structured_output.request GRAMMARS
    call get_structured_output_key(params)
vllm.sampling_params:SamplingParams GRAMMARS
    look up in _validate_structured_outputs: validate_guidance_grammar
vllm.sampling_params:StructuredOutputsParams GRAMMARS
    call __init__(*, regex) all_constraints_none()
""")
# The names that the APIs in front of an engine need: the OpenAI and Anthropic serving classes, the renderer, and the client that they talk to.
SERVING_SIDE = owners("""
# -- the client --------------------------------------------------------------------------------------------------------
vllm.engine.protocol:EngineClient APIS
    implement is_running is_stopped errored dead_error encode notify_kv_transfer_request_rejected is_tracing_enabled do_log_stats check_health
        start_profile stop_profile reset_mm_cache reset_encoder_cache sleep release_kv_cache_memory wake_up is_sleeping pause_generation
        resume_generation is_paused
    override generate(prompt, sampling_params, request_id, *, prompt_text=None, lora_request=None, tokenization_kwargs=None, trace_headers=None,
        priority=0, data_parallel_rank=None, session_id=None, kv_hints=None, reasoning_ended=None, reasoning_parser_kwargs=None) abort(request_id)
        add_lora(lora_request) reset_prefix_cache(reset_running_requests=False, reset_connector=False) shutdown(timeout=None)
    write input_processor model_config renderer vllm_config
vllm.renderers.inputs.preprocess APIS
    call extract_prompt_components(model_config, prompt)
vllm.renderers.inputs.preprocess:PromptComponents APIS
    read text
vllm.exceptions APIS
    read GenerationError GracefulHTTPError RetryableRequestError VLLMClientError VLLMError VLLMServerError VLLMValidationError
vllm.exceptions:VLLMValidationError APIS
    call __init__(message)
# -- the renderer ------------------------------------------------------------------------------------------------------
vllm.renderers.online_renderer:OnlineRenderer APIS
    call __init__(model_config, renderer, *, request_logger, chat_template, chat_template_content_format, enable_auto_tools, tool_parser,
        reasoning_parser, default_chat_template_kwargs) warmup() render_chat(request) render_responses(request)
        effective_chat_template_kwargs(request)
vllm.renderers.base:BaseRenderer APIS at renderer
    call get_tokenizer()
    read mm_processor
    KEPT_TOKENS: call validate_token_ids(token_ids)
    PICTURE_CACHE: read _mm_processor_only_cache
    PICTURE_CACHE: write _mm_processor_cache
    KEPT_TOKENS: read _executor
    TOKENIZER_TURNS: read _executor
    PLAIN_CONTENT: read _executor
    APIS: replace render_messages_async(messages, params) validate_token_ids(token_ids, **options)
    PLAIN_CONTENT: replace render_messages_async(messages, params) tokenize_prompts_async(prompts, params)
vllm.multimodal.media.connector APIS
    read MEDIA_CONNECTOR_REGISTRY
vllm.multimodal.media.connector:MediaConnector APIS
    override load_from_url(url, media_io, *, fetch_timeout) load_from_url_async(url, media_io, *, fetch_timeout)
        fetch_image_embedding(data) fetch_image_embedding_async(data) fetch_audio_embedding(data) fetch_audio_embedding_async(data)
vllm.multimodal.image APIS
    call open_image(fp)
vllm.multimodal.processing.context:BaseProcessingInfo APIS
    read allowed_mm_limits
vllm.renderers.base:_SwappableExecutor TOKENIZER_TURNS at renderer._executor
    write _inner
    read _max_workers
    replace replace_inner()
vllm.renderers.params:ChatParams PLAIN_CONTENT
    read chat_template_kwargs
vllm.renderers.params:TokenizeParams PLAIN_CONTENT
    call apply_pre_tokenization(tokenizer, prompt) get_encode_kwargs()
# -- the APIs ----------------------------------------------------------------------------------------------------------
vllm.entrypoints.openai.models.serving:OpenAIServingModels APIS
    call __init__(engine_client, base_model_paths) load_lora_adapter(request) unload_lora_adapter(request) show_available_models()
        is_base_model(model_name)
    read lora_requests
vllm.entrypoints.openai.models.protocol:BaseModelPath APIS
    call __init__(name, model_path)
vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat APIS
    call __init__(engine_client, models, response_role, *, online_renderer, enable_prompt_tokens_details, request_logger, chat_template,
        chat_template_content_format, enable_auto_tools, tool_parser, reasoning_parser, default_chat_template_kwargs)
        create_chat_completion(request, raw_request)
    override chat_completion_full_generator(request, result_generator, *args, **options)
    read default_sampling_params parser_cls
    write parser_cls
vllm.parser.abstract_parser:DelegatingParser APIS
    call __init__(tokenizer, tools, *, chat_template_kwargs, model_config)
        parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, *, finished)
        _extract_tool_calls_streaming(previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request)
    override _extract_tool_calls(content, request, *args, **options) parse_delta(*args, finished, **options)
    read reasoning_parser tool_parser
vllm.parser.engine.adapters:ParserEngineReasoningAdapter APIS
    write _streaming_count_valid
vllm.reasoning.abs_reasoning_parsers:ReasoningParser APIS
    call is_reasoning_end(input_ids)
    read reasoning_end_str reasoning_start_str
vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion APIS
    call __init__(engine_client, models, *, online_renderer, request_logger, enable_prompt_tokens_details) create_completion(request, raw_request)
    override completion_stream_generator(request, engine_inputs, result_generator, *args, **options)
        request_output_to_completion_response(final_res_batch, request, *args, **options)
vllm.entrypoints.openai.responses.serving:OpenAIServingResponses APIS
    call __init__(engine_client, models, online_renderer, *, request_logger, chat_template, chat_template_content_format, enable_auto_tools,
        tool_parser, reasoning_parser, default_chat_template_kwargs) create_responses(request, raw_request) _extract_prompt_len(prompt)
    read online_renderer
    write parser
    override responses_stream_generator(request, sampling_params, result_generator, *args, **options)
        _make_response_output_items(request, final_output, *args, **options) _create_response_logprobs(token_ids, logprobs, *args, **options)
vllm.entrypoints.serve.tokenize.serving:ServingTokenization APIS
    call __init__(models, online_renderer, *, chat_template, chat_template_content_format, default_chat_template_kwargs)
        create_tokenize(request, raw_request) create_detokenize(request, raw_request) get_tokenizer_info()
vllm.entrypoints.serve.tokenize.protocol:TokenizeChatRequest APIS
vllm.entrypoints.serve.tokenize.protocol:TokenizeCompletionRequest APIS
vllm.entrypoints.serve.tokenize.protocol:TokenizeResponse APIS
vllm.entrypoints.serve.tokenize.protocol:TokenizerInfoResponse APIS
vllm.entrypoints.serve.tokenize.protocol:DetokenizeRequest APIS
vllm.entrypoints.serve.tokenize.protocol:DetokenizeResponse APIS
vllm.entrypoints.anthropic.serving:AnthropicServingMessages APIS
    call __init__(engine_client, models, response_role, *, online_renderer, enable_prompt_tokens_details, request_logger, chat_template,
        chat_template_content_format, enable_auto_tools, tool_parser, reasoning_parser, default_chat_template_kwargs)
        create_messages(request, raw_request) count_tokens(request, raw_request)
    override _should_merge_inline_system(online_renderer)
        to_chat_completion_request(anthropic_request, **options) messages_full_converter(generator) message_stream_converter(generator)
vllm.entrypoints.anthropic.api_router APIS
    call translate_error_response(response)
# -- bodies and replies; `CLIENT_FIELDS` are `SERVER_FIELDS` in `engine_bridge/driver/apis/bodies.py` ------------------
vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest APIS
    read messages stream temperature top_p top_k stop seed ignore_eos
    call to_sampling_params(max_tokens, default_sampling_params)
    CLIENT_FIELDS: read priority kv_transfer_params vllm_xargs
vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse APIS
vllm.entrypoints.openai.completion.protocol:CompletionRequest APIS
    override to_sampling_params(*args, **options)
    read echo max_tokens return_token_ids
    CLIENT_FIELDS: read priority kv_transfer_params vllm_xargs
vllm.entrypoints.openai.completion.protocol:CompletionResponse APIS
vllm.entrypoints.openai.responses.protocol:ResponsesRequest APIS
    CLIENT_FIELDS: read priority
vllm.entrypoints.openai.responses.protocol:ResponsesResponse APIS
vllm.entrypoints.openai.responses.protocol:ResponseCompletedEvent APIS
    read response
vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest APIS
vllm.entrypoints.anthropic.protocol:AnthropicMessagesResponse APIS
vllm.entrypoints.anthropic.protocol:AnthropicCountTokensRequest APIS
vllm.entrypoints.anthropic.protocol:AnthropicCountTokensResponse APIS
# -- tool calls and reasoning ------------------------------------------------------------------------------------------
vllm.tool_parsers.abstract_tool_parser:ToolParser APIS
    call __init__(tokenizer, tools) adjust_request(request)
    override adjust_request(request) get_structural_tag(request, **options) extract_tool_calls(model_output, request)
        extract_tool_calls_streaming(previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request)
        supports_required_and_named
vllm.tool_parsers.abstract_tool_parser:ToolParserManager APIS
    call get_tool_parser(name) list_registered() register_module(*, name, module)
vllm.reasoning.abs_reasoning_parsers:ReasoningParserManager APIS
    call get_reasoning_parser(name) list_registered()
vllm.entrypoints.generate.base.protocol:DeltaMessage APIS
    call __init__(*, content)
    read content tool_calls
vllm.entrypoints.generate.base.protocol:FunctionCall APIS
    call __init__(*, id, name, arguments)
vllm.entrypoints.generate.base.protocol:ExtractedToolCallInformation APIS
    call __init__(*, tools_called, tool_calls, content)
vllm.entrypoints.serve.engine.protocol:ErrorResponse APIS
    read error
vllm.entrypoints.serve.engine.protocol:ErrorInfo APIS
    read code message type
vllm.entrypoints.serve.engine.protocol:ModelCard APIS
vllm.entrypoints.serve.engine.protocol:ModelList APIS
vllm.entrypoints.serve.lora.protocol:LoadLoRAAdapterRequest APIS
    read load_inplace lora_name lora_path
vllm.entrypoints.serve.lora.protocol:UnloadLoRAAdapterRequest APIS
    read lora_name
vllm.entrypoints.serve APIS
    call create_error_response(message, *, param)
vllm.entrypoints.serve.utils.api_utils APIS
    call get_max_tokens(max_model_len, max_tokens, input_length, default_sampling_params)
""")
ALL = (*ENGINE_SIDE, *SAMPLER_SIDE, *SERVING_SIDE, *EMBEDDING_SIDE, *BENCH_SIDE)
