from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash

from engine_bridge.driver.kv.promoter import PrefixCache
from engine_bridge.policy.kv.kv_layout import one_group

NUM_BLOCKS, LENGTH, BLOCK_TOKENS = 20, 8, 32
ONE_GROUP = one_group(BLOCK_TOKENS)
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
        request: Any = SimpleNamespace(block_hashes=PREFIXES[name])
        self.pool.cache_full_blocks(request, blocks, len(there), num_blocks, BLOCK_TOKENS, 0)
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
        entries = ONE_GROUP.leading_entries(PREFIXES[name])
        found = self.cache.find(entries, limit)
        assert len(found) == len(expected)
        assert [get_block_hash(block.block_hash) for block in found] == PREFIXES[name][: len(found)]
        assert self.cache.holds(entries[: len(found) + 1])[: len(found)] == [True] * len(found)
        resident = self.cache.resident(entries, limit)
        assert resident.num_blocks == len(found)
        assert resident.num_unused == sum(block.ref_cnt == 0 for block in found)

    @rule(names=st.sets(NAMES), at=st.integers(0, LENGTH - 1), limit=st.integers(0, NUM_BLOCKS))
    def ask_what_goes_before(self, names: set[str], at: int, limit: int) -> None:
        hashes = [PREFIXES[name][at] for name in names]
        found = [self.pool.get_cached_block(block_hash, [0]) for block_hash in hashes]
        num = self.cache.num_evicted_before(ONE_GROUP.leading_entries(hashes), limit)
        if None in found:
            assert num is None
            return
        free = self.pool.free_block_queue.get_all_free_blocks()
        places = [free.index(block) for blocks in found if blocks for block in blocks if block in free]
        assert num == min([*places, len(free), limit])

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
TestRequests.settings = settings(max_examples=40, stateful_step_count=40)
