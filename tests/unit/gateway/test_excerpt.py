"""The words around what was searched for."""

import pytest

from gateway.sessions.excerpt import AFTER_CHARS, BEFORE_CHARS, MATCH_CHARS, Excerpt, excerpt


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Lisbon", Excerpt("", "Lisbon", "")),
        ("  to\n\n lisbon,\tthen", Excerpt("to ", "lisbon", ", then")),
        ("one LISBON and one Lisbon", Excerpt("one ", "LISBON", " and one Lisbon")),
        ("no such place", None),
    ],
)
def test_the_first_match_stands_between_its_neighbours_on_one_line(text: str, found: Excerpt | None) -> None:
    assert excerpt("Lisbon", text) == found


def test_the_question_is_looked_at_before_the_answer() -> None:
    assert excerpt("port", "the port", "a port") == Excerpt("the ", "port", "")
    assert excerpt("port", "harbour", "a port") == Excerpt("a ", "port", "")


def test_long_texts_are_cut_on_both_sides_and_say_so() -> None:
    found = excerpt("needle", "word " * 1000 + "needle" + " word" * 1000)
    assert found is not None
    assert found.before.startswith("…word") and found.after.endswith("…")
    assert len(found.before) <= BEFORE_CHARS + 1 and len(found.after) <= AFTER_CHARS + 1
    endless = excerpt("x" * 500, "x" * 1000)
    assert endless is not None and len(endless.match) == MATCH_CHARS


def test_what_is_searched_for_is_no_pattern() -> None:
    assert excerpt(".*(", "a .*( b") == Excerpt("a ", ".*(", " b")
    assert excerpt(".*", "abc") is None
