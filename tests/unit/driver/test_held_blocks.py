"""Blocks that copies hold, in vLLM's own block pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool

from engine_bridge.driver.kv import held_blocks
from engine_bridge.driver.kv.held_blocks import HeldBlocks

NUM_BLOCKS = 8


def ids(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=16)


def test_a_saved_block_is_nobody_s_until_it_has_been_copied_though_its_request_has_ended(
    pool: BlockPool,
) -> None:
    woken: list[bool] = []
    held = HeldBlocks(pool, lambda: woken.append(True))
    blocks = pool.get_new_blocks(3)
    end = held.hold(ids(blocks[:2]))
    assert not held.holds_last, "a request holds them, too"
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 3 and held.holds_last
    assert not pool.reset_prefix_cache()
    held.advance()
    assert held.num_open == 1 and not woken
    end(True)
    assert held.has_work() and woken == [True]
    held.advance()
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1 and not held.has_work()
    assert pool.reset_prefix_cache()


def test_what_is_to_be_done_then_comes_before_the_blocks_are_free_and_knows_how_it_ended(
    pool: BlockPool,
) -> None:
    held, heard = HeldBlocks(pool, lambda: None), []

    def then(is_made: bool) -> None:
        heard.append((is_made, pool.get_num_free_blocks()))
        if not is_made:
            raise RuntimeError("nothing is lost by that")

    ends = [held.keep(pool.get_new_blocks(1), then) for _ in range(2)]
    ends[1](True)
    held.advance()
    ends[0](False)
    with pytest.raises(RuntimeError):
        held.advance()
    assert heard == [(True, NUM_BLOCKS - 3), (False, NUM_BLOCKS - 2)]
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_all_copies_can_be_waited_for_but_not_for_ever(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldBlocks(pool, lambda: None)
    ends = [held.hold(ids(pool.get_new_blocks(1))) for _ in range(3)]
    for end in ends[:2]:
        threading.Thread(target=end, args=(True,)).start()
    asked: list[Callable[[bool], None]] = ends[2:]
    held.finish(lambda: asked.pop()(True) if asked else None)
    assert not held.num_open
    monkeypatch.setattr(held_blocks, "PATIENCE_S", 0.01)
    held.hold([3])
    held.finish(lambda: None)
    assert held.num_open == 1


def test_a_copy_that_is_said_to_have_ended_twice_ends_once(pool: BlockPool) -> None:
    held = HeldBlocks(pool, lambda: None)
    end = held.hold(ids(pool.get_new_blocks(1)))
    other = held.hold(ids(pool.get_new_blocks(1)))
    for is_made in (True, False):
        end(is_made)
    other(True)
    held.advance()
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 3, "their requests hold them"
    assert not held.num_open


class HeldMachine(RuleBasedStateMachine):
    """Requests take, save and free blocks; copies end in any order. Nothing is lost, freed twice or given to two."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=16)
        self.held = HeldBlocks(self.pool, lambda: None)
        self.requests: list[list[Any]] = []
        self.copies: list[tuple[list[int], Callable[[bool], None]]] = []

    @rule(num=st.integers(1, 3))
    def starts(self, num: int) -> None:
        if num <= self.pool.get_num_free_blocks():
            blocks = self.pool.get_new_blocks(num)
            assert not set(ids(blocks)) & {number for copied, _ in self.copies for number in copied}
            self.requests.append(blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def saves(self, data: st.DataObject) -> None:
        blocks = ids(data.draw(st.sampled_from(self.requests)))
        self.copies.append((blocks, self.held.hold(blocks)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.pool.free_blocks(reversed(self.requests.pop(index)))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), is_made=st.booleans())
    def is_copied(self, data: st.DataObject, is_made: bool) -> None:
        _, end = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        end(is_made)
        self.held.advance()

    @invariant()
    def each_block_has_its_holders(self) -> None:
        held = [number for copied, _ in self.copies for number in copied]
        held += [number for blocks in self.requests for number in ids(blocks)]
        counts = [block.ref_cnt for block in self.pool.blocks[1:]]
        assert counts == [held.count(number) for number in range(1, NUM_BLOCKS)]
        assert self.pool.get_num_free_blocks() == counts.count(0)


TestHeldMachine = HeldMachine.TestCase
TestHeldMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
