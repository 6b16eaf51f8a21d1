"""When lanes and predictor are fitted, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_bridge.core.scheduling.dispatcher import MAX_PLACED
from engine_bridge.core.scheduling.refits import REFIT_EVERY_S, WINDOW, Refits, at_once
from engine_bridge.policy.scheduling.lanes import MIN_SIZES, knee, least_squares
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.policy.scheduling.sizes import Scale

from .fake_engine import FakeEngine, arrival

SCALE = Scale(1000.0, 1000.0, 1.0)
NUM_TOKENS = 1000


def taught(refits: Refits, num: int = 40) -> Refits:
    """Small and large requests, half of each, ten in a second; the first fit is done."""
    for at in range(num):
        tokens = 10 if at % 2 else 1000
        refits.arrived(str(at), (float(tokens), 16.0, 0.0), tokens, 1.0, at * 0.1)
    refits.start_if_due(num * 0.1, SCALE, NUM_TOKENS, True)
    refits.take()
    return refits


def safely(work: Callable[[], None]) -> None:
    """As a thread does it: what fails is not the caller's."""
    try:
        work()
    except RuntimeError:
        pass


def test_lanes_are_fitted_as_soon_as_they_can_be_and_whenever_twice_as_many_have_come() -> None:
    learned: list[int] = []
    refits, fits = Refits(at_once, lambda: learned.append(1), now=0.0), []
    for num in range(1, 3 * WINDOW):
        refits.arrived(str(num), (float(num), 1.0, 0.0), num, 1.0, 0.0)
        refits.start_if_due(1.0, SCALE, NUM_TOKENS, True)
        if refits.take() is not None:
            fits.append(num)
    assert fits == [MIN_SIZES * 2**times for times in range(8)] and fits[-1] == WINDOW
    assert not learned, "the predictor takes seconds, and has time"


def test_nothing_is_fitted_before_its_time_or_without_requests() -> None:
    refits = Refits(at_once, lambda: None, now=0.0)
    refits.start_if_due(REFIT_EVERY_S, SCALE, NUM_TOKENS, True)
    assert refits.take() is None
    taught(refits)
    refits.due_s = 100.0
    refits.start_if_due(99.0, SCALE, NUM_TOKENS, True)
    assert refits.take() is None
    refits.start_if_due(100.0, SCALE, NUM_TOKENS, True)
    fitted = refits.take()
    assert fitted is not None and fitted.lanes.num_lanes == 2 and sum(fitted.quotas) == NUM_TOKENS
    assert refits.take() is None


def test_a_predictor_that_fails_does_not_cost_the_lanes() -> None:
    def fail() -> None:
        raise RuntimeError("no model")

    refits = taught(Refits(safely, fail, now=0.0))
    for now in (REFIT_EVERY_S, 3 * REFIT_EVERY_S):
        refits.start_if_due(now, SCALE, NUM_TOKENS, True)
        assert refits.take() is not None


def test_one_that_is_still_at_work_is_not_begun_again() -> None:
    works: list[Callable[[], None]] = []
    calls: list[int] = []
    refits = Refits(works.append, lambda: calls.append(1), now=0.0)
    refits.arrived("a", (1.0, 1.0, 0.0), 1, 1.0, 0.0)
    refits.start_if_due(REFIT_EVERY_S, SCALE, NUM_TOKENS, True)
    refits.start_if_due(3 * REFIT_EVERY_S, SCALE, NUM_TOKENS, True)
    assert len(works) == 2 and refits.take() is None
    for work in works:
        work()
    assert refits.take() is not None and calls == [1]
    refits.start_if_due(5 * REFIT_EVERY_S, SCALE, NUM_TOKENS, True)
    assert len(works) == 4


def test_without_lanes_there_is_still_a_predictor_that_learns() -> None:
    calls: list[int] = []
    refits = taught(Refits(at_once, lambda: calls.append(1), now=0.0))
    refits.start_if_due(REFIT_EVERY_S, SCALE, NUM_TOKENS, False)
    assert calls == [1] and refits.take() is None


@pytest.mark.parametrize(("rule", "num_lanes"), [(knee, 1), (least_squares, 4)])
def test_rule_and_period_are_the_callers(rule: object, num_lanes: int) -> None:
    refits = Refits(at_once, lambda: None, now=0.0, every_s=5.0, rule=rule)  # type: ignore[arg-type]
    for at in range(MIN_SIZES - 1):
        refits.arrived(str(at), (500.0 + at, 16.0, 0.0), 10, 1.0, 0.0)
    refits.start_if_due(4.9, SCALE, NUM_TOKENS, True)
    assert refits.take() is None
    refits.arrived("last", (530.0, 16.0, 0.0), 10, 1.0, 0.0)
    refits.start_if_due(5.0, SCALE, NUM_TOKENS, True)
    fitted = refits.take()
    assert fitted is not None and fitted.lanes.num_lanes == num_lanes


def quotas(refits: Refits) -> tuple[int, ...]:
    refits.start_if_due(1000.0, SCALE, 10**6, True)
    fitted = refits.take()
    assert fitted is not None and fitted.lanes.num_lanes == 2
    return fitted.quotas


def test_who_waits_counts_among_those_that_came() -> None:
    """Under overload few of the large ones end, and many come."""
    ended, waiting = (taught(Refits(at_once, lambda: None, now=0.0)) for _ in range(2))
    for at in range(0, 40, 2):
        ended.ended(str(at), 1000, 1.0)
    assert quotas(ended) == quotas(waiting)
    for at in range(40, 400):
        waiting.arrived(str(at), (1000.0, 16.0, 0.0), 1000, 200.0, 4.0)
    assert quotas(waiting)[1] > quotas(taught(Refits(at_once, lambda: None, now=0.0)))[1]


def test_what_really_was_takes_the_place_of_what_was_predicted() -> None:
    refits = taught(Refits(at_once, lambda: None, now=0.0))
    before = quotas(refits)
    refits.due_s = 0.0
    refits.left("1")
    for at in range(1, 40, 2):
        refits.ended(str(at), 500, 1.0)
    after = quotas(refits)
    assert after[0] > before[0], "small prompts had long answers"
    refits.ended("unknown", 1, 1.0)


def test_new_lanes_are_taken_over_some_requests_in_each_step() -> None:
    engine = FakeEngine("mlq", num_slots=0)
    policy = engine.own.policy
    assert isinstance(policy, Mlq)
    for number in range(3 * MAX_PLACED):
        engine.ask(arrival(str(number), 10 if number % 2 else 1000))
    engine.step()  # fits
    steps = 0
    while not engine.own.counts["refits"]:
        assert policy.lanes.num_lanes == 1
        engine.step()
        steps += 1
    assert steps == 3 and policy.lanes.num_lanes == 2
    assert policy.num_waiting() == (48, 48)
    policy.check_invariants()
