"""The work of a step of vLLM: the three numbers by which step times are measured, predicted and corrected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine_bridge.core.scheduling.step_times import StepWork
from engine_bridge.protocol.node_facts import Ranks

if TYPE_CHECKING:
    from engine_bridge.driver.vllm_api import SchedulerOutput


def work_of(scheduler_output: SchedulerOutput) -> tuple[int, int, int]:
    """Return (prefill tokens, decodes, context tokens) of a scheduled step, as `StepTable.step_s` and `StepSample` take them.

    All of it is in the scheduler's output, which does not change when requests continue or end: call this before the step or after it.

    - A decode is a request that has an output token and computes only its last token (and drafts of speculative decoding, which count
      as prefill tokens: they are computed beside it like those of a prompt).
    - Prefill tokens are all others: chunks of prompts, also of a single token, and tokens that a preempted request computes again.
    - Context tokens are the sum of the tokens that the step's requests had computed, found or loaded before it: their new tokens
      attend to those. The sum does not say which request they belong to, so a large sum costs more beside a prefill that attends to
      it than beside a prefill that does not; a table learns the mean of its samples.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    num_context = sum(request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs)
    num_context += sum(cached.num_computed_tokens)
    num_decodes = 0
    for request_id, num_outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        num_drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
        num_decodes += num_outputs > 0 and scheduled[request_id] - num_drafts == 1
    return scheduler_output.total_num_scheduled_tokens - num_decodes, num_decodes, num_context


def with_ranks(
    output: SchedulerOutput, work: tuple[int, int, int], running: Ranks, rank_of: Callable[[str], int]
) -> StepWork:
    """Return the scheduled step's `work`, from `work_of`, with adapters.

    running: ranks of all running requests' adapters. rank_of: returns the rank of a running request's adapter; called for requests whose prompts are
    computed.
    """
    num_prefill, num_decodes, num_context = work
    if not num_prefill:
        return StepWork(Ranks(num_decodes, running.total, running.most), num_context, 0)
    found = [(rank_of(request_id), num) for request_id, num in _prefills(output)]
    total = max(running.total - sum(rank for rank, _ in found), 0)
    decodes = Ranks(num_decodes, total, running.most) if num_decodes else Ranks()
    return StepWork(decodes, num_context, num_prefill, sum(rank * num for rank, num in found))


def _prefills(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Yield the requests whose prompts the step computes, and how many tokens of them."""
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    for request in output.scheduled_new_reqs:
        yield request.req_id, scheduled[request.req_id]
    for request_id, num_outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if num_outputs == 0 or scheduled[request_id] > 1:
            yield request_id, scheduled[request_id]
