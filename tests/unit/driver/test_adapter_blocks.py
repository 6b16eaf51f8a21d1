from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool

from engine_bridge.driver.adapters.blocks import AdapterBlocks
from engine_bridge.driver.adapters.weights import AdapterWeights, ModuleWeights

NUM_BLOCKS, NUM_LAYERS, ROW_FLOATS = 24, 3, 40
KV = 1.0  # what requests write into their blocks


def make_weights(seed: int, rank: int) -> AdapterWeights:
    """A fused layer of which one slice is not adapted, and a plain one outside all layers. NaNs among them: read as KV they would spread."""
    chance = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=chance, dtype=torch.float32)
        return values.where(values < 2, torch.nan).to(torch.bfloat16)

    def attention() -> ModuleWeights:
        a, b = (tensor(rank, 9), None, tensor(rank, 9)), (tensor(7, rank), None, tensor(5, rank))
        return ModuleWeights(a, b, is_list=True)

    modules = {f"model.layers.{layer}.attn.qkv": attention() for layer in range(NUM_LAYERS)}
    modules["head"] = ModuleWeights((tensor(rank, 5),), (tensor(3, rank),), is_list=False)
    num_bytes = sum(t.numel() * 2 for module in modules.values() for t in module.tensors())
    return AdapterWeights(modules, num_bytes, None)


def bits_of(weights: AdapterWeights) -> list[Any]:
    """To compare by: a NaN is not equal to itself."""

    def bits(tensors: Any) -> list[Any]:
        return [None if each is None else each.view(torch.int16).tolist() for each in tensors]

    parts = sorted(weights.modules.items())
    return [(name, module.is_list, bits(module.a + module.b)) for name, module in parts]


class Cache:
    def __init__(self, may_displace: Any = lambda adapter_id, num_blocks: True, **asks: Any) -> None:
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=32)
        self.kv = [torch.zeros(NUM_BLOCKS, ROW_FLOATS) for _ in range(NUM_LAYERS)]
        self.lost: list[int] = []
        self.blocks = AdapterBlocks(self.pool, self.kv, self.lost.append, may_displace, **asks)

    def read(self, adapter_id: int) -> AdapterWeights | None:
        entry = self.blocks.entry(adapter_id)
        return entry.read(torch.empty(entry.size_bytes, dtype=torch.uint8))

    def put_whole(self, adapter_id: int, weights: AdapterWeights) -> bool:
        is_put = self.blocks.put(adapter_id, weights)
        self.blocks.write(1 << 30)
        return is_put


class PoolMachine(RuleBasedStateMachine):
    """Requests take and free blocks while adapters come, are written bit by bit, are used and go."""

    @initialize()
    def begin(self) -> None:
        self.cache = Cache()
        self.taken: list[list[Any]] = []
        self.put_in: dict[int, AdapterWeights] = {}
        self.next_id = 1

    @rule(rank=st.integers(1, 12))
    def put(self, rank: int) -> None:
        weights = make_weights(self.next_id, rank)
        if self.cache.blocks.put(self.next_id, weights):
            self.put_in[self.next_id] = weights
        self.next_id += 1

    @rule(max_bytes=st.integers(1, 400))
    def write(self, max_bytes: int) -> None:
        self.cache.blocks.write(max_bytes)

    @rule(data=st.data())
    @precondition(lambda self: self.put_in)
    def use_or_drop(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted(self.put_in)))
        if data.draw(st.booleans()):
            self.cache.blocks.used(adapter_id)
        else:
            self.cache.blocks.drop(adapter_id)

    @rule(num_blocks=st.integers(1, 10))
    def request(self, num_blocks: int) -> None:
        if num_blocks <= self.cache.pool.get_num_free_blocks():
            blocks = self.cache.pool.get_new_blocks(num_blocks)
            for block in blocks:
                for layer in self.cache.kv:
                    row = layer[block.block_id]
                    assert ((row == 0) | (row == KV)).all(), "a request sees weights in its block"
                    row.fill_(KV)
            self.taken.append(blocks)

    @rule(data=st.data())
    @precondition(lambda self: self.taken)
    def finish(self, data: st.DataObject) -> None:
        self.cache.pool.free_blocks(reversed(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))))

    @rule()
    @precondition(lambda self: not self.taken)
    def reset(self) -> None:
        assert self.cache.pool.reset_prefix_cache()

    @invariant()
    def free_is_what_requests_do_not_hold(self) -> None:
        num_taken = sum(len(blocks) for blocks in self.taken)
        assert self.cache.pool.get_num_free_blocks() == NUM_BLOCKS - 1 - num_taken
        assert len(self.cache.pool.free_block_queue.get_all_free_blocks()) == NUM_BLOCKS - 1 - num_taken

    @invariant()
    def what_is_held_is_whole(self) -> None:
        held = [block.block_id for blocks in self.taken for block in blocks]
        for adapter_id in self.cache.blocks.ids():
            weights = self.cache.read(adapter_id)
            assert weights is not None and bits_of(weights) == bits_of(self.put_in[adapter_id])
            lent = [block.block_id for block in self.cache.blocks.entry(adapter_id).blocks]
            assert not set(held) & set(lent)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40)


def full(*ranks: int) -> Cache:
    """A cache with adapters 1, 2, … of these ranks."""
    cache = Cache()
    assert all(cache.put_whole(number, make_weights(number, rank)) for number, rank in enumerate(ranks, 1))
    return cache


def test_a_reader_notices_that_kv_came() -> None:
    """A copy that was under way while its blocks were taken is thrown away, not used."""
    cache = full(8)
    entry = cache.blocks.entry(1)
    cache.pool.get_new_blocks(NUM_BLOCKS - 1)
    assert entry.read(torch.empty(entry.size_bytes, dtype=torch.uint8)) is None
    assert cache.lost == [1] and not cache.blocks.holds(1)


def test_the_longest_unused_goes_first_or_the_one_that_the_policy_names() -> None:
    """What is left of an adapter that has lost a block is of no use: the next request gets it before anything else."""
    cache = full(4, 4, 4)
    num_lent = len(cache.blocks.entry(1).blocks)
    num_others = NUM_BLOCKS - 1 - cache.blocks.num_blocks
    cache.blocks.used(1)
    cache.pool.get_new_blocks(num_others + 1)
    assert cache.lost == [2]
    cache.pool.get_new_blocks(num_lent - 1)
    assert cache.lost == [2] and cache.blocks.ids() == [1, 3]
    named = [3]
    cache = Cache(first_to_go=lambda: named.pop() if named else None)
    assert all(cache.put_whole(number, make_weights(number, 4)) for number in (1, 2, 3))
    cache.pool.get_new_blocks(num_others + num_lent)
    assert cache.blocks.ids() == [1, 2] and cache.lost == []


def cache_prefixes(cache: Cache) -> None:
    """Every free block holds somebody's prefix."""
    blocks = cache.pool.get_new_blocks(cache.pool.get_num_free_blocks())
    for block in blocks:
        block.set_block_hash(bytes([block.block_id]) * 36, num_tokens=32)
    cache.pool.free_blocks(blocks)


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_prefix_blocks_are_taken_only_for_more(is_worth_it: bool) -> None:
    """Free blocks with a prefix in them are somebody's cache: the policy is asked, and told how many there are."""
    asked: list[int] = []
    cache = Cache(lambda adapter_id, num_blocks: asked.append(num_blocks) or is_worth_it)
    cache_prefixes(cache)
    assert cache.blocks.put(1, make_weights(1, 4)) is is_worth_it
    assert asked and asked[0] > 0


def test_an_adapter_that_is_worth_less_goes_before_prefixes() -> None:
    """KV wants blocks: the cheaper adapter makes way although it was used last; no prefix is lost for it, and the other adapter stays."""
    cheap: list[int] = []
    cache = Cache(less_valuable_than_blocks=lambda num_blocks: cheap.pop() if cheap else None)
    cache_prefixes(cache)
    assert cache.put_whole(1, make_weights(1, 4)) and cache.put_whole(2, make_weights(2, 4))
    num_lent = len(cache.blocks.entry(2).blocks)
    cheap.append(2)
    num_prefixes = sum(block.block_hash is not None for block in cache.pool.blocks)
    taken = cache.pool.get_new_blocks(num_lent)
    assert sum(block.block_hash is not None for block in cache.pool.blocks) == num_prefixes
    assert cache.blocks.ids() == [1]
    assert all((layer[block.block_id] == 0).all() for layer in cache.kv for block in taken)


def test_a_gpu_has_not_written_an_adapter_before_its_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights in host memory may be overwritten by another adapter as soon as it counts as written."""
    made: list[bool] = []
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: bool(made))
    )
    cache = Cache()
    cache.blocks._is_cuda = True
    assert cache.put_whole(1, make_weights(1, 4))
    assert cache.blocks.is_writing() and not cache.blocks.holds(1)
    assert cache.blocks.write(1 << 30) == 0 and cache.blocks.is_writing()
    made.append(True)
    assert cache.blocks.write(1 << 30) == 0 and cache.blocks.holds(1)
    cache.put_whole(2, make_weights(2, 4))
    cache.pool.get_new_blocks(NUM_BLOCKS - 1)
    assert cache.lost == [1, 2] and not cache.blocks.is_writing()
