"""The device's blocks that a restored request with recurrent layers needs.

It needs two for each group of such layers: one for the state that is loaded, and one in which it computes. vLLM counts the second only, so where
memory is short it begins to give out blocks, finds too few, and the step fails with all requests. Source: vLLM 0.32,
`v1/core/single_type_kv_cache_manager.py`, `MambaManager`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def install() -> None:
    """Make vLLM's manager of recurrent layers count both blocks."""
    from engine_bridge.driver.vllm_api import MambaManager

    stock = MambaManager.get_num_blocks_to_allocate
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def get_num_blocks_to_allocate(
        self: Any,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Return vLLM's count, and one more where a state is loaded from elsewhere."""
        known = (num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens)
        num_blocks: int = stock(self, request_id, *known, *args, **kwargs)
        return num_blocks + (total_computed_tokens > num_local_computed_tokens)

    MambaManager.get_num_blocks_to_allocate = get_num_blocks_to_allocate
