"""What the device is about to lose is saved once more: nothing is lost that device and host memory have room for, and nothing wrong is kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine_bridge.core.kv.asked import NewRequest
from engine_bridge.core.kv.step_moves import StepMoves
from engine_bridge.driver.kv.kv_tiers import settle
from engine_bridge.driver.kv.last_saves import LastSaves
from engine_bridge.driver.kv.layer_groups import register
from engine_bridge.policy.kv.kv_layout import BlockAt
from kvtiers.keys import BlockKey
from tests.unit.driver.test_promoter import NUM_DEVICE_BLOCKS, SHAPE, Bench, keys_of

NUM_SESSIONS, NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 4, 36
WATCHED = 4


class Sessions(Bench):
    """Sessions that take turns on a device which does not hold them all."""

    def __init__(self) -> None:
        super().__init__(num_host_blocks=NUM_HOST_BLOCKS)
        self.last_saves = LastSaves(self.pool, self.tiers, WATCHED)
        self.computed: set[bytes] = set()
        self.num_lost = 0

    def run(self, name: str, *, is_wrong: bool = False, is_kept: bool = True) -> None:
        """One request of a session: what neither device nor host memory has is computed, and saved. Then its blocks are free.

        is_kept: whether the step keeps what it has saved.
        """
        keys = keys_of(name, NUM_BLOCKS)
        entries = [key + bytes(4) for key in keys]
        found = [self.pool.get_cached_block(key, [0]) for key in keys]
        hits = [each[0] for each in found[: next((i for i, each in enumerate(found) if each is None), None)]]
        self.pool.touch(hits)
        stage = self.store.stage(name, [BlockKey(key) for key in keys[len(hits) :]])
        new = self.pool.get_new_blocks(NUM_BLOCKS - len(hits))
        for at, block in enumerate(new):
            key = keys[len(hits) + at]
            is_loaded = at < len(stage.blocks)
            self.num_lost += key in self.computed and not is_loaded
            for layer in range(SHAPE.num_layers):
                source = self.store.pool.region[stage.blocks[at].slots[layer]] if is_loaded else None
                content = bytes(source) if source is not None else self.content(key, layer)
                assert content == self.content(key, layer)
                wrong = b"\xff" * len(content)
                self.device[layer][block.block_id] = list_of(wrong if is_wrong else content)
        self.store.release(stage)
        register(self.pool, entries[len(hits) :], new, len(hits))
        self.computed.update(keys)
        blocks = [*hits, *new]
        if is_wrong:
            self.pool.evict_blocks({block.block_id for block in new})
        request = NewRequest(name, keys, session=name)
        sources = {BlockAt(0, at): block.block_id for at, block in enumerate(blocks)}
        job = self.restores.saves.save(request, sources, self.store)
        if job is not None:
            moves = StepMoves(saves=[job])
            for layer in range(SHAPE.num_layers):
                self.copier.to_host(layer, job.block_ids, [slots[layer] for slots in job.save.slots])
            self.copier.catch_up()
            settle(self.store, moves, is_right=is_kept and not is_wrong)
        self.pool.free_blocks(reversed(blocks))
        self.last_saves.advance()


def list_of(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    made = Sessions()
    yield made
    made.close()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_sessions_that_device_and_host_memory_hold_together_lose_nothing(
    sessions: Sessions, seed: int, overlaps: bool
) -> None:
    assert NUM_SESSIONS * NUM_BLOCKS > NUM_DEVICE_BLOCKS, "the device alone would not do"
    sessions.copier.overlaps = overlaps
    rng = random.Random(seed)
    for _ in range(150):
        sessions.run(f"s{rng.randrange(NUM_SESSIONS)}")
        sessions.arrive()
    assert sessions.store.stats().host.num_evicted > 50
    assert sessions.num_lost == 0
    assert sessions.pool.get_num_free_blocks() == NUM_DEVICE_BLOCKS - 1


def test_what_is_copied_is_no_request_s_until_then_and_is_given_away_first_again(sessions: Sessions) -> None:
    for number in range(NUM_SESSIONS):
        sessions.run(f"s{number}")
        sessions.arrive()
    sessions.run("new")
    held = {block.block_id for block in sessions.pool.blocks if block.ref_cnt and not block.is_null}
    assert held, "something is on its way"
    assert held.isdisjoint(each.block_id for each in sessions.pool.free_block_queue.get_all_free_blocks())
    sessions.arrive()
    queue = sessions.pool.free_block_queue.get_all_free_blocks()
    assert {block.block_id for block in queue[: len(held)]} == held


def test_kv_that_is_wrong_is_never_saved(sessions: Sessions) -> None:
    for number in range(NUM_SESSIONS):
        sessions.run(f"s{number}")
    sessions.arrive()
    sessions.run("wrong", is_wrong=True)
    for _ in range(3):
        for number in range(NUM_SESSIONS):
            sessions.run(f"s{number}")
            sessions.arrive()
    assert not sessions.store.num_held([BlockKey(keys_of("wrong", 1)[0])])


def test_what_a_step_did_not_keep_because_of_another_s_rows_is_saved_before_the_device_loses_it(
    sessions: Sessions,
) -> None:
    """Host memory has room for all, so nothing ever leaves it."""
    sessions.run("s0", is_kept=False)
    for number in range(1, NUM_HOST_BLOCKS // NUM_BLOCKS):
        sessions.run(f"s{number}")
        sessions.arrive()
    sessions.run("s0")
    assert sessions.num_lost == 0 and not sessions.store.stats().host.num_evicted


def test_a_session_that_was_deleted_is_not_saved_again(sessions: Sessions) -> None:
    for number in range(3):
        sessions.run(f"s{number}")
    sessions.store.end("s0")
    before = sessions.store.stats().host.num_saved
    for number in range(3, NUM_SESSIONS + 3):
        sessions.run(f"s{number}")
        sessions.arrive()
    assert sessions.store.stats().host.num_saved > before
    assert not sessions.store.num_held([BlockKey(keys_of("s0", 1)[0])])


def test_a_copy_that_fails_costs_one_save_and_holds_nothing(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(NUM_SESSIONS):
        sessions.run(f"s{number}")
        sessions.arrive()
    copy_out, failed = sessions.tiers.copy_out, []

    def fail_once(*arguments: Any) -> None:
        if not failed:
            failed.append(True)
            monkeypatch.setattr(sessions.copier, "to_host", broken)
        try:
            copy_out(*arguments)
        finally:
            monkeypatch.undo()

    def broken(*arguments: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(sessions.tiers, "copy_out", fail_once)
    for number in range(NUM_SESSIONS):
        sessions.run(f"new{number}")
        sessions.arrive()
    assert failed
    assert sessions.store.check_invariants() == 0
    assert sessions.pool.get_num_free_blocks() == NUM_DEVICE_BLOCKS - 1 and not sessions.last_saves._copying
