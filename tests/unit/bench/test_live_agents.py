"""How the bench of agents judges sessions, and what its programs are."""

from __future__ import annotations

import pytest

from bench.live.agents.judging import Recognising, ToldCall, judge
from bench.live.agents.programs import programs


def calls(*told: str) -> list[ToldCall]:
    """Calls in their order, each `thread session`, or `thread<after session` for the first one of a thread that leaves off from another."""
    made: list[ToldCall] = []
    for at, each in enumerate(told):
        names, session = each.split()
        thread, _, after = names.partition("<")
        number = sum(other.thread == thread for other in made)
        seen = {
            "session": "" if session == "-" else session,
            "ttft_s": None,
            "num_prompt": 9,
            "num_cached": 0,
        }
        made.append(ToldCall(thread=thread, after=after, number=number, began_s=float(at), **seen))
    return made


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (["a s1", "b s2", "a s1", "b s2"], (2, 2, 0)),
        # Lost on the way: a new session, or none.
        (["a s1", "a s3", "a -"], (2, 0, 0)),
        # Two conversations in one session, from the first call on or later.
        (["a s1", "b s1", "b s1"], (1, 1, 2)),
        (["a s1", "b s2", "b s1"], (1, 0, 1)),
        # One branch goes on in the session that it left off from; the other one may not.
        (["a s1", "x<a s1", "y<a s2", "x s1", "y s2"], (2, 2, 0)),
        (["a s1", "x<a s1", "y<a s1", "y s1"], (1, 1, 2)),
        # A helper leaves off from nothing.
        (["a s1", "helper s1"], (0, 0, 1)),
    ],
)
def test_a_conversation_is_to_be_given_its_own_session_and_no_other(
    told: list[str], found: tuple[int, int, int]
) -> None:
    assert judge(calls(*told)) == Recognising(*found)


def test_a_round_has_every_hard_case_in_words_of_its_own() -> None:
    first, second = (programs(number, has_framework=True) for number in (1, 2))
    assert {program.event for program in first} == {"", "branches", "helper", "compacts"}
    assert {program.api for program in first} == {"chat", "responses", "messages", "framework"}
    assert first[0].first == first[1].first and first[0].steps != first[1].steps, "two begin alike"
    assert len({program.name for program in first}) == len(first)
    assert not {program.first for program in first} & {program.first for program in second}
    assert {program.api for program in programs(1, has_framework=False)} == {"chat", "responses", "messages"}
