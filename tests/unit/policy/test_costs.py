"""What steps, prefills, swaps and restores are predicted to take, and the way that is chosen by it."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_bridge.policy.costs.costs import (
    ERROR_RATE,
    LEARNING_RATE,
    MIN_USUAL_ERROR,
    OUTLIER_ERRORS,
    SLOWNESS_RATE,
    CopyTable,
    CopyTimes,
    KvBlock,
    Link,
    StepGrid,
    StepTable,
    TablePrefill,
)
from engine_bridge.policy.kv.restore_method import (
    FullCost,
    SwapOrRecompute,
    Way,
)
from engine_bridge.predict.steps import (
    REGRESSORS,
    StepSample,
    fit_steps,
    repeatability,
    table_error,
)
from kvtiers.policy.rates import HALF_LIFE_S
from kvtiers.policy.restore import Action, FasterWins, RestoreFacts
from tests.unit.facts import LinearPrefill

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
AXES = ([0, 1, 16, 64, 256], [0, 1, 4, 16], [0, 100, 1000, 10_000])


def linear(work: tuple[int, int, int]) -> float:
    num_prefill, num_decodes, num_context = work
    return 0.004 + 2e-4 * num_prefill + 3e-4 * num_decodes + 1e-6 * num_context


def table_of(step_s: Callable[[tuple[int, int, int]], float] = linear) -> StepTable:
    return StepTable.of(lambda points: [step_s(point) for point in points], *AXES)


works = st.tuples(st.integers(0, 256), st.integers(0, 16), st.integers(0, 10_000)).filter(
    lambda w: w[0] + w[1] > 0
)
tables = st.lists(
    st.floats(0, 10), min_size=math.prod(map(len, AXES)), max_size=math.prod(map(len, AXES))
).map(
    lambda seconds: StepTable(
        StepGrid(
            num_prefill_tokens=tuple(AXES[0]),
            num_decodes=tuple(AXES[1]),
            num_context_tokens=tuple(AXES[2]),
            seconds=tuple(seconds),
        )
    )
)


# -- the table ---------------------------------------------------------------------------------------------------------


@given(works.filter(lambda work: work[0] == 0 or work[1] >= 1))
def test_what_is_linear_is_exact_between_and_beyond_the_points(work: tuple[int, int, int]) -> None:
    assert table_of().step_s(*work) == pytest.approx(linear(work))
    beyond = (work[0] + 1000, work[1] + 50, work[2] + 10**6)
    assert table_of().step_s(*beyond) == pytest.approx(linear(beyond))


def test_a_step_without_work_takes_no_time() -> None:
    assert table_of().step_s(0, 0, 5000) == 0.0


@settings(max_examples=50)
@given(tables, works, works)
def test_more_work_never_takes_less(
    table: StepTable, one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    both = tuple(max(pair) for pair in zip(one, other, strict=True))
    assert table.step_s(*both) >= table.step_s(*one) - 1e-9


@settings(max_examples=150)
@given(tables, works, st.floats(0.01, 3))
def test_a_real_step_moves_the_prediction_towards_it_and_never_past_it(
    table: StepTable, work: tuple[int, int, int], share: float
) -> None:
    seconds = max(share * table.step_s(*work), 1e-6)
    before = table.step_s(*work)
    table.observe(*work, seconds)
    after = table.step_s(*work)
    low, high = sorted((before, seconds))
    assert low - 1e-9 <= after <= high + 1e-9
    if abs(seconds - before) > 1e-3 and before > 1e-3:
        assert after != before


@settings(max_examples=25)
@given(tables, st.lists(st.tuples(works, st.floats(1e-6, 100)), max_size=30))
def test_after_any_steps_more_work_still_never_takes_less(
    table: StepTable, steps: list[tuple[tuple[int, int, int], float]]
) -> None:
    for work, seconds in steps:
        table.observe(*work, seconds)
    grid = table.grid()
    sizes = [len(axis) for axis in grid.axes]
    at = dict(zip(itertools.product(*map(range, sizes)), grid.seconds, strict=True))
    for point, seconds in at.items():
        for axis in range(3):
            ahead = tuple(place + (which == axis) for which, place in enumerate(point))
            assert at.get(ahead, math.inf) >= seconds
    assert len(grid.seconds) == math.prod(sizes)
    assert min(grid.seconds) >= 0


def test_one_stall_hardly_counts_and_a_lasting_change_is_learned() -> None:
    table = table_of()
    work = (32, 4, 500)
    usual_s = table.step_s(*work)
    most = OUTLIER_ERRORS * table.usual_error
    table.observe(*work, 1000 * usual_s)
    longer = (1 + LEARNING_RATE * most) * (1 + SLOWNESS_RATE * most)
    assert table.step_s(*work) <= usual_s * longer * (1 + 1e-9)
    for _ in range(200):
        table.observe(*work, 2 * usual_s)
    assert table.step_s(*work) == pytest.approx(2 * usual_s, rel=0.02)


def test_one_stall_does_not_make_the_next_one_believable() -> None:
    table = table_of()
    before = table.usual_error
    table.observe(32, 4, 500, 1000.0)
    assert before < table.usual_error <= before * (1 + ERROR_RATE * (OUTLIER_ERRORS - 1)) * (1 + 1e-9)


def test_after_many_exact_steps_a_change_is_still_noticed() -> None:
    table = table_of()
    for _ in range(200):
        table.observe(32, 4, 500, table.step_s(32, 4, 500))
    assert table.usual_error == MIN_USUAL_ERROR
    assert table.num_steps == 200


def test_a_machine_that_slows_down_is_slower_with_other_work_too() -> None:
    table, other = table_of(), (200, 1, 8000)
    before = table.step_s(*other)
    for _ in range(20):
        table.observe(0, 8, 500, 1.5 * linear((0, 8, 500)))
    assert table.step_s(*other) > 1.25 * before
    assert max(table.grid().seconds) == pytest.approx(table.step_s(256, 16, 10_000))


def test_what_was_never_predicted_is_believed_at_once() -> None:
    table = table_of(lambda work: 0.0)
    table.observe(64, 4, 1000, 2.0)
    assert table.step_s(64, 4, 1000) == pytest.approx(LEARNING_RATE * 2.0)


def test_what_a_regressor_says_of_a_step_without_work_counts_for_nothing() -> None:
    table = table_of(lambda work: linear(work) if work[0] + work[1] else 99.0)
    assert table.step_s(64, 4, 1000) == pytest.approx(linear((64, 4, 1000)))


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_step_beyond_the_points_corrects_the_last_ones(share: float) -> None:
    table, work = table_of(), (1000, 50, 50_000)
    before, edge = table.step_s(*work), table.step_s(256, 16, 10_000)
    table.observe(*work, share * before)
    most = OUTLIER_ERRORS * 0.1 * (1 if share > 1 else -1)
    corrected = edge + LEARNING_RATE * most * before
    assert table.step_s(256, 16, 10_000) == pytest.approx(corrected * (1 + SLOWNESS_RATE * most))


@pytest.mark.parametrize(
    "work", [(1000, 8, 3000), (32, 50, 3000), (32, 8, 150_000), (0, 8, 150_000), (1000, 50, 150_000)]
)
@pytest.mark.parametrize("share", [0.8, 1.2])
def test_however_far_beyond_the_points_a_step_is_the_prediction_never_moves_past_it(
    work: tuple[int, int, int], share: float
) -> None:
    table = table_of()
    before = table.step_s(*work)
    table.observe(*work, share * before)
    moved = table.step_s(*work) / before - 1
    assert moved == pytest.approx((1 + LEARNING_RATE * (share - 1)) * (1 + SLOWNESS_RATE * (share - 1)) - 1)


def test_noise_of_real_steps_averages_out() -> None:
    table, rng = table_of(lambda work: 3 * linear(work)), random.Random(1)
    points = [(rng.randint(1, 256), rng.randint(1, 16), rng.randint(0, 10_000)) for _ in range(6000)]
    for work in points:
        table.observe(*work, linear(work) * rng.lognormvariate(0, 0.05))
    errors = [abs(table.step_s(*work) / linear(work) - 1) for work in points[-500:]]
    assert sum(errors) / len(errors) < 0.05


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(seconds: float) -> None:
    table = table_of()
    before = table.grid()
    table.observe(32, 4, 500, seconds)
    table.observe(0, 0, 500, 1.0)
    assert table.grid() == before


def test_a_table_comes_back_as_it_was_saved() -> None:
    table = table_of()
    table.observe(10, 3, 500, 1.0)
    saved = msgspec.json.encode(table.grid())
    again = StepTable(msgspec.json.decode(saved, type=StepGrid))
    assert again.grid() == table.grid()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_decodes": (1, 4)},
        {"num_decodes": (0, 4, 4)},
        {"num_decodes": (0,)},
        {"seconds": (1.0,)},
        {"seconds": (math.nan,) * 8},
    ],
)
def test_a_damaged_grid_is_refused(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "num_prefill_tokens": (0, 1),
        "num_decodes": (0, 1),
        "num_context_tokens": (0, 1),
        "seconds": (1.0,) * 8,
    }
    StepTable(StepGrid(**fields))
    with pytest.raises(ValueError, match="step table"):
        StepTable(StepGrid(**(fields | changes)))


# -- prefills ----------------------------------------------------------------------------------------------------------


def test_a_prefill_is_the_sum_of_its_chunks() -> None:
    prefill = TablePrefill(table_of(), chunk_tokens=64)
    chunks = [(64, 100), (64, 164), (64, 228), (10, 292)]
    expected_s = sum(linear((num, 0, context)) for num, context in chunks)
    assert prefill.prefill_s(202, 100) == pytest.approx(expected_s)
    assert prefill.prefill_s(0, 100) == 0.0


def test_many_chunks_are_sampled_without_error_where_cost_is_linear() -> None:
    prefill = TablePrefill(table_of(), chunk_tokens=64)
    expected_s = sum(linear((64, 0, 64 * chunk)) for chunk in range(101))
    assert prefill.prefill_s(101 * 64) == pytest.approx(expected_s, rel=1e-3)


# -- swap or recompute -------------------------------------------------------------------------------------------------

SHAPE = KvBlock(block_size_tokens=16, block_bytes=2 << 20)
FAST = Link(d2h_bytes_per_s=20e9, h2d_bytes_per_s=20e9)
SLOW = Link(d2h_bytes_per_s=0.2e9, h2d_bytes_per_s=0.2e9)
PREFILL = LinearPrefill(1e-4)  # 0.16 s for 1600 tokens, of which FAST copies 210 MB in 10 ms


def test_swapping_takes_what_the_formula_says() -> None:
    link = Link(d2h_bytes_per_s=20e9, h2d_bytes_per_s=25e9)
    # 100 tokens of a 13B model: 7 blocks. (The paper's 39.1 MB are the half of what its own formula gives, K or V alone.)
    shape = KvBlock(block_size_tokens=16, block_bytes=2 * 40 * 5120 * 16 * 2)
    num_bytes = 7 * shape.block_bytes
    costs = SwapOrRecompute(LinearPrefill(1.0), shape, link)
    assert costs.decide(100).swap_s == pytest.approx(num_bytes / 25e9)
    assert costs.decide(100, read_s=0.5).swap_s == pytest.approx(0.5 + num_bytes / 25e9)
    assert costs.decide(0).swap_s == 0.0
    slow_start = Link(d2h_bytes_per_s=100.0, h2d_bytes_per_s=50.0, setup_s=3.0)
    assert (slow_start.out_s(100), slow_start.in_s(100)) == (4.0, 5.0)
    assert slow_start.out_s(0) == slow_start.in_s(0) == 0.0


def test_the_faster_way_is_chosen_and_both_costs_are_told() -> None:
    swap = SwapOrRecompute(PREFILL, SHAPE, FAST).decide(1600)
    assert swap.way is Way.SWAP and swap.swap_s == pytest.approx(100 * SHAPE.block_bytes / 20e9)
    recompute = SwapOrRecompute(PREFILL, SHAPE, SLOW).decide(1600)
    assert recompute.way is Way.RECOMPUTE and recompute.recompute_s == pytest.approx(0.16)


def test_what_is_kept_is_not_restored() -> None:
    policy = SwapOrRecompute(PREFILL, SHAPE, FAST)
    kept = policy.decide(1600, num_kept_tokens=800)
    assert kept.swap_s == pytest.approx(50 * SHAPE.block_bytes / 20e9)
    assert kept.recompute_s == pytest.approx(0.08)
    whole = policy.decide(1600, num_kept_tokens=5000)
    assert (whole.swap_s, whole.recompute_s) == (0.0, 0.0)


@given(st.integers(1, 5000), st.integers(0, 5000), st.floats(1e6, 1e11), st.floats(1e-6, 1e-2))
def test_no_decision_is_slower_than_the_other_way(
    num_tokens: int, num_kept: int, bytes_per_s: float, s_per_token: float
) -> None:
    link = Link(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s, setup_s=1e-4)
    decision = SwapOrRecompute(LinearPrefill(s_per_token), SHAPE, link).decide(num_tokens, num_kept)
    seconds = {Way.SWAP: decision.swap_s, Way.RECOMPUTE: decision.recompute_s}
    assert seconds[decision.way] == min(seconds.values()) >= 0


# -- copies ------------------------------------------------------------------------------------------------------------

LINK = Link(d2h_bytes_per_s=8e9, h2d_bytes_per_s=4e9, setup_s=1e-4)
sizes = st.integers(1, 1 << 31)


@given(st.integers(1 << 16, 1 << 31))
def test_copies_take_what_the_link_says_until_they_are_seen(num_bytes: int) -> None:
    now = CopyTimes(LINK).at(0.0)
    assert now.in_s(num_bytes) == pytest.approx(LINK.in_s(num_bytes))
    assert now.in_s(0) == now.in_s(-1) == 0.0


SLOPE_OVERSHOOTS = [(1, 1.0, 0.0)] * 4 + [
    (1, 1.0, 84.0),
    (2, 1.0, 0.0),
    (1, 14.0, 25.0),
    (1, 39.0, 177.0),
    (1, 86.0, 116.0),
    (1_361_345_923, 100.0, 200.0),
]


@settings(max_examples=50)
@example(SLOPE_OVERSHOOTS, 763_368_038, 5_496_896)
@given(st.lists(st.tuples(sizes, st.floats(1e-6, 100), st.floats(0, 200)), max_size=30), sizes, sizes)
def test_more_bytes_never_take_less_whatever_was_seen(
    copies: list[tuple[int, float, float]], one: int, other: int
) -> None:
    table, now = CopyTable(LINK.in_s), 0.0
    for num_bytes, seconds, pause_s in copies:
        now += pause_s
        before = table.copy_s(num_bytes, now)
        table.observe(num_bytes, seconds, now)
        low, high = sorted((before, seconds))
        assert low * (1 - 1e-9) <= table.copy_s(num_bytes, now) <= high * (1 + 1e-9)
    few, many = sorted((one, other))
    assert 0 < table.copy_s(few, now) <= table.copy_s(many, now) * (1 + 1e-9)


def test_copies_of_two_sizes_teach_their_set_up_and_their_speed() -> None:
    table, real, rng = (
        CopyTable(LINK.in_s),
        Link(d2h_bytes_per_s=1e9, h2d_bytes_per_s=2e9, setup_s=2e-3),
        random.Random(1),
    )
    for _ in range(500):
        num_bytes = rng.choice((1 << 20, 1 << 23))
        table.observe(num_bytes, real.in_s(num_bytes) * rng.lognormvariate(0, 0.05), 0.0)
    for num_bytes in (1 << 20, 1 << 22, 1 << 23):
        assert table.copy_s(num_bytes, 0.0) == pytest.approx(real.in_s(num_bytes), rel=0.1)


def test_slow_copies_are_forgiven_after_a_while_and_fast_ones_are_not() -> None:
    slow, fast, usual_s = CopyTable(LINK.in_s), CopyTable(LINK.in_s), LINK.in_s(1 << 23)
    for _ in range(100):
        slow.observe(1 << 23, 10 * usual_s, 0.0)
        fast.observe(1 << 23, usual_s / 10, 0.0)
    assert slow.copy_s(1 << 23, 0.0) == pytest.approx(10 * usual_s, rel=0.05)
    assert slow.copy_s(1 << 23, HALF_LIFE_S) == pytest.approx(5.5 * usual_s, rel=0.05)
    assert slow.copy_s(1 << 23, 100 * HALF_LIFE_S) == pytest.approx(usual_s)
    assert fast.copy_s(1 << 23, 100 * HALF_LIFE_S) == pytest.approx(usual_s / 10, rel=0.05)
    slow.observe(1 << 23, 10 * usual_s, 100 * HALF_LIFE_S)
    assert usual_s < slow.copy_s(1 << 23, 100 * HALF_LIFE_S) < 4 * usual_s


def test_a_copy_of_nothing_teaches_nothing() -> None:
    table = CopyTable(LINK.in_s)
    for num_bytes, seconds in ((0, 1.0), (1 << 20, 0.0), (1 << 20, math.inf), (1 << 20, math.nan)):
        table.observe(num_bytes, seconds, 0.0)
    assert table.copy_s(1 << 20, 0.0) == pytest.approx(LINK.in_s(1 << 20))


# -- restores of sessions ----------------------------------------------------------------------------------------------

READY = RestoreFacts(
    num_blocks=64,
    num_ready_blocks=64,
    num_tail_tokens=32,
    block_size_tokens=32,
    block_bytes=384 << 10,
    num_layers=12,
    num_ready_layers=12,
    disk_bytes_done=0,
    disk_bytes_left=0,
    disk_bytes_ahead=0,
    waited_s=0.0,
    prefill_s_per_token=1 / 5000,
    disk_bytes_per_s=1e9,
    host_bytes_per_s=10e9,
)


def changed(**changes: Any) -> RestoreFacts:
    return RestoreFacts(**({name: getattr(READY, name) for name in READY.__dataclass_fields__} | changes))


ON_DISK = {"num_ready_blocks": 0, "num_ready_layers": 0, "disk_bytes_left": 24 * MIB}


@pytest.mark.parametrize(
    "changes", [{}, ON_DISK, ON_DISK | {"disk_bytes_per_s": 20e6}, {"host_bytes_per_s": 1e6}]
)
def test_with_the_same_costs_it_decides_as_the_simple_policy_does(changes: dict[str, Any]) -> None:
    facts = changed(**changes)
    simple = FasterWins().decide(facts)
    assert FullCost().decide(facts) == simple
    by_rate = FullCost(prefill=LinearPrefill(1 / 5000)).decide(facts)
    assert (by_rate.action, by_rate.num_blocks, by_rate.reason) == (
        simple.action,
        simple.num_blocks,
        simple.reason,
    )
    assert by_rate.expected_s == pytest.approx(simple.expected_s)


def test_a_table_that_knows_better_changes_the_decision() -> None:
    facts = changed(**ON_DISK, disk_bytes_per_s=100e6)
    assert FasterWins().decide(facts).action is Action.WAIT
    quick = FullCost(prefill=LinearPrefill(1 / 50_000)).decide(facts)
    assert (quick.action, quick.num_blocks) == (Action.LOAD, 0)


def test_a_restore_is_computed_behind_what_the_device_holds() -> None:
    prefill = TablePrefill(table_of(), chunk_tokens=64)
    facts = changed(host_bytes_per_s=1e3, num_context_tokens=5000)
    decision = FullCost(prefill=prefill).decide(facts)
    assert (decision.action, decision.num_blocks) == (Action.LOAD, 0)
    assert decision.expected_s == pytest.approx(prefill.prefill_s(64 * 32 + 32, 5000))


@given(
    st.floats(1e5, 1e11), st.floats(1e5, 1e11), st.integers(0, 1 << 30), st.booleans(), st.integers(1, 3000)
)
def test_a_restore_never_promises_more_than_computing_would_take(
    disk_bytes_per_s: float, host_bytes_per_s: float, ahead: int, is_ready: bool, num_tail: int
) -> None:
    facts = changed(
        **({} if is_ready else ON_DISK),
        disk_bytes_ahead=0 if is_ready else ahead,
        disk_bytes_per_s=disk_bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        num_tail_tokens=num_tail,
    )
    prefill = LinearPrefill(1e-4)
    decision = FullCost(prefill=prefill).decide(facts)
    assert decision.expected_s <= prefill.prefill_s(64 * 32 + num_tail) * (1 + 1e-9)


# -- fitting -----------------------------------------------------------------------------------------------------------


def sampled(noise: float, seed: int = 1) -> list[StepSample]:
    """A machine on which weights bound small steps, computing large ones, and attention costs by context."""
    rng = random.Random(seed)
    samples = []
    for work in itertools.product([0, 16, 64, 256, 1024], [0, 1, 4, 16, 64], [0, 512, 4096, 32_768]):
        if work[0] + work[1] == 0:
            continue
        num_tokens = work[0] + work[1]
        seconds = 0.004 + max(0.006, 3e-4 * num_tokens) + 2.4e-7 * work[2] + 2e-9 * work[0] * work[2]
        samples += [StepSample(*work, seconds * rng.lognormvariate(0, noise)) for _ in range(2)]
    return samples


def test_the_fit_names_a_winner_whose_table_foretells_the_machine() -> None:
    asked: list[tuple[int, int]] = []
    samples = sampled(noise=0.01)
    fit = fit_steps(samples, degrees=(2,), on_progress=lambda done, all_: asked.append((done, all_)))
    assert {c.regressor for c in fit.candidates} == set(REGRESSORS) and len(fit.candidates) == 8
    assert [c.table_error for c in fit.candidates] == sorted(c.table_error for c in fit.candidates)
    assert fit.winner.table_error < 0.06
    assert fit.repeatability == pytest.approx(0.0056, abs=0.003)  # half the mean distance of two, at 1% noise
    assert table_error(fit.table, samples) < 0.04
    assert asked[0] == (0, 8) and asked[-1] == (8, 8)


def test_where_cost_is_linear_the_linear_model_wins() -> None:
    samples = [
        StepSample(*work, linear(work))
        for work in itertools.product([0, 7, 60, 300], [1, 5, 20], [0, 700, 9000, 50_000])
    ]
    fit = fit_steps(samples, regressors=("linear", "forest", "nearest"), degrees=(1,))
    assert fit.winner.regressor == "linear" and fit.winner.table_error < 1e-6
    assert fit.table.step_s(100, 10, 3000) == pytest.approx(linear((100, 10, 3000)))


def test_too_few_samples_and_unknown_regressors_are_refused() -> None:
    with pytest.raises(ValueError, match="40 samples"):
        fit_steps(sampled(0.0)[:39])
    with pytest.raises(ValueError, match="unknown regressor"):
        fit_steps(sampled(0.0), regressors=("oracle",))


def test_repeatability_is_unknown_where_nothing_was_measured_twice() -> None:
    assert repeatability([StepSample(1, 0, 0, 1.0), StepSample(2, 0, 0, 2.0)]) is None
    assert repeatability([StepSample(1, 0, 0, 0.9), StepSample(1, 0, 0, 1.1)]) == pytest.approx(0.1)


# -- imports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("engine_bridge.policy.costs.costs", {"asyncio", "threading", "numpy", "sklearn", "torch", "vllm"}),
        (
            "engine_bridge.policy.scheduling.preemption",
            {"asyncio", "threading", "numpy", "sklearn", "torch", "vllm"},
        ),
        ("engine_bridge.predict.steps", {"asyncio", "numpy", "sklearn", "torch", "vllm"}),
        ("engine_bridge.predict.length", {"asyncio", "numpy", "sklearn", "torch", "vllm"}),
    ],
)
def test_it_loads_without_what_it_does_not_need(module: str, heavy: set[str]) -> None:
    code = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert set(done.stdout.split()) & heavy == set()
