"""Figures of a run."""

from __future__ import annotations

from collections.abc import Iterable

from bench.sim.core.requests import Request


def counted(requests: Iterable[Request], warm_up_s: float, span_s: float) -> list[Request]:
    """Those that came after the warm-up and before the end. All of them have ended: a run goes on until nobody is left."""
    return [request for request in requests if warm_up_s <= request.arrival.at_s < span_s]
