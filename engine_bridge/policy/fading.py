"""A rate that fades: what was counted long ago counts for less. Pure."""

from __future__ import annotations

import math


class FadingRate:
    """Amounts per second over a window without an edge: an amount counts half after `half_life_s`.

    Over the first half-lives it is divided by the time there was, at least a second.
    """

    def __init__(self, half_life_s: float) -> None:
        if half_life_s <= 0:
            raise ValueError("a half-life is positive")
        self._mean_life_s = half_life_s / math.log(2)
        self._sum = 0.0
        self._at_s: float | None = None
        self._started_s = 0.0

    def add(self, amount: float, now: float) -> None:
        if self._at_s is None:
            self._started_s = now
        self._sum = self._faded(now) + amount
        self._at_s = now

    def per_s(self, now: float) -> float:
        if self._at_s is None:
            return 0.0
        seen_s = max(now - self._started_s, 1.0)
        return self._faded(now) / (self._mean_life_s * -math.expm1(-seen_s / self._mean_life_s))

    def _faded(self, now: float) -> float:
        if self._at_s is None:
            return 0.0
        return self._sum * math.exp(-max(now - self._at_s, 0.0) / self._mean_life_s)
