"""What our settings come to as vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_bridge.driver.engine.building import engine_args
from engine_bridge.settings.engine_config import EngineConfig
from gateway.settings.config import DEMO_MODEL_DIR


@pytest.mark.parametrize("gib", [0.125, 1.0, 1.5])
def test_a_cpus_kv_cache_has_the_size_that_was_said(gib: float, tmp_path: Path) -> None:
    config = EngineConfig(model=str(DEMO_MODEL_DIR), served_model_name="demo", device="cpu", kv_cache_gib=gib)
    assert engine_args(config, None).kv_cache_memory_bytes == gib * 2**30


@pytest.mark.parametrize(("gib", "num_bytes"), [(None, None), (2.5, 5 * 2**29)])
def test_a_gpus_kv_cache_has_the_size_that_was_said_or_what_its_share_of_memory_leaves(
    gib: float | None, num_bytes: int | None
) -> None:
    config = EngineConfig(
        model=str(DEMO_MODEL_DIR), served_model_name="demo", device="cuda", kv_cache_gib=gib
    )
    assert engine_args(config, None).kv_cache_memory_bytes == num_bytes


def test_a_cpus_kv_cache_is_a_gibibyte_where_nobody_says_otherwise() -> None:
    config = EngineConfig(model=str(DEMO_MODEL_DIR), served_model_name="demo", device="cpu")
    assert engine_args(config, None).kv_cache_memory_bytes == 2**30
