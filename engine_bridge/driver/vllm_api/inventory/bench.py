"""Names of vLLM's that benches use beyond the server: its own queues, loading and arithmetic, to be measured beside ours."""

from engine_bridge.driver.vllm_api.features import BENCHES
from engine_bridge.driver.vllm_api.uses import builds, calls, owner, reads, replaces, writes

OWNERS = (
    owner("vllm.v1.core.sched.request_queue:SchedulingPolicy", BENCHES),
    owner("vllm.v1.core.sched.request_queue", BENCHES, calls("create_request_queue(policy)")),
    owner("vllm.v1.core.sched.scheduler:Scheduler", BENCHES, writes("policy")),
    owner("vllm.v1.request:Request", BENCHES, calls("from_engine_core_request(request, block_hasher)")),
    owner("vllm.v1.engine.llm_engine:LLMEngine", BENCHES, reads("model_executor")),
    owner(
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager",
        BENCHES,
        replaces("_load_adapter"),
        calls("list_adapters()"),
    ),
    owner(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        BENCHES,
        builds("max_num_batched_tokens, max_batches, device"),
    ),
    owner("vllm.renderers.hf", BENCHES, reads("_detect_content_format")),
    owner("vllm.v1.executor.uniproc_executor:UniProcExecutor", BENCHES, replaces("execute_model")),
    # The emulated node: what vLLM's scheduler is built from, without an engine.
    owner("vllm.utils.hashing", BENCHES, reads("sha256_cbor")),
    owner("vllm.v1.core.kv_cache_utils", BENCHES, reads("init_none_hash BlockHash")),
    owner("vllm.v1.kv_cache_interface:FullAttentionSpec", BENCHES),
    owner("vllm.v1.kv_cache_interface:KVCacheGroupSpec", BENCHES),
    owner("vllm.v1.outputs:ModelRunnerOutput", BENCHES),
)
