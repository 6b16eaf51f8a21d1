"""Requests as the traffic sends them, their times, and predictors of their answers' lengths with a stated accuracy."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from engine_bridge.protocol.engine_request import LengthGuess


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as the traffic sends it.

    Attributes:
        adapter_id: None for the base model.
        max_answer_tokens: the client's bound, None without.
        priority: lower is more urgent, as in vLLM.
        session: prompts of one session begin alike; empty for a request without one.
        turn, caller: as in `EngineRequest`.
    """

    request_id: str
    at_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    adapter_id: int | None = None
    max_answer_tokens: int | None = None
    tenant: str = ""
    priority: int = 0
    session: str = ""
    turn: Literal["", "begins", "continues"] = ""
    caller: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the whole answer."""
        return self.num_prompt_tokens + self.num_answer_tokens


class Timed:
    """Durations of a request, in seconds."""

    __slots__ = ()
    arrival: Arrival
    first_token_s: float
    ended_s: float

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to first token."""
        return self.first_token_s - self.arrival.at_s

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to last token."""
        return self.ended_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first one; nan for an answer of one token."""
        num_gaps = self.arrival.num_answer_tokens - 1
        return (self.ended_s - self.first_token_s) / num_gaps if num_gaps else math.nan


Guesser = Callable[[Arrival], LengthGuess]
"""Foretells the length of an answer."""

# Where classes end, as shares of all lengths. Source: SSJF (Qiu et al., 2024), whose BERT names one of five; it is Chameleon's predictor.
CLASS_ENDS = (0.25, 0.5, 0.75, 0.99)


class Classes:
    """Predictor that names one of five classes of length, with a stated probability the right one; the guess is that class's quantiles.

    Where it errs, it names another class in proportion to the class's frequency.

    Chameleon assumes an accuracy of 0.8 and does not say of what; this is SSJF's measure. The same request always gets the same guess, whatever
    the policy.
    """

    def __init__(self, lengths: Sequence[int], accuracy: float, seed: int) -> None:
        if not 0 <= accuracy <= 1:
            raise ValueError("an accuracy is a share")
        ordered = sorted(lengths)
        edges = [0, *(int(share * len(ordered)) for share in CLASS_ENDS), len(ordered)]
        self._classes = [ordered[first:end] for first, end in pairwise(edges) if end > first]
        self._ends = [values[-1] for values in self._classes[:-1]]
        self._guesses = [_quantiles(values) for values in self._classes]
        self._accuracy, self._seed = accuracy, seed

    def __call__(self, arrival: Arrival) -> LengthGuess:
        """Return the quantiles of the class that is named."""
        rng = random.Random(f"{self._seed} {arrival.request_id}")
        true = bisect_right(self._ends, arrival.num_answer_tokens - 1)
        if rng.random() < self._accuracy or len(self._classes) == 1:
            return self._guesses[true]
        others = [at for at in range(len(self._classes)) if at != true]
        (named,) = rng.choices(others, [len(self._classes[at]) for at in others])
        return self._guesses[named]


def _quantiles(values: Sequence[int]) -> LengthGuess:
    return LengthGuess(
        max(values[len(values) // 2], 1), max(values[int(0.9 * (len(values) - 1))], 1), "class"
    )
