"""The KV of somebody whose data is erased is gone from device, host memory and disk, while others are served; no block gives on what it held."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from engine_bridge.driver.in_process import kv_caches_of, scheduler_of
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig

from .nodes import engine, generate, load, small, text

PROMPT, OTHER = text(1, 130), text(2, 130)


def named_blocks(driver: Any) -> set[int]:
    """The blocks of the device that hold something which a prompt could find."""
    pool = scheduler_of(driver.engine).kv_cache_manager.block_pool
    return {block.block_id for block in pool.blocks if block.block_hash is not None}


def is_zero(driver: Any, blocks: set[int]) -> bool:
    return all(not cache[block].any() for cache in kv_caches_of(driver.engine) for block in blocks)


async def test_a_tenants_kv_is_gone_at_once_and_anothers_comes_back(tmp_path: Path) -> None:
    """What stays comes back after a restart, too: that is tested without an engine."""
    tiers = KvTiers(TiersConfig(host_bytes=64 << 20, disk_bytes=64 << 20, folder=tmp_path))
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
        assert await node.erase_kv("nobody") == 0
        tiers.store.check_invariants()


async def test_kv_that_is_being_copied_is_erased_when_it_is_copied(tmp_path: Path) -> None:
    """A GPU copies beside the steps, and holds the blocks meanwhile."""
    tiers = KvTiers(TiersConfig(host_bytes=64 << 20, disk_bytes=0, folder=tmp_path))
    async with engine(tiers, num_kv_blocks=64) as node:
        await generate(node, PROMPT, session_id="s", tenant="ada")
        held = await node.run_on_engine(named_blocks)

        def copy_beside(driver: Any) -> None:
            assert tiers.held is not None
            threading.Timer(0.1, tiers.held.hold(held), [True]).start()

        await node.run_on_engine(copy_beside)
        await node.erase_kv("ada")
        assert not await node.run_on_engine(named_blocks)
        assert await node.run_on_engine(lambda driver: is_zero(driver, held))


async def test_kv_that_is_no_number_reaches_nobody_who_has_its_blocks_next(tmp_path: Path) -> None:
    """An adapter's values may be sound, and what they make of a prompt too large."""
    shutil.copytree(small().adapters / "pirate", tmp_path / "vast")
    path = tmp_path / "vast/adapter_model.safetensors"
    weights = {name: each * 1e38 if "lora_B" in name else each for name, each in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    prompts = [text(number, 37 + 11 * number) for number in range(4)]
    async with engine(num_kv_blocks=20, max_model_len=512, adapters_in_kv=False) as node:
        await load(node, "vast", tmp_path / "vast")
        before = [(await generate(node, prompt, tenant="ada")).token_ids for prompt in prompts]
        for number in range(3):  # they fill the device
            await generate(node, text(("vast", number), 300), adapter="vast")
        after = [(await generate(node, prompt, tenant="bob")).token_ids for prompt in prompts]
        assert after == before
