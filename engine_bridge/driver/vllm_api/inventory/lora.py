"""Adapters: vLLM's layers and slots, with our loading, our arithmetic on a CPU, and our part of a GPU's steps."""

from engine_bridge.driver.vllm_api.features import CPU_LORA, CUDA_LORA, LORA
from engine_bridge.driver.vllm_api.uses import (
    builds,
    calls,
    looks_up,
    overrides,
    overrides_values,
    owner,
    reads,
    replaces,
    writes,
)

# Layers whose weights lie in stacks that we fill.
_SLOTTED = ("set_lora(index, lora_a, lora_b)", "reset_lora(index)")

OWNERS = (
    # -- loading -----------------------------------------------------------------------------------------------------
    owner(
        "vllm.v1.worker.lora_model_runner_mixin",
        LORA,
        replaces("LRUCacheWorkerLoRAManager"),
    ),
    owner(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin",
        LORA,
        looks_up("load_lora_model", "LRUCacheWorkerLoRAManager"),
        reads("lora_manager"),
    ),
    owner(
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager",
        LORA,
        overrides("_apply_adapters(lora_requests)"),
        overrides_values("_manager_cls"),
        looks_up("set_active_adapters", "_apply_adapters"),
        looks_up("create_lora_manager", "_manager_cls"),
        reads("_adapter_manager vocab_size"),
        # vLLM's own reading of an adapter's files, which we repeat.
        looks_up("_load_adapter", "hf_to_vllm_mapper get_rename_mapper lora_skip_prefixes"),
    ),
    owner(
        "vllm.lora.model_manager:LRUCacheLoRAModelManager",
        LORA,
        overrides_values("lora_slots capacity"),
        overrides("set_adapter_mapping(mapping)"),
        writes("_last_mapping lora_index_to_id"),
        reads(
            "device lora_config model modules packed_modules packed_modules_mapping punica_wrapper_mapping supported_lora_modules"
        ),
        calls("_create_merged_loras_inplace(lora_model)", "remove_all_adapters()"),
    ),
    owner(
        "vllm.lora.layers:LoRAMapping",
        LORA,
        reads("index_mapping prompt_mapping"),
        builds("index_mapping, prompt_mapping, *, is_prefill"),
    ),
    # -- which adapter computes which logits -------------------------------------------------------------------------
    owner("vllm.lora.layers:LoRAMappingType", LORA, reads("LANGUAGE")),
    owner(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        LORA,
        reads("model"),
        replaces(
            "_set_active_loras(prompt_lora_mapping, token_lora_mapping, lora_requests, mapping_type=None)",
            "_get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)",
        ),
        looks_up("execute_model", "compute_logits"),
        looks_up("_get_prompt_logprobs_dict", "compute_logits"),
        looks_up("set_active_loras", "_set_active_loras"),
        at="engine_core.engine_core.model_executor.driver_worker.worker.model_runner",
    ),
    # The newer model runner, by its subclass: the older one has the same name.
    owner(
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
        CUDA_LORA,
        replaces("sample(hidden_states, input_batch, grammar_output)", "sample_tokens(grammar_output)"),
    ),
    owner("vllm.v1.worker.gpu.input_batch:InputBatch", CUDA_LORA, reads("cu_num_logits_np")),
    owner("vllm.config:LoRAConfig", LORA, reads("lora_dtype max_loras max_lora_rank")),
    owner(
        "vllm.lora.lora_model:LoRAModel",
        LORA,
        calls(
            "from_lora_tensors(lora_model_id, tensors, peft_helper, *, device, dtype, model_vocab_size, weights_mapper, skip_prefixes)"
        ),
        reads("loras"),
    ),
    owner("vllm.lora.lora_weights:LoRALayerWeights", LORA, reads("lora_a lora_b")),
    owner(
        "vllm.lora.peft_helper:PEFTHelper",
        LORA,
        calls("from_dict(config_dict)", "_validate_features()", "get_rank_and_scaling(module_name)"),
    ),
    owner("vllm.lora.utils", LORA, calls("parse_fine_tuned_lora_name(name, weights_mapper)")),
    owner("vllm.model_executor.layers.attention.mla_attention:MLAAttention", LORA, reads("kv_b_proj")),
    owner("vllm.model_executor.models.utils:WeightsMapper", LORA, calls("get_rename_mapper()")),
    # -- computing ---------------------------------------------------------------------------------------------------
    owner(
        "vllm.lora.layers.base:BaseLayerWithLoRA",
        LORA,
        calls(*_SLOTTED),
        replaces("set_mapping(punica_wrapper)", feature=CPU_LORA),
    ),
    owner(
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA",
        LORA,
        calls(*_SLOTTED),
        reads("lora_a_stacked lora_b_stacked tp_size"),
        looks_up("_apply_lora_to_output", "add_lora_linear", CPU_LORA),
        replaces("_apply_lora_to_output(x, output)", feature=CUDA_LORA),
    ),
    owner(
        "vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA", LORA, calls(*_SLOTTED)
    ),
    owner(
        "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA",
        LORA,
        calls(*_SLOTTED),
        looks_up("_get_logits", "add_lora_logits", CPU_LORA),
    ),
    owner(
        "vllm.lora.layers.vocab_parallel_embedding:VocabParallelEmbeddingWithLoRA",
        LORA,
        calls(*_SLOTTED),
        looks_up("forward", "add_lora_embedding", CPU_LORA),
    ),
    # -- our arithmetic on a CPU -------------------------------------------------------------------------------------
    owner("vllm.lora.model_manager", CPU_LORA, replaces("get_punica_wrapper")),
    owner(
        "vllm.lora.model_manager:LoRAModelManager",
        CPU_LORA,
        looks_up("_init_punica_wrapper", "get_punica_wrapper"),
        looks_up("_create_lora_modules", "set_mapping"),
        looks_up("activate_adapter", "set_lora reset_lora"),
        looks_up("_set_adapter_mapping", "update_metadata"),
    ),
    owner(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        CPU_LORA,
        overrides(
            "__init__(max_num_batched_tokens, max_batches, device, **kwargs)",
            "update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)",
            "add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs)",
            "add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs)",
            "add_lora_embedding(y, x, lora_b_stacked, add_inputs=True, **kwargs)",
            "add_shrink(y, x, lora_a_stacked, scale, **kwargs)",
            "add_expand(y, x, lora_b_stacked, output_slices, offset_start=0, add_inputs=True, **kwargs)",
        ),
    ),
    # -- rows of adapters that are still on their way to a GPU -------------------------------------------------------
    owner(
        "vllm.utils.torch_utils",
        LORA,
        calls("direct_register_custom_op(*, op_name, op_func, mutates_args, fake_impl)"),
    ),
)
