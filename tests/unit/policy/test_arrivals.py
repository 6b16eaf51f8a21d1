"""Whose next request is predicted by how its earlier ones came, and whose is not."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.adapters.arrivals import MAX_GAPS, ArrivalHistogram

BEYOND_S = 1e6


def histogram(gaps_s: Iterable[float]) -> ArrivalHistogram:
    found = ArrivalHistogram()
    for gap_s in gaps_s:
        found.note(gap_s)
    return found


def regular(period_s: float, num: int = 30) -> list[float]:
    rng = random.Random(0)
    return [period_s * rng.uniform(0.95, 1.05) for _ in range(num)]


def test_the_next_request_becomes_likelier_as_its_time_comes_near() -> None:
    found = histogram(regular(60.0))
    assert found.probability(5.0, 10.0) == 0.0
    assert found.probability(5.0, 120.0) == pytest.approx(1.0)
    assert found.probability(57.0, 10.0) > 0.5


def test_a_new_habit_replaces_an_old_one_and_gaps_out_of_range_silence_it_where_they_are_more() -> None:
    assert histogram([*regular(60.0, 200), *regular(300.0, 400)]).window[0] > 200
    assert histogram([60.0] * 10 + [BEYOND_S] * 9).window is not None
    assert histogram([60.0] * 10 + [BEYOND_S] * 10).window is None


@given(st.lists(st.floats(-1, 1e6), max_size=300), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5))
def test_longer_leads_are_likelier(gaps_s: list[float], idle_s: float, lead_s: float, more_s: float) -> None:
    found = histogram(gaps_s)
    assert found.num_gaps < MAX_GAPS
    soon, later = found.probability(idle_s, lead_s), found.probability(idle_s, lead_s + more_s)
    assert 0 <= soon <= later + 1e-9 <= 1 + 2e-9
    if found.window is not None:
        assert found.window[0] < found.window[1]
