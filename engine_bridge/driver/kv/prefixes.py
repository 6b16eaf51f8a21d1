"""What the device and the tiers have of the prompts' beginnings, how often it is found on the device, and what it would cost to lose it there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine_bridge.policy.adapters.adapter_cache import PrefixFacts
from engine_bridge.policy.costs.decay import FadingRate
from kvtiers.keys import BlockKey

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers

# How fast what was found on the device is forgotten in judging what prefixes there are worth, and a token's prefill before it was measured. Chosen.
PREFIX_HALF_LIFE_S = 300.0
PRIOR_PREFILL_S_PER_TOKEN = 1e-3


class Prefixes:
    """Of one engine. Every method runs on its thread.

    Args:
        pool: vLLM's block pool of the one KV cache group.
        tiers: where KV goes that leaves the device; None: it is computed again.
    """

    def __init__(
        self, pool: Any, block_size: int, tiers: KvTiers | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool, self._block_size, self._tiers, self._clock = pool, block_size, tiers, clock
        self._hits = FadingRate(PREFIX_HALF_LIFE_S)  # blocks

    def found(self, num_tokens: int) -> None:
        """A prompt has begun of which the device had so many tokens."""
        self._hits.add(num_tokens / self._block_size, self._clock())

    def num_cached_tokens(self, request: Any) -> int:
        """Of a waiting request's prompt, what the device or the tiers hold, from its first token on."""
        hashes = request.block_hashes
        on_device = (self._pool.get_cached_block(block_hash, [0]) is not None for block_hash in hashes)
        num = next((at for at, is_there in enumerate(on_device) if not is_there), len(hashes))
        if self._tiers is not None and self._tiers.store is not None and num < len(hashes):
            num += self._tiers.store.num_held([BlockKey(bytes(block_hash)) for block_hash in hashes[num:]])
        return num * self._block_size

    def cost(self, num_blocks: int, block_bytes: int) -> PrefixFacts:
        """What it would cost to lose so many of the oldest prefix blocks."""
        num_bytes = num_blocks * block_bytes
        hits_per_s = self._hits.per_s(self._clock()) / self._pool.num_gpu_blocks
        restore_s = self._restore_s(num_blocks, num_bytes)
        return PrefixFacts(num_bytes=num_bytes, restore_s=restore_s, reuse_per_s=hits_per_s)

    def _restore_s(self, num_blocks: int, num_bytes: int) -> float:
        """To have them again from host memory or to compute them, whichever is faster."""
        prefill_s = self._tiers.prefill_s_per_token() if self._tiers is not None else None
        compute_s = (prefill_s or PRIOR_PREFILL_S_PER_TOKEN) * num_blocks * self._block_size
        if self._tiers is None:
            return compute_s
        return min(compute_s, num_bytes / self._tiers.host_bytes_per_s())
