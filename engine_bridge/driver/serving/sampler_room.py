"""The widths of the tables in which vLLM's newer model runner keeps requests' settings: see `engine_bridge/policy/limits/sampler_room.py`."""

from __future__ import annotations

from typing import Any

from engine_bridge.policy.limits.sampler_room import SamplerRoom
from engine_bridge.protocol.errors import SeamMoved


def sampler_room_of(vllm_config: Any) -> SamplerRoom | None:
    """Return what a built engine's sampler has room for; None where it has no tables, as in vLLM's older model runner, or where they have moved."""
    if not vllm_config.use_v2_model_runner:
        return None
    try:
        return newer_sampler_room()
    except SeamMoved:  # the start has said so
        return None


def newer_sampler_room() -> SamplerRoom:
    """Return what the newer model runner's sampler has room for. Raises SeamMoved."""
    from engine_bridge.driver.vllm_api import (
        MAX_NUM_ALLOWED_TOKEN_IDS,
        MAX_NUM_LOGIT_BIAS_TOKENS,
        MAX_NUM_STOP_TOKEN_IDS,
        VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        VLLM_MAX_NUM_BAD_WORDS,
    )

    return SamplerRoom(
        allowed_tokens=MAX_NUM_ALLOWED_TOKEN_IDS,
        biased_tokens=MAX_NUM_LOGIT_BIAS_TOKENS,
        stop_tokens=MAX_NUM_STOP_TOKEN_IDS,
        bad_words=VLLM_MAX_NUM_BAD_WORDS,
        bad_word_tokens=VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    )
