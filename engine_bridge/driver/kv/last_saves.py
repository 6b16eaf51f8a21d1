"""Watches the blocks that vLLM's pool gives to requests next, and has their KV saved once more where host memory lacks it."""

from __future__ import annotations

import functools
import logging
from itertools import islice
from typing import Any

from engine_bridge.core.kv.step_moves import SaveJob
from engine_bridge.driver.kv.kv_tiers import KvTiers
from engine_bridge.policy.kv.kv_layout import Entry, KvLayout
from kvtiers.keys import BlockKey

log = logging.getLogger(__name__)

# At each look, the recorded maximum of blocks given away between two looks is multiplied by this. Chosen: half after 350 steps.
FADE = 0.998


class LastSaves:
    """See the module. On the engine thread, between two steps.

    The front of the queue is walked again when a third of the watched blocks are given away, or a request has ended or found KV on the device.

    Args:
        tiers: of the same engine; their store is open.
        num_blocks: how many blocks to watch at least: see `num_leaving`.
    """

    def __init__(self, pool: Any, tiers: KvTiers, num_blocks: int) -> None:
        assert tiers.store is not None
        self._pool, self._tiers = pool, tiers
        # A watched block is worth its place in host memory, so on a small device not all are.
        self._num_blocks = min(num_blocks, pool.num_gpu_blocks // 2)
        self._most_given = 0.0
        self._leaving: dict[int, Entry] = {}
        """What the watched blocks hold, by their numbers."""
        self._num_watched = self._num_free = 0
        self._last: Any = None
        """The end of the queue when it was walked."""
        self._copying: dict[int, Entry] = {}
        """The same of those that are being copied: they are not in the queue meanwhile."""
        tiers.store.use_device(self.keeps)

    def keeps(self, key: BlockKey) -> bool:
        """Return whether the device has a key's content, and is not about to lose it. From any thread."""
        restores = self._tiers.restores
        found = restores.saves.find(key) if restores is not None else None
        if found is None:
            return False
        block = self._pool.blocks[found.block_id]
        if block.block_hash != found.entry:
            return False
        if found.block_id in self._copying:
            return False
        return bool(block.ref_cnt) or self._leaving.get(found.block_id) != found.entry

    def advance(self) -> None:
        """Save what host memory lacks of the blocks that are given away next."""
        store, restores = self._tiers.usable_store, self._tiers.restores
        if store is None or restores is None:
            return
        try:
            for job in restores.saves.save_again(self._look(), store):
                self._copying.update((each, self._leaving[each]) for each in job.block_ids)
                self._tiers.copy_out(job, functools.partial(self._copied, job))
        except Exception:
            # Begun saves are given up, and no further save has begun. The next look finds these blocks again if they are still there.
            log.exception("KV that leaves the device could not be saved")
            self._leaving = {}

    def _look(self) -> list[tuple[int, Entry]]:
        """Return the newly watched blocks: their numbers and content."""
        queue, num_free = self._pool.free_block_queue, self._pool.get_num_free_blocks()
        num_wanted = max(self._num_blocks, int(2 * self._most_given))
        # What a request lets go of, or finds again, comes to the end of the queue; then others may have come to its front.
        last = queue.fake_free_list_tail.prev_free_block
        if last is self._last and self._num_watched - max(self._num_free - num_free, 0) >= num_wanted:
            return []
        before, blocks = self._leaving, self._pool.blocks
        num_given = sum(blocks[number].block_hash != entry for number, entry in before.items())
        # What starting requests load comes on top of what a step computes.
        self._most_given = max(num_given, self._most_given * FADE)
        watched = list(islice(queue.iter_blocks_after(None), num_wanted * 3 // 2))
        self._last, self._num_watched, self._num_free = last, len(watched), num_free
        self._leaving = {
            block.block_id: block.block_hash for block in watched if block.block_hash is not None
        }
        return [each for each in self._leaving.items() if before.get(each[0]) != each[1]]

    def _copied(self, job: SaveJob) -> None:
        """Note that a copy has ended: its blocks are the next to be given away again."""
        self._leaving.update((each, self._copying.pop(each)) for each in job.block_ids)


def num_leaving(scheduler: Any, layout: KvLayout) -> int:
    """Return how many blocks two steps may give to requests: the next step must not need a block that is copied out beside this one."""
    config = scheduler.scheduler_config
    # A running answer takes a block once for as many steps as the block has tokens.
    num_tokens = config.max_num_batched_tokens + config.max_num_seqs
    return 2 * sum(-(-num_tokens // group.block_tokens) for group in layout.groups)
