"""Which experts compute a token on a CPU, where the model chooses them with a learned bias or by single sigmoids.

vLLM's router for CPUs knows both for experts in groups alone. Without groups it leaves the bias out, so that other experts are chosen than the model
was trained with (ERNIE 4.5), and refuses sigmoids (MiniMax-M2). All experts in one group are as good as in none, and what the router computes then is
what vLLM computes on a GPU. Source: vLLM 0.32, `model_executor/layers/fused_moe/router/cpu_router.py`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def install() -> None:
    """Make vLLM's routers take experts that are in no groups as one group, where they have a bias or sigmoids."""
    from engine_bridge.driver.vllm_api import CPURouter

    stock = CPURouter.__init__
    if hasattr(stock, "__wrapped__"):
        return

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
