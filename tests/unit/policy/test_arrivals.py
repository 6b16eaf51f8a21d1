"""Whose next request is predicted by how its earlier ones came, and whose is not."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.adapters.arrivals import (
    MAX_GAPS,
    MIN_GAPS,
    NUM_BINS,
    ArrivalHistogram,
    Arrivals,
    bin_of,
    edges_s,
)

BEYOND_S = 1e6


def histogram(gaps_s: Iterable[float]) -> ArrivalHistogram:
    found = ArrivalHistogram()
    for gap_s in gaps_s:
        found.note(gap_s)
    return found


def regular(period_s: float, num: int = 30, jitter: float = 0.05, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [period_s * rng.uniform(1 - jitter, 1 + jitter) for _ in range(num)]


def memoryless(mean_s: float, num: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.expovariate(1 / mean_s) for _ in range(num)]


# -- bins --------------------------------------------------------------------------------------------------------------


@given(st.floats(-10, 1e6))
def test_a_gap_lies_in_its_bin(gap_s: float) -> None:
    at = bin_of(gap_s)
    if at == NUM_BINS:
        assert gap_s >= edges_s(NUM_BINS - 1)[1]
    else:
        low_s, high_s = edges_s(at)
        assert (low_s <= gap_s or at == 0) and gap_s < high_s


def test_bins_touch_and_an_edge_belongs_to_the_next_one() -> None:
    assert edges_s(0)[0] == 0.0
    for at in range(NUM_BINS - 1):
        assert edges_s(at)[1] == edges_s(at + 1)[0]
        assert bin_of(edges_s(at)[1]) == at + 1


# -- one adapter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period_s", [1.0, 60.0, 3600.0])
def test_a_regular_adapters_window_holds_its_period(period_s: float) -> None:
    window = histogram(regular(period_s)).window
    assert window is not None
    head_s, tail_s = window
    assert 0.7 * period_s < head_s <= 0.96 * period_s
    assert 1.04 * period_s <= tail_s < 1.4 * period_s


@pytest.mark.parametrize("mean_s", [2.0, 30.0, 600.0])
def test_a_memoryless_adapter_foretells_nothing(mean_s: float) -> None:
    """In 200 requests each of 20 adapters, hardly ever: few gaps may crowd by chance."""
    told = 0
    for seed in range(20):
        found = ArrivalHistogram()
        for gap_s in memoryless(mean_s, 200, seed):
            found.note(gap_s)
            told += found.window is not None
    assert told < 0.02 * 20 * 200


def test_few_gaps_foretell_nothing() -> None:
    assert histogram([60.0] * (MIN_GAPS - 1)).window is None
    assert histogram([60.0] * MIN_GAPS).window is not None


def test_gaps_out_of_range_silence_a_histogram_that_they_outnumber() -> None:
    assert histogram([60.0] * 10 + [BEYOND_S] * 9).window is not None
    assert histogram([60.0] * 10 + [BEYOND_S] * 10).window is None


def test_the_next_request_becomes_likelier_as_its_time_comes_near() -> None:
    found = histogram(regular(60.0))
    assert found.probability(5.0, 10.0) == 0.0
    assert found.probability(5.0, 120.0) == pytest.approx(1.0)
    assert found.probability(57.0, 10.0) > 0.5


def test_after_the_tail_it_is_silent_again() -> None:
    found = histogram([*regular(60.0, 110), 500.0])  # the last is beyond 99%
    assert found.probability(55.0, 1000.0) > 0.9
    assert found.probability(200.0, 1000.0) == 0.0


def test_two_habits_are_told_apart_by_how_long_it_has_been_idle() -> None:
    found = histogram([2.0, 100.0] * 15)
    assert found.probability(0.0, 3.0) == pytest.approx(0.5)
    assert found.probability(10.0, 3.0) == 0.0
    assert found.probability(10.0, 150.0) == pytest.approx(1.0)


def test_a_new_habit_replaces_an_old_one() -> None:
    found = histogram([*regular(60.0, 200), *regular(300.0, 400)])
    assert found.window is not None
    assert found.window[0] > 200


@given(
    st.lists(st.floats(-1, 1e6), max_size=300),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
)
def test_probabilities_are_ones_and_grow_with_the_lead(
    gaps_s: list[float], idle_s: float, lead_s: float, more_s: float
) -> None:
    found = histogram(gaps_s)
    assert found.num_gaps < MAX_GAPS
    soon, later = found.probability(idle_s, lead_s), found.probability(idle_s, lead_s + more_s)
    assert 0 <= soon <= later + 1e-9 <= 1 + 2e-9
    if found.window is not None:
        assert found.window[0] < found.window[1]


# -- all adapters ------------------------------------------------------------------------------------------------------


def test_who_is_due_is_told_the_likeliest_first() -> None:
    arrivals = Arrivals()
    for turn in range(20):
        arrivals.arrived(1, turn * 60.0)
        arrivals.arrived(2, turn * 60.0 + 50.0)
        arrivals.arrived(3, turn * 60.0 + 30.0 * (turn % 2))  # gaps of 30 and 90 s
    last_s = 19 * 60.0
    assert arrivals.due(last_s + 50.0, 1.0) == []
    due = arrivals.due(last_s + 51.0, 21.0)
    assert [adapter_id for adapter_id, _ in due] == [1, 3]
    assert due[0][1] == pytest.approx(1.0)
    assert 0 < due[1][1] <= 0.5


def test_a_memoryless_adapter_is_hardly_ever_due_and_a_regular_one_nearly_always_before_it_comes() -> None:
    rng = random.Random(3)
    arrivals, told, predicted = Arrivals(), 0, 0
    shared = sorted(rng.uniform(0, 30_000) for _ in range(500))
    timed = [60.0 * turn + rng.uniform(-2, 2) for turn in range(500)]
    for at_s, adapter_id in sorted([(at_s, 1) for at_s in shared] + [(at_s, 2) for at_s in timed]):
        due = {each for each, _ in arrivals.due(at_s - 1.0, 10.0)}
        told += 1 in due
        predicted += adapter_id == 2 and 2 in due
        arrivals.arrived(adapter_id, at_s)
    assert told < 0.02 * 1000
    assert predicted > 0.95 * 500


def test_an_adapter_nobody_asked_for_twice_is_never_due() -> None:
    arrivals = Arrivals()
    arrivals.arrived(1, 0.0)
    assert arrivals.due(0.0, 1e6) == []
    assert arrivals.window(1) is None and arrivals.window(2) is None


def test_beyond_the_cap_the_longest_silent_is_forgotten() -> None:
    arrivals = Arrivals(max_adapters=2)
    for turn in range(MIN_GAPS + 1):
        arrivals.arrived(1, turn * 60.0)
        arrivals.arrived(2, turn * 60.0 + 1)
    arrivals.arrived(3, 1000.0)
    assert len(arrivals) == 2
    assert arrivals.window(1) is None
    assert arrivals.window(2) is not None


def test_what_is_forgotten_is_not_due() -> None:
    arrivals = Arrivals()
    for turn in range(MIN_GAPS + 1):
        arrivals.arrived(1, turn * 60.0)
    assert arrivals.due(MIN_GAPS * 60.0, 100.0)
    arrivals.forget(1)
    arrivals.forget(1)
    assert arrivals.due(MIN_GAPS * 60.0, 100.0) == []


def test_room_for_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="room"):
        Arrivals(max_adapters=0)
