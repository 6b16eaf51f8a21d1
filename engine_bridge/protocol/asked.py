"""What a request says of the answer that it wants: numbers by which its length is predicted."""

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
    """What a call asks.

    question: the text of the last message, at most MAX_READ characters of it. hints: TEXT_HINTS, then CONTEXT_HINTS. system: a hash of the system
    prompt; "" without one. template: one of it and of how the question begins, which what a program fills in leaves as it is; "" without a
    question. words: `words.places_of` the question.
    """

    question: str = ""
    hints: tuple[float, ...] = NO_TEXT + NO_CONTEXT
    system: str = ""
    template: str = ""
    words: tuple[int, ...] = ()

    def numbers(self) -> Asked:
        """Without the text."""
        return msgspec.structs.replace(self, question="")


NOTHING_ASKED = Asked()
