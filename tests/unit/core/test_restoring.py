"""Long restores go to the device in pieces, take little of host memory, and leave nothing behind, whatever becomes of them."""

from dataclasses import replace
from typing import Any

from engine_bridge.core.kv.restoring import Restore

from .shelf import BLOCK_TOKENS, keys_of
from .test_restores import Bench


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

    @property
    def held(self) -> list[int]:
        return [len(stage.blocks) for stage in self.shelf.stages]


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


def test_where_nobody_waits_for_a_piece_it_is_copied_whole() -> None:
    for copies_beside, num_copied in ((False, 1), (True, 8)):
        bench = Pieces()
        bench.tiers.bytes_per_s = 1.0
        bench.tiers.loads_must_hold = bench.tiers.copies_beside = copies_beside
        bench.come("a")
        bench.look("a")
        bench.read()
        assert bench.look("a") is None
        (copy,) = bench.restores.take_copies().values()
        assert (copy.start, len(copy.sources)) == (0, num_copied)


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


def test_a_step_loads_of_several_stages_what_it_starts_with_and_the_others_are_let_go() -> None:
    first, second = ([*range(3, 8)], [*range(103, 108)], True), ([*range(5)], [*range(108, 113)], False)
    for num_blocks, expected in ((10, [first, second]), (2, [([3, 4], [103, 104], True)])):
        bench = Pieces()
        bench.shelf.put(keys_of("a", 8))
        bench.shelf.put(keys_of("a", 16)[8:], on_disk=True)
        stages = [bench.shelf.stage("a", keys_of("a", 16)[at : at + 8]) for at in (0, 8)]  # type: ignore[arg-type]
        restore = Restore(stages, 0, num_skipped=3)
        loads = restore.loads([list(range(100, 120))], num_blocks, bench.shelf)
        assert [(load.positions, load.block_ids, load.is_whole) for load in loads] == expected
        for load in loads:
            bench.shelf.release(load.stage)
        assert not bench.held and not restore.stages
