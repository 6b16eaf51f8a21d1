"""An answer's length as a linear function of its question's words and of what else is known of the request.

Words are hashed to 16,384 places, which many words share, and no text is kept. The function is fitted by ridge regression, which says more than trees
where few answers are known and many words; `length.py`'s trees read its estimate and correct it where lengths are not linear.
"""

from __future__ import annotations

import math
import re
import zlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

    Floats = NDArray[np.float64]

NUM_PLACES = 1 << 14
# Words of a question that are read, half from its beginning and half from its end. Chosen: bounds the time, 30 µs with the rest of the hints.
MAX_WORDS = 64
# A word that fewer questions had says nothing yet. Chosen.
MIN_QUESTIONS = 2
# The penalty on weights, and how large the other figures are beside a question's words, whose squares add up to one. Measured on first turns of
# MT-Bench-101 and on OpenAssistant, where half and twice as much change little.
PENALTY, FIGURE_SCALE = 1.0, 0.3
# Standard deviations beyond which a figure counts no further. Chosen.
MOST_DEVIATIONS = 4.0
NUM_FOLDS = 5
_WORD = re.compile(r"[a-z]+|[0-9]+|[^\W\d_]")


def places_of(question: str) -> tuple[int, ...]:
    """Return the places of the question's different words, pairs of words, and first word."""
    words = _WORD.findall(question.lower())
    if len(words) > MAX_WORDS:
        words = words[: MAX_WORDS // 2] + words[-MAX_WORDS // 2 :]
    said = dict.fromkeys(words) | dict.fromkeys(f"{one} {other}" for one, other in pairwise(words))
    first = [f"^{words[0]}"] if words else []
    return tuple(zlib.crc32(word.encode()) % NUM_PLACES for word in [*said, *first])


class Figure(Struct, frozen=True, array_like=True):
    """The contribution of one figure of a request: its distance from the mean, in units of `spread`, times `weight`."""

    mean: float
    spread: float
    weight: float


class Linear(Struct, frozen=True, array_like=True):
    """The fitted function. weights: NUM_PLACES of them, 0 for a place that says nothing."""

    base: float
    weights: list[float]
    figures: tuple[Figure, ...]

    def value(self, row: Sequence[float], places: Sequence[int]) -> float:
        """Return the estimated logarithm of the length, from a request's figures and the places of its question's words. 10 µs."""
        total = self.base
        for figure, number in zip(self.figures, row, strict=True):
            deviations = (number - figure.mean) / figure.spread
            total += figure.weight * max(min(deviations, MOST_DEVIATIONS), -MOST_DEVIATIONS)
        weights = self.weights
        said = [weight for place in places if (weight := weights[place])]
        return total + sum(said) / math.sqrt(len(said)) if said else total


def fitted(rows: Floats, lengths: Floats, words: Sequence[bytes], seed: int) -> tuple[Linear, Floats]:
    """Fit the function to known answers. words: the places of each question's words, as `packed` makes them. lengths: their logarithms.

    Returns the function, and for each answer the estimate by functions that were fitted to other answers, in random folds: what reads it learns how
    far it can be trusted.
    """
    import numpy as np
    from scipy.sparse import csr_matrix, hstack

    means, spreads = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    figures = np.clip((rows - means) / spreads, -MOST_DEVIATIONS, MOST_DEVIATIONS) * FIGURE_SCALE
    all_known = hstack([_by_place(words), csr_matrix(figures)]).tocsr()
    folds = np.random.default_rng(seed).permutation(len(rows)) % NUM_FOLDS
    out_of_fold = np.zeros(len(rows))
    for fold in range(NUM_FOLDS):
        others = folds != fold
        base, weights = _ridge(all_known[others], lengths[others])
        out_of_fold[~others] = base + all_known[~others] @ weights
    base, weights = _ridge(all_known, lengths)
    each = zip(means, spreads, weights[NUM_PLACES:] * FIGURE_SCALE, strict=True)
    linear = Linear(
        base, weights[:NUM_PLACES].tolist(), tuple(Figure(*map(float, figure)) for figure in each)
    )
    return linear, out_of_fold


def packed(places: Sequence[int]) -> bytes:
    """Return places as two bytes each, to be kept by the thousand."""
    return array("H", places).tobytes()


def _by_place(words: Sequence[bytes]) -> csr_matrix:
    """Return a row for each question, in which the places that it has are equal and their squares add up to one. Rare places are left out."""
    import numpy as np
    from scipy.sparse import csr_matrix

    places = np.frombuffer(b"".join(words), dtype=np.uint16).astype(np.int64)
    questions = np.repeat(np.arange(len(words)), [len(each) // 2 for each in words])
    kept = np.bincount(places, minlength=NUM_PLACES)[places] >= MIN_QUESTIONS
    places, questions = places[kept], questions[kept]
    num_kept = np.bincount(questions, minlength=len(words))
    return csr_matrix((1 / np.sqrt(num_kept[questions]), (questions, places)), shape=(len(words), NUM_PLACES))


def _ridge(known: csr_matrix, lengths: Floats) -> tuple[float, Floats]:
    from sklearn.linear_model import Ridge  # type: ignore[import-untyped]

    # Of the solvers for sparse rows, this one computes on one core: the other cores are the engine's.
    base = float(lengths.mean())
    model = Ridge(PENALTY, fit_intercept=False, solver="sag", random_state=0).fit(known, lengths - base)
    return base, model.coef_
