"""A question's words as a predictor of its answer's length: a learned weight for each of 16,384 places that words are hashed to.

A word's place says little of the word (many share it), and no text is kept. The estimate is linear in the words of the question, learned by AdaGrad
(Duchi et al., 2011) on the logarithm of the length, and is one of the figures that `length.py`'s trees read: made before the answer was seen,
so that the trees learn how far it can be trusted.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct, field

NUM_PLACES = 1 << 14
# Words of a question that are read, half from its beginning and half from its end. Chosen: bounds the time, 30 µs with the rest of the hints.
MAX_WORDS = 64
# Measured on first turns of MT-Bench-101 and on OpenAssistant: 0.1 learns too slowly from a thousand answers, 0.3 has 2 to 3% less pinball loss.
RATE = 0.3
# Answers after which the mean follows slowly. Chosen.
MAX_MEAN_WEIGHT = 500
_WORD = re.compile(r"[a-z]+|[0-9]+|[^\W\d_]")


def places_of(question: str) -> tuple[int, ...]:
    """Return the places of the question's different words, pairs of words, and first word."""
    words = _WORD.findall(question.lower())
    if len(words) > MAX_WORDS:
        words = words[: MAX_WORDS // 2] + words[-MAX_WORDS // 2 :]
    said = dict.fromkeys(words) | dict.fromkeys(f"{one} {other}" for one, other in pairwise(words))
    first = [f"^{words[0]}"] if words else []
    return tuple(zlib.crc32(word.encode()) % NUM_PLACES for word in [*said, *first])


class Words(Struct):
    """The weights of all places. `predict` and `learn` run on one thread.

    Attributes:
        mean: the mean of all lengths, as a logarithm.
        weights, squares: NUM_PLACES each; a square is the sum of the squared steps of its weight.
        num_learned: answers so far.
    """

    mean: float
    weights: list[float] = field(default_factory=lambda: [0.0] * NUM_PLACES)
    squares: list[float] = field(default_factory=lambda: [1.0] * NUM_PLACES)
    num_learned: int = 0

    def predict(self, places: Sequence[int]) -> float:
        """Predict the logarithm of the length from a question's places."""
        if not places:
            return self.mean
        weights = self.weights
        return self.mean + sum([weights[place] for place in places]) / math.sqrt(len(places))

    def learn(self, places: Sequence[int], length: float) -> None:
        """Learn that an answer to a question with these places had this length, as a logarithm."""
        error = length - self.predict(places)
        self.num_learned += 1
        self.mean += error / max(10, min(self.num_learned, MAX_MEAN_WEIGHT))
        if not places:
            return
        step = max(min(error, 1.0), -1.0) / math.sqrt(len(places))
        for place in places:
            self.squares[place] += step * step
            self.weights[place] += RATE * step / math.sqrt(self.squares[place])
