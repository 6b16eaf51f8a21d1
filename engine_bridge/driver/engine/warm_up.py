"""The first work of a new engine, so that no user waits for lazy set-up and the time of steps is known."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from engine_bridge.policy.scheduling.pacing import table_from

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers
    from engine_bridge.policy.costs.costs import StepTable

log = logging.getLogger(__name__)

# Tokens of the warm-up's requests: one loads the lazy parts, so its time says nothing; a short one and a long one measure prefill.
WARM_UP_TOKENS = (32, 32, 512)


def warm_up(engine: Any, scheduler: Any, tiers: KvTiers | None) -> StepTable:
    """Run some requests and forget their KV. Returns how long steps took. The tiers see nothing of it."""
    from engine_bridge.driver.vllm_api import SamplingParams

    limit = engine.vllm_config.model_config.max_model_len
    if tiers is not None:
        tiers.is_paused = True
    prefills, decode_s = [], 0.0
    for number, num_tokens in enumerate(min(wanted, limit - 2) for wanted in WARM_UP_TOKENS):
        # Each prompt repeats another token: a prompt that begins like an earlier one is cached, and takes no time.
        prompt: Any = {"prompt_token_ids": [1 + number] * num_tokens}
        engine.add_request(f"warm-up-{number}", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        prefill_s, decode_s = _time_request(engine, scheduler)
        prefills.append((num_tokens, prefill_s))
    _warm_up_grammars(engine, scheduler)
    engine.reset_prefix_cache()
    if tiers is not None:
        tiers.is_paused = False
    return table_from(prefills[1:], decode_s)


def _time_request(engine: Any, scheduler: Any) -> tuple[float, float]:
    """Run the only request to its end; returns the seconds to its first token, and from there to its last.

    The time is not told by counting steps: an engine that schedules ahead returns from the first one before anything is computed.
    """
    times = [time.perf_counter()]
    while scheduler.has_requests():
        if engine.step():
            times.append(time.perf_counter())
    return times[1] - times[0], times[-1] - times[1]


def _warm_up_grammars(engine: Any, scheduler: Any) -> None:
    """Build the grammar backend now: otherwise the first grammar builds it inside a step, which takes a second with a large vocabulary."""
    from engine_bridge.driver.vllm_api import SamplingParams, StructuredOutputsParams

    grammar = StructuredOutputsParams(regex="[a-z]{1,2}")
    params = SamplingParams(max_tokens=2, structured_outputs=grammar)
    try:
        engine.add_request("warm-up-grammar", {"prompt_token_ids": [1] * 4}, params)
    except ValueError as error:
        log.warning("structured output is not offered with this model: %s", error)
        return
    while scheduler.has_requests():
        engine.step()
