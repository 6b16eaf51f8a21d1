"""What sessions' requests tell of those to come."""

import pytest

from kvtiers.policy.returns import ASSUMED_PAUSE_S, NUM_PAUSES, OVER_AFTER_PAUSES, Returns


def play(returns: Returns, session: str, pause_s: float, num: int, now: float = 0.0) -> float:
    """So many requests of a second each, with pauses in between. Returns when the last one ended."""
    for _ in range(num):
        returns.came(session, now)
        returns.left(session, now + 1)
        now += 1 + pause_s
    return now - pause_s


def test_the_usual_pause_is_learned_and_learned_anew() -> None:
    returns = Returns()
    assert returns.usual_pause_s == ASSUMED_PAUSE_S
    now = play(returns, "agents", 2.0, NUM_PAUSES)
    assert returns.usual_pause_s == pytest.approx(2.0)
    play(returns, "agents", 900.0, NUM_PAUSES, now)
    assert returns.usual_pause_s == pytest.approx(900.0)


def test_what_nobody_asked_for_ends_no_pause() -> None:
    """A draft is computed while its author types: the pause is from answer to question."""
    returns = Returns()
    for number in range(2 * NUM_PAUSES):
        returns.came("a", 100.0 * number)
        returns.left("a", 100.0 * number + 10)
        returns.left("a", 100.0 * number + 99)  # the draft's end
    assert returns.usual_pause_s == pytest.approx(90.0)


def test_requests_that_only_begin_alike_count_and_pause_for_nothing() -> None:
    returns = Returns()
    for number in range(2 * NUM_PAUSES):
        returns.came("a prefix", float(number), is_one=False)
        returns.left("a prefix", number + 0.5)
    assert returns.usual_pause_s == ASSUMED_PAUSE_S
    assert returns.num_requests("a prefix") == 2 * NUM_PAUSES


def test_after_how_many_requests_sessions_end_is_learned() -> None:
    """All have three requests. One that has sent the third is taken to go on until others have shown that none does."""
    returns, now = Returns(), 0.0
    returns.came("early", now)
    assert 0.2 < returns.goes_on("early") < 0.3  # what is assumed
    for number in range(200):
        now = play(returns, f"s{number}", 5.0, 3, now)
    now += OVER_AFTER_PAUSES * 2 * returns.usual_pause_s
    for num, is_most in ((1, True), (2, True), (3, False)):
        play(returns, f"last {num}", 5.0, num, now)
        assert (returns.goes_on(f"last {num}") > 0.9) is is_most and (
            returns.goes_on(f"last {num}") < 0.2
        ) is not is_most


def test_a_session_that_comes_back_after_all_was_not_over() -> None:
    """Half of the pauses are so long that the session counts as over meanwhile, and yet each goes on for ever."""
    returns = Returns()
    now = play(returns, "usual", 1.0, NUM_PAUSES)
    for number in range(100):
        returns.came("slow", now)
        returns.left("slow", now)
        now += 1.0 if number % 2 else 2 * OVER_AFTER_PAUSES
        returns.came("other", now)
        returns.left("other", now)
    assert returns.goes_on("slow") > 0.8
