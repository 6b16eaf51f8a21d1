"""When people ask: they read an answer, type a question, and ask; the same times for every arm of a bench.

They read at 238 words a minute (Brysbaert 2019) and type at 52 (Dhakal et al. 2018), each with a lognormal spread.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

READ_WORDS_PER_MIN, TYPE_WORDS_PER_MIN = 238, 52
QUESTION_WORDS = 10
SPREAD = 0.4  # of the logarithm of a person's times. Chosen.


@dataclass(frozen=True)
class Times:
    """One person's questions, in seconds: from the last answer (or the round's beginning) to each, and how long it was typed."""

    session: str
    asks_s: list[float]
    leads_s: list[float]

    @property
    def is_cut(self) -> bool:
        """Whether the first question was already being typed when the round began, so that no advisory could come in time."""
        return self.leads_s[0] > self.asks_s[0]


def times_of(people: Sequence[str], answer_words: int, round_s: float, number: int) -> list[Times]:
    """Return the times of the people who ask within a round. It begins in the middle of their reading and typing; `number` is the round's."""
    chance = random.Random(f"round {number}")
    found = []
    for session in people:
        read_s, type_s = human_times(chance, answer_words)
        phase_s = chance.random() * (read_s + type_s)
        asks_s, leads_s = [], []
        due_s, total_s = read_s + type_s - phase_s, 0.0
        while total_s + due_s < round_s:
            asks_s.append(due_s)
            leads_s.append(type_s)
            total_s += due_s
            read_s, type_s = human_times(chance, answer_words)
            due_s = read_s + type_s
        if asks_s:
            found.append(Times(session, asks_s, leads_s))
    return found


def human_times(chance: random.Random, answer_words: int) -> tuple[float, float]:
    """Seconds to read an answer and to type a question."""
    read_s = answer_words / READ_WORDS_PER_MIN * 60 * math.exp(chance.gauss(0, SPREAD))
    type_s = QUESTION_WORDS / TYPE_WORDS_PER_MIN * 60 * math.exp(chance.gauss(0, SPREAD))
    return read_s, type_s


def script(times: Sequence[Times], is_announced: Callable[[], bool]) -> list[dict[str, Any]]:
    """Return a round as a worker takes it. is_announced: whether an advisory goes out for the next question; asked once for each."""
    return [
        {
            "session": each.session,
            "asks_s": each.asks_s,
            "leads_s": [lead_s if is_announced() else None for lead_s in each.leads_s],
        }
        for each in times
    ]
