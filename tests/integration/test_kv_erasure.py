"""The KV of somebody whose data is erased is gone from device, host memory and disk, while the engine serves others on."""

import asyncio
from pathlib import Path
from typing import Any

from engine_bridge.driver.in_process import kv_caches_of, scheduler_of
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig

from .nodes import engine, generate, text

PROMPT, OTHER = text(1, 130), text(2, 130)


def named_blocks(driver: Any) -> set[int]:
    """The blocks of the device that hold something which a prompt could find."""
    pool = scheduler_of(driver.engine).kv_cache_manager.block_pool
    return {block.block_id for block in pool.blocks if block.block_hash is not None}


def is_zero(driver: Any, blocks: set[int]) -> bool:
    return all(not cache[block].any() for cache in kv_caches_of(driver.engine) for block in blocks)


async def test_a_tenants_kv_is_gone_at_once_and_anothers_comes_back(tmp_path: Path) -> None:
    config = TiersConfig(host_bytes=64 << 20, disk_bytes=64 << 20, folder=tmp_path)
    tiers = KvTiers(config)
    async with engine(tiers, num_kv_blocks=64) as node:
        first = await generate(node, PROMPT, session_id="s", tenant="ada")
        others = await generate(node, OTHER, session_id="s", tenant="bob")
        assert tiers.store is not None
        assert await asyncio.to_thread(tiers.store.flush)
        held = await node.run_on_engine(named_blocks)
        assert len(held) >= 8 and not await node.run_on_engine(lambda driver: is_zero(driver, held))
        assert (await generate(node, PROMPT, session_id="s", tenant="ada")).num_reused >= 96

        assert await node.erase_kv("ada") >= 4
        assert not await node.run_on_engine(named_blocks)
        assert await node.run_on_engine(lambda driver: is_zero(driver, held))
        again = await generate(node, OTHER, session_id="s", tenant="bob")
        assert again.token_ids == others.token_ids and again.kv.host >= 96, "it came back from host memory"
        after = await generate(node, PROMPT, session_id="s", tenant="ada")
        assert after.num_reused == 0 and after.token_ids == first.token_ids
        tiers.store.check_invariants()
    tiers = KvTiers(config)
    async with engine(tiers, num_kv_blocks=64) as node:
        assert (await generate(node, OTHER, session_id="s", tenant="bob")).kv.disk >= 96
        assert await node.erase_kv("nobody") == 0
