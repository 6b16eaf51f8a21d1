"""Rotary position embeddings on a CPU, for queries and keys that have a separate dimension for their heads.

vLLM's kernel takes the last stride but one for the distance between two tokens. That holds for (num_tokens, num_heads × head_size). With (num_tokens,
num_heads, head_size), as multi-head latent attention has it, the kernel turns other numbers than it should, and every position but the first is
wrong. Source: vLLM 0.32, `csrc/cpu/pos_encoding.cpp` and `model_executor/layers/mla.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FlatHeads:
    """vLLM's operation, given tensors without a dimension for heads. It changes queries and keys in place, as vLLM's does."""

    def __init__(self, rotate: Callable[..., None]) -> None:
        self._rotate = rotate

    def __call__(self, positions: Any, query: Any, key: Any, *rest: Any, **options: Any) -> None:
        """Rotate `query` and `key`, which may be None, by `positions`. Further arguments are passed on to vLLM's operation."""
        if query.dim() == positions.dim() + 1:
            self._rotate(positions, query, key, *rest, **options)
            return
        flat = [None if each is None else each.contiguous().flatten(positions.dim()) for each in (query, key)]
        self._rotate(positions, *flat, *rest, **options)
        for each, rotated in zip((query, key), flat, strict=True):
            if rotated is not None and not each.is_contiguous():
                each.copy_(rotated.view_as(each))


def install() -> None:
    """Make vLLM's layers call the operation in this way."""
    from engine_bridge.driver.vllm_api import _custom_ops

    if not isinstance(_custom_ops.rotary_embedding, FlatHeads):
        _custom_ops.rotary_embedding = FlatHeads(_custom_ops.rotary_embedding)
