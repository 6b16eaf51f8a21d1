"""The order of starting: vLLM's scheduler under our order, and the content of a step."""

from engine_bridge.driver.vllm_api.features import ENGINE, KV_TIERS, LORA, PACE, PROFILING, REPORT, SCHEDULING
from engine_bridge.driver.vllm_api.uses import (
    calls,
    implements,
    looks_up,
    overrides,
    owner,
    reads,
    writes,
)

OWNERS = (
    owner(
        "vllm.v1.core.sched.scheduler:Scheduler",
        ENGINE,
        calls("has_requests()", "get_request_counts()"),
        overrides("schedule(*args, **kwargs)"),
        overrides(
            "_free_request(request, *args, **kwargs)",
            "_preempt_request(request, *args, **kwargs)",
            feature=SCHEDULING,
        ),
        overrides("update_from_output(scheduler_output, model_runner_output)", feature=PACE),
        overrides("_handle_blocked_waiting_request(request)", feature=LORA),
        calls("_preempt_request(request, timestamp, *, drop_stale_output)", feature=SCHEDULING),
        looks_up("schedule", "_handle_blocked_waiting_request", LORA),
        looks_up("schedule", "_preempt_request", SCHEDULING),
        looks_up("schedule", "waiting peek_request pop_request prepend_requests", SCHEDULING),
        looks_up("_preempt_request", "prepend_request", SCHEDULING),
        looks_up("finish_requests", "remove_requests _free_request", SCHEDULING),
        looks_up("get_request_counts", "waiting running", SCHEDULING),
        reads("kv_cache_manager max_num_scheduled_tokens running scheduler_config"),
        writes("waiting", SCHEDULING),
        reads("max_num_running_reqs", SCHEDULING),
        writes("adaptive_long_prefill_threshold max_num_scheduled_tokens", PACE),
        looks_up(
            "schedule",
            "max_num_scheduled_tokens long_prefill_token_threshold adaptive_long_prefill_threshold",
            PACE,
        ),
        reads("deferred_waiting kv_holding_waiting lora_config", REPORT),
        reads("requests", PROFILING),
        reads("connector", KV_TIERS),
        at="engine_core.engine_core.scheduler",
    ),
    owner("vllm.v1.core.sched.async_scheduler:AsyncScheduler", ENGINE, reads("schedule")),
    owner(
        "vllm.config:SchedulerConfig",
        PACE,
        reads("enable_chunked_prefill"),
        writes("long_prefill_token_threshold"),
        reads("max_num_batched_tokens max_num_seqs", PROFILING),
        at="vllm_config.scheduler_config",
    ),
    owner(
        "vllm.v1.core.sched.request_queue:RequestQueue",
        SCHEDULING,
        implements(
            "add_request pop_request peek_request prepend_request prepend_requests remove_request remove_requests"
        ),
        implements("__bool__ __len__ __iter__"),
        overrides("add_request(request)", "prepend_request(request)", "prepend_requests(requests)"),
        overrides("pop_request()", "peek_request()", "remove_request(request)", "remove_requests(requests)"),
    ),
    owner(
        "vllm.v1.request:RequestStatus",
        SCHEDULING,
        reads("FINISHED_LENGTH_CAPPED FINISHED_STOPPED WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"),
        reads("WAITING_FOR_REMOTE_KVS", REPORT),
    ),
    owner(
        "vllm.v1.structured_output.request:StructuredOutputRequest",
        SCHEDULING,
        reads("grammar"),
        reads("_grammar", REPORT),
    ),
    owner(
        "vllm.v1.core.sched.output:SchedulerOutput",
        PACE,
        reads("num_scheduled_tokens scheduled_cached_reqs scheduled_new_reqs scheduled_spec_decode_tokens"),
        reads("total_num_scheduled_tokens"),
    ),
    owner(
        "vllm.v1.core.sched.output:CachedRequestData",
        PACE,
        reads("num_computed_tokens num_output_tokens req_ids"),
    ),
    owner("vllm.v1.core.sched.output:NewRequestData", PACE, reads("num_computed_tokens")),
    owner("vllm.config:LoRAConfig", REPORT, reads("max_loras")),
)
