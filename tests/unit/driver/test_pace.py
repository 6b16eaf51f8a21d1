from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from engine_bridge.core.scheduling.pacer import StepBounds
from engine_bridge.core.scheduling.step_times import StepSeconds, StepTimes, StepWork
from engine_bridge.driver.carried import FACTS
from engine_bridge.driver.scheduling.pace import Pace
from engine_bridge.driver.scheduling.step_work import work_of
from engine_bridge.policy.scheduling.pacing import table_from
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.node_facts import Ranks


class Running(NamedTuple):
    """A request that was scheduled before. outputs: tokens it has given."""

    scheduled: int
    computed: int
    outputs: int
    drafts: int = 0


def output(new: list[tuple[int, int]], *running: Running) -> SchedulerOutput:
    """A step. new: (scheduled, computed) of requests in their first step."""
    result, names = SchedulerOutput.make_empty(), [f"old{i}" for i in range(len(running))]
    result.scheduled_new_reqs = [
        SimpleNamespace(req_id=f"new{i}", num_computed_tokens=done) for i, (_, done) in enumerate(new)
    ]
    nothing = {"resumed_req_ids": set(), "new_token_ids": [], "all_token_ids": {}, "req_ids": names}
    computed, outputs = [old.computed for old in running], [old.outputs for old in running]
    counts = {"num_computed_tokens": computed, "num_output_tokens": outputs}
    nothing["new_block_ids"] = [None] * len(running)
    result.scheduled_cached_reqs = CachedRequestData(**nothing, **counts)
    olds = dict(zip(names, running, strict=True))
    result.num_scheduled_tokens = {f"new{i}": num for i, (num, _) in enumerate(new)}
    result.num_scheduled_tokens |= {name: request.scheduled for name, request in olds.items()}
    result.scheduled_spec_decode_tokens = {name: [7] * old.drafts for name, old in olds.items() if old.drafts}
    result.total_num_scheduled_tokens = sum(result.num_scheduled_tokens.values())
    return result


@pytest.mark.parametrize(
    ("step", "work"),
    [
        (SchedulerOutput.make_empty(), (0, 0, 0)),
        (output([(100, 0), (20, 640)]), (120, 0, 640)),
        # Requests with an output decode; later chunks of prompts do not.
        (
            output([(64, 32)], Running(1, 50, outputs=3), Running(1, 700, outputs=1), Running(512, 1024, 0)),
            (64 + 512, 2, 32 + 50 + 700 + 1024),
        ),
        (output([(1, 96)], Running(1, 512, outputs=0)), (2, 0, 608)),  # a prompt's last single token
        (output([], Running(300, 0, outputs=40)), (300, 0, 0)),  # a preempted request computes again
        (output([], Running(4, 200, outputs=9, drafts=3)), (3, 1, 200)),  # drafts are as tokens of a prompt
    ],
)
def test_a_steps_work_is_what_vllm_has_scheduled(step: SchedulerOutput, work: tuple[int, int, int]) -> None:
    assert work_of(step) == work


def scheduler(block_tokens: int = 0) -> Any:
    """block_tokens: of the blocks of recurrent layers, in which prompts are computed; 0 where there are none."""
    config = SimpleNamespace(
        enable_chunked_prefill=True, long_prefill_token_threshold=0, disable_chunked_mm_input=False
    )
    requests = {name: with_rank(rank) for name, rank in (("old0", 0), ("old1", 8), ("new0", 16))}
    return SimpleNamespace(
        scheduler_config=config,
        max_num_scheduled_tokens=2048,
        requests=requests,
        running=list(requests),
        num_spec_tokens=0,
        need_mamba_block_aligned_split=block_tokens > 0,
        cache_config=SimpleNamespace(block_size=block_tokens or 32),
    )


def bounds_with_drafts(drafts: Sequence[int], bounds: StepBounds, block_tokens: int = 0) -> tuple[int, int]:
    """The most tokens of a step and of each long prompt in it, where requests run with so many drafts each, of up to four tokens."""
    nothing: Any = None
    engine = scheduler(block_tokens)
    engine.num_spec_tokens = max(drafts)
    engine.running = [SimpleNamespace(spec_token_ids=[7] * num) for num in drafts]
    Pace(engine, nothing, nothing, 0.0).set_bounds(bounds)
    return engine.max_num_scheduled_tokens, engine.scheduler_config.long_prefill_token_threshold


def with_rank(rank: int) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args={FACTS: EngineRequest(rank=rank)}))


@pytest.mark.parametrize(
    ("block_tokens", "wished", "bound"),
    [
        *(
            (1056, wished, bound)
            for wished, bound in ((1100, 1100), (1062, 1062), (1061, 1055), (1056, 1055))
        ),
        (1056, 40, 40),
        (7, 9, 9),  # those that run take more than a block's tokens
        (8, 9, 7),
        *((0, wished, wished) for wished in (4, 5, 6, 1061)),
    ],
)
def test_a_prompt_that_is_computed_in_whole_blocks_gets_on_beside_requests_that_run(
    block_tokens: int, wished: int, bound: int
) -> None:
    """vLLM computes no part of a block that a step has room for, and three requests of two tokens each take that room in every step."""
    found = bounds_with_drafts((1, 1, 1), StepBounds(wished - 3, wished - 5), block_tokens)
    assert found == (bound, max(bound - 5, 2)), "answers keep theirs"


@pytest.mark.parametrize(
    ("drafts", "bound"), [((0, 0, 0), 67), ((4, 0, 3), 74), ((4,) * 64, 67 + 256), ((4,) * 600, 2048)]
)
def test_drafts_take_nothing_from_prompts(drafts: Sequence[int], bound: int) -> None:
    """64 tokens of prompts, and one for each of three requests."""
    assert bounds_with_drafts(drafts, StepBounds(67, None))[0] == bound


@pytest.mark.parametrize("num_long", [1, 3])
def test_prompts_leave_drafts_their_room_where_the_step_is_full(num_long: int) -> None:
    """64 answers with four drafts each take 320 of 2,048 tokens. Behind prompts that took the rest, the last of them would stand still."""
    share = (2048 - 64) // num_long
    _, found = bounds_with_drafts((4,) * 64, StepBounds(2048, share, num_long))
    assert found == share - -(-256 // num_long)
    assert num_long * found + 64 * 5 <= 2048


def test_no_part_of_a_prompt_is_so_short_that_an_answers_drafts_are_cut() -> None:
    for wished, chunk in ((2, 5), (64, 64)):
        assert bounds_with_drafts((4, 0), StepBounds(300, wished))[1] == chunk


@pytest.mark.parametrize(
    ("is_whole", "num_computed", "is_bounded"),
    [(True, 0, False), (True, 10, False), (True, 265, False), (True, 266, True), (False, 10, True)],
)
@pytest.mark.parametrize("is_starting", [True, False])
def test_a_picture_that_a_model_reads_as_a_whole_is_not_cut(
    is_whole: bool, num_computed: int, is_bounded: bool, is_starting: bool
) -> None:
    """Its 256 tokens begin at the tenth. Beside it runs a request without a picture."""
    at = SimpleNamespace(mm_position=SimpleNamespace(offset=10, length=256))
    seeing = SimpleNamespace(mm_features=[at], num_computed_tokens=num_computed)
    nothing: Any = None
    engine = scheduler()
    engine.scheduler_config.disable_chunked_mm_input = is_whole
    pace = Pace(engine, nothing, nothing, 0.0)
    engine.running = [SimpleNamespace(mm_features=[], num_computed_tokens=5)]
    if not is_starting:
        engine.running.append(seeing)
    pace.set_bounds(StepBounds(64, 32), [seeing] if is_starting else [])
    bounds = engine.max_num_scheduled_tokens, engine.scheduler_config.long_prefill_token_threshold
    assert bounds == ((64, 32) if is_bounded else (2048, 0))


class Bench:
    """A pace whose table and times write down what they are shown: the prompts' tokens of a step, or all of its work, and its seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps: list[tuple[int, float]] = []
        self.works: list[tuple[StepWork, float]] = []
        table: Any = SimpleNamespace(observe=lambda num, *_: self.steps.append((num, pytest.approx(_[-1]))))
        times: Any = SimpleNamespace(observe=lambda work, s: self.works.append((work, pytest.approx(s))))
        self.pace = Pace(scheduler(), table, times, 0.0, lambda: self.now)

    def schedule(self, num_tokens: int, now: float) -> SchedulerOutput:
        self.now, step = now, output([(num_tokens, 0)])
        self.pace.scheduled(step, Ranks(1))
        return step

    def end(self, step: SchedulerOutput, now: float) -> None:
        self.now = now
        self.pace.ended(step)


def test_a_prompt_of_several_steps_is_predicted_to_take_them_all() -> None:
    table = table_from([(1, 0.1), (2048, 0.1)], 0.1)  # whatever a step computes, it takes as long
    times = StepTimes(StepSeconds(fixed_s=0.01), "mbgmv")
    prefill_s = Pace(scheduler(), table, times, 0.0).prefill_s
    assert [prefill_s(num) for num in (0, 100, 2048, 2049, 5000)] == pytest.approx([0, 0.1, 0.1, 0.2, 0.3])


def test_a_step_is_shown_with_the_time_that_it_was_alone_on_the_device() -> None:
    bench = Bench()
    bench.end(bench.schedule(100, now=1.0), now=1.5)
    bench.end(bench.schedule(7, now=9.0), now=9.25)
    assert bench.steps == [(100, 0.5), (7, 0.25)]
    ahead = Bench()  # a step that is scheduled ahead begins when the one before it ends
    first, second = ahead.schedule(100, now=0.0), ahead.schedule(7, now=0.1)
    ahead.end(first, now=0.5)
    third = ahead.schedule(30, now=0.6)
    ahead.end(second, now=0.75)
    ahead.end(third, now=1.0)
    assert ahead.steps == [(100, 0.5), (7, 0.25), (30, 0.25)]
    failed = Bench()
    failed.schedule(100, now=0.0)  # it does not lend its work to the next
    failed.end(failed.schedule(7, now=5.0), now=5.25)
    assert failed.steps == [(7, 0.25)]


def test_a_step_is_shown_with_the_ranks_of_those_that_decode_and_of_each_token_of_a_prompt() -> None:
    bench = Bench()
    step = output([(20, 0)], Running(1, 50, outputs=3), Running(10, 100, outputs=0))
    bench.pace.scheduled(step, Ranks(3, 24, 16))
    bench.end(step, now=0.5)
    assert bench.works == [(StepWork(Ranks(1, 0, 16), 150, 30, 10 * 8 + 20 * 16), 0.5)]
    assert bench.steps == [(30, 0.5)]
