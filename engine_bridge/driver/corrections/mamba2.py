"""Prefix caching of Mamba2 layers on a CPU.

Behind a prompt's last whole block vLLM keeps these layers' state from the middle of a step, which its kernel for CPUs does not give: the first prompt
that takes several steps fails. Without that vLLM ends a step there, as it does for all other recurrent layers. Source: vLLM 0.32,
`model_executor/layers/mamba/mamba_mixer2.py` and `ops/cpu/mamba_ssm.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any


def install() -> None:
    """Make vLLM's layers say that they keep no state from the middle of a step."""
    from engine_bridge.driver.vllm_api import MambaMixer2

    stock = MambaMixer2.get_kv_cache_spec
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        """Return what the layer keeps, as vLLM has it, without a block for a state from the middle of a step."""
        spec = stock(self, vllm_config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
