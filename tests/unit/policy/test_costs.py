"""What steps, prefills, swaps and restores are predicted to take, and the way that is chosen by it."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_bridge.policy.costs import costs
from engine_bridge.policy.costs.costs import CopyTable, CopyTimes, Link, StepTable, TablePrefill
from engine_bridge.policy.kv.restore_method import FullCost, SwapOrRecompute, Way
from kvtiers.policy.rates import HALF_LIFE_S
from kvtiers.policy.restore import Action
from tests.unit.facts import LinearPrefill, restore_facts

AXES = ([0, 1, 16, 64, 256], [0, 1, 4, 16], [0, 100, 1000, 10_000])


def linear(work: tuple[int, int, int]) -> float:
    num_prefill, num_decodes, num_context = work
    return 0.004 + 2e-4 * num_prefill + 3e-4 * num_decodes + 1e-6 * num_context


def table_of(step_s: Callable[[tuple[int, int, int]], float] = linear) -> StepTable:
    return StepTable.of(lambda points: [step_s(point) for point in points], *AXES)


works = st.tuples(st.integers(0, 256), st.integers(0, 16), st.integers(0, 10_000))
works = works.filter(lambda work: work[0] + work[1] > 0)
NUM_POINTS = math.prod(map(len, AXES))
tables = st.lists(st.floats(0, 10), min_size=NUM_POINTS, max_size=NUM_POINTS).map(
    lambda seconds: StepTable.of(lambda points: seconds, *AXES)
)


@settings(max_examples=150)
@given(tables, works, st.floats(0.01, 3))
def test_a_step_moves_its_prediction(table: StepTable, work: tuple[int, int, int], share: float) -> None:
    seconds = max(share * table.step_s(*work), 1e-6)
    before = table.step_s(*work)
    table.observe(*work, seconds)
    after = table.step_s(*work)
    low, high = sorted((before, seconds))
    assert low - 1e-9 <= after <= high + 1e-9
    if abs(seconds - before) > 1e-3 and before > 1e-3:
        assert after != before


more_work = st.tuples(st.integers(0, 2000), st.integers(0, 100), st.integers(0, 100_000))
# Either the prefill or the decodes take a second, and both together no more.
SATURATED = table_of(lambda work: float(work[0] > 64 or work[1] > 4))


@example(SATURATED, (1, 1, 1), (1000, 60, 0))
@given(tables, works, more_work)
def test_more_work_never_takes_less_also_beyond_the_grid(
    table: StepTable, work: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    of_both = [one + other for one, other in zip(work, more, strict=True)]
    assert 0 <= table.step_s(*work) <= table.step_s(*of_both) * (1 + 1e-9) + 1e-12


def test_beyond_the_grid_the_slopes_at_its_edge_continue() -> None:
    work = (1000, 60, 30_000)
    assert table_of().step_s(*work) == pytest.approx(linear(work))


def test_one_stall_hardly_counts_and_a_lasting_change_is_learned() -> None:
    table = table_of()
    work = (32, 4, 500)
    usual_s = table.step_s(*work)
    most = costs.OUTLIER_ERRORS * table.usual_error
    table.observe(*work, 1000 * usual_s)
    longer = (1 + most) ** (costs.LEARNING_RATE + costs.SLOWNESS_RATE)
    assert table.step_s(*work) <= usual_s * longer * (1 + 1e-9)
    for _ in range(200):
        table.observe(*work, 2 * usual_s)
    assert table.step_s(*work) == pytest.approx(2 * usual_s, rel=0.02)


def test_noise_leaves_the_times_of_other_work_where_they_were() -> None:
    """Ten thousand steps of one kind on a machine as fast as predicted, each longer or shorter by a tenth."""
    rng, work, other = random.Random(0), (16, 4, 1000), (256, 0, 0)
    table = table_of()
    before = table.step_s(*other)
    for _ in range(10_000):
        table.observe(*work, linear(work) * rng.lognormvariate(0, 0.1))
    assert table.step_s(*work) == pytest.approx(linear(work), rel=0.2)
    assert table.step_s(*other) == pytest.approx(before, rel=0.2)


def test_steps_that_take_no_time_do_not_silence_the_table() -> None:
    table, work = table_of(), (16, 4, 1000)
    for _ in range(500):
        table.observe(*work, 1e-300)
    for _ in range(500):
        table.observe(*work, linear(work))
    assert table.step_s(*work) == pytest.approx(linear(work), rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(seconds: float) -> None:
    table = table_of()
    before = table.grid()
    table.observe(32, 4, 500, seconds)
    table.observe(0, 0, 500, 1.0)
    assert table.grid() == before


def test_a_prefill_is_the_sum_of_its_chunks() -> None:
    prefill = TablePrefill(table_of(), chunk_tokens=64)
    chunks = [(64, 100), (64, 164), (64, 228), (10, 292)]
    expected_s = sum(linear((num, 0, context)) for num, context in chunks)
    assert prefill.prefill_s(202, 100) == pytest.approx(expected_s)
    assert prefill.prefill_s(0, 100) == 0.0


BLOCK_BYTES = 2 << 20


def test_swapping_takes_what_the_formula_says() -> None:
    link = Link(d2h_bytes_per_s=20e9, h2d_bytes_per_s=25e9)
    costs = SwapOrRecompute(LinearPrefill(1.0), 16, link.in_s)
    assert costs.decide(100, 7 * BLOCK_BYTES, read_s=0.5).swap_s == pytest.approx(
        0.5 + 7 * BLOCK_BYTES / 25e9
    )
    assert costs.decide(0, 0).swap_s == 0.0
    slow_start = Link(d2h_bytes_per_s=100.0, h2d_bytes_per_s=50.0, setup_s=3.0)
    assert (slow_start.out_s(100), slow_start.in_s(100)) == (4.0, 5.0)
    assert slow_start.out_s(0) == slow_start.in_s(0) == 0.0


@given(st.integers(1, 5000), st.integers(0, 5000), st.floats(1e6, 1e11), st.floats(1e-6, 1e-2))
def test_the_faster_way_is_taken(
    num_tokens: int, num_kept: int, bytes_per_s: float, s_per_token: float
) -> None:
    link = Link(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s, setup_s=1e-4)
    costs = SwapOrRecompute(LinearPrefill(s_per_token), 16, link.in_s)
    num_reused = min(num_kept, num_tokens) // 16
    num_lost_bytes = (math.ceil(num_tokens / 16) - num_reused) * BLOCK_BYTES
    decision = costs.decide(num_tokens, num_lost_bytes, num_kept)
    assert decision.swap_s == pytest.approx(link.in_s(num_lost_bytes))
    assert decision.recompute_s == pytest.approx(s_per_token * (num_tokens - 16 * num_reused))
    seconds = {Way.SWAP: decision.swap_s, Way.RECOMPUTE: decision.recompute_s}
    assert seconds[decision.way] == min(seconds.values()) >= 0


LINK = Link(d2h_bytes_per_s=8e9, h2d_bytes_per_s=4e9, setup_s=1e-4)
sizes = st.integers(1, 1 << 31)


SLOPE_OVERSHOOTS = [(1, 1.0, 0.0)] * 4 + [(1, 1.0, 84.0), (2, 1.0, 0.0), (1, 14.0, 25.0)]
SLOPE_OVERSHOOTS += [(1, 39.0, 177.0), (1, 86.0, 116.0), (1_361_345_923, 100.0, 200.0)]


@settings(max_examples=50)
@example(SLOPE_OVERSHOOTS, 763_368_038, 5_496_896)
@given(st.lists(st.tuples(sizes, st.floats(1e-6, 100), st.floats(0, 200)), max_size=30), sizes, sizes)
def test_more_bytes_never_take_less(copies: list[tuple[int, float, float]], one: int, other: int) -> None:
    table, now = CopyTimes(LINK).back, 0.0
    unseen = one + (1 << 16)
    assert table.copy_s(unseen, 0.0) == pytest.approx(LINK.in_s(unseen)), "as the link says until then"
    assert table.copy_s(0, 0.0) == table.copy_s(-1, 0.0) == 0.0
    for num_bytes, seconds, pause_s in copies:
        now += pause_s
        before = table.copy_s(num_bytes, now)
        table.observe(num_bytes, seconds, now)
        low, high = sorted((before, seconds))
        assert low * (1 - 1e-9) <= table.copy_s(num_bytes, now) <= high * (1 + 1e-9)
    few, many = sorted((one, other))
    assert 0 < table.copy_s(few, now) <= table.copy_s(many, now) * (1 + 1e-9)


def test_copies_of_two_sizes_teach_their_set_up_and_their_speed() -> None:
    table, rng = CopyTable(LINK.in_s), random.Random(1)
    real = Link(d2h_bytes_per_s=1e9, h2d_bytes_per_s=2e9, setup_s=2e-3)
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


def test_a_restore_is_computed_behind_what_the_device_holds() -> None:
    prefill = TablePrefill(table_of(), chunk_tokens=64)
    ready = {"num_ready_blocks": 64, "num_ready_layers": 12, "disk_bytes_left": 0}
    facts = restore_facts(**ready, host_bytes_per_s=1e3, num_context_tokens=5000)
    decision = FullCost(prefill=prefill).decide(facts)
    assert (decision.action, decision.num_blocks) == (Action.LOAD, 0)
    assert decision.expected_s == pytest.approx(prefill.prefill_s(64 * 32 + 32, 5000))
