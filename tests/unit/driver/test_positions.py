"""A context is no longer than the table of positions that vLLM's layers look tokens up in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_bridge.driver.engine.model_facts import num_positions_of

TRAINED, FACTOR = 256, 4


def config_of(rope_parameters: Any) -> Any:
    return SimpleNamespace(max_position_embeddings=TRAINED, rope_parameters=rope_parameters)


@pytest.mark.parametrize("kind", ["dynamic", "linear"])
def test_no_token_is_looked_up_behind_the_table(kind: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    scaled = {"rope_type": kind, "factor": float(FACTOR), "rope_theta": 10_000.0}
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(32, max_position=TRAINED, rope_parameters=scaled, dtype=torch.float32)
    allowed = TRAINED * FACTOR  # by vLLM
    assert len(rope.cos_sin_cache) == (num_positions_of(config_of(scaled)) or allowed)


def test_one_kind_of_layers_is_enough() -> None:
    kinds = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert num_positions_of(config_of(kinds)) == TRAINED
    assert num_positions_of(config_of(None)) is None
