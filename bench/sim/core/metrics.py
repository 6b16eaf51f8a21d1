"""Figures of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from bench.sim.core.requests import Timed

Each = TypeVar("Each", bound=Timed)


def counted(requests: Iterable[Each], warm_up_s: float, span_s: float) -> list[Each]:
    """Those that came after the warm-up and before the end. All of them have ended: a run goes on until nobody is left."""
    return [request for request in requests if warm_up_s <= request.arrival.at_s < span_s]
