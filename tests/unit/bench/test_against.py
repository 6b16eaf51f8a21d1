"""What two checkouts' figures say of each other."""

from __future__ import annotations

from bench.live.against import compared

STEADY = (1.0, 1.1, 0.9, 1.0, 1.05, 0.95)


def test_the_same_figures_are_no_worse() -> None:
    assert compared(STEADY, STEADY)["verdict"] == "no worse"


def test_a_fifth_more_in_each_round_is_worse() -> None:
    found = compared([1.2 * value for value in STEADY], STEADY)
    assert (found["ratio"], found["verdict"]) == (1.2, "worse")


def test_rounds_that_contradict_each_other_decide_nothing() -> None:
    assert compared([0.5, 2.0] * 3, [1.0] * 6)["verdict"] == "undecided"
