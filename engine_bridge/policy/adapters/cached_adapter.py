"""The interface of eviction policies for adapters, and how uses are counted. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from msgspec import Struct

# After this long a use counts half, for scores that count uses by time. Measured: bench.emulated adapter_cache; 100 to 300 s are as good within 1%.
USE_HALF_LIFE_S = 150.0
MAX_COUNTED_ADAPTERS = 4096  # 100 bytes each. Chosen.


class CachedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that lies in memory. It is unused when a policy is asked which adapter should leave.

    Attributes:
        uses: uses in the caller's window, fractions allowed.
        reload_s: predicted seconds to bring it back.
        is_queued: whether a waiting request needs it, or one is announced.
        num_requests: requests that use it now or wait for it.
    """

    adapter_id: int
    num_bytes: int
    last_used_s: float
    uses: float
    reload_s: float
    is_queued: bool = False
    num_requests: int = 0


class AdapterEvictionPolicy(ABC):
    """Decides which adapter leaves first.

    A policy may keep state; it learns of events by the three hooks, from one caller and in order of time.
    """

    @abstractmethod
    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        """Return all adapters, the first to leave first, queued ones after all others.

        Asking twice gives the same; a policy may note how much it chose from.
        """

    @abstractmethod
    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """Return the saving per byte of each adapter, in seconds of waiting per second, as this policy judges. Changes no state.

        No worth is higher than the worth of an adapter that `order` evicts later. window_s: the time that `uses` were counted over.
        """

    def touched(self, adapter: CachedAdapter, now: float) -> None:  # noqa: B027 (not every policy keeps state)
        """Note that a request for the adapter came or has ended; its `uses` and `num_requests` count that already.

        A caller that never sets `num_requests` calls it at each use.
        """

    def evicted(self, adapter_id: int) -> None:  # noqa: B027
        """Note that the adapter was evicted. Call it for every victim, in the order of `choose_victims`."""

    def forgotten(self, adapter_id: int) -> None:  # noqa: B027
        """Note that the adapter left for another reason (unloaded, replaced by a new version)."""


def by_value(cached: Sequence[CachedAdapter], values: Sequence[float]) -> list[CachedAdapter]:
    """Return the adapters by value, the lowest first; among equals the longest unused first; queued ones last."""
    ranked = sorted(
        zip(values, cached, strict=True),
        key=lambda item: (item[1].is_queued, item[0], item[1].last_used_s, item[1].adapter_id),
    )
    return [adapter for _, adapter in ranked]


class UseWindow:
    """Uses per adapter in a window that fades: a use counts half after `USE_HALF_LIFE_S`. Remembers evicted adapters, too.

    Source: Chameleon §4.1, "usage frequency … within a specific time frame", which it does not give. A fading window needs one number per adapter
    and has no edge at which a burst drops out at once.
    """

    def __init__(self, max_adapters: int = MAX_COUNTED_ADAPTERS) -> None:
        self._mean_life_s = USE_HALF_LIFE_S / math.log(2)
        self._max_adapters = max_adapters
        self._counts: dict[int, tuple[float, float]] = {}  # as of a time; the longest unused first
        self._started_s: float | None = None

    def used(self, adapter_id: int, now: float) -> None:
        """Note a request for the adapter. If the window is full, the longest unused adapter is forgotten."""
        if self._started_s is None:
            self._started_s = now
        uses = self.uses(adapter_id, now) + 1
        self._counts.pop(adapter_id, None)
        if len(self._counts) >= self._max_adapters:
            del self._counts[next(iter(self._counts))]
        self._counts[adapter_id] = (uses, now)

    def uses(self, adapter_id: int, now: float) -> float:
        """Return the faded uses; 0 for an unknown adapter."""
        uses, at_s = self._counts.get(adapter_id, (0.0, now))
        return uses * math.exp(-max(now - at_s, 0.0) / self._mean_life_s)

    def length_s(self, now: float) -> float:
        """Return the seconds that uses are counted over: one use per second adds up to this number.

        Over the first half-lives it is the time since the first use, at least a second.
        """
        seen_s = max(now - self._started_s, 1.0) if self._started_s is not None else 1.0
        return self._mean_life_s * -math.expm1(-seen_s / self._mean_life_s)

    def forget(self, adapter_id: int) -> None:
        """Forget an adapter that was unloaded for good. An unknown one is ignored."""
        self._counts.pop(adapter_id, None)
