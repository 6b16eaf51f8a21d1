"""KV blocks: where they are, how they leave the device and come back, and what else may lie in them."""

from engine_bridge.driver.vllm_api.features import (
    ADAPTERS_IN_KV,
    CUDA_COPIES,
    ENGINE,
    KV_TIERS,
    PROMOTION,
    SCHEDULING,
)
from engine_bridge.driver.vllm_api.uses import (
    calls,
    implements,
    looks_up,
    overrides,
    overrides_values,
    owner,
    reads,
    replaces,
)

OWNERS = (
    owner(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        ENGINE,
        reads("block_pool"),
        calls("get_block_ids(request_id)", "evict_blocks(block_ids)", feature=KV_TIERS),
        at="engine_core.engine_core.scheduler.kv_cache_manager",
    ),
    owner("vllm.v1.core.kv_cache_manager:KVCacheBlocks", KV_TIERS, calls("get_block_ids()")),
    owner(
        "vllm.v1.core.block_pool:BlockPool",
        ENGINE,
        reads("num_gpu_blocks"),
        calls("get_num_free_blocks()"),
        calls("get_cached_block(block_hash, kv_cache_group_ids)", feature=SCHEDULING),
        calls(
            "get_new_blocks(num_blocks)",
            "touch(blocks)",
            "free_blocks(ordered_blocks)",
            "cache_full_blocks(*, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)",
            feature=PROMOTION,
        ),
        # A promotion has only hashes to give in place of a request.
        looks_up("cache_full_blocks", "block_hashes", PROMOTION),
        replaces("get_new_blocks(num_blocks)", feature=ADAPTERS_IN_KV),
        calls("unpin_blocks(blocks, on_reuse)", feature=ADAPTERS_IN_KV),
        looks_up("get_new_blocks", "_notify_reuse", ADAPTERS_IN_KV),
        reads("free_block_queue", ADAPTERS_IN_KV),
        reads("free_block_queue", PROMOTION),
        at="engine_core.engine_core.scheduler.kv_cache_manager.block_pool",
    ),
    owner(
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue",
        ADAPTERS_IN_KV,
        calls("remove(block)", "append_n(blocks)", "prepend_n(blocks)"),
        reads("fake_free_list_head fake_free_list_tail"),
        at="engine_core.engine_core.scheduler.kv_cache_manager.block_pool.free_block_queue",
    ),
    owner(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        ADAPTERS_IN_KV,
        reads("block_hash next_free_block"),
        reads("block_id ref_cnt", PROMOTION),
    ),
    owner(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
        KV_TIERS,
        implements(
            "build_connector_meta get_num_new_matched_tokens save_kv_layer start_load_kv update_state_after_alloc"
        ),
        implements("wait_for_layer_load wait_for_save"),
        overrides("__init__(vllm_config, role, kv_cache_config)"),
        overrides_values("requires_kv_delivery"),
        overrides(
            "requires_piecewise_for_cudagraph(extra_config)",
            "on_new_request(request)",
            "get_num_new_matched_tokens(request, num_computed_tokens)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
            "build_connector_meta(scheduler_output)",
            "update_connector_output(connector_output)",
            "request_finished(request, block_ids)",
            "register_kv_caches(kv_caches)",
            "bind_connector_metadata(connector_metadata)",
            "start_load_kv(forward_context, **kwargs)",
            "wait_for_layer_load(layer_name)",
            "save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)",
            "wait_for_save()",
            "get_block_ids_with_load_errors()",
        ),
        reads("_kv_cache_manager _vllm_config"),
    ),
    owner(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA",
        KV_TIERS,
        implements("request_finished_all_groups"),
        overrides("request_finished_all_groups(request, block_ids)"),
    ),
    owner("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata", KV_TIERS),
    owner("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole", KV_TIERS, reads("SCHEDULER")),
    owner("vllm.v1.outputs:KVConnectorOutput", KV_TIERS, reads("invalid_block_ids")),
    owner("vllm.v1.kv_cache_interface:KVCacheConfig", KV_TIERS, reads("kv_cache_groups")),
    owner("vllm.v1.kv_cache_interface:KVCacheGroupSpec", KV_TIERS, reads("kv_cache_spec")),
    owner("vllm.v1.kv_cache_interface:FullAttentionSpec", KV_TIERS),
    owner("vllm.v1.kv_cache_interface:MLAAttentionSpec", KV_TIERS),
    owner("vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs", KV_TIERS, reads("kv_cache_specs")),
    owner(
        "vllm._custom_ops", CUDA_COPIES, calls("swap_blocks(src, dst, block_size_in_bytes, block_mapping)")
    ),
    owner("vllm.v1.core.kv_cache_utils", KV_TIERS, calls("get_none_hash_seed()")),
    owner("vllm", KV_TIERS, reads("__version__")),
)
