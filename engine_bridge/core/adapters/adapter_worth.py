"""The worth of adapters in each tier: the facts that an eviction policy judges by, and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from engine_bridge.core.adapters.adapter_table import Version
from engine_bridge.policy.adapters.adapter_cache import POLICIES, PrefixFacts, choose_victims, may_take_prefix
from engine_bridge.policy.adapters.cached_adapter import AdapterEvictionPolicy, CachedAdapter, UseWindow
from kvtiers.policy.rates import Rate

Tier = Literal["slot", "cached", "host"]

# Speeds before anything was measured, in bytes per second. Chosen: a slow SSD, and memory.
PRIOR_DISK_BYTES_PER_S, PRIOR_COPY_BYTES_PER_S = 0.5e9, 5e9


class Worth:
    """One policy's judgement, kept apart for host memory and for the device (slots and KV blocks).

    Args:
        policy: a name in `engine_bridge.policy.adapters.adapter_cache.POLICIES`.
        load_bytes_per_s, copy_bytes_per_s: speeds from disk to host memory, and from there to the device, as a profile has them; they hold
            until speeds are measured.
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
        """Judge by this policy from now on. It knows of no earlier use. Raises KeyError: there is no policy of this name."""
        self._uses = UseWindow()
        self._host: AdapterEvictionPolicy = POLICIES[policy]()
        self._device: AdapterEvictionPolicy = POLICIES[policy]()

    # -- what happens ------------------------------------------------------------------------------------------------

    def used(self, adapter_id: int, now: float) -> None:
        """Note that a request for this adapter came."""
        self._uses.used(adapter_id, now)

    def touched(self, version: Version, now: float) -> None:
        """Note that a request of this version came or ended."""
        self._host.touched(self._facts(version, "host", now), now)
        self._device.touched(self._facts(version, "cached", now), now)

    def left(self, adapter_id: int, tier: Tier) -> None:
        """Note that the adapter was evicted from this tier."""
        self._of(tier).evicted(adapter_id)

    def forgotten(self, adapter_id: int) -> None:
        """Forget all uses of this adapter."""
        self._uses.forget(adapter_id)
        self._host.forgotten(adapter_id)
        self._device.forgotten(adapter_id)

    # -- judgements --------------------------------------------------------------------------------------------------

    def order(self, versions: Iterable[Version], tier: Tier, now: float) -> list[int]:
        """Return the ids of the versions in the order in which they should leave the tier."""
        facts = [self._facts(version, tier, now) for version in versions]
        return [adapter.adapter_id for adapter in self._of(tier).order(facts, now)]

    def victims(
        self, versions: Iterable[Version], tier: Tier, needed_bytes: int, now: float
    ) -> tuple[int, ...]:
        """Return the ids of the versions that should leave to free `needed_bytes`; empty if all of them together would not be enough."""
        facts = [self._facts(version, tier, now) for version in versions]
        return choose_victims(facts, needed_bytes, self._of(tier), now)

    def may_displace(
        self, version: Version, cached: Sequence[Version], prefix: PrefixFacts, now: float
    ) -> bool:
        """Return whether the version is worth more per byte than these prefix blocks (E3). cached: the other versions in KV blocks."""
        facts = [self._facts(other, "cached", now) for other in (version, *cached)]
        return may_take_prefix(self._device.worths(facts, self._uses.length_s(now), now)[0], prefix)

    def less_valuable_than_blocks(
        self, cached: Iterable[Version], prefix: PrefixFacts, now: float
    ) -> int | None:
        """Return the least valuable adapter in KV blocks that no waiting request needs, if these prefix blocks are worth no less per byte (E3).

        Returns:
            The adapter's id; None if every such adapter is worth more than the blocks.
        """
        facts = [self._facts(version, "cached", now) for version in cached]
        worths = self._device.worths(facts, self._uses.length_s(now), now)
        unused = [(worth, at) for at, worth in enumerate(worths) if not facts[at].is_queued]
        if not unused:
            return None
        worth, at = min(unused)
        return None if may_take_prefix(worth, prefix) else facts[at].adapter_id

    def _of(self, tier: Tier) -> AdapterEvictionPolicy:
        return self._host if tier == "host" else self._device

    def _facts(self, version: Version, tier: Tier, now: float) -> CachedAdapter:
        """Return the facts by which a policy judges this version.

        The cost of its leaving this tier is the way back from the next best place.
        """
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
