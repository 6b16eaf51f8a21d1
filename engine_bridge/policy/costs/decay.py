"""Rates and shares that fade: the older an amount, the less it counts. Pure."""

from __future__ import annotations

import math


class FadingRate:
    """Amounts per second over a window without an edge: an amount counts half after `half_life_s`.

    Over the first half-lives the sum is divided by the time since the first amount, at least a second.
    """

    def __init__(self, half_life_s: float) -> None:
        self._mean_life_s = half_life_s / math.log(2)
        self._sum = 0.0
        self._at_s: float | None = None
        self._started_s = 0.0

    def add(self, amount: float, now: float) -> None:
        """Count an amount."""
        if self._at_s is None:
            self._started_s = now
        self._sum = self.faded(now) + amount
        self._at_s = now

    def per_s(self, now: float) -> float:
        """Return the amount per second; 0 before any was counted."""
        if self._at_s is None:
            return 0.0
        seen_s = max(now - self._started_s, 1.0)
        return self.faded(now) / (self._mean_life_s * -math.expm1(-seen_s / self._mean_life_s))

    def faded(self, now: float) -> float:
        """Return the faded sum of all amounts."""
        if self._at_s is None:
            return 0.0
        return self._sum * math.exp(-max(now - self._at_s, 0.0) / self._mean_life_s)


class FadingShare:
    """The share of recent trials that succeeded, from 0 to 1.

    Each trial counts half after `half_life_s`; `num_assumed` successes are assumed beside them, so that it is 1 before the first trial and again
    long after the last one.
    """

    def __init__(self, half_life_s: float, num_assumed: float) -> None:
        self._good, self._all = FadingRate(half_life_s), FadingRate(half_life_s)
        self._num_assumed = num_assumed

    def add(self, num_good: float, num: float, now: float) -> None:
        """Note that `num_good` of `num` trials succeeded."""
        self._good.add(num_good, now)
        self._all.add(num, now)

    def at(self, now: float) -> float:
        """Return the share at this time."""
        return (self._good.faded(now) + self._num_assumed) / (self._all.faded(now) + self._num_assumed)
