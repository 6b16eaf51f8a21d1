"""Each real step corrects the table by its own work and its own time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from engine_bridge.core.scheduling.step_times import StepSeconds, StepTimes, StepWork
from engine_bridge.driver.carried import FACTS, Carried
from engine_bridge.driver.scheduling.pace import Pace
from engine_bridge.policy.scheduling.pacing import table_from
from engine_bridge.protocol.node_facts import Ranks


def scheduler() -> Any:
    config = SimpleNamespace(enable_chunked_prefill=True, long_prefill_token_threshold=0)
    requests = {name: with_rank(rank) for name, rank in (("a", 0), ("b", 8), ("c", 16))}
    return SimpleNamespace(scheduler_config=config, max_num_scheduled_tokens=2048, requests=requests)


def with_rank(rank: int) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args={FACTS: Carried(rank=rank)}))


def times() -> StepTimes:
    return StepTimes(StepSeconds(fixed_s=0.01), "mbgmv")


class Table:
    """Writes down what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def observe(self, num_prefill_tokens: int, num_decodes: int, num_context: int, seconds: float) -> None:
        self.seen.append((num_prefill_tokens, pytest.approx(seconds)))


class Times:
    """Writes down what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[StepWork, float]] = []

    def observe(self, work: StepWork, seconds: float) -> None:
        self.seen.append((work, pytest.approx(seconds)))


class Bench:
    def __init__(self) -> None:
        self.table, self.times, self.now = Table(), Times(), 0.0
        self.pace = Pace(scheduler(), self.table, self.times, 0.0, lambda: self.now)  # type: ignore[arg-type]

    def schedule(self, num_tokens: int, now: float) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        new: list[Any] = [SimpleNamespace(req_id="a", num_computed_tokens=0)]
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, CachedRequestData.make_empty()
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"a": num_tokens}, num_tokens
        self.now = now
        self.pace.scheduled(output, Ranks(1))
        return output

    def end(self, output: SchedulerOutput, now: float) -> None:
        self.now = now
        self.pace.ended(output)


def test_a_prompt_of_several_steps_is_predicted_to_take_them_all() -> None:
    table = table_from([(1, 0.1), (2048, 0.1)], 0.1)  # whatever a step computes, it takes as long
    prefill_s = Pace(scheduler(), table, times(), 0.0).prefill_s
    assert [prefill_s(num) for num in (0, 100, 2048, 2049, 5000)] == pytest.approx([0, 0.1, 0.1, 0.2, 0.3])


def test_a_step_is_shown_with_the_time_since_it_was_scheduled() -> None:
    bench = Bench()
    bench.end(bench.schedule(100, now=1.0), now=1.5)
    bench.end(bench.schedule(7, now=9.0), now=9.25)
    assert bench.table.seen == [(100, 0.5), (7, 0.25)]


def test_of_steps_scheduled_ahead_each_keeps_its_work_and_begins_when_the_one_before_ends() -> None:
    bench = Bench()
    first = bench.schedule(100, now=0.0)
    second = bench.schedule(7, now=0.1)
    bench.end(first, now=0.5)
    third = bench.schedule(30, now=0.6)
    bench.end(second, now=0.75)
    bench.end(third, now=1.0)
    assert bench.table.seen == [(100, 0.5), (7, 0.25), (30, 0.25)]


def test_a_step_that_failed_does_not_lend_its_work_to_the_next() -> None:
    bench = Bench()
    bench.schedule(100, now=0.0)
    bench.end(bench.schedule(7, now=5.0), now=5.25)
    assert bench.table.seen == [(7, 0.25)]


def test_a_step_is_shown_with_the_ranks_of_those_that_decode_and_of_each_token_of_a_prompt() -> None:
    bench, output = Bench(), SchedulerOutput.make_empty()
    # `a` decodes, `b` is at its second chunk, `c` begins.
    output.scheduled_new_reqs = [SimpleNamespace(req_id="c", num_computed_tokens=0)]  # type: ignore[list-item]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=["a", "b"],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None, None],
        num_computed_tokens=[50, 100],
        num_output_tokens=[3, 0],
    )
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"a": 1, "b": 10, "c": 20}, 31
    bench.pace.scheduled(output, Ranks(3, 24, 16))
    bench.end(output, now=0.5)
    assert bench.times.seen == [(StepWork(Ranks(1, 0, 16), 150, 30, 10 * 8 + 20 * 16), 0.5)]
    assert bench.table.seen == [(30, 0.5)]
