"""A grammar's matcher may take a little at each token."""

from engine_bridge.policy.limits.matcher_budget import PER_TOKEN_S, SAVED_S, MatcherBudget


def test_a_share_may_be_taken_for_ever_and_one_token_over_all_that_was_saved_ends_it_for_good() -> None:
    budget = MatcherBudget()
    for _ in range(10_000):
        budget.next_token()
        budget.spend(PER_TOKEN_S)
        assert not budget.is_spent
    budget = MatcherBudget()
    budget.spend(1.2 * SAVED_S)
    for _ in range(1000):
        budget.next_token()
    assert budget.is_spent
