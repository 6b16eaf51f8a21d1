"""Requests that come at their times: people who read, type and ask, and agents that call each other. The same script for every engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN = 3, 258


def text(num_tokens: int, *seed: object) -> list[int]:
    """Random token ids, the same for the same seed."""
    generator = random.Random(repr(seed))
    return generator.choices(range(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN + 1), k=num_tokens)


@dataclass
class Conversations:
    """What has been said in each session so far, in token ids."""

    histories: dict[str, list[int]] = field(default_factory=dict)
    num_turns: dict[str, int] = field(default_factory=dict)
    seed: str = ""
    _begun: dict[str, list[int]] = field(default_factory=dict)

    def begin(self, session: str, num_tokens: int) -> list[int]:
        """A session's first prompt."""
        self.histories[session] = text(num_tokens, "history", session)
        self.num_turns[session] = 0
        return self.histories[session]

    def ask(self, session: str, new: Sequence[int]) -> list[int]:
        """The prompt of the next turn: all that was said, and this. A session that has not begun begins with it."""
        self.num_turns[session] = self.num_turns.get(session, 0) + 1
        self.histories.setdefault(session, []).extend(new)
        return self.histories[session]

    def restart(self, seed: str) -> None:
        """Go on from where every conversation stood at first, with other questions: no arm of a bench is to have longer histories."""
        self._begun = self._begun or {session: list(said) for session, said in self.histories.items()}
        self.histories = {session: list(said) for session, said in self._begun.items()}
        self.num_turns = dict.fromkeys(self._begun, 0)
        self.seed = seed

    def question(self, session: str, num_tokens: int) -> list[int]:
        """The same question for the same turn of the same session and seed, whoever answers."""
        return text(num_tokens, "question", self.seed, session, self.num_turns[session])

    def answered(self, session: str, answer: Sequence[int]) -> None:
        self.histories[session] += answer


@dataclass(frozen=True)
class Asked:
    """One follow-up: its TTFT in seconds, and what it was answered."""

    session: str
    turn: int
    ttft_s: float
    num_cached_tokens: int
    answer: list[int]

    def as_dict(self) -> dict[str, Any]:
        return self.__dict__
