"""Who is paused for urgent requests, who goes on, and for how long anybody may stand."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.scheduling.pausing import (
    GRACE_S,
    MIN_PAUSE_S,
    Batch,
    Other,
    PauseDecision,
    decide,
    kept_from_starting,
)

SLO_S = 0.1


def decode_s(num_requests: int, num_tokens: int) -> float:
    """10 ms for each request and for a thousand tokens: with requests of 1,000, five fit the SLO."""
    return 0.01 * num_requests + 1e-5 * num_tokens


def other(name: str, **fields: Any) -> Other:
    defaults: dict[str, Any] = {
        "priority": 0,
        "arrived_s": 0.0,
        "num_tokens": 1000,
        "ran_s": 10.0,
        "paused_s": 0.0,
    }
    return Other(request_id=name, **(defaults | fields))


def others(num: int, **fields: Any) -> list[Other]:
    return [other(str(at), arrived_s=float(at), **fields) for at in range(num)]


def of(num_urgent: int, running: list[Other], paused: list[Other] | None = None) -> PauseDecision:
    return decide(decode_s, SLO_S, Batch(num_urgent, 1000 * num_urgent), running, paused or [])


def test_nobody_is_paused_while_urgent_requests_decode_in_time() -> None:
    assert of(1, others(4)) == PauseDecision()
    assert of(0, others(50)) == PauseDecision()


def test_as_few_as_it_takes_are_paused_and_the_youngest_of_them() -> None:
    assert set(of(1, others(7)).pause) == {"4", "5", "6"}


def test_who_can_wait_longest_is_paused_first() -> None:
    running = [*others(4), other("can wait", priority=5, arrived_s=-9.0)]
    assert of(1, running).pause == ("can wait",)


def test_all_go_on_the_oldest_first_once_nobody_is_urgent() -> None:
    assert of(0, [], others(30)[::-1]).resume == tuple(str(at) for at in range(30))


def test_who_goes_on_leaves_some_of_the_time_and_came_first() -> None:
    assert of(1, [other("runs")], others(9)[::-1]).resume == ("0", "1")
    assert of(1, others(3), others(9)).resume == ()
    assert of(1, others(4), others(9)) == PauseDecision()


def test_nobody_is_paused_where_that_would_hardly_help() -> None:
    slow = lambda num, num_tokens: 1.0 + 0.001 * num  # noqa: E731
    assert decide(slow, SLO_S, Batch(1, 1000), others(20), []) == PauseDecision()
    assert not kept_from_starting(slow, SLO_S, Batch(1, 1000), Batch(20, 20_000), others(3))


def test_where_the_slo_cannot_be_kept_but_much_is_gained_all_are_paused() -> None:
    assert len(of(9, others(9)).pause) == 9


def test_who_was_paused_as_long_as_it_ran_goes_on_whatever_comes() -> None:
    done = other("done", ran_s=3.0, paused_s=3.0 + GRACE_S)
    decision = of(9, [], [done, other("not yet", ran_s=3.0, paused_s=3.0)])
    assert decision.resume == ("done",)


def test_who_could_be_paused_for_a_moment_only_runs_on() -> None:
    tired = other("tired", ran_s=3.0, paused_s=3.0 + GRACE_S - MIN_PAUSE_S / 2, arrived_s=99.0)
    assert of(9, [*others(3), tired]).pause == ("0", "1", "2")


def test_of_those_that_could_start_only_those_do_with_which_urgent_ones_decode_in_time() -> None:
    urgent = Batch(1, 1000)
    running = Batch(3, 3000)
    assert kept_from_starting(decode_s, SLO_S, urgent, running, others(4, ran_s=0.0)) == {"2", "3"}
    small = [other("large", num_tokens=20_000), other("small", num_tokens=10)]
    assert kept_from_starting(decode_s, SLO_S, urgent, running, small) == {"large"}


def test_who_was_kept_from_starting_for_long_enough_starts() -> None:
    due = other("due", ran_s=0.0, paused_s=GRACE_S)
    assert not kept_from_starting(decode_s, SLO_S, Batch(9, 9000), Batch(9, 9000), [due])


some = st.builds(
    other,
    name=st.uuids().map(str),
    priority=st.integers(0, 2),
    arrived_s=st.floats(0, 100),
    num_tokens=st.integers(1, 4000),
    ran_s=st.floats(0, 20),
    paused_s=st.floats(0, 20),
)


@given(st.integers(0, 6), st.lists(some, max_size=12), st.lists(some, max_size=12))
def test_whatever_runs_pauses_help_as_far_as_they_may_and_nobody_stands_beyond_its_share(
    num_urgent: int, running: list[Other], paused: list[Other]
) -> None:
    decision = of(num_urgent, running, paused)
    by_id = {each.request_id: each for each in (*running, *paused)}
    assert set(decision.pause) <= {each.request_id for each in running}
    assert set(decision.resume) <= {each.request_id for each in paused}
    assert all(by_id[each].left_s >= MIN_PAUSE_S for each in decision.pause)
    stand = {each.request_id for each in paused} - set(decision.resume)
    assert all(by_id[each].left_s > 0 for each in stand)
    if decision.pause:
        left = [each for each in running if each.request_id not in decision.pause]
        left += [by_id[each] for each in decision.resume]
        before = len(running) + num_urgent, sum(each.num_tokens for each in running) + 1000 * num_urgent
        after_s = decode_s(num_urgent + len(left), 1000 * num_urgent + sum(each.num_tokens for each in left))
        assert after_s <= SLO_S or not any(each.left_s >= MIN_PAUSE_S for each in left)
        assert num_urgent and (decode_s(*before) > SLO_S or decision.resume)
