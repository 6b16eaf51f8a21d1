"""Who gives up device memory, and whether the way back that was chosen then still is right."""

from __future__ import annotations

import pytest

from engine_bridge.policy.kv.restore_method import LossDecision, Way
from engine_bridge.policy.scheduling.preemption import (
    MAX_REGRET,
    RunningFacts,
    is_still_right,
    least_fair_first,
)


def first_victim(*running: RunningFacts) -> str:
    return min(running, key=least_fair_first).request_id


def running(request_id: str, fairness: float = 0.1, started_s: float = 0.0, urgency: int = 0) -> RunningFacts:
    return RunningFacts(
        request_id=request_id, fairness=fairness, started_s=started_s, num_blocks=4, urgency=urgency
    )


def test_the_lowest_priority_goes_first() -> None:
    assert first_victim(running("old", 0.9), running("new", 0.1), running("mid", 0.5)) == "new"


def test_of_equals_the_one_that_began_last_goes_first() -> None:
    assert first_victim(running("before", started_s=1.0), running("last", started_s=2.0)) == "last"


def test_an_urgent_request_stays_whatever_its_fairness() -> None:
    assert first_victim(running("urgent", 0.0, urgency=-1), running("usual", 5.0)) == "usual"


@pytest.mark.parametrize(
    ("way", "swap_s", "is_right"),
    [
        (Way.SWAP, 1.0, True),
        (Way.SWAP, MAX_REGRET * 0.9, True),
        (Way.SWAP, MAX_REGRET * 1.1, False),
        (Way.RECOMPUTE, 0.9 / MAX_REGRET, False),
        (Way.RECOMPUTE, 0.9, True),
    ],
)
def test_a_way_is_left_once_the_other_is_much_faster(way: Way, swap_s: float, is_right: bool) -> None:
    assert is_still_right(way, LossDecision(way, swap_s, recompute_s=1.0)) is is_right
