"""What the words of a question say of its answer's length, learned from answers: a weight for each of 16,384 places that words are hashed to.

A word's place says little of the word (many share it), and no text is kept. The estimate is linear in the words that are there, learned by AdaGrad
(Duchi et al., 2011) on the logarithm of the length, and is one of the figures that `length.py`'s trees read: made before the answer was seen,
so that the trees learn how far it can be trusted.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from itertools import pairwise

NUM_PLACES = 1 << 14
# Of a question's words, half from its beginning and half from its end. Chosen: bounds the time, 30 µs with the rest of the hints.
MAX_WORDS = 64
# Measured on first turns of MT-Bench-101 and on OpenAssistant: 0.1 learns too slowly from a thousand answers, 0.3 has 2 to 3% less pinball loss.
RATE = 0.3
# Outcomes after which the mean follows slowly. Chosen.
MAX_MEAN_WEIGHT = 500
_WORD = re.compile(r"[a-z]+|[0-9]+|[^\W\d_]")


def places_of(question: str) -> tuple[int, ...]:
    """Where its words, its pairs of words and its first word lie. As many as there are different ones."""
    words = _WORD.findall(question.lower())
    if len(words) > MAX_WORDS:
        words = words[: MAX_WORDS // 2] + words[-MAX_WORDS // 2 :]
    said = dict.fromkeys(words) | dict.fromkeys(f"{one} {other}" for one, other in pairwise(words))
    first = [f"^{words[0]}"] if words else []
    return tuple(zlib.crc32(word.encode()) % NUM_PLACES for word in [*said, *first])


class Words:
    """The weights. `predict` and `learn` on one thread.

    Attributes: weights, squares (of what each was moved by so far): NUM_PLACES of each. mean, num_learned: of all lengths.
    """

    def __init__(self, mean: float) -> None:
        self.weights = [0.0] * NUM_PLACES
        self.squares = [1.0] * NUM_PLACES
        self.mean = mean
        self.num_learned = 0

    def predict(self, places: Sequence[int]) -> float:
        """The logarithm of the length."""
        if not places:
            return self.mean
        weights = self.weights
        return self.mean + sum([weights[place] for place in places]) / math.sqrt(len(places))

    def learn(self, places: Sequence[int], length: float) -> None:
        """An answer had this length, as a logarithm."""
        error = length - self.predict(places)
        self.num_learned += 1
        self.mean += error / max(10, min(self.num_learned, MAX_MEAN_WEIGHT))
        if not places:
            return
        step = max(min(error, 1.0), -1.0) / math.sqrt(len(places))
        for place in places:
            self.squares[place] += step * step
            self.weights[place] += RATE * step / math.sqrt(self.squares[place])
