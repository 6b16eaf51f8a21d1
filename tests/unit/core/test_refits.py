"""When lanes and predictor are fitted, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_bridge.core.dispatcher import MAX_PLACED
from engine_bridge.core.refits import REFIT_EVERY_S, Refits, at_once
from engine_bridge.policy.lanes import least_squares
from engine_bridge.policy.mlq import Mlq
from engine_bridge.policy.quotas import SeenRequest
from engine_bridge.policy.sizes import Scale

from .fake_engine import FakeEngine, arrival


def taught(refits: Refits, num: int = 40) -> Refits:
    """Small and large requests, half of each."""
    for at in range(num):
        tokens = 10 if at % 2 else 1000
        refits.saw(SeenRequest(0.0, tokens, 1.0), (float(tokens), 16.0, 0.0), at * 0.1)
    return refits


SCALE = Scale(1000.0, 1000.0, 1.0)


def safely(work: Callable[[], None]) -> None:
    """As a thread does it: what fails is not the caller's."""
    try:
        work()
    except RuntimeError:
        pass


def test_nothing_is_fitted_before_its_time_or_without_requests() -> None:
    refits = Refits(at_once, lambda: None, now=0.0)
    refits.start_if_due(REFIT_EVERY_S, SCALE, 1000, True)
    assert refits.take() is None
    taught(refits)
    refits.due_s = 100.0
    refits.start_if_due(99.0, SCALE, 1000, True)
    assert refits.take() is None
    refits.start_if_due(100.0, SCALE, 1000, True)
    fitted = refits.take()
    assert fitted is not None and fitted.lanes.num_lanes == 2 and sum(fitted.quotas) == 1000
    assert refits.take() is None


def test_a_predictor_that_fails_does_not_cost_the_lanes() -> None:
    def fail() -> None:
        raise RuntimeError("no model")

    refits = taught(Refits(safely, fail, now=0.0))
    for now in (REFIT_EVERY_S, 3 * REFIT_EVERY_S):
        refits.start_if_due(now, SCALE, 1000, True)
        assert refits.take() is not None


def test_one_that_is_still_at_work_is_not_begun_again() -> None:
    works: list[Callable[[], None]] = []
    calls: list[int] = []
    refits = taught(Refits(works.append, lambda: calls.append(1), now=0.0))
    refits.start_if_due(REFIT_EVERY_S, SCALE, 1000, True)
    refits.start_if_due(3 * REFIT_EVERY_S, SCALE, 1000, True)
    assert len(works) == 2 and refits.take() is None
    for work in works:
        work()
    assert refits.take() is not None and calls == [1]
    refits.start_if_due(5 * REFIT_EVERY_S, SCALE, 1000, True)
    assert len(works) == 4


def test_without_lanes_there_is_still_a_predictor_that_learns() -> None:
    calls: list[int] = []
    refits = taught(Refits(at_once, lambda: calls.append(1), now=0.0))
    refits.start_if_due(REFIT_EVERY_S, SCALE, 1000, False)
    assert calls == [1] and refits.take() is None


@pytest.mark.parametrize("every_s", [5.0, 300.0])
def test_rule_and_period_are_the_callers(every_s: float) -> None:
    refits = taught(Refits(at_once, lambda: None, now=0.0, every_s=every_s, rule=least_squares))
    refits.start_if_due(every_s - 0.1, SCALE, 1000, True)
    assert refits.take() is None
    refits.start_if_due(every_s, SCALE, 1000, True)
    fitted = refits.take()
    assert fitted is not None and fitted.lanes.num_lanes == 2, "there are two sizes"


def test_new_lanes_are_taken_over_some_requests_in_each_step() -> None:
    engine = FakeEngine("mlq", num_slots=0)
    policy = engine.own.policy
    assert isinstance(policy, Mlq)
    taught(engine.own.refits)
    for number in range(3 * MAX_PLACED):
        engine.ask(arrival(str(number), 10 if number % 2 else 1000))
    engine.step()
    engine.now = REFIT_EVERY_S
    engine.step()
    steps = 0
    while not engine.own.counts["refits"]:
        assert policy.lanes.num_lanes == 1
        engine.step()
        steps += 1
    assert steps == 3 and policy.lanes.num_lanes == 2
    assert policy.num_waiting() == (48, 48)
    policy.check_invariants()
