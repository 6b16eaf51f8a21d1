"""The first work of a new engine, so that no user waits for lazy set-up and the time of steps is known."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from engine_bridge.driver.in_process import runner_of
from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.policy.scheduling.pacing import table_from

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers

log = logging.getLogger(__name__)

# Tokens of the warm-up's requests: one loads the lazy parts, so its time says nothing; short ones and a long one measure prefill. Of the short ones
# the quicker one counts: one that was held up as long as the long one takes would say that tokens cost nothing, so that no KV is worth a copy.
WARM_UP_TOKENS = (32, 32, 32, 512)
# Tokens of prompts with an adapter on a GPU. Triton compiles a kernel when a step first needs it: other ones for a number of rows that 16 divides and
# for one that it does not, and other ones from 128 rows on. The last two are more than a CUDA graph holds (512 by itself). Found by reading; without
# them the first adapter took 0.7 s, and 6.8 s where nothing is compiled ahead (measured on an H200).
ADAPTER_WARM_UP_TOKENS = (9, 16, 137, 208, 521, 528)
# As vLLM has it for its own warm-up. The kernels are those of the largest rank, whatever the adapter's is.
DUMMY_RANK = 8


def warm_up(engine: Any, scheduler: Any, tiers: KvTiers | None, *, with_adapter: bool = False) -> StepTable:
    """Run some requests and forget their KV. Returns how long steps took. The tiers see nothing of it.

    with_adapter: some requests have an adapter of vLLM's making, which must still be the one that loads adapters.
    """
    from engine_bridge.driver.vllm_api import SamplingParams

    limit = engine.vllm_config.model_config.max_model_len
    if tiers is not None:
        tiers.is_paused = True
    prefills, decode_s = [], 0.0
    for number, num_tokens in enumerate(_within(limit, WARM_UP_TOKENS)):
        # Each prompt repeats another token: a prompt that begins like an earlier one is cached, and takes no time.
        prompt: Any = {"prompt_token_ids": [1 + number] * num_tokens}
        engine.add_request(f"warm-up-{number}", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        prefill_s, decode_s = _time_request(engine, scheduler)
        prefills.append((num_tokens, prefill_s))
    _warm_up_grammars(engine, scheduler)
    if with_adapter:
        _warm_up_adapter(engine, scheduler, limit)
    engine.reset_prefix_cache()
    if tiers is not None:
        tiers.is_paused = False
    return table_from(prefills[1:], decode_s)


def _within(limit: int, wanted: Iterable[int]) -> list[int]:
    """Return the tokens of prompts that with two tokens of answer fit into a context; of the shortest contexts there is room for one."""
    return [max(1, min(each, limit - 2)) for each in wanted]


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
        engine.add_request("warm-up-grammar", {"prompt_token_ids": [1]}, params)
    except ValueError as error:
        log.warning("structured output is not offered with this model: %s", error)
        return
    while scheduler.has_requests():
        engine.step()


def _warm_up_adapter(engine: Any, scheduler: Any, limit: int) -> None:
    """Compute prompts of several lengths, of at most `limit` tokens with their answers, with an adapter of zeros: its kernels are compiled now."""
    from engine_bridge.driver.vllm_api import LoRARequest, SamplingParams

    started_s = time.perf_counter()
    manager = runner_of(engine).lora_manager
    # Nothing is read from the path: vLLM finds an adapter of this number.
    request = LoRARequest(lora_name="warm-up", lora_int_id=1, lora_path="/warm-up")
    rank = min(DUMMY_RANK, manager.lora_config.max_lora_rank)
    manager.add_dummy_lora(request, manager.get_dummy_lora_warmup_rank(rank))
    for num_tokens in dict.fromkeys(_within(limit, ADAPTER_WARM_UP_TOKENS)):
        prompt: Any = {"prompt_token_ids": [1 + num_tokens] * num_tokens}
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        engine.add_request(f"warm-up-adapter-{num_tokens}", prompt, params, lora_request=request)
        while scheduler.has_requests():
            engine.step()
    manager.remove_all_adapters()
    log.info("the kernels of adapters are compiled: %.1f s", time.perf_counter() - started_s)
