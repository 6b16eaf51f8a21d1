"""How tokens are shared among lanes, and that all of them come back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.scheduling import quotas
from engine_bridge.policy.scheduling.quotas import (
    LaneLoad,
    Ledger,
    SeenRequest,
    fitted,
    minimum_tokens,
    share,
)


def load(**fields: Any) -> LaneLoad:
    defaults = {"largest_tokens": 100, "duration_s": 2.0, "arrivals_per_s": 3.0, "slo_s": 10.0}
    return LaneLoad(**(defaults | fields))


loads = st.lists(
    st.builds(
        load,
        largest_tokens=st.integers(0, 10_000),
        duration_s=st.floats(0, 100),
        arrivals_per_s=st.floats(0, 100),
        slo_s=st.floats(0.1, 100),
    ),
    min_size=1,
    max_size=4,
)


def test_the_minimum_is_that_of_the_paper() -> None:
    """With it, 1/(μ − λ) is just the SLO."""
    one = load()
    tokens = minimum_tokens(one)
    assert tokens == pytest.approx(100 * 2.0 * (3.0 + 1 / 10.0))
    per_s = tokens / (one.largest_tokens * one.duration_s)
    assert 1 / (per_s - one.arrivals_per_s) == pytest.approx(one.slo_s)


@given(loads, st.integers(0, 100_000))
def test_shares_are_all_there_is_in_proportion_to_the_minima(each: list[LaneLoad], num_tokens: int) -> None:
    quotas = share(each, num_tokens)
    assert sum(quotas) == num_tokens
    minima = [minimum_tokens(one) for one in each]
    for quota, minimum in zip(quotas, minima, strict=True):
        assert quota == pytest.approx(num_tokens * minimum / sum(minima), abs=1.0)
        assert num_tokens < sum(minima) + len(each) or quota >= int(minimum)


def test_a_lane_borrows_only_from_the_pool_and_leaves_what_is_kept() -> None:
    spare = Ledger([100, 50, 50]).spare(200)
    assert spare.fits(0, 100)
    assert not spare.fits(0, 101)
    assert spare.fits_pool(0, 200, set())
    assert spare.fits_pool(0, 150, {0, 2})
    assert not spare.fits_pool(0, 151, {0, 2})


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_what_is_overcharged_is_never_held_at_one_time(running: list[tuple[int, int]]) -> None:
    """Against every step of what runs, one by one; running: tokens held now and still to be made."""
    charged = sum(held + left for held, left in running)
    most = max((sum(held + step for held, left in running if step <= left) for step in range(31)), default=0)
    assert quotas.overcharged_tokens([(held + left, left) for held, left in running], False) == charged - most
    assert quotas.overcharged_tokens([(100, 40), (50, 0), (30, 15)], True) == 55, "where KV is copied back"


def test_two_kinds_of_requests_become_two_lanes_with_all_tokens_between_them() -> None:
    small = [SeenRequest(0.1 + number / 1000, 50, 1.0) for number in range(50)]
    large = [SeenRequest(0.8 + number / 1000, 900, 20.0) for number in range(50)]
    lanes, quotas = fitted(small + large, 100.0, 10_000)
    assert lanes.num_lanes == len(quotas) == 2
    assert lanes.lane_of(0.12) != lanes.lane_of(0.83)
    assert sum(quotas) == 10_000 and quotas[1] > quotas[0] > 0
    with pytest.raises(ValueError, match="fitted to requests"):
        fitted([], 1.0, 100)
