"""The words around a searched text, as a list of results shows them."""

from __future__ import annotations

import re
from typing import Final

import msgspec

MATCH_CHARS: Final = 120  # Chosen: a longer match fills the place where an excerpt is shown.
BEFORE_CHARS: Final = 30  # Chosen: the match stands near the start, where a narrow list still shows it.
WINDOW_CHARS: Final = 500  # Before a place in a text, and three times as many after it: more than the longest query and an excerpt.
AFTER_CHARS: Final = 90  # Chosen: about three lines of the page's list together with what stands before.


class Excerpt(msgspec.Struct, frozen=True):
    """A passage of a turn on one line. `before` and `after` begin or end with "…" where the text continues."""

    before: str
    match: str
    after: str


def excerpt(q: str, *texts: str) -> Excerpt | None:
    """Cut the first place that holds `q`, in either case, out of the first of the texts that has one.

    Returns None where Python finds no such place: the index folds the case of some letters (ß, İ) in its own way.
    """
    wanted = _folded(q)
    for text in texts:
        if (start := _folded(text).find(wanted)) >= 0:
            return _cut(text, start, start + len(q))
    return None


def _folded(text: str) -> str:
    """Return the text in lower case with every letter at its place. A letter that would become two (İ) stays as it is."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)


def _cut(text: str, start: int, end: int) -> Excerpt:
    # One blank is kept at both ends, because it separates the match from the words beside it.
    first = max(0, start - BEFORE_CHARS)
    before = _line(text[first:start])
    if first > 0:
        # Not in the middle of a word, where there is a whole one to begin with.
        _, space, whole = before.partition(" ")
        before = "…" + (whole if space and whole.strip() else before)
    last = end + AFTER_CHARS
    return Excerpt(
        before.lstrip(),
        _line(text[start : min(end, start + MATCH_CHARS)]),
        _line(text[end:last]).rstrip() + ("…" if last < len(text) else ""),
    )


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
