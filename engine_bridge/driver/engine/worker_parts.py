"""Our parts in place of vLLM's, in the process whose worker computes: the engine's own, or each rank of an engine of several.

Call `install` before the worker is made, and `watch` once its model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_bridge.driver.corrections import bad_words, cpu_layers, cpu_steps, model_files
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
    Feature,
)
from engine_bridge.driver.vllm_api.start import Off

if TYPE_CHECKING:
    from collections.abc import Callable

_ON_CPU: dict[Feature, Callable[[], None]] = {
    DRAFT_SETTINGS: cpu_steps.follow_settings_of_drafts,
    ROTARY: cpu_layers.flatten_heads,
    MAMBA2: cpu_layers.end_steps_at_states,
    GATED_DELTA: cpu_layers.take_single_tokens,
    EXPERT_ROUTING: cpu_layers.group_experts,
}
_EVERYWHERE: dict[Feature, Callable[[], None]] = {
    BAD_WORDS: bad_words.install,
    QUERY_SCALES: model_files.read_query_scales,
    MISSING_WEIGHTS: model_files.note_missing_weights,
}


def install(off: Off, *, on_cpu: bool, has_adapters: bool) -> None:
    """Replace parts of vLLM, except for features that are `off`. has_adapters: whether the worker's engine is built with LoRA."""
    if has_adapters and on_cpu:
        from engine_bridge.driver.lora import experts, lora

        lora.install()
        experts.install()
    if has_adapters:
        from engine_bridge.driver.adapters import seam

        seam.install()
    for feature, replace in (_EVERYWHERE | (_ON_CPU if on_cpu else {})).items():
        if feature not in off:
            replace()


def watch(runner: Any, off: Off, *, on_cpu: bool, has_adapters: bool) -> None:
    """Replace parts of a model runner whose model is loaded. For the arguments see `install`. Raises SeamMoved."""
    if MISSING_WEIGHTS not in off:
        model_files.say_missing_weights(runner)
    if on_cpu and DRAFT_GROUPS not in off:
        cpu_steps.draft_in_own_group(runner)
    if on_cpu and SEEDS not in off:
        cpu_steps.keep_seeds(runner)
    if has_adapters:
        from engine_bridge.driver.corrections import logits_rows

        logits_rows.watch(runner)
    if has_adapters and on_cpu:
        from engine_bridge.driver.lora import lora

        lora.check_runner(runner)
