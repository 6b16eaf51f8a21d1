"""What is done for requests that may come takes a small share of the time of those that run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.kv.copy_share import CREDIT_S, LONGEST_TURN_S, SHARE, SHORTEST_TURN_S, WorkShare


@given(steps=st.lists(st.floats(1e-4, 5.0), min_size=1, max_size=60), overrun=st.floats(0.1, 3.0))
def test_turns_in_vain_take_no_more_than_their_share_of_the_time(steps: list[float], overrun: float) -> None:
    share, now, taken_s, last_s = WorkShare(), 50.0, 0.0, 0.0
    for step_s in steps:
        now += step_s
        allowed_s = share.allowed_s(now)
        assert allowed_s == 0 or SHORTEST_TURN_S <= allowed_s <= LONGEST_TURN_S
        if allowed_s:
            last_s = allowed_s * overrun
            now += last_s
            share.took(last_s, 10, now)
            taken_s += last_s
    assert taken_s <= CREDIT_S + SHARE * (now - 50.0) + last_s


@pytest.mark.parametrize(
    ("step_s", "turn_s"), [(0.001, SHORTEST_TURN_S), (0.01, 0.005), (0.2, LONGEST_TURN_S)]
)
def test_a_turn_takes_half_of_a_step_within_bounds(step_s: float, turn_s: float) -> None:
    share, now = WorkShare(), 0.0
    for _ in range(2000):
        now += step_s
        share.allowed_s(now)
    assert share.allowed_s(now + step_s) == pytest.approx(turn_s, rel=0.01)


def test_work_that_comes_to_use_costs_nothing() -> None:
    share, now, taken_s = WorkShare(), 0.0, 0.0
    while now < 100:
        now += 0.01
        if allowed_s := share.allowed_s(now):
            now += allowed_s
            share.took(allowed_s, 10, now)
            share.used(10)
            taken_s += allowed_s
    assert taken_s == pytest.approx(now / 3, rel=0.05)  # half a step after each


def test_more_than_was_lost_is_never_paid_back() -> None:
    share = WorkShare()
    share.took(CREDIT_S / 100, 10, 0.0)
    share.used(1000)
    share.took(CREDIT_S, 0, 0.0)
    assert share.allowed_s(0.0) == 0.0
