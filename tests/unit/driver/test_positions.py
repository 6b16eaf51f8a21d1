"""A context ends where the table of positions does that vLLM's layers look tokens up in."""

import json
from pathlib import Path

import pytest
import torch

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize(("kind", "expected"), [("dynamic", 256), ("linear", 1024)])
def test_no_token_is_looked_up_behind_the_table(tmp_path: Path, kind: str, expected: int) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from engine_bridge.driver.corrections import positions
    from engine_bridge.driver.vllm_api import ModelConfig

    positions.install()
    scaled = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0}
    described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(described | SIZES | {"rope_parameters": scaled}))
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(32, max_position=256, rope_parameters=scaled, dtype=torch.float32)
    assert model.max_model_len == len(rope.cos_sin_cache) == expected
