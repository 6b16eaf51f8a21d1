"""What promotions find of a prefix in vLLM's own block pool is what is there now, whatever became of it since they last looked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash

from engine_bridge.driver import promoter
from engine_bridge.driver.promoter import PrefixCache

NUM_BLOCKS, LENGTH, BLOCK_TOKENS = 20, 8, 32
# Two conversations that begin with the same blocks, and one of its own. A hash stands for all that comes before it.
COMMON = [b"common %d" % at for at in range(3)]
PREFIXES = {
    "one": COMMON + [b"one %d" % at for at in range(LENGTH - len(COMMON))],
    "other": COMMON + [b"other %d" % at for at in range(LENGTH - len(COMMON))],
    "third": [b"third %d" % at for at in range(LENGTH)],
}
NAMES = st.sampled_from(sorted(PREFIXES))


class Requests(RuleBasedStateMachine):
    """Requests compute, share and free blocks; some blocks lose what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.cache = PrefixCache(self.pool)
        self.held: list[list[Any]] = []

    @rule(name=NAMES, num_blocks=st.integers(1, LENGTH), shares=st.booleans())
    def compute(self, name: str, num_blocks: int, shares: bool) -> None:
        """shares: what is cached is used again; otherwise the same is computed a second time, and is there twice."""
        there = self.direct(name)[:num_blocks] if shares else []
        num_unused = sum(block.ref_cnt == 0 for block in there)
        if num_blocks - len(there) > self.pool.get_num_free_blocks() - num_unused:
            return
        self.pool.touch(there)
        blocks = [*there, *self.pool.get_new_blocks(num_blocks - len(there))]
        self.pool.cache_full_blocks(
            request=SimpleNamespace(block_hashes=PREFIXES[name]),
            blocks=blocks,
            num_cached_blocks=len(there),
            num_full_blocks=num_blocks,
            block_size=BLOCK_TOKENS,
            kv_cache_group_id=0,
        )
        self.held.append(blocks)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def finish(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free_blocks(reversed(self.held.pop(at)))

    @rule(block_ids=st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=4))
    def lose(self, block_ids: set[int]) -> None:
        self.pool.evict_blocks(block_ids)

    @rule()
    @precondition(lambda self: not self.held)
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    @rule(name=NAMES, limit=st.integers(0, LENGTH + 1))
    def look(self, name: str, limit: int) -> None:
        expected = self.direct(name)[:limit]
        found = self.cache.find(PREFIXES[name], limit)
        assert len(found) == len(expected)
        assert [get_block_hash(block.block_hash) for block in found] == PREFIXES[name][: len(found)]
        resident = self.cache.resident(PREFIXES[name], limit)
        assert resident.num_blocks == len(found)
        assert resident.num_unused == sum(block.ref_cnt == 0 for block in found)

    @invariant()
    def of_nothing_there_is_nothing(self) -> None:
        assert self.cache.find([], 5) == []

    def direct(self, name: str) -> list[Any]:
        """Looked up block by block."""
        blocks = []
        for block_hash in PREFIXES[name]:
            found = self.pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            blocks.append(found[0])
        return blocks


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_of_many_prefixes_the_longest_unused_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promoter, "MAX_FOUND", 2)
    pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    cache, num_looked_up = PrefixCache(pool), 0
    stock = pool.get_cached_block

    def counted(*args: Any) -> Any:
        nonlocal num_looked_up
        num_looked_up += 1
        return stock(*args)

    pool.get_cached_block = counted  # type: ignore[method-assign]
    (block,) = pool.get_new_blocks(1)
    named = SimpleNamespace(block_hashes=PREFIXES["third"])
    pool.cache_full_blocks(named, [block], 0, 1, BLOCK_TOKENS, 0)  # type: ignore[arg-type]
    for name, num_more in [("third", 2), ("third", 1), ("one", 1), ("third", 1), ("other", 1), ("one", 1)]:
        before = num_looked_up
        cache.find(PREFIXES[name], LENGTH)
        assert num_looked_up - before == num_more
    before = num_looked_up
    cache.find(PREFIXES["third"], LENGTH)
    assert num_looked_up - before == 2, "one and other are remembered, it is not"
