"""Eviction that learns its traffic: how far back to look, and whether to trust frequency or recency. Pure: facts in, decisions out.

Two layers. `RequestShares` forecasts each adapter's share of the requests: it counts requests at several half-lives at once and trusts each
half-life by how well it predicted the requests that came (a Bayesian mixture whose weights may shift). The forecast that predicts the next request
best is not always the best guide to which adapters to keep, since most requests that come soon are hits under any order. So `Adaptive` also runs
shadow caches, lists of ids without weights in them: one for the mixture and for some single half-lives each, and one that evicts the longest unused
(LRU). It keeps to LRU's very order until a forecast's shadow has lost less time than LRU's, by more than chance explains, and returns to it when
that lead is spent.

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
    USE_HALF_LIFE_S,
    AdapterEvictionPolicy,
    CachedAdapter,
    by_value,
)
from engine_bridge.policy.costs.decay import FadingRate

# Half-lives in requests, and the trust in each before any request came: recency until frequency has proved itself. Measured:
# bench.emulated adapter_cache; a uniform start, or factors of 2 or 8 instead of 4, change the wait of no kind of traffic by more than 1%.
HALF_LIVES = (1, 4, 16, 64, 256, 1024, 4096)
FIRST_TRUST = (0.2, 0.2, 0.4, 0.1, 0.05, 0.03, 0.02)
# The part of all trust that is dealt anew as above at every lesson, so that none is lost for ever. Measured as above: 0.001 to 0.01 are alike.
SHARED_TRUST = 0.003
# Requests added to the count of every adapter, so that none is impossible. Chosen.
UNSEEN = 1e-3
# Shadow caches besides LRU's, the mixture's and that of `alike`: places in HALF_LIVES, as it is and with an even rest. Measured as above: without
# any, 14% longer than LRU in the worst run of `jobs`; the shadow with an even rest takes `cohorts` at 20% of cache from 1.00 to 0.96. That of `alike`
# takes `loops` from 0.65 to 0.82 of LRU's wait, by the cache's size, to 0.25 to 0.32.
SHADOW_HALF_LIFE = 3
EVEN_HALF_LIFE = 2
# Requests for unused adapters after which a shadow's loss counts half. Measured: 300 to 3,000 are alike.
LOSS_FADE = math.exp(-math.log(2) / 500)
HYSTERESIS = 0.02  # Another shadow is followed once it has lost less by this share. Chosen.
# The lead over LRU from which on a forecast may be followed, in standard deviations of that lead if each request for an adapter that only one of
# the two caches has were a toss. Measured as above: with 2 or 2.5 single runs of `cohorts` and `jobs` are 2 to 5% longer than LRU, with 3 at most
# 0.6%.
SURE = 3.0
# A shadow evicts the least valuable of this many in turn, so that it costs the same with thousands. Chosen.
NUM_COMPARED = 64
TIE = 1e-9  # By how much an adapter is preferred to the one before it, so that equals have an order that stays. Chosen.
ROOM_FADE = 0.98  # Per eviction: how fast the size of shadows follows a cache that shrinks. Chosen.


class RequestShares:
    """Each adapter's share of the requests, by several half-lives and by all of them together."""

    def __init__(self, max_adapters: int = MAX_COUNTED_ADAPTERS) -> None:
        self.trust = list(FIRST_TRUST)
        """The trust in each half-life; the sum is 1."""
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
        """Return the adapter's share by each half-life; zeros for an unknown adapter."""
        counts = self._faded(adapter_id)
        return [count / total if total else 0.0 for count, total in zip(counts, self._sums, strict=True)]

    def by(self, half_life: int, adapter_id: int) -> float:
        """Return the adapter's share by the half-life at this place alone; 0 for an unknown adapter."""
        known = self._counts.get(adapter_id)
        if known is None:
            return 0.0
        age = self._num_requests - known[0]
        return known[1][half_life] * math.exp(-self._fades[half_life] * age) / self._sums[half_life]

    def evened(self, half_life: int, adapter_id: int) -> float:
        """Return the share by one half-life, plus an even share of as many requests again.

        Adapters that the half-life has forgotten are then alike, and the saving per byte decides between them.
        """
        if adapter_id not in self._counts:
            return 0.0
        return self.by(half_life, adapter_id) + 1 / len(self._counts)

    def alike(self, adapter_id: int) -> float:
        """Return nearly the same share for every known adapter: the cheapest to bring back leaves first, whenever it was used.

        Among adapters of one size those of the highest ids stay. Where adapters are asked for in a circle, what is kept must stay the same, as the
        one that was used last is the one whose next use is farthest.
        """
        return (1 + adapter_id * TIE) / len(self._counts) if adapter_id in self._counts else 0.0

    def mixed(self, adapter_id: int) -> float:
        """Return the share by all half-lives, each weighted by its trust."""
        return sum([t * share for t, share in zip(self.trust, self.of(adapter_id), strict=True)])

    def learn(self, adapter_id: int) -> None:
        """Trust the half-lives that foresaw this request for a known, unused adapter. Call it before `used`."""
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
        """Note a request for the adapter. Return the adapter that is forgotten for it, if there are too many."""
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
        """Forget the adapter. An unknown one is ignored."""
        self._counts.pop(adapter_id, None)

    def _faded(self, adapter_id: int) -> list[float]:
        known = self._counts.get(adapter_id)
        if known is None:
            return [0.0] * len(HALF_LIVES)
        age = self._num_requests - known[0]
        return [count * math.exp(-fade * age) for count, fade in zip(known[1], self._fades, strict=True)]


class ShadowCache:
    """The ids that would be cached if one forecast decided, and the time that its misses took, fading.

    Args:
        share_of: the forecast for a known adapter. Without a forecast the longest unused leaves first, whatever its size and its cost: LRU.
    """

    def __init__(self, share_of: Callable[[int], float] | None = None) -> None:
        self.share_of = share_of
        self.lost_s = 0.0
        self.lead_s = 0.0
        """The lost time of LRU minus `lost_s`."""
        self._lead_squares = 0.0
        self._entries: dict[int, tuple[int, float]] = {}  # bytes, and seconds of loading that a byte saves
        self._num_bytes = 0

    def taken(self, adapter: CachedAdapter) -> float:
        """Note a request for a known, unused adapter, which was here or is loaded now. Return the seconds that loading takes."""
        lost_s = 0.0 if self.leave(adapter.adapter_id) else adapter.reload_s
        self.lost_s = self.lost_s * LOSS_FADE + lost_s
        return lost_s

    def compared(self, gained_s: float) -> None:
        """Note that LRU lost `gained_s` more seconds at the same request, or fewer if it is negative. Call it after `taken`."""
        self.lead_s = self.lead_s * LOSS_FADE + gained_s
        self._lead_squares = self._lead_squares * LOSS_FADE**2 + gained_s**2

    def surely_leads(self) -> bool:
        """Return whether the lead over LRU is more than chance explains."""
        return self.lead_s > SURE * math.sqrt(self._lead_squares)

    def enter(self, adapter: CachedAdapter, room_bytes: float) -> None:
        """Cache the adapter, as its last request has ended. The least valuable adapters leave until all fit, perhaps this one."""
        self.leave(adapter.adapter_id)
        self._entries[adapter.adapter_id] = (adapter.num_bytes, seconds_per_byte(adapter))
        self._num_bytes += adapter.num_bytes
        while self._num_bytes > room_bytes and self._entries:
            self.leave(self._least_valuable())

    def leave(self, adapter_id: int) -> bool:
        """Remove the adapter, and return whether it was here."""
        entry = self._entries.pop(adapter_id, None)
        self._num_bytes -= entry[0] if entry else 0
        return entry is not None

    def _least_valuable(self) -> int:
        share_of = self.share_of
        if share_of is None:
            return next(iter(self._entries))
        compared = list(islice(self._entries.items(), NUM_COMPARED))
        if len(compared) < len(self._entries):  # the other adapters are compared next time
            for adapter_id, entry in compared:
                del self._entries[adapter_id]
                self._entries[adapter_id] = entry
        return min(compared, key=lambda item: share_of(item[0]) * item[1][1])[0]

    def check_invariants(self, room_bytes: float) -> None:
        """Check the books. Raises AssertionError: the bytes do not add up or are more than `room_bytes`."""
        assert self._num_bytes == sum(num_bytes for num_bytes, _ in self._entries.values()) <= room_bytes


class Adaptive(AdapterEvictionPolicy):
    """LRU's order, or the order of a forecast that is surely better.

    A forecast evicts the lowest expected saving per byte first: the share of requests that it predicts for an adapter, times reload_s over
    num_bytes.
    """

    def __init__(self, max_adapters: int = MAX_COUNTED_ADAPTERS) -> None:
        self.shares = RequestShares(max_adapters)
        self.lru = ShadowCache()
        shares = self.shares
        by_half_lives = (partial(shares.by, SHADOW_HALF_LIFE), partial(shares.evened, EVEN_HALF_LIFE))
        self.forecasts = [ShadowCache(each) for each in (shares.mixed, *by_half_lives, shares.alike)]
        self.followed = self.lru
        self._rate = FadingRate(USE_HALF_LIFE_S)  # of all requests together
        self._num_requests: dict[int, int] = {}  # of adapters in use
        self._num_bytes: dict[int, int] = {}
        self._kept_bytes: int | None = None  # bytes of the offered adapters, less the evicted ones
        self.room_bytes = math.inf
        """Bytes that the shadows may cache: the bytes that the cache had at its recent evictions."""

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        """Return the adapters in the order of the cache that is followed, and note how many bytes there were to choose from."""
        if self._kept_bytes is not None:
            fading = self.room_bytes * ROOM_FADE if math.isfinite(self.room_bytes) else 0.0
            self.room_bytes = max(self._kept_bytes, fading)
        self._kept_bytes = sum(adapter.num_bytes for adapter in cached)
        return by_value(cached, self._values(cached))

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """Return worths by the mixture, whose shares are true on average, dealt out in the order of the forecast that is followed."""
        per_s = self._rate.per_s(now)
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
        """Learn from a request that came, or cache the adapter in the shadows when its last request has ended."""
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
        """Note that the cache has lost this adapter's bytes."""
        if self._kept_bytes is not None:
            self._kept_bytes -= self._num_bytes.get(adapter_id, 0)

    def forgotten(self, adapter_id: int) -> None:
        """Forget all that was counted for the adapter."""
        self._num_requests.pop(adapter_id, None)
        self._forget(adapter_id)
        self.shares.forget(adapter_id)

    def _requested(self, adapter: CachedAdapter, was_unused: bool, now: float) -> None:
        if was_unused and adapter.adapter_id in self.shares:
            self.shares.learn(adapter.adapter_id)
            self._compare(adapter)
        self._rate.add(1, now)
        self._num_bytes[adapter.adapter_id] = adapter.num_bytes
        forgotten = self.shares.used(adapter.adapter_id)
        if forgotten is not None:
            self._forget(forgotten)

    def _compare(self, adapter: CachedAdapter) -> None:
        """Have the shadows process a request, and choose which one to follow from now on."""
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
        """Return equal values where LRU is followed: among equals the longest unused leaves first."""
        share_of = self.followed.share_of
        if share_of is None:
            return [0.0] * len(cached)
        return [share_of(each.adapter_id) * seconds_per_byte(each) for each in cached]


def seconds_per_byte(adapter: CachedAdapter) -> float:
    """Return the seconds of loading that a byte of the adapter saves at every use."""
    return adapter.reload_s / max(adapter.num_bytes, 1)
