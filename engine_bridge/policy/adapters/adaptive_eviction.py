"""Eviction that learns what its traffic is like: how far back to look, and whether to trust frequency or recency. Pure: facts in, decisions out.

Two layers. `RequestShares` forecasts which part of the requests each adapter will have: it counts requests at several half-lives at once and trusts
each half-life by how well it predicted the requests that came (a Bayesian mixture whose weights may shift). What predicts the next request best is
not always best to keep, since most requests that come soon are hits under any order. So `Adaptive` also runs shadow caches, lists of ids without
weights in them, in which the mixture and some single half-lives each have their own way, and one in which the longest unused goes first (LRU). It
keeps to LRU's very order until a forecast's shadow has lost less time than LRU's, by more than chance explains, and returns to it when that lead is
spent.

Time is counted in requests, so that nothing is forgotten over a quiet night, and traffic at ten times the speed is treated alike.

Source: ours. The parts: weights by log loss that share a little, Herbster and Warmuth, Tracking the Best Expert, 1998; following the shadow cache
that lost the least, as ARC and W-TinyLFU do with ghosts (Megiddo and Modha, FAST 2003; Einziger et al., ACM TOS 2017); value per
byte, GreedyDual-Size (Cao and Irani, USITS 1997).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from engine_bridge.policy.adapters.cached_adapter import (
    MAX_COUNTED_ADAPTERS,
    CachedAdapter,
    UseWindow,
    by_value,
)

# Requests after which one counts half, and what each is trusted before anything was seen: recency until frequency has proved itself. Measured:
# bench.sim.adapter_cache; a uniform start, or factors of 2 or 8 instead of 4, change the wait of no kind of traffic by more than 1%.
HALF_LIVES = (1, 4, 16, 64, 256, 1024, 4096)
FIRST_TRUST = (0.2, 0.2, 0.4, 0.1, 0.05, 0.03, 0.02)
# The part of all trust that is dealt anew as above at every lesson, so that none is lost for ever. Measured as above: 0.001 to 0.01 are alike.
SHARED_TRUST = 0.003
UNSEEN = 1e-3  # Requests that every adapter has besides those that were seen: none is impossible. Chosen.
# Shadow caches besides LRU's and the mixture's: places in HALF_LIVES, as they are and with an even rest. Measured as above: without any, 14%
# longer than LRU in the worst run of `jobs`; the one with an even rest takes `cohorts` at 20% of cache from 1.00 to 0.96.
SHADOW_HALF_LIVES = (2, 3)
EVEN_HALF_LIFE = 2
# Requests for unused adapters after which a shadow's loss counts half. Measured: 300 to 3,000 are alike.
LOSS_FADE = math.exp(-math.log(2) / 500)
HYSTERESIS = 0.02  # Another is followed once it has lost so much less. Chosen.
# Standard deviations of its lead over LRU, were each request that one has and the other lacks a toss, from which on a forecast may be followed.
# Measured as above: with 2 or 2.5 single runs of `cohorts` and `jobs` are 2 to 5% longer than LRU, with 3 at most 0.6%.
SURE = 3.0
NUM_COMPARED = 64  # A shadow gives up the least valuable of this many in turn, so that it costs the same with thousands. Chosen.
ROOM_FADE = 0.98  # Per eviction: how fast the size of shadows follows a cache that shrinks. Chosen.


class RequestShares:
    """Which part of the requests goes to which adapter, as several half-lives have it, and as they have it together."""

    def __init__(self, max_adapters: int = MAX_COUNTED_ADAPTERS) -> None:
        self.trust = list(FIRST_TRUST)
        """Of each half-life; they add up to 1."""
        self._fades = [math.log(2) / half_life for half_life in HALF_LIVES]
        self._max_adapters = max_adapters
        self._num_requests = 0
        self._sums = [0.0] * len(HALF_LIVES)
        self._counts: dict[
            int, tuple[int, list[float]]
        ] = {}  # as of a number of requests; longest unused first

    def __contains__(self, adapter_id: int) -> bool:
        return adapter_id in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, adapter_id: int) -> list[float]:
        """For each half-life; zeros for an unknown adapter."""
        counts = self._faded(adapter_id)
        return [count / total if total else 0.0 for count, total in zip(counts, self._sums, strict=True)]

    def by(self, half_life: int, adapter_id: int) -> float:
        """For the half-life at this place alone."""
        known = self._counts.get(adapter_id)
        if known is None:
            return 0.0
        age = self._num_requests - known[0]
        return known[1][half_life] * math.exp(-self._fades[half_life] * age) / self._sums[half_life]

    def evened(self, half_life: int, adapter_id: int) -> float:
        """The same, and as many requests again dealt evenly: those that it has forgotten are alike, and what a byte of them saves decides."""
        if adapter_id not in self._counts:
            return 0.0
        return self.by(half_life, adapter_id) + 1 / len(self._counts)

    def mixed(self, adapter_id: int) -> float:
        """As all half-lives have it, each by its trust."""
        return sum([t * share for t, share in zip(self.trust, self.of(adapter_id), strict=True)])

    def learn(self, adapter_id: int) -> None:
        """A known adapter is asked for that was unused: trust those that had foreseen it. Call it before `used`."""
        unseen = UNSEEN * len(self._counts)
        likelihoods = [
            (count + UNSEEN) / (total + unseen)
            for count, total in zip(self._faded(adapter_id), self._sums, strict=True)
        ]
        trust = [t * likelihood for t, likelihood in zip(self.trust, likelihoods, strict=True)]
        total = math.fsum(trust)
        self.trust = [
            (1 - SHARED_TRUST) * t / total + SHARED_TRUST * first
            for t, first in zip(trust, FIRST_TRUST, strict=True)
        ]

    def used(self, adapter_id: int) -> int | None:
        """A request came for it. Returns the adapter that is forgotten for it, if there are too many."""
        counts = self._faded(adapter_id)
        self._num_requests += 1
        self._sums = [
            total * math.exp(-fade) + 1 for total, fade in zip(self._sums, self._fades, strict=True)
        ]
        self._counts.pop(adapter_id, None)
        self._counts[adapter_id] = (
            self._num_requests,
            [count * math.exp(-fade) + 1 for count, fade in zip(counts, self._fades, strict=True)],
        )
        if len(self._counts) <= self._max_adapters:
            return None
        oldest = next(iter(self._counts))
        del self._counts[oldest]
        return oldest

    def forget(self, adapter_id: int) -> None:
        self._counts.pop(adapter_id, None)

    def _faded(self, adapter_id: int) -> list[float]:
        known = self._counts.get(adapter_id)
        if known is None:
            return [0.0] * len(HALF_LIVES)
        age = self._num_requests - known[0]
        return [count * math.exp(-fade * age) for count, fade in zip(known[1], self._fades, strict=True)]


class ShadowCache:
    """The ids that would be cached if one forecast had its way, and the time that its misses took, fading.

    share_of: the forecast, of a known adapter. Without one the longest unused leaves first, whatever its size and its cost: LRU.
    """

    def __init__(self, share_of: Callable[[int], float] | None = None) -> None:
        self.share_of = share_of
        self.lost_s = 0.0
        self.lead_s = 0.0
        """How much less that is than what LRU lost."""
        self._lead_squares = 0.0
        self._entries: dict[int, tuple[int, float]] = {}  # bytes, and seconds of loading that a byte saves
        self._num_bytes = 0

    def taken(self, adapter: CachedAdapter) -> float:
        """A request asks for a known adapter that was unused: it was here, or it is loaded now. Returns the seconds that takes."""
        lost_s = 0.0 if self.leave(adapter.adapter_id) else adapter.reload_s
        self.lost_s = self.lost_s * LOSS_FADE + lost_s
        return lost_s

    def compared(self, gained_s: float) -> None:
        """At the same request LRU lost so much more, or less if it is negative. Call it after `taken`."""
        self.lead_s = self.lead_s * LOSS_FADE + gained_s
        self._lead_squares = self._lead_squares * LOSS_FADE**2 + gained_s**2

    def surely_leads(self) -> bool:
        """Is its lead over LRU more than chance explains?"""
        return self.lead_s > SURE * math.sqrt(self._lead_squares)

    def enter(self, adapter: CachedAdapter, room_bytes: float) -> None:
        """Its last request has ended. What is worth the least leaves until all fit, the newcomer perhaps."""
        self.leave(adapter.adapter_id)
        self._entries[adapter.adapter_id] = (adapter.num_bytes, seconds_per_byte(adapter))
        self._num_bytes += adapter.num_bytes
        while self._num_bytes > room_bytes and self._entries:
            self.leave(self._least_valuable())

    def leave(self, adapter_id: int) -> bool:
        """Was it here?"""
        entry = self._entries.pop(adapter_id, None)
        self._num_bytes -= entry[0] if entry else 0
        return entry is not None

    def _least_valuable(self) -> int:
        share_of = self.share_of
        if share_of is None:
            return next(iter(self._entries))
        compared = list(islice(self._entries.items(), NUM_COMPARED))
        if len(compared) < len(self._entries):  # the others' turn comes next
            for adapter_id, entry in compared:
                del self._entries[adapter_id]
                self._entries[adapter_id] = entry
        return min(compared, key=lambda item: share_of(item[0]) * item[1][1])[0]

    def check_invariants(self, room_bytes: float) -> None:
        assert self._num_bytes == sum(num_bytes for num_bytes, _ in self._entries.values()) <= room_bytes


class Adaptive:
    """LRU's order, or that of a forecast which surely does better: lowest expected saving per byte first, the share of requests that it gives an
    adapter, times reload_s over num_bytes.
    """

    name = "adaptive"

    def __init__(self, max_adapters: int = MAX_COUNTED_ADAPTERS) -> None:
        self.shares = RequestShares(max_adapters)
        self.lru = ShadowCache()
        self.forecasts = [ShadowCache(self.shares.mixed)]
        self.forecasts += [ShadowCache(partial(self.shares.by, at)) for at in SHADOW_HALF_LIVES]
        self.forecasts.append(ShadowCache(partial(self.shares.evened, EVEN_HALF_LIFE)))
        self.followed = self.lru
        self._rate = UseWindow()  # of all requests together
        self._num_requests: dict[int, int] = {}  # of adapters in use
        self._num_bytes: dict[int, int] = {}
        self._kept_bytes: int | None = None  # of what was to choose from, less what went
        self.room_bytes = math.inf
        """Of shadows: what the cache had at its evictions of late."""

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        if self._kept_bytes is not None:
            fading = self.room_bytes * ROOM_FADE if math.isfinite(self.room_bytes) else 0.0
            self.room_bytes = max(self._kept_bytes, fading)
        self._kept_bytes = sum(adapter.num_bytes for adapter in cached)
        return by_value(cached, self._values(cached))

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """By the mixture, whose shares are true on average; dealt out in the order of the forecast that is followed."""
        per_s = self._rate.per_s(0, now)
        worths = sorted(
            self.shares.mixed(each.adapter_id) * per_s * seconds_per_byte(each) for each in cached
        )
        values = self._values(cached)
        places = sorted(
            range(len(cached)), key=lambda at: (values[at], cached[at].last_used_s, cached[at].adapter_id)
        )
        found = [0.0] * len(cached)
        for place, worth in zip(places, worths, strict=True):
            found[place] = worth
        return found

    def touched(self, adapter: CachedAdapter, now: float) -> None:
        before = self._num_requests.get(adapter.adapter_id, 0)
        if adapter.num_requests > before or not before:
            self._requested(adapter, not before, now)
        if adapter.num_requests:
            self._num_requests[adapter.adapter_id] = adapter.num_requests
            return
        self._num_requests.pop(adapter.adapter_id, None)
        for shadow in (self.lru, *self.forecasts):
            shadow.enter(adapter, self.room_bytes)

    def evicted(self, adapter_id: int) -> None:
        if self._kept_bytes is not None:
            self._kept_bytes -= self._num_bytes.get(adapter_id, 0)

    def forgotten(self, adapter_id: int) -> None:
        self._num_requests.pop(adapter_id, None)
        self._forget(adapter_id)
        self.shares.forget(adapter_id)

    def _requested(self, adapter: CachedAdapter, was_unused: bool, now: float) -> None:
        if was_unused and adapter.adapter_id in self.shares:
            self.shares.learn(adapter.adapter_id)
            self._compare(adapter)
        self._rate.used(0, now)
        self._num_bytes[adapter.adapter_id] = adapter.num_bytes
        forgotten = self.shares.used(adapter.adapter_id)
        if forgotten is not None:
            self._forget(forgotten)

    def _compare(self, adapter: CachedAdapter) -> None:
        """What the shadows make of a request, and whom to follow from now on."""
        lru_lost_s = self.lru.taken(adapter)
        for shadow in self.forecasts:
            shadow.compared(lru_lost_s - shadow.taken(adapter))
        if self.followed.lead_s <= 0:
            self.followed = self.lru
        sure = [shadow for shadow in self.forecasts if shadow.surely_leads()]
        least = min(sure, key=lambda shadow: shadow.lost_s, default=self.lru)
        if least.lost_s < self.followed.lost_s * (1 - HYSTERESIS):
            self.followed = least

    def _forget(self, adapter_id: int) -> None:
        self._num_bytes.pop(adapter_id, None)
        for shadow in (self.lru, *self.forecasts):
            shadow.leave(adapter_id)

    def _values(self, cached: Sequence[CachedAdapter]) -> list[float]:
        """Equal ones where LRU is followed: among equals the longest unused goes first."""
        share_of = self.followed.share_of
        if share_of is None:
            return [0.0] * len(cached)
        return [share_of(each.adapter_id) * seconds_per_byte(each) for each in cached]


def seconds_per_byte(adapter: CachedAdapter) -> float:
    """Of loading, that a byte of it saves at every use."""
    return adapter.reload_s / max(adapter.num_bytes, 1)
