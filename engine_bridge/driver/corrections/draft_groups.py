"""A draft model beside a model whose layers keep their KV in several groups, such as Gemma 3.

vLLM tells the draft model of the first group's blocks, whichever group its own layers are in. It writes its KV over that of others then: answers are
wrong, and what is kept of them is, too. Source: vLLM 0.32, `v1/worker/gpu_model_runner.py`, `_build_attention_metadata`.
"""

from __future__ import annotations

from copy import copy
from typing import Any


def watch(runner: Any) -> None:
    """Make this model runner tell a draft model of the blocks of its own group."""
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
