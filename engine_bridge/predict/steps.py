"""Which regressor predicts this machine's step times best, and a `StepTable` made from it. Offline: seconds of work, off the engine's thread.

Source: AdaptiveLLM §3.2 and tables 5 and 6 (D1): eight regressors, each on polynomial features of degree 1 to 5, the least error on held-out
points wins. There it is a random forest on degree 2 with 1.3 to 1.8%, from 64,000 samples. From 580 samples on a grid of two made-up machines
(formulas with 1 and 4% noise, not measurements) boosting came first, polynomials of degree 2 to 5 next, and forests last: they average what lies far
apart.

Departs in: one model and device at a time, so layers and hidden size are no features; context tokens are one, since decode steps read all KV;
features are scaled; samples are weighted by 1/seconds², because the error that counts is relative (the paper's linear models, at 40% and more, seem
to lack that); what is compared is the table made from each regressor, because the table is what answers at run time.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from engine_bridge.policy.costs.costs import StepTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

REGRESSORS = (
    "linear",
    "tree",
    "forest",
    "ridge",
    "lasso",
    "elastic_net",
    "gradient_boosting",
    "nearest",
)
DEGREES = (1, 2, 3, 4, 5)
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
        return self.num_prefill_tokens, self.num_decodes, self.num_context_tokens


class Candidate(Struct, frozen=True):
    """Mean relative errors on held-out points: of the regressor, and of the table made from it."""

    regressor: str
    degree: int
    error: float
    table_error: float


class StepFit(Struct, frozen=True):
    """candidates: the best table first. repeatability: mean relative error that the machine itself leaves (see there); None where nothing repeats."""

    table: StepTable
    candidates: tuple[Candidate, ...]
    repeatability: float | None
    num_held_out: int

    @property
    def winner(self) -> Candidate:
        return self.candidates[0]


def fit_steps(
    samples: Sequence[StepSample],
    *,
    regressors: Sequence[str] = REGRESSORS,
    degrees: Sequence[int] = DEGREES,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, all_: None,
) -> StepFit:
    """Fit all candidates, and make the table from the best one with all samples.

    Args:
        on_progress: called with (candidates done, of how many).

    Raises:
        ValueError: fewer than MIN_SAMPLES samples with work and time, or an unknown regressor.
    """
    usable = [s for s in samples if sum(s.work[:2]) > 0 and 0 < s.seconds < math.inf]
    if len(usable) < MIN_SAMPLES:
        raise ValueError(f"fitting step times takes {MIN_SAMPLES} samples, not {len(usable)}")
    train, held_out = _divide(usable, seed)
    axes = _axes(usable)
    pairs = [(name, degree) for name in regressors for degree in degrees]
    candidates = []
    for done, (name, degree) in enumerate(pairs):
        on_progress(done, len(pairs))
        predict = _fitted(name, degree, train, seed)
        error = _error(predict([s.work for s in held_out]), held_out)
        table = StepTable.of(predict, *axes)
        candidates.append(Candidate(name, degree, error, table_error(table, held_out)))
    on_progress(len(pairs), len(pairs))
    candidates.sort(key=lambda c: (c.table_error, c.degree))
    best = candidates[0]
    table = StepTable.of(_fitted(best.regressor, best.degree, usable, seed), *axes)
    table.usual_error = max(best.table_error, 0.02)
    return StepFit(table, tuple(candidates), repeatability(usable), len(held_out))


def table_error(table: StepTable, samples: Sequence[StepSample]) -> float:
    """Mean relative error of a table's predictions."""
    return _error([table.step_s(*sample.work) for sample in samples], samples)


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


def _divide(samples: Sequence[StepSample], seed: int) -> tuple[list[StepSample], list[StepSample]]:
    """Training and held-out samples. Repeats of one work go to the same side, else held-out points would have been seen."""
    import random

    works = sorted({sample.work for sample in samples})
    random.Random(seed).shuffle(works)
    held = set(works[: max(round(len(works) * HELD_OUT), 1)])
    train = [sample for sample in samples if sample.work not in held]
    held_out = [sample for sample in samples if sample.work in held]
    return (train, held_out) if train else (held_out, held_out)


def _error(predicted: Sequence[float], samples: Sequence[StepSample]) -> float:
    pairs = zip(predicted, samples, strict=True)
    return statistics.fmean(abs(seconds / sample.seconds - 1) for seconds, sample in pairs)


def _axes(samples: Sequence[StepSample]) -> tuple[list[int], list[int], list[int]]:
    return (
        _axis([sample.num_prefill_tokens for sample in samples]),
        _axis([sample.num_decodes for sample in samples]),
        _axis([sample.num_context_tokens for sample in samples]),
    )


def _axis(amounts: Sequence[int]) -> list[int]:
    """0, 1, and what was measured, thinned to NUM_AXIS_POINTS by equal factors: where samples are, the table is exact."""
    seen = sorted(set(amounts) - {0})
    if not seen:
        return [0, 1]
    if len(seen) > NUM_AXIS_POINTS - 2:
        num = NUM_AXIS_POINTS - 3
        wanted = [seen[0] * (seen[-1] / seen[0]) ** (place / num) for place in range(num + 1)]
        seen = sorted({min(seen, key=lambda amount: abs(amount - point)) for point in wanted})
    return sorted({0, 1, *seen})


def _fitted(
    name: str, degree: int, samples: Sequence[StepSample], seed: int
) -> Callable[[Sequence[tuple[int, int, int]]], list[float]]:
    """A predictor of seconds, trained on the samples. scikit-learn ships no types."""
    import warnings

    import numpy as np
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
    from sklearn.preprocessing import MaxAbsScaler, PolynomialFeatures, StandardScaler  # type: ignore[import-untyped]

    work = np.array([sample.work for sample in samples], dtype=np.float64)
    seconds: Floats = np.array([sample.seconds for sample in samples])
    features = make_pipeline(MaxAbsScaler(), PolynomialFeatures(degree, include_bias=False), StandardScaler())
    model = _regressor(name, len(samples), seed)
    # In units of the median step, so that the penalties of ridge, lasso and elastic net do not depend on the machine's speed.
    unit = float(np.median(seconds))
    target = seconds / unit
    weights = {} if name == "nearest" else {"sample_weight": target**-2 / np.mean(target**-2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # then its error on held-out points shows it
        model.fit(features.fit_transform(work), target, **weights)

    def predict(points: Sequence[tuple[int, int, int]]) -> list[float]:
        found: Floats = model.predict(features.transform(np.array(points, dtype=np.float64)))
        return [float(value) for value in np.maximum(found, 0.0) * unit]

    return predict


def _regressor(name: str, num_samples: int, seed: int) -> Any:
    """One of the eight. Penalties are small: features are scaled and targets are near 1. Chosen."""
    from sklearn import ensemble, linear_model, neighbors, tree  # type: ignore[import-untyped]

    made: dict[str, Callable[[], Any]] = {
        "linear": linear_model.LinearRegression,
        "tree": lambda: tree.DecisionTreeRegressor(random_state=seed),
        "forest": lambda: ensemble.RandomForestRegressor(n_estimators=50, random_state=seed),
        "ridge": lambda: linear_model.Ridge(alpha=1e-3),
        "lasso": lambda: linear_model.Lasso(alpha=1e-3, max_iter=2000),
        "elastic_net": lambda: linear_model.ElasticNet(alpha=1e-3, max_iter=2000),
        "gradient_boosting": lambda: ensemble.GradientBoostingRegressor(random_state=seed),
        "nearest": lambda: neighbors.KNeighborsRegressor(min(5, num_samples), weights="distance"),
    }
    if name not in made:
        raise ValueError(f"unknown regressor {name!r}; there are {', '.join(made)}")
    return made[name]()
