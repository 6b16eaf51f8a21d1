"""Which of our scheduler classes an engine gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.emulated.core.vllm_parts import Engine, make_scheduler
from engine_bridge.driver.scheduling.seam import SCHEDULER, GatedAsyncScheduler, GatedScheduler


def scheduler_with(**settings: Any) -> Any:
    other: Any = make_scheduler(Engine(num_blocks=8), None)
    config = copy.copy(other.vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    for name, value in {"scheduler_cls": SCHEDULER, **settings}.items():
        setattr(config.scheduler_config, name, value)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=other.kv_cache_config,
        structured_output_manager=other.structured_output_manager,
        include_finished_set=False,
        log_stats=False,
        block_size=other.block_size,
        hash_block_size=other.block_size,
    )


@pytest.mark.parametrize(
    ("schedules_ahead", "wanted"), [(True, GatedAsyncScheduler), (False, GatedScheduler)]
)
def test_an_engine_gets_the_scheduler_for_what_vllm_has_decided(schedules_ahead: bool, wanted: type) -> None:
    """As vLLM makes it: by the name in its settings, with keywords."""
    made = scheduler_with(async_scheduling=schedules_ahead)
    assert type(made) is wanted


@pytest.mark.parametrize(("takes_parts", "most_tokens"), [(False, 64), (True, 16)])
def test_a_step_has_room_for_the_longest_prompt_that_is_computed_whole(
    takes_parts: bool, most_tokens: int
) -> None:
    """With drafted tokens vLLM notes the room before it knows that."""
    settings = {
        "enable_chunked_prefill": takes_parts,
        "max_num_batched_tokens": 64,
        "max_num_scheduled_tokens": 16,
    }
    assert scheduler_with(**settings).max_num_scheduled_tokens == most_tokens
