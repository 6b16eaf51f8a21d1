"""Figures of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from bench.sim.core.requests import Request


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed; nan of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)]


def counted(requests: Iterable[Request], warm_up_s: float, span_s: float) -> list[Request]:
    """Those that came after the warm-up and before the end. All of them have ended: a run goes on until nobody is left."""
    return [request for request in requests if warm_up_s <= request.arrival.at_s < span_s]
