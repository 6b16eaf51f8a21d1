"""What adapters are worth where they lie: the facts that an eviction policy judges by, and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from engine_bridge.core.adapters.adapter_table import Version
from engine_bridge.policy.adapters.adapter_cache import POLICIES, PrefixFacts, choose_victims, may_take_prefix
from engine_bridge.policy.adapters.cached_adapter import CachedAdapter, EvictionPolicy, UseWindow
from kvtiers.policy.rates import Rate

Tier = Literal["slot", "cached", "host"]

# Speeds before anything was measured, in bytes per second. Chosen: a slow SSD, and memory.
PRIOR_DISK_BYTES_PER_S, PRIOR_COPY_BYTES_PER_S = 0.5e9, 5e9


class Worth:
    """One policy's judgement, for host memory and for the device (slots and KV blocks) apart.

    Args:
        policy: a name in `engine_bridge.policy.adapters.adapter_cache.POLICIES`.
        load_bytes_per_s, copy_bytes_per_s: from disk to host memory and from there to the device, as a profile has them, until they are seen.
    """

    def __init__(
        self,
        policy: str,
        *,
        load_bytes_per_s: float = PRIOR_DISK_BYTES_PER_S,
        copy_bytes_per_s: float = PRIOR_COPY_BYTES_PER_S,
    ) -> None:
        self.disk_rate = Rate(load_bytes_per_s)
        self.copy_rate = Rate(copy_bytes_per_s)
        self.use_policy(policy)

    def use_policy(self, policy: str) -> None:
        """From now on this one judges; it knows of no use before."""
        self._uses = UseWindow()
        self._host: EvictionPolicy = POLICIES[policy]()
        self._device: EvictionPolicy = POLICIES[policy]()

    # -- what happens ------------------------------------------------------------------------------------------------

    def used(self, adapter_id: int, now: float) -> None:
        """A request came for it."""
        self._uses.used(adapter_id, now)

    def touched(self, version: Version, now: float) -> None:
        """A request came or ended."""
        self._host.touched(self._facts(version, "host", now), now)
        self._device.touched(self._facts(version, "cached", now), now)

    def left(self, adapter_id: int, tier: Tier) -> None:
        """It made room for something."""
        self._of(tier).evicted(adapter_id)

    def forgotten(self, adapter_id: int) -> None:
        self._uses.forget(adapter_id)
        self._host.forgotten(adapter_id)
        self._device.forgotten(adapter_id)

    # -- judgements --------------------------------------------------------------------------------------------------

    def order(self, versions: Iterable[Version], tier: Tier, now: float) -> list[int]:
        """Who leaves first."""
        facts = [self._facts(version, tier, now) for version in versions]
        return [adapter.adapter_id for adapter in self._of(tier).order(facts, now)]

    def victims(
        self, versions: Iterable[Version], tier: Tier, needed_bytes: int, now: float
    ) -> tuple[int, ...]:
        """Who leaves to free so many bytes; nobody if all of them would not do."""
        facts = [self._facts(version, tier, now) for version in versions]
        return choose_victims(facts, needed_bytes, self._of(tier), now)

    def may_displace(
        self, version: Version, cached: Sequence[Version], prefix: PrefixFacts, now: float
    ) -> bool:
        """E3: is it worth more than these prefix blocks, by the byte? cached: the others in KV blocks."""
        facts = [self._facts(other, "cached", now) for other in (version, *cached)]
        return may_take_prefix(self._device.worths(facts, self._uses.length_s(now), now)[0], prefix)

    def less_valuable_than_blocks(
        self, cached: Iterable[Version], prefix: PrefixFacts, now: float
    ) -> int | None:
        """E3: of the adapters in KV blocks that no waiting request needs the least, if these prefix blocks are worth no less, by the byte."""
        facts = [self._facts(version, "cached", now) for version in cached]
        worths = self._device.worths(facts, self._uses.length_s(now), now)
        unused = [(worth, at) for at, worth in enumerate(worths) if not facts[at].is_queued]
        if not unused:
            return None
        worth, at = min(unused)
        return None if may_take_prefix(worth, prefix) else facts[at].adapter_id

    def _of(self, tier: Tier) -> EvictionPolicy:
        return self._host if tier == "host" else self._device

    def _facts(self, version: Version, tier: Tier, now: float) -> CachedAdapter:
        """What its leaving this tier would cost: the way back from the next best place."""
        has_host, has_copy = version.host_bytes is not None, version.copy == "whole"
        is_near = {"slot": has_host or has_copy, "cached": has_host, "host": has_copy}[tier]
        rate = self.copy_rate if is_near else self.disk_rate
        return CachedAdapter(
            adapter_id=version.id,
            num_bytes=version.num_bytes,
            last_used_s=version.last_used_s,
            uses=self._uses.uses(version.id, now),
            reload_s=version.num_bytes / rate.at(now),
            is_queued=bool(version.requests) or version.is_pinned,
            num_requests=len(version.requests),
        )
