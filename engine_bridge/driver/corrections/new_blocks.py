"""Blocks of the KV cache that are given to requests, on a CPU.

vLLM's attention for CPUs multiplies what lies behind a request's last token in its last block by zero. Where the block's last user has left values
that are infinite or no numbers, as an adapter with large values does, the result is no number either: every request that is given the block has wrong
tokens, and its KV is spoiled in turn. vLLM empties new blocks where their memory may hold other kinds of values, and those of full attention alone.
Source: vLLM 0.32, `v1/kv_cache_interface.py` and `v1/worker/cpu_model_runner.py`.
"""

from __future__ import annotations

from typing import Any


def install(engine: Any) -> None:
    """Have an engine's pool overwrite blocks with zeros before it hands them out."""
    from engine_bridge.driver.in_process import kv_caches_of, ranks_of, scheduler_of
    from engine_bridge.driver.memory.zeroing import zero

    pool, ranks = scheduler_of(engine).kv_cache_manager.block_pool, ranks_of(engine)
    stock = pool.get_new_blocks
    kv_caches = kv_caches_of(engine) if ranks is None else []

    def get_new_blocks(num_blocks: int) -> list[Any]:
        """Return new blocks, as vLLM's pool does."""
        blocks: list[Any] = stock(num_blocks)
        numbers = [int(block.block_id) for block in blocks]
        if ranks is None:
            zero(kv_caches, numbers)
        elif numbers:
            ranks.call("overture_zero", numbers)
        return blocks

    pool.get_new_blocks = get_new_blocks
