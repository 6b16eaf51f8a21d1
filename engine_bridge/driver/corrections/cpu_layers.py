"""Layers of models for which vLLM's kernels for CPUs compute something else than its kernels for GPUs, or fail.

Each function here replaces one part of vLLM's, once in a process.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, wraps
from typing import Any


@cache
def flatten_heads() -> None:
    """Have rotary position embeddings take queries and keys that have a separate dimension for their heads.

    vLLM's kernel takes the last stride but one for the distance between two tokens. That holds for (num_tokens, num_heads × head_size). With
    (num_tokens, num_heads, head_size), as multi-head latent attention has it, the kernel turns other numbers than it should, and every position but
    the first is wrong. Source: vLLM 0.32, `csrc/cpu/pos_encoding.cpp` and `model_executor/layers/mla.py`.
    """
    from engine_bridge.driver.vllm_api import _custom_ops

    stock = _custom_ops.rotary_embedding

    @wraps(stock)
    def rotary_embedding(positions: Any, query: Any, key: Any, *rest: Any, **options: Any) -> None:
        """Rotate `query` and `key`, which may be None, by `positions`, in place."""
        if query.dim() == positions.dim() + 1:
            stock(positions, query, key, *rest, **options)
            return
        flat = [None if each is None else each.contiguous().flatten(positions.dim()) for each in (query, key)]
        stock(positions, *flat, *rest, **options)
        for each, rotated in zip((query, key), flat, strict=True):
            if rotated is not None and not each.is_contiguous():
                each.copy_(rotated.view_as(each))

    _custom_ops.rotary_embedding = rotary_embedding


@cache
def end_steps_at_states() -> None:
    """Have Mamba2 layers say that they keep no state from the middle of a step, so that their prefixes are cached.

    Behind a prompt's last whole block vLLM keeps these layers' state from the middle of a step, which its kernel for CPUs does not give: the first
    prompt that takes several steps fails. Without that vLLM ends a step there, as it does for all other recurrent layers. Source: vLLM 0.32,
    `model_executor/layers/mamba/mamba_mixer2.py` and `ops/cpu/mamba_ssm.py`.
    """
    from engine_bridge.driver.vllm_api import MambaMixer2

    stock = MambaMixer2.get_kv_cache_spec

    @wraps(stock)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        """Return what the layer keeps, as vLLM has it, without a block for a state from the middle of a step."""
        spec = stock(self, vllm_config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec


@cache
def take_single_tokens() -> None:
    """Have gated delta nets compute a prompt of one token.

    vLLM's convolution takes its tokens as columns that lie one behind the other, and refuses a single column of a wider tensor: the distance to a
    next column, of which there is none, is another one than the kernel expects. A prompt of one token would end the engine. Source: vLLM 0.32,
    `model_executor/layers/mamba/ops/cpu/gdn_attention.py`.
    """
    from engine_bridge.driver.vllm_api import _custom_ops

    stock = _custom_ops.causal_conv1d_fwd_cpu

    @wraps(stock)
    def causal_conv1d_fwd_cpu(x: Any, *rest: Any, **options: Any) -> Any:
        """Convolve `x`, of shape (size, num_tokens)."""
        if x.shape[1] == 1 and x.stride(0) == 1:
            x = x.as_strided(x.shape, (1, x.shape[0]))
        return stock(x, *rest, **options)

    _custom_ops.causal_conv1d_fwd_cpu = causal_conv1d_fwd_cpu


@cache
def group_experts() -> None:
    """Have routers take experts that are in no groups as one group, where the model chooses them with a learned bias or by single sigmoids.

    vLLM's router for CPUs knows both for experts in groups alone. Without groups it leaves the bias out, so that other experts are chosen than the
    model was trained with (ERNIE 4.5), and refuses sigmoids (MiniMax-M2). All experts in one group are as good as in none, and what the router
    computes then is what vLLM computes on a GPU. Source: vLLM 0.32, `model_executor/layers/fused_moe/router/cpu_router.py`.
    """
    from engine_bridge.driver.vllm_api import CPURouter

    stock = CPURouter.__init__

    @wraps(stock)
    def init(self: Any, **options: Any) -> None:
        """Make a router, as vLLM has it, with a group where it needs one."""
        scores, is_grouped = options.get("scoring_func", "softmax"), options.get("use_grouped_topk")
        has_bias = scores == "softmax" and options.get("e_score_correction_bias") is not None
        if (
            (has_bias or scores == "sigmoid")
            and not is_grouped
            and not options.get("custom_routing_function")
        ):
            options |= {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
        stock(self, **options)

    CPURouter.__init__ = init
