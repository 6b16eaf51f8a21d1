"""A grammar's matcher may take a little at each token."""

from __future__ import annotations

from engine_bridge.policy.limits.matcher_budget import MatcherBudget


def steps_until_spent(cost_s: float, limit: int = 10_000) -> int:
    budget = MatcherBudget(per_token_s=0.01, saved_s=0.5)
    for number in range(limit):
        budget.next_token()
        budget.spend(cost_s)
        if budget.is_spent:
            return number + 1
    return limit


def test_a_matcher_that_takes_no_more_than_its_share_goes_on_for_ever() -> None:
    assert steps_until_spent(0.01) == 10_000


def test_a_matcher_above_its_share_goes_on_for_what_was_saved() -> None:
    assert steps_until_spent(0.06) == 10


def test_one_token_over_all_that_was_saved_ends_it_for_good() -> None:
    budget = MatcherBudget(per_token_s=0.01, saved_s=0.5)
    budget.spend(0.6)
    for _ in range(1000):
        budget.next_token()
    assert budget.is_spent
