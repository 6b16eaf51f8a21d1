"""Repeats against an aim, and two checkouts' figures: decided only where the whole interval of the median is on one side."""

from __future__ import annotations

import pytest

from bench.intervals import Aim, interval, quantile_ratio, quantile_ratio_interval, verdict


def test_the_interval_of_a_median_lies_among_the_repeats_and_narrows_with_them() -> None:
    few, many = [0.7, 0.8, 0.9], [0.7, 0.8, 0.9] * 20
    (low, high), (lowest, highest) = interval(many) or (0, 0), interval(few) or (0, 0)
    assert 0.7 <= lowest <= low <= 0.8 <= high <= highest <= 0.9
    assert high - low < highest - lowest


def test_one_repeat_decides_nothing() -> None:
    assert interval([2.0]) is None and verdict(None, Aim(1.0)) == "undecided"


@pytest.mark.parametrize(
    ("found", "at_least", "at_most"),
    [
        ((0.8, 0.9), "reached", "undecided"),
        ((0.7, 0.79), "missed", "reached"),
        ((0.7, 0.9), "undecided", "undecided"),
    ],
)
def test_an_aim_within_the_interval_is_undecided(
    found: tuple[float, float], at_least: str, at_most: str
) -> None:
    assert verdict(found, Aim(0.8)) == at_least
    assert verdict(found, Aim(0.8, is_most=True)) == at_most


def test_a_ratio_of_quantiles_is_that_of_all_rounds_and_its_interval_is_drawn_by_round() -> None:
    ours, others = [[1.0, 2.0, 3.0], [1.0, 2.0, 9.0]], [[2.0, 4.0, 6.0], [2.0, 4.0, 6.0]]
    assert quantile_ratio(ours, others, 0.5) == 0.5
    assert quantile_ratio(ours, others, 0.99) == 1.5
    # The median is the same whichever rounds are drawn; the largest value is one round's or the other's.
    assert quantile_ratio_interval(ours, others, 0.5) == (0.5, 0.5)
    assert quantile_ratio_interval(ours, others, 0.99) == (0.5, 1.5)
    assert quantile_ratio_interval(ours[:1], others[:1], 0.5) is None
