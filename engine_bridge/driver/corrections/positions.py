"""How long a context is where RoPE is scaled by its length ("dynamic", "ntk").

vLLM allows such a model a context that is longer by the factor of its RoPE, and makes a table of positions for the trained context alone. A token
behind the table's end is turned by what lies in memory there, so its answer is noise. Here the context ends with the table. Source: vLLM 0.32,
`config/model.py`, `_get_and_verify_max_len`, and `model_executor/layers/rotary_embedding/dynamic_ntk_scaling_rope.py`, `ntk_scaling_rope.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache, wraps
from typing import Any

log = logging.getLogger(__name__)

# Of the kinds for which vLLM multiplies the context, those whose table is no longer for it.
_KINDS = frozenset(("dynamic", "ntk"))


def install() -> None:
    """Make vLLM give a model no longer a context than its layers have positions for."""
    from engine_bridge.driver.vllm_api import ModelConfig

    stock = ModelConfig.get_and_verify_max_len
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def get_and_verify_max_len(self: Any, max_model_len: int) -> int:
        """Return the length of the longest context, as vLLM has it, or the number of positions where that is less."""
        found: int = stock(self, max_model_len)
        num_positions = getattr(self.hf_text_config, "max_position_embeddings", None) or found
        if found <= num_positions or not _KINDS & set(_kinds_of(self.hf_text_config)):
            return found
        _say(int(num_positions))
        return int(num_positions)

    ModelConfig.get_and_verify_max_len = get_and_verify_max_len


@cache
def _say(num_positions: int) -> None:
    """Say where the context ends, once: a model's configuration is read several times."""
    log.warning("the context ends at %s tokens: vLLM has no more positions of this model", num_positions)


def _kinds_of(config: Any) -> Iterable[str]:
    """Return the kinds of a model's RoPE, of which layers may have several."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in found.values() if isinstance(each, dict)]
    return (each.get("rope_type", "") for each in (nested or [found]))
