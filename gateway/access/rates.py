"""Budgets in requests: how many a second, and how many at once, under each name (an owner, or an address). Pure: `now` comes in."""

from __future__ import annotations

from typing import NamedTuple

MAX_NAMES = 20_000
"""Names remembered by one set of rates. Chosen: some 4 MB; above it, those nearest to a full bucket start anew."""
PRIOR_LASTS_S = 2.0
"""How long a request is taken to last before one has ended. Chosen: a short answer of a small model."""
MIN_WAIT_S, MAX_WAIT_S = 1.0, 30.0
"""Bounds of what is guessed of the wait for a place. Chosen: sooner is a busy loop, later is given up."""
NEWEST_WEIGHT = 0.2
"""What the newest request counts for in the mean. Chosen: five requests make a new habit."""


class Rate(NamedTuple):
    """A bucket's size in requests, and how many it gains a second."""

    per_s: float
    burst: float


class Rates:
    """A bucket for each name that holds `burst` requests and fills at `per_s`, unless a call says that this name has another rate.

    A bucket is kept as one number, the time at which it will be full again, so a silent name costs nothing. Source: the generic cell rate
    algorithm in its form of virtual scheduling, ITU-T I.371.
    """

    def __init__(self, per_s: float, burst: float, *, max_names: int = MAX_NAMES) -> None:
        self.rate = Rate(per_s, burst)
        self._max_names = max_names
        self._full_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._full_s)

    def wait_s(self, name: str, now: float, rate: Rate | None = None) -> float:
        """Return the seconds until the next request of this name may come; 0.0: now."""
        per_s, burst = rate or self.rate
        full_s = max(self._full_s.get(name, now), now)
        return max(full_s - now - (burst - 1) / per_s, 0.0)

    def take(self, name: str, now: float, rate: Rate | None = None) -> float:
        """Take a request from the bucket and return 0.0; or change nothing and return the seconds until the bucket holds one."""
        rate = rate or self.rate
        wait_s = self.wait_s(name, now, rate)
        # A sliver of a second is a rounding error of many additions, and no reason to send anybody away.
        if wait_s > 1e-6:
            return wait_s
        if len(self._full_s) >= self._max_names and name not in self._full_s:
            self._forget(now)
        self._full_s[name] = max(self._full_s.get(name, now), now) + 1 / rate.per_s
        return 0.0

    def _forget(self, now: float) -> None:
        """Drop full buckets, which are like new ones; if that frees less than half, drop those nearest to full."""
        kept = sorted(((full_s, name) for name, full_s in self._full_s.items() if full_s > now), reverse=True)
        self._full_s = {name: full_s for full_s, name in kept[: self._max_names // 2]}


class Concurrency:
    """Places for requests under way: `limit` under each name."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._inside: dict[str, int] = {}
        # By name, while it has requests under way: how long they last on average.
        self._lasts_s: dict[str, float] = {}

    def enter(self, name: str, limit: int | None = None) -> float:
        """Take one place until `leave` and return 0.0; or change nothing and return an estimate of the seconds until a place is free.

        limit: of this name; None: as for all. The estimate: places become free evenly over the time that a request lasts.
        """
        inside = self._inside.get(name, 0)
        limit = self.limit if limit is None else limit
        if inside >= limit:
            lasts_s = self._lasts_s.get(name, PRIOR_LASTS_S)
            return min(max(lasts_s / limit, MIN_WAIT_S), MAX_WAIT_S)
        self._inside[name] = inside + 1
        return 0.0

    def leave(self, name: str, lasted_s: float) -> None:
        """Give back a place that `enter` gave. lasted_s: how long it was held."""
        inside = self._inside[name] - 1
        if inside:
            self._inside[name] = inside
            mean_s = self._lasts_s.get(name, lasted_s)
            self._lasts_s[name] = mean_s + NEWEST_WEIGHT * (lasted_s - mean_s)
        else:
            del self._inside[name]
            self._lasts_s.pop(name, None)
