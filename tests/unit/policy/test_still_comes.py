"""Whether an announced request still comes, by what is known of those that came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.kv.still_comes import StillComes

WAITS = st.floats(0, 1e4)


@given(st.lists(WAITS, max_size=30), st.floats(0.01, 0.99), WAITS, WAITS)
def test_the_longer_it_has_not_come_the_less_it_is_expected(
    came: list[float], prior: float, first_s: float, second_s: float
) -> None:
    waits = StillComes()
    for waited_s in came:
        waits.came(waited_s)
    sooner, later = sorted((first_s, second_s))
    assert 0.0 <= waits.probability(prior, later) <= waits.probability(prior, sooner) <= prior + 1e-9
    assert waits.probability(prior, 0.0) == pytest.approx(prior)
    assert waits.probability(1.0, later) == 1.0  # of what is certain nothing is taken away


def test_it_is_learned_after_which_time_requests_come() -> None:
    """Where all come within two seconds, one that has not after five will hardly; where they take a minute, it is as likely as before."""
    quick, slow = StillComes(), StillComes()
    for _ in range(100):
        quick.came(2.0)
        slow.came(60.0)
    assert quick.probability(0.7, 1.0) > 0.65 and quick.probability(0.7, 5.0) < 0.2
    assert slow.probability(0.7, 30.0) > 0.65 and slow.probability(0.7, 120.0) < 0.2
    for _ in range(1000):  # and forgotten
        slow.came(2.0)
    assert slow.probability(0.7, 5.0) < 0.2
