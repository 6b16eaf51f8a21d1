"""When lanes and predictor are fitted, and what becomes of it."""

from collections.abc import Callable

from engine_bridge.core.scheduling.refits import REFIT_EVERY_S, Refits, at_once
from engine_bridge.policy.scheduling.sizes import Scale

SCALE = Scale(1000.0, 1000.0, 1.0)
NUM_TOKENS = 1000


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


def quotas(refits: Refits) -> tuple[int, ...]:
    refits.start_if_due(1000.0, SCALE, 10**6, True)
    fitted = refits.take()
    assert fitted is not None and fitted.lanes.num_lanes == 2
    return fitted.quotas


def test_what_really_was_takes_the_place_of_what_was_predicted() -> None:
    refits = Refits(at_once, lambda: None, now=0.0)
    for at in range(40):  # small and large ones, half of each, ten in a second
        tokens = 10 if at % 2 else 1000
        refits.arrived(str(at), (float(tokens), 16.0, 0.0), tokens, 1.0, at * 0.1)
    refits.start_if_due(4.0, SCALE, NUM_TOKENS, True)
    refits.take()
    before = quotas(refits)
    refits.due_s = 0.0
    refits.left("1")
    for at in range(1, 40, 2):
        refits.ended(str(at), 500, 1.0)
    after = quotas(refits)
    assert after[0] > before[0], "small prompts had long answers"
    refits.ended("unknown", 1, 1.0)
