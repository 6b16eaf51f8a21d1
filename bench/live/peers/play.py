"""What engines are asked, and what became of it: requests that come at their times, and conversations that go on. The same for every engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN = 3, 258
# Tokens of each request of the streams beside conversations. Chosen: a short question with a long answer.
STREAM_PROMPT_TOKENS, STREAM_ANSWER_TOKENS = 64, 400


def text(num_tokens: int, *seed: object) -> list[int]:
    """Random token ids, the same for the same seed."""
    generator = random.Random(repr(seed))
    return generator.choices(range(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN + 1), k=num_tokens)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request.

    Attributes:
        at_s: seconds after the play's start.
        session: the conversation that it belongs to; "" for none.
        is_background: it ends when the others have ended.
    """

    prompt: list[int]
    max_tokens: int
    at_s: float = 0.0
    adapter: str | None = None
    session: str = ""
    is_background: bool = False


@dataclass(kw_only=True)
class Answer:
    """The answer to a request; times are in seconds after the play's start.

    Attributes:
        ttft_s: seconds from when the request was due until its first token was there.
        started_s: the begin of the step in which it first ran.
        token_s: the ends of the steps that gave its tokens.
    """

    ttft_s: float = 0.0
    started_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second while all of them decode."""
    start_s = max(answer.token_s[0] for answer in answers)
    end_s = min(answer.token_s[-1] for answer in answers)
    num_tokens = sum(start_s < at_s <= end_s for answer in answers for at_s in answer.token_s)
    return num_tokens / (end_s - start_s)


class StepLog:
    """Times at which each request first ran and at which its tokens came, by the engine's steps. The engine's thread writes it.

    Args:
        scheduler: vLLM's, whose request ids are those of the outputs with a suffix behind a dash.
        name_of: returns the caller's id of a request from an output's.
    """

    def __init__(self, scheduler: Any, name_of: Callable[[str], str] = str) -> None:
        self._scheduler = scheduler
        self._name_of = name_of
        self._token_s: dict[str, list[float]] = {}
        self._started_s: dict[str, float] = {}

    def step(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Have `run` do a step, and note what came of it: outputs of requests that give deltas."""
        began_s = time.perf_counter()
        outputs = run()
        ended_s = time.perf_counter()
        for request in self._scheduler.running:
            self._started_s.setdefault(self._name_of(request.request_id.rpartition("-")[0]), began_s)
        for output in outputs:
            name = self._name_of(output.request_id)
            self._started_s.setdefault(name, began_s)
            self._token_s.setdefault(name, []).extend([ended_s] * len(output.outputs[0].token_ids))
        return outputs

    def take(self, request_id: str, answer: Answer, zero_s: float) -> None:
        """Write this request's times on its answer, in seconds after `zero_s`. They are forgotten."""
        answer.token_s = [at_s - zero_s for at_s in self._token_s.pop(request_id, ())]
        answer.started_s = self._started_s.pop(request_id, zero_s) - zero_s


@dataclass
class Conversations:
    """Token ids of each session so far."""

    histories: dict[str, list[int]] = field(default_factory=dict)
    num_turns: dict[str, int] = field(default_factory=dict)
    seed: str = ""
    _begun: dict[str, list[int]] = field(default_factory=dict)

    def ask(self, session: str, new: Sequence[int]) -> list[int]:
        """The prompt of the next turn: all that was said, and this. A session that has not begun begins with it."""
        self.num_turns[session] = self.num_turns.get(session, 0) + 1
        self.histories.setdefault(session, []).extend(new)
        return list(self.histories[session])

    def restart(self, seed: str) -> None:
        """Go on from where every conversation stood at first, with other questions: no arm of a bench is to have longer histories."""
        self._begun = self._begun or {session: list(said) for session, said in self.histories.items()}
        self.histories = {session: list(said) for session, said in self._begun.items()}
        self.num_turns = dict.fromkeys(self._begun, 0)
        self.seed = seed

    def question(self, session: str, num_tokens: int) -> list[int]:
        """Return the question of this turn: the same for the same session, turn and seed on every engine."""
        return text(num_tokens, "question", self.seed, session, self.num_turns[session])

    def answered(self, session: str, answer: Sequence[int]) -> None:
        """Add an answer to the session's history."""
        self.histories[session] += answer
