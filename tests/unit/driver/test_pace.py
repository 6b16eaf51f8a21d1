"""Each real step corrects the table by its own work and its own time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from engine_bridge.driver.scheduling.pace import Pace
from engine_bridge.policy.pacing import table_from


def scheduler() -> Any:
    config = SimpleNamespace(enable_chunked_prefill=True, long_prefill_token_threshold=0)
    return SimpleNamespace(scheduler_config=config, max_num_scheduled_tokens=2048)


class Table:
    """Writes down what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def observe(self, num_prefill_tokens: int, num_decodes: int, num_context: int, seconds: float) -> None:
        self.seen.append((num_prefill_tokens, pytest.approx(seconds)))


class Bench:
    def __init__(self) -> None:
        self.table, self.now = Table(), 0.0
        self.pace = Pace(scheduler(), self.table, 0.0, lambda: self.now)  # type: ignore[arg-type]

    def schedule(self, num_tokens: int, now: float) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        new: list[Any] = [SimpleNamespace(req_id="a", num_computed_tokens=0)]
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, CachedRequestData.make_empty()
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"a": num_tokens}, num_tokens
        self.now = now
        self.pace.scheduled(output)
        return output

    def end(self, output: SchedulerOutput, now: float) -> None:
        self.now = now
        self.pace.ended(output)


def test_a_prompt_of_several_steps_is_predicted_to_take_them_all() -> None:
    table = table_from([(1, 0.1), (2048, 0.1)], 0.1)  # whatever a step computes, it takes as long
    prefill_s = Pace(scheduler(), table, 0.0).prefill_s
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
