"""Predictors of answer lengths with a stated accuracy."""

from __future__ import annotations

import random
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from bench.sim.core.requests import Arrival
from engine_bridge.predict.length import LengthGuess

# Where classes end, as shares of all lengths. Source: SSJF (Qiu et al., 2024), whose BERT names one of five; it is Chameleon's predictor.
CLASS_ENDS = (0.25, 0.5, 0.75, 0.99)


class Classes:
    """Names an answer's class of five, right with a probability, else another one by how frequent it is. The guess is that class's quantiles.

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

    def guess(self, arrival: Arrival) -> LengthGuess:
        rng = random.Random(f"{self._seed} {arrival.request_id}")
        true = bisect_right(self._ends, arrival.num_answer_tokens - 1)
        if rng.random() < self._accuracy or len(self._classes) == 1:
            return self._guesses[true]
        others = [at for at in range(len(self._classes)) if at != true]
        (named,) = rng.choices(others, [len(self._classes[at]) for at in others])
        return self._guesses[named]

    def ended(self, arrival: Arrival) -> None: ...


def _quantiles(values: Sequence[int]) -> LengthGuess:
    return LengthGuess(
        max(values[len(values) // 2], 1), max(values[int(0.9 * (len(values) - 1))], 1), "class"
    )


class Usual:
    """The same guess for every answer: the mean of all, and their 90th percentile."""

    def __init__(self, lengths: Sequence[int]) -> None:
        ordered = sorted(lengths)
        self._guess = LengthGuess(round(statistics.fmean(ordered)), ordered[int(0.9 * len(ordered))], "usual")

    def guess(self, arrival: Arrival) -> LengthGuess:
        return self._guess

    def ended(self, arrival: Arrival) -> None: ...
