"""Steps that vLLM computes otherwise on a CPU than on a GPU: their blocks, their drafts and their seeds."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np


def empty_new_blocks(engine: Any) -> None:
    """Have an engine's pool overwrite blocks with zeros before it hands them out.

    vLLM's attention for CPUs multiplies what lies behind a request's last token in its last block by zero. Where the block's last user has left
    values that are infinite or no numbers, as an adapter with large values does, the result is no number either: every request that is given the
    block has wrong tokens, and its KV is spoiled in turn. vLLM empties new blocks where their memory may hold other kinds of values, and those of
    full attention alone. Source: vLLM 0.32, `v1/kv_cache_interface.py` and `v1/worker/cpu_model_runner.py`.
    """
    from engine_bridge.driver.in_process import kv_caches_of, ranks_of, scheduler_of
    from engine_bridge.driver.memory.zeroing import zero

    pool, ranks = scheduler_of(engine).kv_cache_manager.block_pool, ranks_of(engine)
    stock = pool.get_new_blocks
    kv_caches = kv_caches_of(engine) if ranks is None else []

    def get_new_blocks(num_blocks: int) -> list[Any]:
        """Return new blocks, as vLLM's pool does."""
        blocks: list[Any] = stock(num_blocks)
        numbers = [int(block.block_id) for block in blocks]
        if ranks is None:
            zero(kv_caches, numbers)
        elif numbers:
            ranks.call("overture_zero", numbers)
        return blocks

    pool.get_new_blocks = get_new_blocks


def keep_seeds(runner: Any) -> None:
    """Make this model runner keep the generators of requests with a seed for tokens that are not thrown away.

    At the end of each part of a prompt vLLM samples a token, throws it away, and sets the request's generator back by what one token takes of a GPU's
    generator. A CPU's generator cannot be set back so: the step fails, and the answers of all requests end with it. Here a request whose token will
    be thrown away samples without its generator, which stays where it was, so that an answer does not depend on the parts either. Source: vLLM 0.32,
    `v1/worker/gpu_model_runner.py`, `_bookkeeping_sync`.
    """
    if not hasattr(runner, "discard_request_mask"):
        return  # the newer model runner draws by position, and throws nothing away
    stock = runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        """Sample, and meanwhile hide the generators of requests whose prompt is not yet computed."""
        batch = runner.input_batch
        if not batch.generators:
            return stock(grammar_output)
        thrown_away = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        hidden = {row: batch.generators.pop(row) for row in thrown_away if row in batch.generators}
        try:
            return stock(grammar_output)
        finally:
            batch.generators.update(hidden)

    runner.sample_tokens = sample_tokens


def draft_in_own_group(runner: Any) -> None:
    """Make this model runner tell a draft model of its own group's blocks, where layers keep their KV in several groups, as Gemma 3's do.

    vLLM tells the draft model of the first group's blocks, whichever group its own layers are in. It writes its KV over that of others then: answers
    are wrong, and what is kept of them is, too. Source: vLLM 0.32, `v1/worker/gpu_model_runner.py`, `_build_attention_metadata`.
    """
    from engine_bridge.driver.vllm_api import DraftModelProposer

    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, DraftModelProposer) or drafter.kv_cache_gid < 1:
        return
    group, stock = drafter.kv_cache_gid, runner._build_attention_metadata

    def build_attention_metadata(
        num_tokens: int, num_reqs: int, *rest: Any, slot_mappings: Any = None, **options: Any
    ) -> Any:
        """Return what layers, and the draft model, are told of a step."""
        of_layers, of_drafts = stock(num_tokens, num_reqs, *rest, slot_mappings=slot_mappings, **options)
        if of_drafts is not None:
            of_drafts = copy(of_drafts)
            of_drafts.block_table_tensor = runner.input_batch.block_table[group].get_device_tensor(
                of_drafts.num_reqs
            )
            of_drafts.slot_mapping = slot_mappings[group][: of_drafts.num_actual_tokens]
        return of_layers, of_drafts

    runner._build_attention_metadata = build_attention_metadata


def follow_settings_of_drafts() -> None:
    """Have drafted tokens follow the temperature, top p and top k of their request: vLLM's sampler expands them without its kernel.

    vLLM writes each request's setting once for each drafted token. Where these are no whole numbers of 64 bits, its kernel for CPUs writes into a
    copy, and the sampler reads memory that nothing was written to. Sampled answers follow no setting then, and greedy answers of the same step are
    wrong, too: their logits are divided by such a number. Source: vLLM 0.32, `utils/cpu_triton_utils.py` and `v1/sample/rejection_sampler.py`.
    """
    from engine_bridge.driver.vllm_api import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Any:
    """Return each request's value in `x`, or `replace_to` where it is `replace_from`, repeated for each of its drafted tokens.

    cu_num_tokens: for each request, the drafted tokens up to its last one. num_tokens: the drafted tokens of all requests.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
