"""Experts beside adapters on a CPU.

With adapters vLLM computes all experts by kernels of Triton, which can also compute experts' own adapters, and which a CPU lacks. Here experts take
no adapters on a CPU, and are computed as they are without: attention, shared experts and dense layers have adapters all the same.

Source: vLLM 0.32, `model_executor/layers/fused_moe/oracle/unquantized.py` and `lora/model_manager.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WithoutAdapters:
    """Makes vLLM's configuration of a layer's experts, in which they take no adapters."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, **options: Any) -> Any:
        """Return a `FusedMoEConfig` of these options."""
        return self._make(**options | {"is_lora_enabled": False})


def install() -> None:
    """Have the next engine of this process compute experts as it would without adapters."""
    from engine_bridge.driver.vllm_api import layer

    if not isinstance(layer.FusedMoEConfig, WithoutAdapters):
        layer.FusedMoEConfig = WithoutAdapters(layer.FusedMoEConfig)


def leave_experts_out(manager: Any) -> None:
    """Have a new LoRA manager of vLLM's take no adapters for experts."""
    from engine_bridge.driver.vllm_api import MoERunner

    modules = manager.model.named_modules()
    experts = {path.rpartition(".")[2] for path, module in modules if isinstance(module, MoERunner)}
    takers = manager.supported_lora_modules
    manager.supported_lora_modules = [name for name in takers if name not in experts]
