"""A machine's step times as a `StepTable`, fitted to measured steps. Offline: a second of work, off the engine's thread.

Source: AdaptiveLLM §3.2 (D1): a regressor on polynomial features of what a step computes. The paper compares eight regressors on degrees 1 to 5 and
takes a random forest. Here it is ridge regression on degree 3. Of the eight it is the best on a real engine (2 cores; 4.8 to 5.1% from degree 2 on,
boosting 5.7%, a forest 10%), and on emulated devices second to boosting (2.6 to 3.4%, 2.4 to 3.0%; bench/LOG.md, "The emulated node").

Departs in: one model and device at a time, so layers and hidden size are no features; context tokens are one, since decode steps read all KV;
features are scaled; samples are weighted by 1/seconds², because the error that counts is relative (the paper's linear models, at 40% and more, seem
to lack that); the error that counts is the table's, because the table is what answers at run time.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from engine_bridge.policy.costs.costs import StepTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

DEGREE = 3
MIN_SAMPLES = 40
HELD_OUT = 0.2  # source: AdaptiveLLM §4.5, 16,000 of 80,000
# Points along each axis of the table. Chosen: 16³ times are 32 KiB, predicted at once.
NUM_AXIS_POINTS = 16


class StepSample(Struct, frozen=True):
    """A measured step: tokens prefilled, requests that decoded one, tokens in KV that all of them attended to."""

    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int
    seconds: float

    @property
    def work(self) -> tuple[int, int, int]:
        """The features that a step's time is predicted from."""
        return self.num_prefill_tokens, self.num_decodes, self.num_context_tokens


class StepFit(Struct, frozen=True):
    """A table and how good it is.

    error: of a table made from the other samples, mean relative, on held-out points. repeatability: mean relative error that the machine itself
    leaves (see there); None where nothing repeats.
    """

    table: StepTable
    error: float
    repeatability: float | None
    num_held_out: int


Predict = Callable[[Sequence[tuple[int, int, int]]], list[float]]
"""Returns the seconds of steps with this work."""


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """Fit a table to measured steps. Raises ValueError for fewer than MIN_SAMPLES samples with work and time."""
    usable = [s for s in samples if sum(s.work[:2]) > 0 and 0 < s.seconds < math.inf]
    if len(usable) < MIN_SAMPLES:
        raise ValueError(f"fitting step times takes {MIN_SAMPLES} samples, not {len(usable)}")
    kept, held_out = _divide(usable)
    axes = [_axis(amounts) for amounts in zip(*(s.work for s in usable), strict=True)]
    error = table_error(StepTable.of(fitted(kept), *axes), held_out)
    return StepFit(StepTable.of(fitted(usable), *axes), error, repeatability(usable), len(held_out))


def table_error(table: StepTable, samples: Sequence[StepSample]) -> float:
    """Mean relative error of a table's predictions."""
    return statistics.fmean(abs(table.step_s(*sample.work) / sample.seconds - 1) for sample in samples)


def repeatability(samples: Sequence[StepSample]) -> float | None:
    """Mean relative deviation of equal steps from their median: no predictor does better. None where no work was measured twice."""
    groups: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.work].append(sample.seconds)
    deviations = [
        abs(seconds / middle - 1)
        for times in groups.values()
        if len(times) > 1 and (middle := statistics.median(times)) > 0
        for seconds in times
    ]
    return statistics.fmean(deviations) if deviations else None


def _divide(samples: Sequence[StepSample]) -> tuple[list[StepSample], list[StepSample]]:
    """Training and held-out samples. Repeats of one work go to the same side, else held-out points would have been seen."""
    works = sorted({sample.work for sample in samples})
    random.Random(0).shuffle(works)
    held = set(works[: max(round(len(works) * HELD_OUT), 1)])
    train = [sample for sample in samples if sample.work not in held]
    held_out = [sample for sample in samples if sample.work in held]
    return (train, held_out) if train else (held_out, held_out)


def _axis(amounts: Sequence[int]) -> list[int]:
    """Return 0, 1 and the measured amounts, thinned to NUM_AXIS_POINTS by equal factors: the table is exact where samples are."""
    seen = sorted(set(amounts) - {0})
    if not seen:
        return [0, 1]
    if len(seen) > NUM_AXIS_POINTS - 2:
        num = NUM_AXIS_POINTS - 3
        wanted = [seen[0] * (seen[-1] / seen[0]) ** (place / num) for place in range(num + 1)]
        seen = sorted({min(seen, key=lambda amount: abs(amount - point)) for point in wanted})
    return sorted({0, 1, *seen})


def fitted(samples: Sequence[StepSample]) -> Predict:
    """Train the regressor on polynomial features. Its penalty is small: features are scaled and targets are near 1. Chosen."""
    import numpy as np
    from sklearn.linear_model import Ridge  # type: ignore[import-untyped]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
    from sklearn.preprocessing import MaxAbsScaler, PolynomialFeatures, StandardScaler  # type: ignore[import-untyped]

    work = np.array([sample.work for sample in samples], dtype=np.float64)
    seconds: Floats = np.array([sample.seconds for sample in samples])
    features = make_pipeline(MaxAbsScaler(), PolynomialFeatures(DEGREE, include_bias=False), StandardScaler())
    # In units of the median step, so that penalties do not depend on the machine's speed.
    unit = float(np.median(seconds))
    target = seconds / unit
    model = Ridge(alpha=1e-3)
    model.fit(features.fit_transform(work), target, sample_weight=target**-2 / np.mean(target**-2))

    def predict(points: Sequence[tuple[int, int, int]]) -> list[float]:
        """Return the seconds of steps with this work, each as `StepSample.work`; never below 0."""
        found: Floats = model.predict(features.transform(np.array(points, dtype=np.float64)))
        return [float(value) for value in np.maximum(found, 0.0) * unit]

    return predict
