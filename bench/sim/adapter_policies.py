"""Eviction policies to compare with: two fixed cost-aware ones, and one that knows the future."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from bench.sim.adapter_traces import Use
from engine_bridge.policy.adapters.adapter_cache import Stateless
from engine_bridge.policy.adapters.adaptive_eviction import seconds_per_byte
from engine_bridge.policy.adapters.cached_adapter import CachedAdapter, by_value


def gain_per_byte(adapter: CachedAdapter) -> float:
    """Seconds of loading that a byte of it saved in the window."""
    return adapter.uses * seconds_per_byte(adapter)


class GreedyDual:
    """Lowest value first: a clock plus uses · reload_s / num_bytes, both as of the last use; each victim sets the clock to its value.

    Source: Cao & Irani, GreedyDual-Size, USITS 1997; Cherkasova, GDSF, HPL-98-69 (the factor of uses). Departs from GDSF in that uses are those
    of the caller's window, which an eviction does not reset.
    """

    name = "greedy_dual"

    def __init__(self) -> None:
        self.clock = 0.0
        self._values: dict[int, float] = {}

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        return by_value(cached, [self._value(adapter) for adapter in cached])

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        return [max(self._value(adapter) - self.clock, 0.0) / window_s for adapter in cached]

    def _value(self, adapter: CachedAdapter) -> float:
        return self._values.get(adapter.adapter_id, self.clock + gain_per_byte(adapter))

    def touched(self, adapter: CachedAdapter, now: float) -> None:
        self._values[adapter.adapter_id] = self.clock + gain_per_byte(adapter)

    def evicted(self, adapter_id: int) -> None:
        self.clock = max(self.clock, self._values.pop(adapter_id, 0.0))

    def forgotten(self, adapter_id: int) -> None:
        self._values.pop(adapter_id, None)


class ExpectedGain(Stateless):
    """Lowest expected saving per byte first: uses in the window, as a forecast of uses to come, times reload_s over num_bytes.

    The default until `adaptive` came: what keeps it from holding yesterday's favourites is the window's fixed half-life alone.
    """

    name = "expected_gain"

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        return by_value(cached, [gain_per_byte(adapter) for adapter in cached])

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        return [gain_per_byte(adapter) / window_s for adapter in cached]


class Clairvoyant(Stateless):
    """Least saved per byte and second until the next use first. A strong heuristic, not a bound: with sizes and costs the best choice is NP-hard."""

    name = "clairvoyant"

    def __init__(self, uses: Sequence[Use]) -> None:
        self._times_s: dict[int, list[float]] = defaultdict(list)
        for use in uses:
            self._times_s[use.adapter_id].append(use.at_s)

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        return sorted(cached, key=lambda adapter: (self._value(adapter, now), adapter.adapter_id))

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        return [self._value(adapter, now) for adapter in cached]

    def _value(self, adapter: CachedAdapter, now: float) -> float:
        times_s = self._times_s[adapter.adapter_id]
        at = bisect_right(times_s, now)
        next_s = times_s[at] - now if at < len(times_s) else math.inf
        return seconds_per_byte(adapter) / next_s
