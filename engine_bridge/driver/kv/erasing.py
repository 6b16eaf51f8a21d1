"""Erasing what the device's free blocks hold: KV of somebody whose data is erased must not lie there until the memory is used again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine_bridge.driver.in_process import kv_caches_of, ranks_of, scheduler_of
from engine_bridge.driver.memory.zeroing import zero
from engine_bridge.protocol.errors import InternalFailure

if TYPE_CHECKING:
    from engine_bridge.bridge import EngineThread
    from engine_bridge.driver.engine.engine import VllmDriver
    from engine_bridge.driver.kv.kv_tiers import KvTiers


async def erase_kv(thread: EngineThread[VllmDriver], tiers: KvTiers | None, tenant: str) -> int:
    """Erase a tenant's KV on the device and in the tiers, and return the number of blocks on disk. On the event loop. Raises as `Node.erase_kv`."""
    await thread.call(erase_free_blocks)
    if tiers is None:
        return 0
    try:
        return await asyncio.to_thread(tiers.erase, tenant)
    except OSError as error:
        raise InternalFailure(f"KV on disk cannot be overwritten: {error.strerror or error}") from error


def erase_free_blocks(driver: VllmDriver) -> int:
    """Forget what the free blocks of the device hold, overwrite it with zeros, and return their number. On the engine thread, between two steps.

    A block does not say whose it is, so these are everybody's: what the tiers have of it comes back from there. Blocks of running requests stay.
    Raises RankError.
    """
    scheduler = scheduler_of(driver.engine)
    if scheduler.connector is not None:
        scheduler.connector.finish_copies()  # a block that is copied is not free, and what is saved is not in the tiers before
    manager = scheduler.kv_cache_manager
    free = manager.block_pool.free_block_queue.iter_blocks_after(None)
    numbers = [int(block.block_id) for block in free if block.block_hash is not None]
    manager.evict_blocks(set(numbers))
    ranks = ranks_of(driver.engine)
    if ranks is not None:
        ranks.call("overture_zero", numbers)
    else:
        zero(kv_caches_of(driver.engine), numbers)
    return len(numbers)
