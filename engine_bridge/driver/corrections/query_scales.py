"""Queries that grow with their position, in Mistral's models whose config.json is in Hugging Face's format (Ministral 3).

vLLM's class knows the scale by the name that it has in Mistral's own format alone. Behind the context that such a model was first trained with, its
queries are too small then. Source: vLLM 0.32, `model_executor/models/mistral.py`; transformers 5.19, `models/ministral3`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def install() -> None:
    """Make vLLM's layers read the scale by both of its names."""
    from engine_bridge.driver.vllm_api import MistralAttention

    stock = MistralAttention.__init__
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def init(self: Any, config: Any, *rest: Any, **options: Any) -> None:
        """Make a layer, as vLLM has it, of a configuration that names the scale as vLLM does."""
        rope = getattr(config, "rope_parameters", None) or {}
        beta, first_context = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        # Without the first context nobody knows where the scale begins: the model is served as vLLM serves it.
        if beta and first_context and getattr(config, "llama_4_scaling", None) is None:
            config.llama_4_scaling = {"beta": beta, "original_max_position_embeddings": first_context}
        stock(self, config, *rest, **options)

    MistralAttention.__init__ = init
