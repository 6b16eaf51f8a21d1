"""Which request gives up device memory, and whether the way back that was chosen for it is still right."""

import pytest

from engine_bridge.policy.kv.restore_method import LossDecision, Way
from engine_bridge.policy.scheduling import preemption
from engine_bridge.policy.scheduling.preemption import RunningFacts, is_still_right, least_fair_first


def running(request_id: str, fairness: float, started_s: float = 0.0, urgency: int = 0) -> RunningFacts:
    told = {"fairness": fairness, "started_s": started_s, "urgency": urgency}
    return RunningFacts(request_id=request_id, **told)


def test_victims_are_the_least_urgent_then_the_least_fair_then_the_last_started() -> None:
    order = [running("mild", 5.0, urgency=1), running("new", 0.1, 2.0), running("last", 0.5, 2.0)]
    order += [running("before", 0.5, 1.0), running("urgent", 0.0, urgency=-1)]
    assert sorted(reversed(order), key=least_fair_first) == order


@pytest.mark.parametrize(
    ("way", "swap_s", "is_right"),
    [
        (Way.SWAP, preemption.MAX_REGRET * 0.9, True),
        (Way.SWAP, preemption.MAX_REGRET * 1.1, False),
        (Way.RECOMPUTE, 0.9 / preemption.MAX_REGRET, False),
        (Way.RECOMPUTE, 0.9, True),
    ],
)
def test_a_way_is_left_once_the_other_is_much_faster(way: Way, swap_s: float, is_right: bool) -> None:
    assert is_still_right(way, LossDecision(way, swap_s, recompute_s=1.0)) is is_right
