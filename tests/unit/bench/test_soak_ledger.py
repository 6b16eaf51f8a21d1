"""The soak bench's checker: what it must notice, and what it must not take for a fault."""

from __future__ import annotations

from typing import Any

import pytest

from bench.live.soak.ledger import AFTERMATH_S, Ledger, Reading, growth


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


@pytest.mark.parametrize("b", [stored("b", "", "running"), stored("b", "", "failed"), stored("b", "Other.")])
def test_turns_that_are_as_they_were_told_are_not_lost(ledger: Ledger, b: dict[str, Any]) -> None:
    ledger.check_session("key", "s", [stored("a"), b])
    assert not ledger.lost and ledger.num_turns == 2


@pytest.mark.parametrize(
    "turns",
    [
        None,
        [],
        [stored("a")],
        [stored("b")],
        [stored("a", "Yes"), stored("b")],
        [stored("a", status="failed"), stored("b")],
        [stored("a", "Yes.", "running"), stored("b")],
        [stored("a"), stored("b", content="Another question.")],
    ],
)
def test_a_turn_that_is_gone_or_changed_is_lost(ledger: Ledger, turns: Any) -> None:
    ledger.check_session("key", "s", turns)
    assert ledger.lost


def test_a_loss_that_is_seen_twice_counts_once(ledger: Ledger) -> None:
    for _ in range(2):
        ledger.check_session("key", "s", [stored("b")])
    assert len(ledger.lost) == 1


def test_the_same_session_of_another_key_is_another(ledger: Ledger) -> None:
    ledger.check_session("other key", "s", None)
    assert not ledger.lost


def test_a_turn_that_is_accepted_again_counts_once(ledger: Ledger) -> None:
    ledger.accepted("key", "s", "b", "Hello!")
    assert ledger.num_turns == 2


def test_what_an_edit_may_have_replaced_may_be_gone_but_not_changed(ledger: Ledger) -> None:
    ledger.asks("key", "s", after="a", is_edit=True)
    ledger.check_session("key", "s", [stored("a")])
    ledger.check_session("key", "s", [stored("a"), stored("b")])
    assert not ledger.lost
    ledger.check_session("key", "s", [stored("b")])
    assert ledger.lost, "the turn before the edit must stay"


def test_after_an_accepted_edit_only_the_new_turns_are_owed(ledger: Ledger) -> None:
    ledger.asks("key", "s", after=None, is_edit=True)
    ledger.accepted("key", "s", "c", "Hello!")
    ledger.check_session("key", "s", [stored("c")])
    assert not ledger.lost
    ledger.check_session("key", "s", [stored("a"), stored("b")])
    assert ledger.lost == {"turn c of session s is gone"}


def test_a_message_that_is_no_edit_puts_nothing_in_doubt(ledger: Ledger) -> None:
    ledger.asks("key", "s", after=None, is_edit=False)
    ledger.check_session("key", "s", [])
    assert len(ledger.lost) == 2


def test_a_deleted_session_is_owed_no_more(ledger: Ledger) -> None:
    ledger.forget("key", "s")
    ledger.check_session("key", "s", None)
    assert not ledger.lost


@pytest.mark.parametrize(
    ("answer", "extent", "is_right"),
    [
        ("Good day.", "whole", True),
        ("Good", "whole", False),
        ("", "whole", False),
        ("Good", "beginning", True),
        ("", "beginning", True),
        ("Good day. And", "beginning", False),
        ("ood", "beginning", False),
    ],
)
def test_an_answer_must_be_its_reference_or_if_cut_off_a_beginning_of_it(
    answer: str, extent: Any, is_right: bool
) -> None:
    ledger = Ledger()
    ledger.check_answer("a visit", answer, ["Good day."], extent)
    assert bool(ledger.wrong) is not is_right and ledger.num_answers_checked == 1


def test_one_of_several_references_is_enough_but_no_mixture() -> None:
    ledger = Ledger()
    ledger.check_answer("a visit", "Arr!", ["Beep.", "Arr!"])
    assert not ledger.wrong
    ledger.check_answer("a visit", "Arr! Beep.", ["Beep.", "Arr!"])
    assert ledger.wrong


@pytest.mark.parametrize("status", [500, 502, 503, 0])
def test_an_error_that_nothing_explains_is_unexpected(status: int) -> None:
    ledger = Ledger()
    ledger.note_error("a call", status, "engine_failed", now_s=10.0)
    assert ledger.unexpected and not ledger.apart


def test_an_error_is_explained_by_what_was_broken_meanwhile_and_shortly_after() -> None:
    ledger = Ledger()
    ledger.disturb("engine")
    ledger.note_error("a call", 503, "engine_failed", now_s=10.0)
    ledger.note_error("a call", 500, "internal", now_s=10.0)
    ledger.note_error("a call", 503, "overloaded", now_s=10.0)
    ledger.mend("engine", now_s=20.0)
    ledger.note_error("a turn", 0, "engine_failed", now_s=20.0 + AFTERMATH_S)
    ledger.note_error("a call", 503, "engine_failed", now_s=20.1 + AFTERMATH_S)
    assert ledger.apart == {"engine_failed": 2}
    assert ledger.unexpected == [
        "a call: 500 internal",
        "a call: 503 overloaded",
        "a call: 503 engine_failed",
    ]


def test_refusals_of_a_key_over_its_limits_are_counted_apart() -> None:
    ledger = Ledger()
    ledger.note_error("a call", 429, "rate_limited", now_s=0.0)
    ledger.note_error("a turn", 0, "rate_limited", now_s=0.0)
    ledger.note_error("a call", 404, "unknown_model", now_s=0.0)
    assert not ledger.unexpected and ledger.apart == {"rate_limited": 2}


def readings(*rss_mib: float, fds: int = 80, kills: bool = False) -> list[Reading]:
    return [
        Reading(float(n), rss, fds + (n if fds != 80 else 0), 60, n if kills else 0)
        for n, rss in enumerate(rss_mib)
    ]


def test_growth_is_the_last_third_over_the_first() -> None:
    grown = growth(readings(100, 100, 300, 101, 102, 103, 110, 110, 110))
    assert grown is not None and grown.rss == pytest.approx(0.10)
    assert (grown.fds, grown.threads) == (0, 0)


def test_one_outlier_is_no_growth() -> None:
    grown = growth(readings(100, 100, 100, 100, 100, 100, 100, 900, 100))
    assert grown is not None and grown.rss == pytest.approx(0.0)


def test_files_that_stay_open_are_growth() -> None:
    grown = growth(readings(*[100.0] * 9, fds=50))
    assert grown is not None and grown.fds == 6


def test_growth_is_told_for_each_engine_that_was_killed() -> None:
    grown = growth(readings(*[100.0 + 5 * n for n in range(9)], kills=True))
    assert grown is not None and grown.rss_mib_per_kill == pytest.approx(5.0)


def test_one_reading_says_nothing_about_growth() -> None:
    assert growth(readings(100)) is None
