"""A grammar's matcher may take a little at each token."""

from engine_bridge.policy.limits.matcher_budget import PER_TOKEN_S, SAVED_S, MatcherBudget


def test_a_matcher_that_takes_no_more_than_its_share_goes_on_for_ever() -> None:
    budget = MatcherBudget()
    for _ in range(10_000):
        budget.next_token()
        budget.spend(PER_TOKEN_S)
        assert not budget.is_spent


def test_one_token_over_all_that_was_saved_ends_it_for_good() -> None:
    budget = MatcherBudget()
    budget.spend(1.2 * SAVED_S)
    for _ in range(1000):
        budget.next_token()
    assert budget.is_spent
