"""How far an owner's advisories are believed, after what became of earlier ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.advisories.precision import HALF_LIFE_S, MAX_WEIGHT, PRIOR, Precision

outcomes = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(-(10**6), 10**6)), max_size=40
)


@given(outcomes, st.floats(0, 1), st.floats(-1e6, 1e6))
def test_probabilities_are_probabilities(
    outcomes: list[tuple[str, bool, int]], prior: float, now: float
) -> None:
    precision = Precision(prior=prior)
    for owner, was_used, at_s in outcomes:
        precision.note(owner, was_used, at_s)
        assert 0 <= precision.probability(owner, now) <= 1


def test_nothing_known_is_the_prior() -> None:
    assert Precision(prior=0.6).probability("a", 0.0) == 0.6


def test_one_outcome_moves_the_prior_by_its_weight() -> None:
    precision = Precision(prior=0.5, prior_weight=4)
    precision.note("a", True, 0.0)
    assert precision.probability("a", 0.0) == pytest.approx(3 / 5)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_it_converges_to_the_share_that_was_used(share: float) -> None:
    rng, precision, estimates = random.Random(7), Precision(), []
    for i in range(10_000):
        precision.note("a", rng.random() < share, float(i))
        if i >= 500:
            estimates.append(precision.probability("a", float(i)))
    assert sum(estimates) / len(estimates) == pytest.approx(share, abs=0.03)
    assert all(abs(estimate - share) < 0.2 for estimate in estimates)


def test_a_changed_habit_is_relearned() -> None:
    precision = Precision()
    for i in range(10_000):
        precision.note("a", True, float(i) * 1e-3)
    for i in range(int(3 * MAX_WEIGHT)):
        precision.note("a", False, 10 + float(i) * 1e-3)
    assert precision.probability("a", 11.0) < 0.1


def test_with_time_it_returns_to_the_prior() -> None:
    precision = Precision()
    for _ in range(50):
        precision.note("a", False, 0.0)
    fresh, later = precision.probability("a", 0.0), precision.probability("a", HALF_LIFE_S)
    assert fresh < later < PRIOR
    assert precision.probability("a", 30 * HALF_LIFE_S) == pytest.approx(PRIOR, abs=1e-6)


def test_old_outcomes_give_way_to_a_new_one() -> None:
    precision = Precision(prior=0.5, prior_weight=4)
    for _ in range(50):
        precision.note("a", False, 0.0)
    precision.note("a", True, 30 * HALF_LIFE_S)
    assert precision.probability("a", 30 * HALF_LIFE_S) == pytest.approx(3 / 5, abs=1e-6)


def test_a_clock_that_goes_back_fades_nothing_and_revives_nothing() -> None:
    precision, steady = Precision(), Precision()
    for was_used, at_s in [(False, HALF_LIFE_S), (False, 0.0), (True, HALF_LIFE_S)]:
        precision.note("a", was_used, at_s)
        steady.note("a", was_used, HALF_LIFE_S)
    for now in (0.0, HALF_LIFE_S):
        assert precision.probability("a", now) == steady.probability("a", HALF_LIFE_S)


@given(outcomes)
def test_owners_do_not_learn_from_each_other(outcomes: list[tuple[str, bool, int]]) -> None:
    together, alone = Precision(), Precision()
    for owner, was_used, at_s in outcomes:
        together.note(owner, was_used, at_s)
        if owner == "a":
            alone.note(owner, was_used, at_s)
    assert together.probability("a", 1e6) == alone.probability("a", 1e6)


def test_the_owner_that_was_silent_for_longest_is_forgotten_first() -> None:
    precision = Precision(max_owners=2)
    for owner in ["a", "b", "a", "c"]:
        precision.note(owner, False, 0.0)
        assert precision.num_owners <= 2
    assert precision.probability("b", 0.0) == PRIOR
    assert precision.probability("a", 0.0) < PRIOR


def test_an_owner_can_be_forgotten() -> None:
    precision = Precision()
    precision.note("a", False, 0.0)
    precision.forget("a")
    precision.forget("a")
    assert precision.probability("a", 0.0) == PRIOR


@pytest.mark.parametrize(
    "wrong", [{"prior": 1.1}, {"prior_weight": 0}, {"max_owners": 0}, {"max_weight": 0.5}, {"half_life_s": 0}]
)
def test_senseless_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Precision(**wrong)  # type: ignore[arg-type]
