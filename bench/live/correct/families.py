"""Tiny checkpoints of model families, with random weights: what differs between families is how attention is masked, packed and cached.

Weights are wide enough that an answer depends on all of its context, so a KV block of another conversation shows as a wrong token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from bench.live.correct.pictures import TOKENS

VOCAB_SIZE = 320
HIDDEN, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 128, 4, 4, 2, 32
MAX_MODEL_LEN = 1024
WINDOW_TOKENS = 128
ADAPTER_RANK, ADAPTER_ALPHA = 8, 16
KV_TOKEN_BYTES = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4
# What LoRA is put on: these names in every family, as PEFT's "all-linear" would, without experts, recurrent layers and the head.
ADAPTED = "q_proj k_proj v_proj o_proj qkv_proj gate_proj up_proj down_proj gate_up_proj".split()

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WITH_HEAD_DIM = _SIZES | {"head_dim": HEAD_DIM}

# A token that stands anywhere before has those behind it drafted: most are wrong ones in an answer of a model of random weights.
DRAFTS_BY_LOOKUP = "--speculative-config=" + json.dumps(
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
)


class Family(Struct, frozen=True):
    """A family's tiny model.

    Attributes:
        config_class: of transformers; config: its arguments.
        extra: fields that config.json has beside them.
        flags: with which the server is started.
        reuses_kv: whether a prompt that is asked again finds its KV; where vLLM turns prefix caching off, nothing may be reused.
        num_adapters: beside the model; 0 where vLLM's class takes none.
        adapted: module names that the adapters change.
        kv_token_bytes: of one token's KV over all layers.
        drafted_by: how vLLM drafts tokens for it: "ngram", "eagle" (a head of random weights, so its drafts are wrong), "mtp" (the same, of the
            model's own last layer) or "draft_model" (the same model, so they are right); "" for not at all.
        kv_cache_dtype: of the KV cache; "" for the dtype of the weights.
        computed_as: fields of its configuration that vLLM computes with in place of what they say.
        quantised: the form of its weights, of `quantising.METHODS`; "" for plain ones.
        operation: of vLLM's for CPUs, which it computes with; "" for none that any CPU lacks.
        has_chat: whether vLLM renders its conversations by the chat template; else by a vocabulary that it would fetch.
        sight: how it reads pictures, by its name in `pictures.SIGHTS`; "" for a model that reads none.
        renamed: parts of weights' names, and what published checkpoints have in place of them.
    """

    name: str
    config_class: str
    config: Mapping[str, Any]
    extra: Mapping[str, Any] = {}
    computed_as: Mapping[str, Any] = {}
    flags: Sequence[str] = ()
    reuses_kv: bool = True
    num_adapters: int = 2
    adapted: Sequence[str] = tuple(ADAPTED)
    kv_token_bytes: int = KV_TOKEN_BYTES
    drafted_by: str = ""
    dtype: str = "float32"
    kv_cache_dtype: str = ""
    quantised: str = ""
    operation: str = ""
    has_chat: bool = True
    sight: str = ""
    renamed: Mapping[str, str] = {}

    @property
    def has_own_rounding(self) -> bool:
        """Whether transformers computes other logits than vLLM, by more than the wrong KV of a block might change them."""
        return bool(self.quantised or self.kv_cache_dtype) or self.dtype != "float32"

    def is_computable(self) -> bool:
        """Return whether vLLM has kernels of this model for this machine's processor."""
        if not self.operation:
            return True
        import torch
        from vllm import _custom_ops  # noqa: F401 - it registers the operations

        return hasattr(torch.ops._C, self.operation)


_MLA = _SIZES | {
    "num_key_value_heads": NUM_HEADS,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": NUM_LAYERS,  # no layer has experts
    "n_group": 2,
    "topk_group": 1,
}
_MLA_EXTRA = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
}

_LAST_IS_FULL = ["sliding_attention"] * (NUM_LAYERS - 1) + ["full_attention"]
_CONVOLUTIONS = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_dim": HIDDEN,
    "conv_dim_out": HIDDEN,
    "block_dim": HIDDEN,
    "tie_word_embeddings": True,
}
_MAMBA2 = {"n_heads": 8, "d_head": 32, "n_groups": 1, "d_state": 32}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}

_DELTA_NETS = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,  # other sizes vLLM's kernel does not know
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
}
_QWEN_TOKENS = {
    "image_token_id": TOKENS["<|image_pad|>"],
    "video_token_id": TOKENS["<|video_pad|>"],
    "vision_start_token_id": TOKENS["<|vision_start|>"],
    "vision_end_token_id": TOKENS["<|vision_end|>"],
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INTERLEAVED = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
_VISION = {"hidden_size": 64, "intermediate_size": 128}
_QWEN3_VISION = _VISION | {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": HIDDEN,
}

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": MAX_MODEL_LEN // 4}
_WINDOW = {"sliding_window": WINDOW_TOKENS}
_MIXED_WINDOWS = _WINDOW | {"layer_types": _LAST_IS_FULL}
_GEMMA = _WITH_HEAD_DIM | _WINDOW | {"query_pre_attn_scalar": HEAD_DIM}
_GEMMA4 = _WITH_HEAD_DIM | _WINDOW | {"global_head_dim": 2 * HEAD_DIM}
_MAMBA2_SIZES = {f"mamba_{name}": size for name, size in _MAMBA2.items()}
_TWICE = 2 * KV_TOKEN_BYTES

FAMILIES = (
    Family("llama", "LlamaConfig", _WITH_HEAD_DIM),
    Family("llama-ngram", "LlamaConfig", _WITH_HEAD_DIM, drafted_by="ngram"),
    Family("llama-eagle", "LlamaConfig", _WITH_HEAD_DIM, drafted_by="eagle", kv_token_bytes=_TWICE),
    Family(
        "llama-draft-model", "LlamaConfig", _WITH_HEAD_DIM, drafted_by="draft_model", kv_token_bytes=_TWICE
    ),
    Family("llama-yarn", "LlamaConfig", _WITH_HEAD_DIM | {"rope_parameters": _YARN}),
    Family("llama-head-80", "LlamaConfig", _SIZES | {"head_dim": 80}, kv_token_bytes=5 * KV_TOKEN_BYTES // 2),
    Family("llama-kv-fp8", "LlamaConfig", _WITH_HEAD_DIM, dtype="bfloat16", kv_cache_dtype="fp8"),
    Family("qwen2", "Qwen2Config", _SIZES),
    Family("qwen3", "Qwen3Config", _WITH_HEAD_DIM),
    Family("mistral-window", "MistralConfig", _WITH_HEAD_DIM | _WINDOW),
    Family(
        "ministral3",  # queries grow behind the first quarter of its context
        "Ministral3Config",
        _WITH_HEAD_DIM | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    ),
    Family("phi3-window", "Phi3Config", _SIZES | _WINDOW),
    Family(
        "glm4",
        "Glm4Config",
        _WITH_HEAD_DIM | {"partial_rotary_factor": 0.5},
        # vLLM takes no adapter on this model's gate_up_proj, which it packs of two that the checkpoint lacks.
        adapted=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
    ),
    Family(
        "deepseek-mla",
        "DeepseekV3Config",
        _MLA,
        extra=_MLA_EXTRA,
        reuses_kv=False,
        # vLLM adds nothing of an adapter to kv_b_proj, which its attention reads past the layer; the server says so of an adapter that has it.
        adapted=("q_a_proj", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        kv_token_bytes=NUM_LAYERS * (512 + 64) * 4,
    ),
    Family(
        "minicpm3",  # latent attention that is computed, and so kept, as usual attention
        "MiniCPM3Config",
        _SIZES
        | {"num_key_value_heads": NUM_HEADS, "q_lora_rank": 64, "kv_lora_rank": 64}
        | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
        extra={"architectures": ["MiniCPM3ForCausalLM"]},
        adapted=("q_a_proj", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        kv_token_bytes=4 * KV_TOKEN_BYTES,
    ),
    Family(
        "opt",  # positions are learned, not turned
        "OPTConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS}
        | {"num_attention_heads": NUM_HEADS, "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN}
        | {"max_position_embeddings": MAX_MODEL_LEN, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        adapted=("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
        kv_token_bytes=_TWICE,
    ),
    Family(
        "gpt-bigcode",  # all heads share one head of keys
        "GPTBigCodeConfig",
        {"vocab_size": VOCAB_SIZE, "n_embd": HIDDEN, "n_layer": NUM_LAYERS, "n_head": NUM_HEADS}
        | {"n_positions": MAX_MODEL_LEN, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        num_adapters=0,
        kv_token_bytes=KV_TOKEN_BYTES // 2,
    ),
    Family(
        "qwen2-window",
        "Qwen2Config",
        _SIZES
        | {"use_sliding_window": True, "sliding_window": WINDOW_TOKENS, "max_window_layers": 0}
        | {"layer_types": ["sliding_attention"] * NUM_LAYERS},
    ),
    Family(
        "granite",
        "GraniteConfig",
        _SIZES | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.25},
    ),
    Family("cohere", "CohereConfig", _SIZES | {"tie_word_embeddings": True, "logit_scale": 0.5}),
    # vLLM runs transformers' classes for these families.
    Family(
        "starcoder2-window",
        "Starcoder2Config",
        _SIZES | _WINDOW,
        adapted=("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
    ),
    Family("olmo2", "Olmo2Config", _SIZES),
    Family(
        "phi",
        "PhiConfig",
        _SIZES | {"partial_rotary_factor": 0.5},
        adapted=("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    ),
    Family("stablelm", "StableLmConfig", _SIZES, num_adapters=0),
    Family(
        "gpt-neox",  # all its heads have keys of their own
        "GPTNeoXConfig",
        _SIZES | {"num_key_value_heads": NUM_HEADS},
        num_adapters=0,
        kv_token_bytes=_TWICE,
    ),
    Family(
        "bloom",  # no positions but in the attention itself
        "BloomConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "n_layer": NUM_LAYERS, "n_head": NUM_HEADS}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        num_adapters=0,
        kv_token_bytes=_TWICE,
    ),
    Family("smollm3", "SmolLM3Config", _SIZES),
    # Layers of two kinds, whose KV caches share memory.
    Family("gemma2", "Gemma2Config", _GEMMA | {"tie_word_embeddings": True}),
    Family("gemma3", "Gemma3TextConfig", _GEMMA | {"layer_types": _LAST_IS_FULL}, num_adapters=8),
    Family("gemma3-ngram", "Gemma3TextConfig", _GEMMA | {"layer_types": _LAST_IS_FULL}, drafted_by="ngram"),
    Family("exaone4", "Exaone4Config", _SIZES | _MIXED_WINDOWS),
    Family(
        "cohere2",
        "Cohere2Config",
        _SIZES | _MIXED_WINDOWS | {"tie_word_embeddings": True, "logit_scale": 0.5},
        # The window leaves out the token itself, as vLLM's class says of how these models were trained.
        computed_as={"sliding_window": WINDOW_TOKENS + 1},
    ),
    Family("olmo3", "Olmo3Config", _SIZES | _MIXED_WINDOWS),
    Family(
        "gemma4",  # layers of two sizes, of which the last ones have the KV of earlier ones
        "Gemma4TextConfig",
        _GEMMA4
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 32}
        | {"use_double_wide_mlp": True},
        kv_token_bytes=_TWICE,
    ),
    Family(
        "gemma4-experts",  # in full attention the values are the keys, so that an adapter of k_proj changes both
        "Gemma4TextConfig",
        _GEMMA4
        | {"layer_types": _LAST_IS_FULL, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"hidden_size_per_layer_input": 0, "enable_moe_block": True}
        | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    ),
    # Experts.
    Family("mixtral", "MixtralConfig", _SIZES | {"num_local_experts": 4}),
    Family("qwen3-moe", "Qwen3MoeConfig", _WITH_HEAD_DIM | _EXPERTS),
    Family("olmoe", "OlmoeConfig", _SIZES | {"num_experts": 8, "num_experts_per_tok": 2}),
    Family(
        "gpt-oss",
        "GptOssConfig",
        _WITH_HEAD_DIM
        | _WINDOW
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
        has_chat=False,
    ),
    Family(
        "llama4",
        "Llama4TextConfig",
        _WITH_HEAD_DIM
        | {"intermediate_size_mlp": 2 * HIDDEN, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW_TOKENS, "use_qk_norm": True}
        | {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "no_rope_layers": [1, 1, 1, 0]},
    ),
    Family(
        "deepseek-experts",
        "DeepseekV3Config",
        _MLA | {"first_k_dense_replace": 1},
        extra=_MLA_EXTRA,
        reuses_kv=False,
        adapted=("q_a_proj", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        kv_token_bytes=NUM_LAYERS * (512 + 64) * 4,
    ),
    Family(
        "ernie4.5-experts",  # chosen with a bias that does not weigh them
        "Ernie4_5_MoeConfig",
        _SIZES
        | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 64}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 3},
        adapted=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    Family(
        "dots1",  # vLLM runs transformers' class, whose adapters change what stands beside the experts, too
        "Dots1Config",
        _WITH_HEAD_DIM
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
        | {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    Family(
        "glm4-experts-mtp",
        "Glm4MoeConfig",
        # The last layer is the one that drafts.
        _WITH_HEAD_DIM
        | {
            "num_hidden_layers": NUM_LAYERS + 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
        }
        | {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "use_qk_norm": True},
        extra={"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1},
        adapted=("q_proj", "k_proj", "v_proj", "o_proj"),
        drafted_by="mtp",
        kv_token_bytes=KV_TOKEN_BYTES + KV_TOKEN_BYTES // NUM_LAYERS,
    ),
    # Recurrent layers, some of them in the memory of attention's blocks.
    Family(
        "lfm2",
        "Lfm2Config",
        _SIZES | _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False, "block_ff_dim": 2 * HIDDEN},
        adapted=("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3"),
        kv_token_bytes=_TWICE,
    ),
    Family(
        "lfm2-experts",
        "Lfm2MoeConfig",
        _SIZES
        | _CONVOLUTIONS
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_dense_layers": 1},
        adapted=("q_proj", "k_proj", "v_proj", "out_proj"),
        kv_token_bytes=_TWICE,
    ),
    Family(
        "granite4",
        "GraniteMoeHybridConfig",
        _SIZES
        | {"layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 0}
        | {"num_experts_per_tok": 0, "shared_intermediate_size": 256, "position_embedding_type": "nope"}
        | _MAMBA2_SIZES
        | {"mamba_expand": 2},
        kv_token_bytes=_TWICE,
    ),
    Family(
        "falcon-h1",  # each layer has both
        "FalconH1Config",
        _WITH_HEAD_DIM | _MAMBA2_SIZES | {"mamba_n_heads": 4, "mamba_d_ssm": HIDDEN},
        kv_token_bytes=_TWICE,
    ),
    Family(
        "qwen3-next",  # gated delta nets, which vLLM computes in this precision alone, and without adapters
        "Qwen3NextConfig",
        _WITH_HEAD_DIM
        | _DELTA_NETS
        | {"shared_expert_intermediate_size": 64}
        # Each token goes to all experts: rounding would send it to others.
        | {
            "num_key_value_heads": NUM_HEADS,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        dtype="bfloat16",
        num_adapters=0,
        kv_token_bytes=_TWICE,
    ),
    Family(
        "mamba2",  # no attention, so vLLM keeps no state that could be found again
        "Mamba2Config",
        {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS}
        | {"num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 1}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        reuses_kv=False,
        num_adapters=0,
        kv_token_bytes=_TWICE,
    ),
    Family(
        "jamba",
        "JambaConfig",
        _SIZES
        | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 2}
        | {"use_mamba_kernels": False},
        operation="selective_scan_fwd",
        kv_token_bytes=_TWICE,
    ),
    # Quantised weights.
    *(
        Family(
            f"qwen3-{form}",
            "Qwen3Config",
            _WITH_HEAD_DIM,
            dtype="bfloat16",
            quantised=form,
            operation="cpu_gemm_wna16",
        )
        for form in ("gptq", "awq")
    ),
    Family("qwen3-w8a8", "Qwen3Config", _WITH_HEAD_DIM, quantised="w8a8"),
    Family("qwen3-fp8", "Qwen3Config", _WITH_HEAD_DIM, dtype="bfloat16", quantised="fp8"),
    # Models that read pictures.
    Family(
        "qwen2.5-vl",
        "Qwen2_5_VLConfig",
        _QWEN_TOKENS
        | {"text_config": _SIZES | {"rope_parameters": _MROPE | {"mrope_section": [4, 6, 6]}}}
        | {
            "vision_config": _VISION
            | {"depth": 2, "num_heads": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
            | {"out_hidden_size": HIDDEN, "spatial_merge_size": 2, "temporal_patch_size": 2}
        },
        sight="qwen2.5-vl",
    ),
    Family(
        "qwen3-vl",
        "Qwen3VLConfig",
        _QWEN_TOKENS
        | {"text_config": _WITH_HEAD_DIM | {"rope_parameters": _MROPE | _INTERLEAVED}}
        | {"vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]}},
        sight="qwen3-vl",
    ),
    Family(
        "qwen3.5",
        "Qwen3_5Config",
        _QWEN_TOKENS
        | {
            "text_config": _WITH_HEAD_DIM
            | _DELTA_NETS
            | {"rope_parameters": _MROPE | _INTERLEAVED | {"partial_rotary_factor": 1.0}}
        }
        | {"vision_config": _QWEN3_VISION},
        sight="qwen3-vl",
        dtype="bfloat16",
        num_adapters=0,
        kv_token_bytes=_TWICE,
    ),
    Family(
        "llava",  # a picture takes as many tokens as it has patches, and no others
        "LlavaConfig",
        {"text_config": _WITH_HEAD_DIM | {"model_type": "llama"}}
        | {
            "vision_config": _VISION
            | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2}
            | {"patch_size": 14, "image_size": 56, "projection_dim": 64}
        }
        | {"image_token_index": TOKENS["<image>"], "vision_feature_layer": -1, "image_seq_length": 16},
        sight="llava",
        renamed={"vision_tower.": "vision_tower.vision_model."},
    ),
    Family(
        "mistral3",  # a token ends each row of a picture's patches
        "Mistral3Config",
        {"text_config": _WITH_HEAD_DIM | {"model_type": "mistral"}}
        | {
            "vision_config": _VISION
            | {"model_type": "pixtral", "num_hidden_layers": 2, "num_attention_heads": 2}
            | {"patch_size": 14, "image_size": 112, "head_dim": 32}
        }
        | {"image_token_index": TOKENS["<image>"], "vision_feature_layer": -1, "spatial_merge_size": 2},
        sight="pixtral",
    ),
    Family(
        "gemma3-vision",
        "Gemma3Config",
        {"text_config": _GEMMA | {"layer_types": _LAST_IS_FULL}}
        | {
            "vision_config": _VISION
            | {"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14, "image_size": 56}
        }
        | {"mm_tokens_per_image": 4, "boi_token_index": TOKENS["<start_of_image>"]}
        | {"eoi_token_index": TOKENS["<end_of_image>"], "image_token_index": TOKENS["<image_soft_token>"]},
        sight="gemma3",
        renamed={"vision_tower.": "vision_tower.vision_model."},
    ),
)
