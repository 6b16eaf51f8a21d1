"""Which of our scheduler classes an engine gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.emulated.core.vllm_parts import Engine, make_scheduler
from engine_bridge.driver.scheduling.seam import SCHEDULER, GatedAsyncScheduler, GatedScheduler


@pytest.mark.parametrize(
    ("schedules_ahead", "wanted"), [(True, GatedAsyncScheduler), (False, GatedScheduler)]
)
def test_an_engine_gets_the_scheduler_for_what_vllm_has_decided(schedules_ahead: bool, wanted: type) -> None:
    """As vLLM makes it: by the name in its settings, with keywords."""
    other: Any = make_scheduler(Engine(num_blocks=8), None)
    config = copy.copy(other.vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = schedules_ahead
    config.scheduler_config.scheduler_cls = SCHEDULER
    made = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=other.kv_cache_config,
        structured_output_manager=other.structured_output_manager,
        include_finished_set=False,
        log_stats=False,
        block_size=other.block_size,
        hash_block_size=other.block_size,
    )
    assert type(made) is wanted
