"""Experts beside adapters: on a CPU they take none, and what stands beside them takes its own everywhere.

With adapters vLLM computes all experts by kernels of Triton, which can also compute experts' own adapters, and which a CPU lacks. Here experts take
no adapters on a CPU, and are computed as they are without: attention, shared experts and dense layers have adapters all the same.

Source: vLLM 0.32, `model_executor/layers/fused_moe/oracle/unquantized.py` and `lora/model_manager.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def install() -> None:
    """Have the engines of this process compute experts as they would without adapters."""
    from engine_bridge.driver.vllm_api import layer

    make = layer.FusedMoEConfig
    layer.FusedMoEConfig = lambda **options: make(**options | {"is_lora_enabled": False})


def leave_experts_out(manager: Any) -> None:
    """Have a new LoRA manager of vLLM's take no adapters for experts."""
    from engine_bridge.driver.vllm_api import MoERunner

    modules = manager.model.named_modules()
    experts = {path.rpartition(".")[2] for path, module in modules if isinstance(module, MoERunner)}
    takers = manager.supported_lora_modules
    manager.supported_lora_modules = [name for name in takers if name not in experts]


def names_outside(model: Any) -> dict[str, str]:
    """Return, by their names inside what runs a mixture's experts, the names that modules such as shared experts have beside it.

    Checkpoints and adapters have them by the latter. vLLM takes the name that it meets first: that is the one inside where transformers' class, which
    vLLM runs, makes its experts first (dots.llm1), so that an adapter's weights for them would fit no module.
    """
    from engine_bridge.driver.vllm_api import MoERunner

    inside = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, MoERunner))
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(path)
    outside = {key: [each for each in of if not each.startswith(inside)] for key, of in names.items()}
    return {
        name: outside[key][0]
        for key, of in names.items()
        for name in of
        if name.startswith(inside) and outside[key]
    }
