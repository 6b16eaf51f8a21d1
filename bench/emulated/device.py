"""What a step that vLLM has scheduled takes on a device that is not there.

Costs are the simulator's: a GPU by its data sheet and one published calibration (`bench/sim/core/{hardware,calibration,steps}.py`, with their
sources), or this machine by what `overture profile` measured (`bench/sim/core/measured.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from bench.sim.core.steps import Chunk, StepCost


class StepWork(NamedTuple):
    """seconds: that the step takes. giving: requests that get a token at its end."""

    seconds: float
    giving: list[str]


def work_of(
    cost: StepCost,
    num_scheduled_tokens: Mapping[str, int],
    requests: Mapping[str, Any],
    ranks: Mapping[str, int],
    assisted: Collection[int] = (),
) -> StepWork:
    """Of what was just scheduled. requests: vLLM's, which count a step's tokens as computed once it is scheduled. assisted: ids of adapters.

    A request gets a token if nothing that it has is left to compute; it decodes if that was its last token alone.
    """
    chunks: list[Chunk] = []
    giving: list[str] = []
    num_decodes = num_context = 0
    by_rank: dict[int, int] = {}
    for request_id, num_tokens in num_scheduled_tokens.items():
        request = requests[request_id]
        num_computed = request.num_computed_tokens
        gives = num_computed >= request.num_tokens
        if gives:
            giving.append(request_id)
        rank = ranks.get(request_id, 0)
        is_assisted = len(assisted) > 0 and rank > 0 and request.lora_request.lora_int_id in assisted
        if num_tokens == 1 and gives and request.num_output_tokens and not is_assisted:
            num_decodes += 1
            num_context += num_computed
            if rank:
                by_rank[rank] = by_rank.get(rank, 0) + 1
        else:
            chunks.append(Chunk(num_tokens, num_computed - num_tokens, rank, gives, is_assisted))
    sum_rank = cost.kernel(by_rank) if by_rank else 0
    return StepWork(cost.step_s(chunks, num_decodes, num_context, sum_rank), giving)
