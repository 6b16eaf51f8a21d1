"""Which of the device's blocks are put behind the others, how many at a time, and what of waiting requests counts as taken."""

from __future__ import annotations

from engine_bridge.core.eviction_order import (
    BLOCKS_PER_S,
    LOOK_EVERY_S,
    MOST_AT_ONCE,
    EvictionOrder,
    Resident,
)
from engine_bridge.core.expected import Hashes

from .shelf import keys_of


class Device:
    """Has everything but what is `gone`."""

    num_blocks = 100_000

    def __init__(self) -> None:
        self.gone: set[bytes] = set()

    def num_free_blocks(self) -> int:
        return self.num_blocks

    def resident(self, hashes: Hashes, limit: int) -> Resident:
        num = next((at for at, name in enumerate(hashes[:limit]) if name in self.gone), limit)
        return Resident(num, num)


def test_a_long_round_is_cut_in_pieces_and_goes_on_where_it_was() -> None:
    order, now = EvictionOrder(Device()), 10.0
    shares = [(keys_of(name, MOST_AT_ONCE // 2 + 1), MOST_AT_ONCE // 2 + 1) for name in "abcde"]
    moved: list[bytes] = []
    for num_pieces in range(1, 4):
        assert order.is_due(now)
        moves = order.moves(shares, now)
        assert sum(move.num_blocks for move in moves) < 2 * MOST_AT_ONCE
        moved += [move.hashes[0] for move in moves]
        assert order.is_owed is (num_pieces < 3)
        assert not order.is_due(now + 0.9 * sum(move.num_blocks for move in moves) / BLOCKS_PER_S)
        now = order.due_s
    assert moved == [hashes[0] for hashes, _ in reversed(shares)]
    assert not order.is_due(now)
    assert order.is_due(10.0 + LOOK_EVERY_S + 1.0)


def test_what_several_waiting_requests_begin_with_counts_once_and_is_moved_once() -> None:
    order = EvictionOrder(Device())
    for number in range(50):
        order.came(f"request {number}", keys_of("system", 48))
    assert order.num_waiting_blocks == 48
    assert [move.num_blocks for move in order.moves([], 0.0)] == [48]
    for number in range(49):
        order.left(f"request {number}")
    assert order.num_waiting_blocks == 48
    order.left("request 49")
    order.left("request 49")
    assert order.num_waiting_blocks == 0
    assert order.moves([], 1.0) == []


def test_of_what_is_wanted_only_what_is_there_is_moved() -> None:
    device = Device()
    order, names = EvictionOrder(device), keys_of("a", 10)
    assert order.came("nothing there", []) is None
    device.gone.add(names[6])
    (move,) = order.moves([(names, 8)], 0.0)
    assert (move.hashes, move.num_blocks) == (names, 6)
