"""The soak bench's checker: what it must notice, and what it must not take for a fault."""

from __future__ import annotations

from typing import Any

import pytest

from bench.live.robustness.soak.ledger import AFTERMATH_S, Ledger, Reading, growth


def stored(
    turn_id: str, answer: str = "Yes.", status: str = "done", content: str = "Hello!"
) -> dict[str, Any]:
    return {"id": turn_id, "content": content, "answer": answer, "status": status}


@pytest.fixture
def ledger() -> Ledger:
    """One session with a finished turn `a` and an accepted turn `b`."""
    ledger = Ledger()
    ledger.accepted("key", "s", "a", "Hello!")
    ledger.done("key", "s", "a", "Yes.")
    ledger.accepted("key", "s", "b", "Hello!")
    return ledger


AS_TOLD = [stored("a"), stored("b")]


@pytest.mark.parametrize(
    ("turns", "lost"),
    [
        ([stored("a"), stored("b", "", "running")], ""),
        ([stored("a"), stored("b", "Other.")], ""),
        (None, "turn a of session s is gone, turn b of session s is gone"),
        ([stored("a")], "turn b of session s is gone"),
        ([stored("b")], "turn a of session s is gone"),
        ([stored("a", "Yes"), stored("b")], "turn a of session s is done with another answer than was sent"),
        (
            [stored("a", "Yes.", "running"), stored("b")],
            "turn a of session s is running with another answer than was sent",
        ),
        ([stored("a"), stored("b", content="Another question.")], "turn b of session s has another question"),
    ],
)
def test_a_turn_that_is_gone_or_changed_is_lost_however_often_that_is_seen(
    ledger: Ledger, turns: Any, lost: str
) -> None:
    for _ in range(2):
        ledger.check_session("key", "s", turns)
    ledger.check_session("other key", "s", None)  # the same session of another key is another
    ledger.accepted("key", "s", "b", "Hello!")  # once more
    assert ", ".join(sorted(ledger.lost)) == lost and ledger.num_turns == 2


def test_what_an_edit_may_have_replaced_may_be_gone_but_not_changed(ledger: Ledger) -> None:
    ledger.asks("key", "s", after="a", is_edit=True)
    for turns in ([stored("a")], AS_TOLD):
        ledger.check_session("key", "s", turns)
        assert not ledger.lost
    ledger.check_session("key", "s", [stored("b")])
    assert ledger.lost, "the turn before the edit must stay"


def test_after_an_accepted_edit_only_the_new_turns_are_owed_and_nothing_after_the_session_is_deleted(
    ledger: Ledger,
) -> None:
    ledger.asks("key", "s", after=None, is_edit=False)
    ledger.check_session("key", "s", [])
    assert len(ledger.lost) == 2, "what is no edit puts nothing in doubt"
    ledger.lost.clear()
    ledger.asks("key", "s", after=None, is_edit=True)
    ledger.accepted("key", "s", "c", "Hello!")
    ledger.check_session("key", "s", [stored("c")])
    assert not ledger.lost
    ledger.check_session("key", "s", AS_TOLD)
    assert ledger.lost == {"turn c of session s is gone"}
    ledger.lost.clear()
    ledger.forget("key", "s")
    ledger.check_session("key", "s", None)
    assert not ledger.lost


@pytest.mark.parametrize(
    ("answer", "extent", "is_right"),
    [
        ("Good day.", "whole", True),
        ("Good day. Arr!", "whole", False),
        ("Good", "whole", False),
        ("Ar", "beginning", True),
        ("", "beginning", True),
        ("Good day. And", "beginning", False),
        ("ood", "beginning", False),
    ],
)
def test_an_answer_must_be_one_of_its_references_or_if_cut_off_a_beginning_of_one(
    answer: str, extent: Any, is_right: bool
) -> None:
    ledger = Ledger()
    ledger.check_answer("a visit", answer, ["Good day.", "Arr!"], extent)
    assert bool(ledger.wrong) is not is_right and ledger.num_answers_checked == 1


def test_an_error_is_explained_by_what_was_broken_meanwhile_and_shortly_after() -> None:
    ledger = Ledger()
    for status in (500, 502, 503, 0):
        ledger.note_error("before", status, "engine_failed", now_s=9.0)
    ledger.note_error("before", 404, "unknown_model", now_s=9.0)
    assert len(ledger.unexpected) == 4 and not ledger.apart
    ledger.unexpected.clear()
    ledger.disturb("engine")
    ledger.note_error("a call", 503, "engine_failed", now_s=10.0)
    ledger.note_error("a call", 500, "internal", now_s=10.0)
    ledger.note_error("a call", 503, "overloaded", now_s=10.0)
    ledger.mend("engine", now_s=20.0)
    ledger.note_error("a turn", 0, "engine_failed", now_s=20.0 + AFTERMATH_S)
    ledger.note_error("a call", 503, "engine_failed", now_s=20.1 + AFTERMATH_S)
    for status in (429, 0):  # refusals of a key that is over its limits
        ledger.note_error("a call", status, "rate_limited", now_s=0.0)
    assert ledger.apart == {"engine_failed": 2, "rate_limited": 2}
    assert ledger.unexpected == [
        "a call: 500 internal",
        "a call: 503 overloaded",
        "a call: 503 engine_failed",
    ]


@pytest.mark.parametrize(
    ("readings", "grown"),
    [
        (
            [Reading(mib, 80, 60, 0) for mib in (100, 100, 300, 101, 102, 103, 110, 110, 110)],
            {"rss_growth": 0.1},
        ),
        ([Reading(900 if n == 7 else 100, 80, 60, 0) for n in range(9)], {}),
        ([Reading(100, 50 + n, 60 + 2 * n, 0) for n in range(9)], {"fd_growth": 6, "thread_growth": 12}),
        (
            [Reading(100 + 5 * n, 80, 60, n) for n in range(9)],
            {"rss_growth": 0.2857, "rss_mib_per_kill": 5.0},
        ),
        ([Reading(100, 80, 60, 3)], {}),
    ],
    ids=["last third over first", "one outlier", "files and threads", "per killed engine", "one reading"],
)
def test_growth_is_that_of_the_medians(readings: list[Reading], grown: dict[str, float]) -> None:
    nothing = dict.fromkeys(("rss_growth", "rss_mib_per_kill", "fd_growth", "thread_growth"), 0.0)
    assert growth(readings) == nothing | grown
