"""A step's work is read off vLLM's own SchedulerOutput."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from engine_bridge.driver.scheduling.step_work import work_of


class Running(NamedTuple):
    """A request that was scheduled before. outputs: tokens it has given."""

    scheduled: int
    computed: int
    outputs: int
    drafts: int = 0


def output(new: list[tuple[int, int]], running: list[Running]) -> SchedulerOutput:
    """new: (scheduled, computed) of requests in their first step."""
    result = SchedulerOutput.make_empty()
    requests: list[Any] = [
        SimpleNamespace(req_id=f"new{i}", num_computed_tokens=done) for i, (_, done) in enumerate(new)
    ]
    result.scheduled_new_reqs = requests
    result.scheduled_cached_reqs = CachedRequestData(
        req_ids=[f"old{i}" for i in range(len(running))],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(running),
        num_computed_tokens=[request.computed for request in running],
        num_output_tokens=[request.outputs for request in running],
    )
    result.num_scheduled_tokens = {f"new{i}": num for i, (num, _) in enumerate(new)} | {
        f"old{i}": request.scheduled for i, request in enumerate(running)
    }
    result.scheduled_spec_decode_tokens = {
        f"old{i}": [7] * request.drafts for i, request in enumerate(running) if request.drafts
    }
    result.total_num_scheduled_tokens = sum(result.num_scheduled_tokens.values())
    return result


def test_nothing_scheduled_is_no_work() -> None:
    assert work_of(SchedulerOutput.make_empty()) == (0, 0, 0)


def test_a_new_prompt_is_prefilled_behind_what_was_found_of_it() -> None:
    assert work_of(output([(100, 0), (20, 640)], [])) == (120, 0, 640)


def test_requests_with_an_output_decode_and_later_chunks_of_prompts_do_not() -> None:
    running = [Running(1, 50, outputs=3), Running(1, 700, outputs=1), Running(512, 1024, outputs=0)]
    assert work_of(output([(64, 32)], running)) == (64 + 512, 2, 32 + 50 + 700 + 1024)


def test_a_prompts_last_single_token_is_prefill() -> None:
    assert work_of(output([(1, 96)], [Running(1, 512, outputs=0)])) == (2, 0, 608)


def test_what_a_preempted_request_computes_again_is_prefill() -> None:
    assert work_of(output([], [Running(300, 0, outputs=40)])) == (300, 0, 0)


def test_drafts_are_computed_beside_a_decode_like_tokens_of_a_prompt() -> None:
    assert work_of(output([], [Running(4, 200, outputs=9, drafts=3)])) == (3, 1, 200)
