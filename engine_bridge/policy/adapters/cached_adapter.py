"""What eviction policies of adapters are told and asked, and how uses are counted. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

# After this long a use counts half, for scores that count uses by time. Measured: bench.sim.adapter_cache; 100 to 300 s are as good within 1%.
USE_HALF_LIFE_S = 150.0
MAX_COUNTED_ADAPTERS = 4096  # 100 bytes each. Chosen.


class CachedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that lies in memory, unused where a policy is asked who goes.

    last_used_s: on the clock of `now`. uses: in the caller's window, fractions allowed. reload_s: what bringing it back is predicted to take.
    is_queued: a waiting request needs it, or one is announced. num_requests: those that use it now or wait for it.
    """

    adapter_id: int
    num_bytes: int
    last_used_s: float
    uses: float
    reload_s: float
    is_queued: bool = False
    num_requests: int = 0


class EvictionPolicy(Protocol):
    """Who goes first. A policy may keep state; it learns of what happens by the three hooks, from one caller and in order of time."""

    @property
    def name(self) -> str:
        """As in `POLICIES`."""
        ...

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        """All of them, the first to go first, those that are queued after all others.

        Asking twice gives the same; a policy may note how much it chose from.
        """
        ...

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """What a byte of each saves, in seconds of waiting per second, as this policy judges. Changes no state.

        None is higher than that of one which `order` lets go later. window_s: the time that `uses` were counted over.
        """
        ...

    def touched(self, adapter: CachedAdapter, now: float) -> None:
        """A request came for it or has ended; its `uses` and `num_requests` count that already.

        A caller that never says `num_requests` calls it at each use.
        """
        ...

    def evicted(self, adapter_id: int) -> None:
        """It made room for something. Call it for every victim, in the order of `choose_victims`."""
        ...

    def forgotten(self, adapter_id: int) -> None:
        """It is gone for another reason (unloaded, replaced by a new version)."""
        ...


def by_value(cached: Sequence[CachedAdapter], values: Sequence[float]) -> list[CachedAdapter]:
    """Lowest value first; among equals the longest unused; queued ones last."""
    ranked = sorted(
        zip(values, cached, strict=True),
        key=lambda item: (item[1].is_queued, item[0], item[1].last_used_s, item[1].adapter_id),
    )
    return [adapter for _, adapter in ranked]


class UseWindow:
    """Uses per adapter in a window that fades: a use counts half after `half_life_s`. Remembers evicted adapters, too.

    Source: Chameleon §4.1, "usage frequency … within a specific time frame", which it does not give. A fading window needs one number per adapter
    and has no edge at which a burst drops out at once.
    """

    def __init__(
        self, half_life_s: float = USE_HALF_LIFE_S, max_adapters: int = MAX_COUNTED_ADAPTERS
    ) -> None:
        if half_life_s <= 0 or max_adapters < 1:
            raise ValueError("a window needs a positive half-life and room for an adapter")
        self._mean_life_s = half_life_s / math.log(2)
        self._max_adapters = max_adapters
        self._counts: dict[int, tuple[float, float]] = {}  # as of a time; the longest unused first
        self._started_s: float | None = None

    def __len__(self) -> int:
        return len(self._counts)

    def used(self, adapter_id: int, now: float) -> None:
        """A request came for it. If the window is full, the longest unused adapter is forgotten."""
        if self._started_s is None:
            self._started_s = now
        uses = self.uses(adapter_id, now) + 1
        self._counts.pop(adapter_id, None)
        if len(self._counts) >= self._max_adapters:
            del self._counts[next(iter(self._counts))]
        self._counts[adapter_id] = (uses, now)

    def uses(self, adapter_id: int, now: float) -> float:
        """Faded uses; 0 for an unknown adapter."""
        uses, at_s = self._counts.get(adapter_id, (0.0, now))
        return uses * math.exp(-max(now - at_s, 0.0) / self._mean_life_s)

    def length_s(self, now: float) -> float:
        """What uses are counted over: one every second comes to so many. Over the first half-lives it is the time there was, at least a second."""
        seen_s = max(now - self._started_s, 1.0) if self._started_s is not None else 1.0
        return self._mean_life_s * -math.expm1(-seen_s / self._mean_life_s)

    def per_s(self, adapter_id: int, now: float) -> float:
        """Uses per second, by the window so far."""
        return self.uses(adapter_id, now) / self.length_s(now)

    def forget(self, adapter_id: int) -> None:
        """Unloaded for good; unknown ones are ignored."""
        self._counts.pop(adapter_id, None)
