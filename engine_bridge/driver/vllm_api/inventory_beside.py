"""The names of vLLM's that are used beside the server's own engine and API, as data. Read as those of `inventory.py`."""

from engine_bridge.driver.vllm_api.uses import owners

# The names that a model for embeddings or scores needs beyond those above.
EMBEDDING_SIDE = owners("""
vllm.v1.engine.llm_engine:LLMEngine EMBEDDINGS
    call add_request(request_id, prompt, params, *, priority)
vllm.engine.arg_utils:EngineArgs EMBEDDINGS
    call __init__(*, model, runner, scheduling_policy)
vllm.outputs:PoolingRequestOutput EMBEDDINGS
    read finished prompt_token_ids request_id
vllm.renderers.chat_utils:ChatTemplateConfig EMBEDDINGS
    call __init__(*, chat_template)
vllm.entrypoints.pooling.base.serving:PoolingBaseServing EMBEDDINGS
    call __call__(request, raw_request)
    look up in __call__: _preprocessing _prepare_generators
    look up in _preprocessing: render_async
    look up in _prepare_generators: encode
vllm.entrypoints.pooling.base.serving:PoolingServing EMBEDDINGS
    read io_processor
vllm.entrypoints.pooling.base.io_processor:PoolingIOProcessor EMBEDDINGS
    write render_async
vllm.entrypoints.pooling.embed.serving:ServingEmbedding EMBEDDINGS
    call __init__(engine_client, models, *, request_logger, chat_template_config)
vllm.entrypoints.pooling.scoring.serving:ServingScores EMBEDDINGS
    call __init__(engine_client, models, *, supported_tasks, enable_flash_late_interaction, request_logger, chat_template_config)
vllm.entrypoints.pooling.utils EMBEDDINGS
    call enable_scoring_api(supported_tasks, model_config)
vllm.entrypoints.pooling.embed.protocol:EmbeddingCompletionRequest EMBEDDINGS
vllm.entrypoints.pooling.embed.protocol:EmbeddingResponse EMBEDDINGS
vllm.entrypoints.pooling.scoring.protocol EMBEDDINGS
    read ScoreRequest
vllm.entrypoints.pooling.scoring.protocol:RerankRequest EMBEDDINGS
vllm.entrypoints.pooling.scoring.protocol:RerankResponse EMBEDDINGS
vllm.entrypoints.pooling.scoring.protocol:ScoreResponse EMBEDDINGS
""")
# The names that bounds of a GPU's sampler need beyond the engine's.
SAMPLER_SIDE = owners("""
vllm.config:VllmConfig SAMPLER_ROOM at vllm_config
    read use_v2_model_runner
vllm.sampling_params:SamplingParams SAMPLER_ROOM
    read all_stop_token_ids allowed_token_ids bad_words_token_ids min_tokens
vllm.v1.worker.gpu.sample.logit_bias SAMPLER_ROOM
    read MAX_NUM_ALLOWED_TOKEN_IDS MAX_NUM_LOGIT_BIAS_TOKENS MAX_NUM_STOP_TOKEN_IDS
vllm.envs SAMPLER_ROOM
    read VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
""")
# The names that benches use beyond the server: vLLM's own queues, loading and arithmetic, to be measured beside ours.
BENCH_SIDE = owners("""
vllm.v1.core.sched.scheduler:Scheduler BENCHES
    write policy
vllm.lora.worker_manager:LRUCacheWorkerLoRAManager BENCHES
    call list_adapters()
vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU BENCHES
    call __init__(max_num_batched_tokens, max_batches, device)
vllm.v1.executor.uniproc_executor:UniProcExecutor BENCHES
    replace execute_model
# The emulated node: what vLLM's scheduler is built from, without an engine.
vllm.utils.hashing BENCHES
    read sha256_cbor
vllm.v1.core.kv_cache_utils BENCHES
    read init_none_hash BlockHash
vllm.v1.kv_cache_interface:FullAttentionSpec BENCHES
vllm.v1.kv_cache_interface:KVCacheGroupSpec BENCHES
vllm.v1.outputs:ModelRunnerOutput BENCHES
""")
