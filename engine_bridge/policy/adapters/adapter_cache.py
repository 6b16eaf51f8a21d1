"""Which unused adapters leave device memory, and whether an adapter is worth more than prefix KV. Pure: facts in, decisions out.

Every policy answers with an order, the first to leave first; `choose_victims` turns an order into a set. Adapters of running requests are not in
the lists that policies see; adapters that a waiting request needs are, and leave after all others. Source: Chameleon §4.1 (cost-aware eviction).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from engine_bridge.policy.adapters.adaptive_eviction import Adaptive
from engine_bridge.policy.adapters.cached_adapter import AdapterEvictionPolicy, CachedAdapter, by_value


def _shares(scores: Sequence[float], cached: Sequence[CachedAdapter], window_s: float) -> list[float]:
    """Return the worths of adapters by scores that have no unit: the saving of all of them together, divided in proportion."""
    num_bytes, total = sum(adapter.num_bytes for adapter in cached), sum(scores)
    if not num_bytes or not total:
        return [0.0] * len(cached)
    saved_per_byte = sum(adapter.uses * adapter.reload_s for adapter in cached) / num_bytes / window_s
    return [saved_per_byte * score * len(scores) / total for score in scores]


# -- policies ----------------------------------------------------------------------------------------------------------


class AdapterLru(AdapterEvictionPolicy):
    """The adapter unused for the longest time leaves first. The baseline."""

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        """Return the adapters in the order of their last use, the oldest first."""
        return by_value(cached, [adapter.last_used_s for adapter in cached])

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """Return worths by the time since the last use: an adapter unused for t seconds counts as used every t seconds, at least one."""
        return _shares([1 / max(now - adapter.last_used_s, 1.0) for adapter in cached], cached, window_s)


@dataclass(frozen=True)
class ChameleonScore(AdapterEvictionPolicy):
    """The adapter with the lowest F·frequency + R·recency + S·size leaves first, each term between 0 and 1.

    Source: Chameleon §4.1, its coefficients. It does not say how the three are normalised; here over the adapters in the list: frequency is uses
    over the most uses, size is bytes over the most bytes, recency is 1 for an adapter used right now and falls to 0 for the one unused the longest,
    in proportion to time. The frame of its "usage frequency" is not given either; here it is the caller's (`UseWindow`). The paper says both that
    small adapters should leave first, being cheap to bring back, and that large ones should; its formula does the first, and so does this.
    """

    frequency: float = 0.45
    recency: float = 0.10
    size: float = 0.45

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        """Return the adapters in the order of their scores, the lowest first."""
        return by_value(cached, self.scores(cached, now))

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        """Return worths in proportion to the scores."""
        return _shares(self.scores(cached, now), cached, window_s)

    def scores(self, cached: Sequence[CachedAdapter], now: float) -> list[float]:
        """Return a score in [0, 1] for each adapter, as long as the coefficients add up to 1."""
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


class EqualWeights(ChameleonScore):
    """The same score with equal coefficients. Source: Chameleon §5.3, "FairShare"."""

    def __init__(self) -> None:
        super().__init__(1 / 3, 1 / 3, 1 / 3)


POLICIES: dict[str, Callable[[], AdapterEvictionPolicy]] = {
    "lru": AdapterLru,
    "equal_weights": EqualWeights,
    "chameleon": ChameleonScore,
    "adaptive": Adaptive,
}


# -- decisions ---------------------------------------------------------------------------------------------------------


def choose_victims(
    cached: Sequence[CachedAdapter], needed_bytes: int, policy: AdapterEvictionPolicy, now: float
) -> tuple[int, ...]:
    """Return the ids of adapters that free at least `needed_bytes`, in the policy's order; each of them is needed for that.

    The result is empty if `needed_bytes` is 0 or less, and if all adapters together are too small: then no state changes. An adapter that is to
    come in may be among `cached`, with needed_bytes the bytes by which the cache is over its budget; if it is chosen itself, it is not worth its
    place. The caller evicts the adapters and tells the policy of each (`evicted`).
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
    """Return the chosen adapters that are needed, because a large one may free the bytes for which smaller ones were chosen before it.

    The most valuable are spared first.
    """
    needed: list[CachedAdapter] = []
    for adapter in reversed(chosen):
        if adapter.num_bytes <= spare_bytes:
            spare_bytes -= adapter.num_bytes
        else:
            needed.append(adapter)
    return needed[::-1]


class PrefixFacts(Struct, frozen=True, kw_only=True):
    """The oldest cached prefix blocks, which would make room.

    Attributes:
        restore_s: seconds to bring their KV back, by copy or by prefill, whichever is faster.
        reuse_per_s: how often such blocks are asked for again, per second.
    """

    num_bytes: int
    restore_s: float
    reuse_per_s: float


def may_take_prefix(worth: float, prefix: PrefixFacts) -> bool:
    """Return whether an unused adapter may stay on the device, or come to it, in place of the oldest cached prefix blocks (E3).

    Both are copies of data that can be brought back in some time, so both are worth the seconds they will save: uses per second times the seconds
    that a use saves, per byte held. Only a higher value displaces the present one; with equal values nothing moves. Do not ask for an adapter that a
    waiting request needs: seconds per byte do not measure it, as the request cannot run without it. worth: from `AdapterEvictionPolicy.worths`.
    """
    return worth > prefix.reuse_per_s * prefix.restore_s / max(prefix.num_bytes, 1)
