"""Prompts of one token for gated delta nets on a CPU.

vLLM's convolution takes its tokens as columns that lie one behind the other, and refuses a single column of a wider tensor: the distance to a next
column, of which there is none, is another one than the kernel expects. A prompt of one token would end the engine. Source: vLLM 0.32,
`model_executor/layers/mamba/ops/cpu/gdn_attention.py`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def install() -> None:
    """Make vLLM's layers call the convolution with a single token as it expects it."""
    from engine_bridge.driver.vllm_api import _custom_ops

    stock = _custom_ops.causal_conv1d_fwd_cpu
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def causal_conv1d_fwd_cpu(x: Any, *rest: Any, **options: Any) -> Any:
        """Convolve `x`, of shape (size, num_tokens)."""
        if x.shape[1] == 1 and x.stride(0) == 1:
            x = x.as_strided(x.shape, (1, x.shape[0]))
        return stock(x, *rest, **options)

    _custom_ops.causal_conv1d_fwd_cpu = causal_conv1d_fwd_cpu
