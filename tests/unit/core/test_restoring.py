"""Long restores go to the device in pieces, take little of host memory, and leave nothing behind, whatever becomes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine_bridge.core.kv.kv_transfers import MAX_WAITS, Sources
from engine_bridge.core.kv.restoring import COPY_S, Behind, LoadBlocks, Restore
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts

from .shelf import BLOCK_TOKENS, SHAPE, keys_of
from .test_restores import Bench


class Hasty:
    """Loads everything at once, whether it is there or not."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        return RestoreDecision(Action.LOAD, facts.num_blocks, "", 0.0)


class Pieces(Bench):
    """Host memory of 64 blocks, of which a piece takes 8, and a device with so much room."""

    NUM_BLOCKS = 40

    def __init__(self, device_room: int = 100) -> None:
        super().__init__()
        self.tiers.num_free_blocks = device_room

    def come(self, name: str, num_blocks: int = NUM_BLOCKS) -> None:
        self.shelf.put(keys_of(name, num_blocks), on_disk=True)
        self.enter(name, num_blocks)

    def look(self, name: str, device: int = 0) -> int | None:
        return self.match(name, device=device, tokens=self.NUM_BLOCKS * BLOCK_TOKENS + 2)

    def read(self, num: int = 8) -> None:
        for _ in range(num):
            self.shelf.read_one()

    def start(self, name: str, num_loaded: int) -> list[LoadBlocks]:
        num_tokens = self.NUM_BLOCKS * BLOCK_TOKENS + 2
        block_ids = list(range(100, 100 + self.NUM_BLOCKS))
        self.restores.admit(name, block_ids, num_loaded * BLOCK_TOKENS, num_tokens, is_resumed=False)
        return self.restores.next_step([(name, num_tokens)], lambda name: block_ids).loads

    @property
    def held(self) -> list[int]:
        return [len(stage.blocks) for stage in self.shelf.stages]


def test_a_long_restore_takes_a_quarter_of_host_memory_and_goes_to_the_device_in_pieces() -> None:
    bench = Pieces()
    bench.come("a")
    num_on_device, num_looks = 0, 0
    while (num_tokens := bench.look("a", num_on_device)) is None:
        assert bench.held in ([8, 8], [8])
        for copy in bench.restores.take_copies().values():
            assert copy.start == num_on_device
            keys = keys_of("a", 40)[copy.start : copy.start + len(copy.sources)]
            assert [block.key for block in copy.sources] == keys
            num_on_device += len(copy.sources)
        bench.shelf.read_one()
        num_looks += 1
        assert num_looks < 100
    assert num_on_device + num_tokens // BLOCK_TOKENS == 40, "the step that starts it loads the rest"
    loads = bench.start("a", num_tokens // BLOCK_TOKENS)
    assert [(load.positions, load.block_ids, load.is_whole) for load in loads] == [
        (list(range(8)), list(range(132, 140)), True)
    ]
    assert bench.restores.take_sources("a") == Sources(device=0, disk=160)
    for load in loads:
        bench.shelf.release(load.stage)
    bench.restores.forget("a")
    assert not bench.held


def test_one_restore_at_a_time_goes_in_pieces_and_the_next_begins_when_its_last_one_is_read() -> None:
    bench = Pieces()
    bench.come("a")
    bench.come("b")
    bench.enter("c")
    bench.shelf.put(keys_of("c", 5), on_disk=True)
    assert [bench.look("a"), bench.look("b"), bench.match("c")] == [None, None, None]
    assert bench.held == [8, 8, 5], "who reads little does not wait for its turn"
    for num_on_device in range(0, 24, 8):
        assert bench.look("b") is None
        bench.read()
        bench.look("a", num_on_device)
        assert len(bench.restores.take_copies()) == 1
    bench.look("a", 24)
    assert bench.look("b") is None
    assert bench.held == [5, 8, 8, 8, 8]


@pytest.mark.parametrize("device_room", [0, 40])
def test_where_the_device_has_no_room_for_pieces_a_restore_goes_whole(device_room: int) -> None:
    bench = Pieces(device_room)
    bench.come("a")
    assert bench.look("a") is None
    assert bench.held == [40]


@pytest.mark.parametrize("why", ["room", "failure", "nobody copies"])
def test_a_restore_whose_pieces_cannot_go_on_goes_whole(why: str) -> None:
    bench = Pieces()
    bench.come("a")
    bench.look("a")
    bench.read()
    bench.look("a")
    if why == "room":
        bench.tiers.num_free_blocks = 40
    elif why == "nobody copies":
        for _ in range(MAX_WAITS - 1):
            bench.look("a")
            assert bench.restores.take_copies()
    else:
        assert bench.restores.take_copies()
        bench.restores.go_whole("a")
    assert bench.look("a") is None
    assert bench.held == [40] and not bench.restores.take_copies()
    bench.read(40)
    assert bench.look("a") == 160


def test_a_piece_that_the_device_has_lost_is_read_again() -> None:
    bench = Pieces()
    bench.come("a")
    bench.look("a")
    bench.read()
    bench.look("a")
    assert bench.restores.take_copies()["a"].start == 0
    assert bench.look("a", 8) is None
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    assert bench.look("a", 3) is None
    assert bench.held == [8, 8]
    bench.read()
    bench.look("a", 3)
    copy = bench.restores.take_copies()["a"]
    assert (copy.start, copy.sources[0].key) == (3, keys_of("a", 4)[3])


def test_what_the_device_has_of_a_piece_is_not_copied_again() -> None:
    bench = Pieces()
    bench.come("a")
    bench.look("a")
    bench.read()
    bench.look("a", 5)
    copy = bench.restores.take_copies()["a"]
    assert (copy.start, len(copy.sources)) == (5, 3)
    assert bench.look("a", 30) is None, "another request computed more than was staged"
    assert bench.held == [8, 2]


def test_no_more_of_a_piece_is_copied_at_once_than_others_may_wait_for() -> None:
    bench = Pieces()
    bench.tiers.bytes_per_s = 3 * SHAPE.block_bytes / COPY_S
    bench.come("a")
    bench.look("a")
    bench.read()
    for num_on_device, num_sources in ((0, 3), (3, 3), (6, 2)):
        bench.look("a", num_on_device)
        copy = bench.restores.take_copies()["a"]
        assert (copy.start, len(copy.sources)) == (num_on_device, num_sources)


def test_a_turn_goes_to_the_next_when_the_engine_does_not_ask_for_its_holder() -> None:
    bench = Pieces()
    for name in "ab":
        bench.come(name)
        assert bench.look(name) is None
    assert bench.held == [8, 8]
    for _ in range(2):  # as where the first one has no place in the engine's plan
        assert bench.look("b") is None
        bench.step()
    assert bench.look("b") is None
    assert bench.held == [8, 8, 8, 8]
    assert bench.look("a") is None, "it goes on when it is asked for again"
    bench.read()
    bench.look("a")
    bench.look("b")
    assert sorted(bench.restores.take_copies()) == ["a", "b"]


def test_nobody_waits_for_a_turn_that_comes_later_than_computing_takes() -> None:
    bench = Pieces()
    own_s = 40 * SHAPE.block_bytes / bench.shelf.disk_rate
    bench.tiers.s_per_token = 2.5 * own_s / (40 * BLOCK_TOKENS)
    for name in "abc":
        bench.come(name)
        assert bench.look(name) is None
    assert bench.held == [8, 8, 40], "the third reads all at once, and computes if that takes too long"


def test_a_restore_in_pieces_needs_device_memory_beside_others() -> None:
    bench = Pieces(device_room=41 + 16)
    bench.come("a")
    bench.come("b")
    for num_on_device in (0, 8, 16):
        bench.look("a", num_on_device)
        bench.read()
    bench.step()
    bench.step()
    assert bench.look("b") is None
    assert bench.held == [8, 8, 8, 8], "there is room for one and what the other has by now"
    bench.look("a", 24)
    assert bench.look("b") is None
    assert bench.held == [8, 8, 40]


def test_what_is_computed_ahead_goes_in_no_pieces() -> None:
    bench = Pieces()
    bench.shelf.put(keys_of("a", 40), on_disk=True)
    bench.enter("a", 40, is_saved=False)
    assert bench.look("a") is None
    assert bench.held == [40]


def test_sources_say_where_pieces_were_also_of_those_that_were_lost_and_read_again() -> None:
    bench = Pieces()
    bench.come("a")
    bench.look("a")
    for num_on_device in (8, 16, 24):
        bench.read()
        bench.look("a", num_on_device)
    bench.shelf.put(keys_of("a", 24), on_disk=True)
    num_on_device, num_tokens = 10, bench.look("a", 10)
    while num_tokens is None:
        bench.read(1)
        for copy in bench.restores.take_copies().values():
            num_on_device = copy.start + len(copy.sources)
        num_tokens = bench.look("a", num_on_device)
    bench.start("a", num_tokens // BLOCK_TOKENS)
    sources = bench.restores.take_sources("a")
    assert sources is not None and (sources.device, sources.host + sources.disk) == (0, 160)


def test_a_restore_that_ends_by_computing_says_what_its_pieces_brought() -> None:
    bench = Pieces()
    bench.come("a")
    bench.look("a")
    bench.read()
    bench.look("a", 8)
    assert bench.start("a", 0) == []
    assert bench.restores.take_sources("a") == Sources(device=0, disk=32)
    assert not bench.held


def test_an_engine_that_goes_leaves_nothing_in_host_memory() -> None:
    bench = Pieces()
    bench.come("a")
    bench.come("b", 8)
    bench.look("a")
    bench.look("b")
    bench.read()
    bench.restores.admit("b", list(range(8)), 8 * BLOCK_TOKENS, 33, is_resumed=False)
    assert len(bench.held) == 3
    bench.restores.close()
    assert not bench.held


def test_a_disk_is_not_given_up_for_what_it_has_delivered_long_ago() -> None:
    bench = Pieces()
    bench.shelf.put(keys_of("a", 40), on_disk=True)
    stages = [bench.shelf.stage("a", keys_of("a", 40)[at : at + 8]) for at in (0, 8)]  # type: ignore[arg-type]
    progress, waited = bench.shelf.progress, {id(stages[0]): 30.0, id(stages[1]): 20.0}
    bench.shelf.progress = lambda stage: replace(progress(stage), waited_s=waited[id(stage)])  # type: ignore[method-assign]
    restore = Restore(stages, 0, later=Behind(24, 0))
    assert restore.progress(bench.shelf).waited_s == 30.0
    for block in stages[0].blocks:
        block.ready = SHAPE.num_layers
    assert restore.progress(bench.shelf).waited_s == 20.0
    bench.read()
    assert restore.progress(bench.shelf).waited_s == 0.0


def test_pieces_end_before_a_block_that_cannot_be_read() -> None:
    bench = Pieces()
    bench.come("a")
    bench.look("a")
    progress = bench.shelf.progress

    def damaged(stage: Any) -> Any:
        found = progress(stage)
        return replace(found, num_blocks=4, num_ready_blocks=4) if stage is bench.shelf.stages[0] else found

    bench.shelf.progress = damaged  # type: ignore[method-assign]
    assert bench.look("a") == 4 * BLOCK_TOKENS
    assert bench.held == [8]


def test_without_room_in_host_memory_there_are_no_pieces() -> None:
    bench = Pieces()
    bench.shelf.room = 0
    bench.come("a")
    assert bench.look("a") == 0
    assert not bench.held


def test_a_request_that_goes_leaves_no_piece() -> None:
    bench = Pieces()
    bench.come("a")
    bench.look("a")
    bench.read()
    bench.look("a")
    bench.restores.forget("a")
    assert not bench.held and not bench.restores.take_copies()
    bench.come("b")
    assert bench.look("b") is None
    assert bench.held == [8, 8]


def test_a_step_loads_of_several_stages_what_it_starts_with_and_the_others_are_let_go() -> None:
    for num_blocks, expected in (
        (
            10,
            [
                ([3, 4, 5, 6, 7], [103, 104, 105, 106, 107], True),
                ([0, 1, 2, 3, 4], [108, 109, 110, 111, 112], False),
            ],
        ),
        (2, [([3, 4], [103, 104], True)]),
    ):
        bench = Pieces()
        bench.shelf.put(keys_of("a", 8))
        bench.shelf.put(keys_of("a", 16)[8:], on_disk=True)
        stages = [bench.shelf.stage("a", keys_of("a", 16)[at : at + 8]) for at in (0, 8)]  # type: ignore[arg-type]
        restore = Restore(stages, 0, num_skipped=3)
        loads = restore.loads(list(range(100, 120)), num_blocks, bench.shelf)
        assert [(load.positions, load.block_ids, load.is_whole) for load in loads] == expected
        for load in loads:
            bench.shelf.release(load.stage)
        assert not bench.held and not restore.stages


def test_a_policy_that_waits_for_nothing_starts_with_the_pieces_that_have_memory() -> None:
    bench = Pieces()
    bench.tiers.policy = Hasty()
    bench.come("a")
    assert bench.look("a") == 16 * BLOCK_TOKENS
    loads = bench.start("a", 16)
    assert [block_id for load in loads for block_id in load.block_ids] == list(range(100, 116))


def test_an_engine_whose_loads_must_hold_loads_only_what_has_come() -> None:
    """What its step would find missing it could not compute again."""
    bench = Bench(Hasty())
    bench.tiers.loads_must_hold = True
    bench.shelf.put(keys_of("a", 5), on_disk=True)
    bench.enter("a")
    for num_come in range(6):
        assert bench.match("a") == num_come * BLOCK_TOKENS
        bench.shelf.read_one()


def test_for_such_an_engine_a_layer_counts_with_its_block() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 5))
    restore = Restore([bench.shelf.stage("a", keys_of("a", 5))], 0)  # type: ignore[arg-type]
    for loads_must_hold, num_layers in ((False, SHAPE.num_layers), (True, 0)):
        bench.tiers.loads_must_hold = loads_must_hold
        facts = restore.facts(bench.shelf, bench.tiers, 22, BLOCK_TOKENS)
        assert (facts.num_ready_layers, facts.num_ready_blocks) == (num_layers, 5)


def test_of_a_restore_in_pieces_what_is_left_to_read_is_all_of_it() -> None:
    bench = Pieces()
    bench.shelf.put(keys_of("a", 40), on_disk=True)
    stages = [bench.shelf.stage("a", keys_of("a", 40)[at : at + 8]) for at in (0, 8)]  # type: ignore[arg-type]
    restore = Restore(stages, 0, later=Behind(24, 24 * SHAPE.block_bytes))
    found = restore.progress(bench.shelf)
    assert (found.num_blocks, found.num_ready_blocks, found.num_ready_layers) == (40, 0, 0)
    assert (found.disk_bytes_left, found.disk_bytes_ahead) == (40 * SHAPE.block_bytes, 0)
    bench.read(5)
    assert restore.progress(bench.shelf).num_ready_blocks == 5
    bench.read(3)
    assert restore.progress(bench.shelf).num_ready_blocks == 16
