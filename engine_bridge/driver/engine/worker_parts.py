"""Our parts in place of vLLM's, in the process whose worker computes: the engine's own, or each rank of an engine of several.

Call `install` before the worker is made, and `watch` once its model is loaded.
"""

from __future__ import annotations

from typing import Any

from engine_bridge.driver.corrections import (
    bad_words,
    draft_groups,
    draft_settings,
    expert_routing,
    gated_delta,
    mamba2,
    missing_weights,
    query_scales,
    rotary,
    seeds,
)
from engine_bridge.driver.vllm_api.features import (
    BAD_WORDS,
    DRAFT_GROUPS,
    DRAFT_SETTINGS,
    EXPERT_ROUTING,
    GATED_DELTA,
    MAMBA2,
    MISSING_WEIGHTS,
    QUERY_SCALES,
    ROTARY,
    SEEDS,
)
from engine_bridge.driver.vllm_api.start import Off

_ON_CPU = {
    DRAFT_SETTINGS: draft_settings,
    ROTARY: rotary,
    MAMBA2: mamba2,
    GATED_DELTA: gated_delta,
    EXPERT_ROUTING: expert_routing,
}
_EVERYWHERE = {BAD_WORDS: bad_words, QUERY_SCALES: query_scales, MISSING_WEIGHTS: missing_weights}


def install(off: Off, *, on_cpu: bool, has_adapters: bool) -> None:
    """Replace parts of vLLM, except for features that are `off`. has_adapters: whether the worker's engine is built with LoRA."""
    if has_adapters and on_cpu:
        from engine_bridge.driver.lora import experts, lora

        lora.install()
        experts.install()
    if has_adapters:
        from engine_bridge.driver.adapters import seam

        seam.install()
    for feature, part in _ON_CPU.items() if on_cpu else ():
        if feature not in off:
            part.install()
    for feature, part in _EVERYWHERE.items():
        if feature not in off:
            part.install()


def watch(runner: Any, off: Off, *, on_cpu: bool, has_adapters: bool) -> None:
    """Replace parts of a model runner whose model is loaded. For the arguments see `install`. Raises SeamMoved."""
    if MISSING_WEIGHTS not in off:
        missing_weights.say(runner)
    if on_cpu and DRAFT_GROUPS not in off:
        draft_groups.watch(runner)
    if on_cpu and SEEDS not in off:
        seeds.watch(runner)
    if has_adapters:
        from engine_bridge.driver.corrections import logits_rows

        logits_rows.watch(runner)
    if has_adapters and on_cpu:
        from engine_bridge.driver.lora import lora

        lora.check_runner(runner)
