"""Which unused adapters leave device memory, and whether one is worth more than prefix KV. Pure: facts in, decisions out.

Every policy answers with an order, the first to go first; `choose_victims` turns an order into a set. Adapters of running requests are not in the
lists that policies see; adapters that a waiting request needs are, and go after all others. Source: Chameleon §4.1 (cost-aware eviction).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

# After this long a use counts half. Measured: bench.sim.adapter_cache, --part sweep; anything from 100 to 300 s is as good within 1%.
USE_HALF_LIFE_S = 150.0
MAX_COUNTED_ADAPTERS = 4096  # 100 bytes each. Chosen.


class CachedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that lies in device memory and that no running request uses.

    last_used_s: on the clock of `now`. uses: in the caller's window, fractions allowed. reload_s: what bringing it back is predicted to take.
    is_queued: a waiting request needs it, or one is announced.
    """

    adapter_id: int
    num_bytes: int
    last_used_s: float
    uses: float
    reload_s: float
    is_queued: bool = False


class EvictionPolicy(Protocol):
    """Who goes first. A policy may keep state; it learns of what happens by the three hooks, from one caller and in order of time."""

    @property
    def name(self) -> str:
        """As in `POLICIES`."""
        ...

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        """All of them, the first to go first, those that are queued after all others. Changes no state."""
        ...

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """What a byte of each saves, in seconds of waiting per second, as this policy judges. Changes no state.

        None is higher than that of one which `order` lets go later. window_s: the time that `uses` were counted over.
        """
        ...

    def touched(self, adapter: CachedAdapter, now: float) -> None:
        """A request used it, or the last one that did has ended; its `uses` count this one already."""
        ...

    def evicted(self, adapter_id: int) -> None:
        """It made room for something. Call it for every victim, in the order of `choose_victims`."""
        ...

    def forgotten(self, adapter_id: int) -> None:
        """It is gone for another reason (unloaded, replaced by a new version)."""
        ...


class _Stateless:
    """Hooks for policies that judge by the facts alone."""

    def touched(self, adapter: CachedAdapter, now: float) -> None: ...

    def evicted(self, adapter_id: int) -> None: ...

    def forgotten(self, adapter_id: int) -> None: ...


def _by_value(cached: Sequence[CachedAdapter], values: Sequence[float]) -> list[CachedAdapter]:
    """Lowest value first; among equals the longest unused; queued ones last."""
    ranked = sorted(
        zip(values, cached, strict=True),
        key=lambda item: (item[1].is_queued, item[0], item[1].last_used_s, item[1].adapter_id),
    )
    return [adapter for _, adapter in ranked]


def _shares(scores: Sequence[float], cached: Sequence[CachedAdapter], window_s: float) -> list[float]:
    """Worths of adapters by scores that have no unit: what all of them save together, divided in proportion."""
    num_bytes, total = sum(adapter.num_bytes for adapter in cached), sum(scores)
    if not num_bytes or not total:
        return [0.0] * len(cached)
    saved_per_byte = sum(adapter.uses * adapter.reload_s for adapter in cached) / num_bytes / window_s
    return [saved_per_byte * score * len(scores) / total for score in scores]


# -- policies ----------------------------------------------------------------------------------------------------------


class Lru(_Stateless):
    """Longest unused first. The baseline."""

    name = "lru"

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        return _by_value(cached, [adapter.last_used_s for adapter in cached])

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """One unused for t seconds is taken to be used every t seconds; less than a second counts as one."""
        return _shares([1 / max(now - adapter.last_used_s, 1.0) for adapter in cached], cached, window_s)


@dataclass(frozen=True, slots=True)
class ChameleonScore(_Stateless):
    """Lowest F·frequency + R·recency + S·size first, each between 0 and 1.

    Source: Chameleon §4.1, its coefficients. It does not say how the three are normalised; here over the adapters in the list: frequency is uses
    over the most uses, size is bytes over the most bytes, recency is 1 for one used right now and falls to 0 for the one unused the longest, in
    proportion to time. The frame of its "usage frequency" is not given either; here it is the caller's (`UseWindow`). The paper says both that small
    adapters should go first, being cheap to bring back, and that large ones should; its formula does the first, and so does this.
    """

    frequency: float = 0.45
    recency: float = 0.10
    size: float = 0.45

    @property
    def name(self) -> str:
        return "chameleon"

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        return _by_value(cached, self.scores(cached, now))

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        return _shares(self.scores(cached, now), cached, window_s)

    def scores(self, cached: Sequence[CachedAdapter], now: float) -> list[float]:
        """One in [0, 1] for each, as long as the coefficients add up to 1."""
        most_uses = max((adapter.uses for adapter in cached), default=0.0) or 1.0
        most_bytes = max((adapter.num_bytes for adapter in cached), default=0) or 1
        idle_s = [max(now - adapter.last_used_s, 0.0) for adapter in cached]
        most_idle_s = max(idle_s, default=0.0) or 1.0
        return [
            self.frequency * adapter.uses / most_uses
            + self.recency * (1 - idle / most_idle_s)
            + self.size * adapter.num_bytes / most_bytes
            for adapter, idle in zip(cached, idle_s, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class EqualWeights(ChameleonScore):
    """The same score with equal coefficients. Source: Chameleon §5.3, "FairShare"."""

    frequency: float = 1 / 3
    recency: float = 1 / 3
    size: float = 1 / 3

    @property
    def name(self) -> str:
        return "equal_weights"


class GreedyDual(_Stateless):
    """Lowest value first: a clock plus uses · reload_s / num_bytes, both as of the last use; each victim sets the clock to its value.

    The clock ages what is not used: whoever is used later starts higher. With equal uses, sizes and costs it is LRU.

    Source: Cao & Irani, GreedyDual-Size, USITS 1997; Cherkasova, GDSF, HPL-98-69 (the factor of uses). Departs from GDSF in that uses are those
    of the caller's window, which an eviction does not reset.
    """

    name = "greedy_dual"

    def __init__(self) -> None:
        self.clock = 0.0
        """In seconds per byte, as the values; it never goes back."""
        self._values: dict[int, float] = {}

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        return _by_value(cached, [self.value(adapter) for adapter in cached])

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """What lies above the clock."""
        return [max(self.value(adapter) - self.clock, 0.0) / window_s for adapter in cached]

    def value(self, adapter: CachedAdapter) -> float:
        """The adapter's credit; the lowest one is evicted first. One that was never used gets that of a first use."""
        known = self._values.get(adapter.adapter_id)
        return self.clock + gain_per_byte(adapter) if known is None else known

    def touched(self, adapter: CachedAdapter, now: float) -> None:
        self._values[adapter.adapter_id] = self.clock + gain_per_byte(adapter)

    def evicted(self, adapter_id: int) -> None:
        self.clock = max(self.clock, self._values.pop(adapter_id, 0.0))

    def forgotten(self, adapter_id: int) -> None:
        self._values.pop(adapter_id, None)


class ExpectedGain(_Stateless):
    """Lowest expected saving per byte first: uses in the window, as a forecast of uses to come, times reload_s over num_bytes.

    What keeps it from holding yesterday's favourites is the window's decay alone. Source: ours; it is GDSF without the clock.
    Measured (bench.sim.adapter_cache): waits 13 to 19% shorter than LRU's where popularity is stable, 2 to 5% where it changes every 3 minutes.
    """

    name = "expected_gain"

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        return _by_value(cached, [gain_per_byte(adapter) for adapter in cached])

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        return [gain_per_byte(adapter) / window_s for adapter in cached]


def gain_per_byte(adapter: CachedAdapter) -> float:
    """Seconds of loading that a byte of it saved in the window."""
    return adapter.uses * adapter.reload_s / max(adapter.num_bytes, 1)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "equal_weights": EqualWeights,
    "chameleon": ChameleonScore,
    "greedy_dual": GreedyDual,
    "expected_gain": ExpectedGain,
}


# -- decisions ---------------------------------------------------------------------------------------------------------


def choose_victims(
    cached: Sequence[CachedAdapter], needed_bytes: int, policy: EvictionPolicy, now: float
) -> tuple[int, ...]:
    """Ids of adapters that free at least `needed_bytes`, in the policy's order; none of them could be spared.

    Empty if nothing is needed, and if all together do not suffice: then no state changes. An adapter that wants to come in may be among
    `cached`, with needed_bytes what the cache is over its budget by; if it is chosen itself, it is not worth its place.
    The caller evicts them and tells the policy of each (`evicted`).
    """
    if needed_bytes <= 0 or sum(adapter.num_bytes for adapter in cached) < needed_bytes:
        return ()
    chosen: list[CachedAdapter] = []
    freed_bytes = 0
    for adapter in policy.order(cached, now):
        chosen.append(adapter)
        freed_bytes += adapter.num_bytes
        if freed_bytes >= needed_bytes:
            break
    return tuple(adapter.adapter_id for adapter in _without_spare(chosen, freed_bytes - needed_bytes))


def _without_spare(chosen: Sequence[CachedAdapter], spare_bytes: int) -> list[CachedAdapter]:
    """Those that are needed: a large victim may cover what smaller ones before it were chosen for. The best are spared first."""
    needed: list[CachedAdapter] = []
    for adapter in reversed(chosen):
        if adapter.num_bytes <= spare_bytes:
            spare_bytes -= adapter.num_bytes
        else:
            needed.append(adapter)
    return needed[::-1]


class PrefixFacts(Struct, frozen=True, kw_only=True):
    """The oldest cached prefix blocks, those that would make room.

    restore_s: what bringing their KV back would take, by copy or by prefill, whichever is faster. reuse_per_s: how often such blocks are asked
    for again, per second.
    """

    num_bytes: int
    restore_s: float
    reuse_per_s: float


def may_take_prefix(worth: float, prefix: PrefixFacts) -> bool:
    """Whether an unused adapter may stay on the device, or come to it, in place of the oldest cached prefix blocks (E3).

    worth: by `EvictionPolicy.worths`. Both are copies of something that can be had again for some time, so both are worth the seconds they
    will save: a use per second times the seconds a use saves, per byte held. Only a higher value takes the place of what is there; with
    equal ones nothing moves. It is not for an adapter that a waiting request needs: that one is not worth seconds per byte, the request
    cannot run without it.
    """
    return worth > prefix.reuse_per_s * prefix.restore_s / max(prefix.num_bytes, 1)


# -- counting ----------------------------------------------------------------------------------------------------------


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
