"""What repeats of a measurement say of an aim: their median, its interval, and whether that is enough to decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from bench.measures import quantile

NUM_RESAMPLES = 2000  # Chosen: 0.1 s, and intervals of two runs over the same repeats agree to a hundredth.


class Aim(NamedTuple):
    """A value for the median to reach. is_most: as an upper bound, else as a lower one."""

    value: float
    is_most: bool = False

    def __str__(self) -> str:
        return f"aim {'≤' if self.is_most else '≥'} {self.value:g}"


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval in which the median lies at 95%, by bootstrap over the repeats; None of a single one, which says nothing about others."""
    if len(values) < 2:
        return None
    return _bootstrap(np.array(values), np.median)


def _bootstrap(drawn_from: Any, of: Callable[..., Any], **options: Any) -> tuple[float, float]:
    from scipy.stats import bootstrap  # which is slow to import

    found = bootstrap((drawn_from,), of, confidence_level=0.95, method="percentile", rng=0, **options)
    low, high = found.confidence_interval
    return round(float(low), 4), round(float(high), 4)


Rounds = Sequence[Sequence[float]]
"""What was measured, by round."""


def quantile_ratio(rounds: Rounds, others: Rounds, share: float) -> float:
    """Return a quantile of all rounds over that of the other arm's."""
    return quantile(list(chain(*rounds)), share) / quantile(list(chain(*others)), share)


def quantile_ratio_interval(rounds: Rounds, others: Rounds, share: float) -> tuple[float, float] | None:
    """Return the interval in which `quantile_ratio` lies at 95%, by bootstrap over rounds with both arms; None of a single round."""
    if len(rounds) < 2:
        return None

    def of(drawn: Any) -> float:
        """Return the ratio over the drawn rounds."""
        return quantile_ratio([rounds[n] for n in drawn], [others[n] for n in drawn], share)

    return _bootstrap(np.arange(len(rounds)), of, vectorized=False, n_resamples=NUM_RESAMPLES)


def verdict(found: tuple[float, float] | None, aim: Aim) -> str:
    """Return `reached` or `missed` where the whole interval is on one side of the aim, else `undecided`."""
    if found is None:
        return "undecided"
    low, high = found
    if aim.is_most:
        low, high = -high, -low
    value = -aim.value if aim.is_most else aim.value
    return "reached" if low >= value else "missed" if high < value else "undecided"


def judged(values: Mapping[str, Sequence[float]], aims: Mapping[str, Aim]) -> dict[str, Any]:
    """Return `intervals` and `verdicts` by figure for a bench's JSON, of the figures that were measured."""
    found = {name: interval(repeats) for name, repeats in values.items() if repeats}
    return {"intervals": found, "verdicts": {name: verdict(each, aims[name]) for name, each in found.items()}}
