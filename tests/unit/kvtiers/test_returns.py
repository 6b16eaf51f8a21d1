"""What sessions' requests tell of those to come."""

from __future__ import annotations

from kvtiers.policy.eviction import ByValue, GroupFacts
from kvtiers.policy.returns import ASSUMED_PAUSE_S, NUM_PAUSES, Returns


def play(returns: Returns, session: str, pause_s: float, num: int, now: float = 0.0) -> float:
    """So many requests of a second each, with pauses in between. Returns when the last one ended."""
    for _ in range(num):
        returns.came(session, now)
        returns.left(session, now + 1)
        now += 1 + pause_s
    return now - pause_s


def test_requests_are_counted_by_session() -> None:
    returns = Returns()
    play(returns, "a", 5.0, 3)
    play(returns, "b", 5.0, 1)
    assert [returns.num_requests(name) for name in ("a", "b", "c")] == [3, 1, 0]


def test_the_usual_pause_is_learned_and_learned_anew() -> None:
    returns = Returns()
    assert returns.usual_pause_s == ASSUMED_PAUSE_S
    now = play(returns, "agents", 2.0, NUM_PAUSES)
    assert returns.usual_pause_s == 2.0
    play(returns, "agents", 900.0, NUM_PAUSES, now)
    assert returns.usual_pause_s == 900.0


def test_a_few_pauses_change_little() -> None:
    returns = Returns()
    play(returns, "a", 2.0, 8)
    assert returns.usual_pause_s == ASSUMED_PAUSE_S


def test_what_nobody_asked_for_ends_no_pause() -> None:
    """A draft is computed while its author types: the pause is from answer to question."""
    returns = Returns()
    for number in range(2 * NUM_PAUSES):
        returns.came("a", 100.0 * number)
        returns.left("a", 100.0 * number + 10)
        returns.left("a", 100.0 * number + 99)  # the draft's end
    assert returns.usual_pause_s == 90.0


def test_requests_that_only_begin_alike_count_and_pause_for_nothing() -> None:
    returns = Returns()
    for number in range(2 * NUM_PAUSES):
        returns.came("a prefix", float(number), is_one=False)
        returns.left("a prefix", number + 0.5)
    assert returns.usual_pause_s == ASSUMED_PAUSE_S
    assert returns.num_requests("a prefix") == 2 * NUM_PAUSES


def test_requests_that_overlap_pause_for_nothing() -> None:
    returns = Returns()
    for _ in range(2 * NUM_PAUSES):
        returns.came("a", 0.0)
    assert returns.usual_pause_s == ASSUMED_PAUSE_S


def test_sessions_that_were_not_heard_of_for_longest_are_forgotten() -> None:
    returns = Returns(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        play(returns, name, 5.0, 1)
    assert [returns.num_requests(name) for name in ("a", "b", "c")] == [2, 0, 1]
    returns.left("b", 9.0)  # nobody knows it
    assert returns.num_requests("b") == 0


def test_where_sessions_return_within_seconds_one_that_is_over_makes_room_for_a_new_one() -> None:
    """Many requests of long ago are worth less than one of just now; where sessions pause for minutes, they are worth more."""

    def first_to_go(usual_pause_s: float) -> str:
        old = GroupFacts("old", 1, 900.0, 20, usual_pause_s=usual_pause_s)
        new = GroupFacts("new", 1, 998.0, 1, usual_pause_s=usual_pause_s)
        return next(ByValue().order([old, new], 8, 1000.0)).group

    assert first_to_go(2.0) == "old"
    assert first_to_go(120.0) == "new"
