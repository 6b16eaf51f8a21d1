"""How much of the prompts' beginnings the device and the tiers hold, how often it is found on the device, and what losing it there would cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from engine_bridge.policy.adapters.adapter_cache import PrefixFacts
from engine_bridge.policy.costs.decay import FadingRate
from kvtiers.keys import BlockKey

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers

# The half-life of hits on the device when the worth of prefixes there is judged, and a token's prefill before it was measured. Both chosen.
PREFIX_HALF_LIFE_S = 300.0
PRIOR_PREFILL_S_PER_TOKEN = 1e-3


class Prefixes:
    """Facts about one engine's prefixes. Every method runs on its thread.

    Args:
        pool: vLLM's block pool of the one KV cache group.
        block_size: tokens in a block.
        tiers: the tiers that KV moves to when it leaves the device; None: it is computed again.
    """

    def __init__(self, pool: Any, block_size: int, tiers: KvTiers | None) -> None:
        self._pool, self._block_size, self._tiers, self._clock = pool, block_size, tiers, time.monotonic
        self._hits = FadingRate(PREFIX_HALF_LIFE_S)  # counts blocks

    def found(self, num_tokens: int) -> None:
        """Note that a prompt has begun of which the device had `num_tokens` tokens."""
        self._hits.add(num_tokens / self._block_size, self._clock())

    def num_cached_tokens(self, request: Any) -> int:
        """Return how many leading tokens of a waiting request's prompt the device or the tiers hold."""
        hashes = request.block_hashes
        on_device = (self._pool.get_cached_block(block_hash, [0]) is not None for block_hash in hashes)
        num = next((at for at, is_there in enumerate(on_device) if not is_there), len(hashes))
        if self._tiers is not None and self._tiers.store is not None and num < len(hashes):
            num += self._tiers.store.num_held([BlockKey(bytes(block_hash)) for block_hash in hashes[num:]])
        return num * self._block_size

    def cost(self, num_blocks: int, block_bytes: int) -> PrefixFacts:
        """Return what losing the `num_blocks` oldest prefix blocks, of `block_bytes` each, would cost."""
        num_bytes = num_blocks * block_bytes
        hits_per_s = self._hits.per_s(self._clock()) / self._pool.num_gpu_blocks
        restore_s = self._restore_s(num_blocks, num_bytes)
        return PrefixFacts(num_bytes=num_bytes, restore_s=restore_s, reuse_per_s=hits_per_s)

    def _restore_s(self, num_blocks: int, num_bytes: int) -> float:
        """Return the seconds to load the blocks from host memory again or to compute them, whichever is faster."""
        prefill_s = self._tiers.prefill_s_per_token() if self._tiers is not None else None
        compute_s = (prefill_s or PRIOR_PREFILL_S_PER_TOKEN) * num_blocks * self._block_size
        if self._tiers is None:
            return compute_s
        return min(compute_s, num_bytes / self._tiers.host_bytes_per_s())
