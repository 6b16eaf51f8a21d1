"""Which requests pause for urgent ones, which resume, and how long a pause may last."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.scheduling import pausing
from engine_bridge.policy.scheduling.pausing import Batch, Other, PauseDecision, decide, kept_from_starting

SLO_S = 0.1


def decode_s(num_requests: int, num_tokens: int) -> float:
    """10 ms for each request and for a thousand tokens: with requests of 1,000, five fit the SLO."""
    return 0.01 * num_requests + 1e-5 * num_tokens


def other(name: str, **fields: Any) -> Other:
    defaults = {"priority": 0, "arrived_s": 0.0, "num_tokens": 1000, "ran_s": 10.0, "paused_s": 0.0}
    return Other(request_id=name, **(defaults | fields))


def others(num: int, **fields: Any) -> list[Other]:
    return [other(str(at), arrived_s=float(at), **fields) for at in range(num)]


def of(num_urgent: int, running: list[Other], paused: list[Other] | None = None) -> PauseDecision:
    return decide(decode_s, SLO_S, Batch(num_urgent, 1000 * num_urgent), running, paused or [])


DONE = other("done", ran_s=3.0, paused_s=3.0 + pausing.GRACE_S)
NOT_YET = other("not yet", ran_s=3.0, paused_s=4.5)
LOW = other("late", priority=5, arrived_s=-9.0)
TIRED = other("tired", ran_s=3.0, paused_s=3.0 + pausing.GRACE_S - pausing.MIN_PAUSE_S / 2, arrived_s=99.0)


@pytest.mark.parametrize(
    ("num_urgent", "running", "paused", "pause", "resume"),
    [
        pytest.param(1, others(4), [], (), (), id="urgent ones decode in time"),
        pytest.param(0, others(50), [], (), (), id="none is urgent"),
        pytest.param(1, others(7), [], ("4", "5", "6"), (), id="as few as it takes, the youngest"),
        pytest.param(1, [*others(4), LOW], [], ("late",), (), id="priority"),
        pytest.param(0, [], others(30)[::-1], (), tuple(map(str, range(30))), id="all resume, oldest first"),
        pytest.param(1, [other("runs")], others(9)[::-1], (), ("0", "1"), id="some of the time is left"),
        pytest.param(1, others(3), others(9), (), (), id="none could resume"),
        pytest.param(9, others(9), [], tuple(map(str, range(9))), (), id="SLO missed, but much is gained"),
        pytest.param(9, [], [DONE, NOT_YET], (), ("done",), id="paused for long enough"),
        pytest.param(9, [*others(3), TIRED], [], ("0", "1", "2"), (), id="a moment is no pause"),
    ],
)
def test_which_pause_and_which_resume(
    num_urgent: int, running: list[Other], paused: list[Other], pause: Any, resume: Any
) -> None:
    assert of(num_urgent, running, paused) == PauseDecision(pause, resume)


@pytest.mark.parametrize(
    ("num_urgent", "num_running", "starting", "kept"),
    [
        (1, 3, others(4, ran_s=0.0), {"2", "3"}),
        (1, 3, [other("large", num_tokens=20_000), other("small", num_tokens=10)], {"large"}),
        (9, 9, [other("due", ran_s=0.0, paused_s=pausing.GRACE_S)], set()),
    ],
)
def test_requests_start_with_which_urgent_ones_decode_in_time(
    num_urgent: int, num_running: int, starting: list[Other], kept: set[str]
) -> None:
    urgent, running = (Batch(num, 1000 * num) for num in (num_urgent, num_running))
    assert kept_from_starting(decode_s, SLO_S, urgent, running, starting) == kept


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
def test_pauses_help_within_their_share(num_urgent: int, running: list[Other], paused: list[Other]) -> None:
    decision = of(num_urgent, running, paused)
    by_id = {each.request_id: each for each in (*running, *paused)}
    assert set(decision.pause) <= {each.request_id for each in running}
    assert all(by_id[each].left_s >= pausing.MIN_PAUSE_S for each in decision.pause)
    assert all(each.left_s > 0 for each in paused if each.request_id not in decision.resume)
    if decision.pause:
        left = [each for each in running if each.request_id not in decision.pause]
        left += [by_id[each] for each in decision.resume]
        after_s = decode_s(num_urgent + len(left), 1000 * num_urgent + sum(each.num_tokens for each in left))
        assert after_s <= SLO_S or not any(each.left_s >= pausing.MIN_PAUSE_S for each in left)
