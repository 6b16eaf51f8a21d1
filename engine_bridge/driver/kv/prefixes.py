"""How much of the prompts' beginnings the device and the tiers hold, how often it is found on the device, and what losing it there would cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine_bridge.core.kv.tier_store import block_key
from engine_bridge.driver.kv.layer_groups import cached_block
from engine_bridge.policy.adapters.adapter_cache import PrefixFacts
from engine_bridge.policy.costs.decay import FadingRate
from engine_bridge.policy.kv.kv_layout import Entry, KvLayout
from kvtiers.blocks import count_while

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers

# The half-life of hits on the device when the worth of prefixes there is judged, and a token's prefill before it was measured. Both chosen.
PREFIX_HALF_LIFE_S = 300.0
PRIOR_PREFILL_S_PER_TOKEN = 1e-3


class Prefixes:
    """Facts about one engine's prefixes. Every method runs on its thread.

    Args:
        layout: what a prefix needs of the engine's layers.
        tiers: the tiers that KV moves to when it leaves the device; None: it is computed again.
    """

    def __init__(self, pool: Any, layout: KvLayout, tiers: KvTiers | None) -> None:
        self._pool, self._layout, self._tiers, self._clock = pool, layout, tiers, time.monotonic
        self._hits = FadingRate(PREFIX_HALF_LIFE_S)  # counts blocks

    def found(self, num_tokens: int) -> None:
        """Note that a prompt has begun of which the device had `num_tokens` tokens."""
        self._hits.add(num_tokens * self._layout.blocks_per_token, self._clock())

    def num_cached_tokens(self, request: Any) -> int:
        """Return how many leading tokens of a waiting request's prompt the device or the tiers hold."""
        layout, hashes = self._layout, request.block_hashes
        if not layout.is_divisible:
            return layout.longest(hashes, 0, len(hashes) * layout.hash_tokens, self._held).num_tokens
        entries = layout.leading_entries(hashes)
        num = count_while(cached_block(self._pool, entry) is not None for entry in entries)
        if self._tiers is not None and self._tiers.store is not None and num < len(hashes):
            num += self._tiers.store.num_held([block_key(entry) for entry in entries[num:]])
        return num * layout.unit_tokens

    def _held(self, entries: Sequence[Entry]) -> list[bool]:
        held = [cached_block(self._pool, entry) is not None for entry in entries]
        if self._tiers is None or self._tiers.store is None:
            return held
        in_tiers = self._tiers.store.are_held([block_key(entry) for entry in entries])
        return [either or other for either, other in zip(held, in_tiers, strict=True)]

    def cost(self, num_blocks: int, block_bytes: int) -> PrefixFacts:
        """Return what losing the `num_blocks` oldest prefix blocks, of `block_bytes` each, would cost."""
        num_bytes = num_blocks * block_bytes
        hits_per_s = self._hits.per_s(self._clock()) / self._pool.num_gpu_blocks
        restore_s = self._restore_s(num_blocks, num_bytes)
        return PrefixFacts(num_bytes=num_bytes, restore_s=restore_s, reuse_per_s=hits_per_s)

    def _restore_s(self, num_blocks: int, num_bytes: int) -> float:
        """Return the seconds to load the blocks from host memory again or to compute them, whichever is faster."""
        prefill_s = self._tiers.prefill_s_per_token() if self._tiers is not None else None
        compute_s = (prefill_s or PRIOR_PREFILL_S_PER_TOKEN) * num_blocks / self._layout.blocks_per_token
        if self._tiers is None:
            return compute_s
        return min(compute_s, num_bytes / self._tiers.host_bytes_per_s())
