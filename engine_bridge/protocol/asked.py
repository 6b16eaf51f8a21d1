"""Facts about a request's text, by which the length of its answer is predicted."""

from __future__ import annotations

import msgspec
from msgspec import Struct

TEXT_HINTS = (
    "question_words",
    "question_marks",
    "lines",
    "digits",
    "tokens_asked_for",
    "brief",
    "long",
    "parts",
    "same",
    "code",
)
CONTEXT_HINTS = ("system_chars", "num_turns", "tools")
NO_TEXT = (0.0,) * len(TEXT_HINTS)
NO_CONTEXT = (0.0,) * len(CONTEXT_HINTS)


class Asked(Struct, frozen=True):
    """Facts about a call's text.

    Attributes:
        question: the text of the last message, at most MAX_READ characters of it.
        hints: TEXT_HINTS, then CONTEXT_HINTS.
        system: a hash of the system prompt; "" without one.
        template: a hash of the system prompt and of the question's beginning, without the parts that a program fills in; "" without a question.
        words: `words.places_of` the question.
    """

    question: str = ""
    hints: tuple[float, ...] = NO_TEXT + NO_CONTEXT
    system: str = ""
    template: str = ""
    words: tuple[int, ...] = ()

    def numbers(self) -> Asked:
        """Return the same facts without the text."""
        return msgspec.structs.replace(self, question="")


NOTHING_ASKED = Asked()
