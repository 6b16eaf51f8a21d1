"""What sessions' requests tell of those to come."""

from kvtiers.policy.returns import ASSUMED_PAUSE_S, NUM_PAUSES, Returns


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
    assert returns.usual_pause_s == 2.0
    play(returns, "agents", 900.0, NUM_PAUSES, now)
    assert returns.usual_pause_s == 900.0


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
