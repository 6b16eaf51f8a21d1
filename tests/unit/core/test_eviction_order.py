"""Which of the device's blocks are put behind the others, how many at a time, and what of waiting requests counts as taken."""

from __future__ import annotations

from collections.abc import Collection

from engine_bridge.core.kv.eviction_order import (
    BLOCKS_PER_S,
    LOOK_EVERY_S,
    MOST_AT_ONCE,
    EvictionOrder,
    Resident,
)
from engine_bridge.core.kv.expected import Hashes

from .shelf import keys_of


class Device:
    """Has everything but what is `gone`."""

    num_blocks = 100_000

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.num_before = 0  # blocks that are evicted before any that was moved

    def num_free_blocks(self) -> int:
        return self.num_blocks

    def resident(self, hashes: Hashes, limit: int) -> Resident:
        num = next((at for at, name in enumerate(hashes[:limit]) if name in self.gone), limit)
        return Resident(num, num)

    def num_evicted_before(self, hashes: Collection[bytes], limit: int) -> int | None:
        return None if self.gone.intersection(hashes) else min(self.num_before, limit)


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


def test_guesses_get_what_lies_before_the_first_that_was_moved_and_no_more() -> None:
    device = Device()
    order = EvictionOrder(device)
    assert order.num_unexpected(5) == 5
    order.moves([(keys_of("a", 4), 4), (keys_of("b", 4), 4)], 0.0)
    device.num_before = 7
    assert order.num_unexpected(7) == 7 and not order.is_owed
    assert order.num_unexpected(8) == 7
    assert order.is_owed, "what is not before them is to get there"
    assert not order.is_due(order.due_s / 2)
    assert order.is_due(order.due_s / 2, is_busy=False)


def test_a_loss_is_told_once_in_a_round() -> None:
    device = Device()
    order, names = EvictionOrder(device), keys_of("a", 4)
    assert not order.has_lost()
    order.moves([(names, 4)], 0.0)
    assert not order.has_lost()
    device.gone.add(names[3])
    assert order.has_lost() and order.is_owed
    assert not order.has_lost()
    assert order.num_unexpected(5) == 0
    order.moves([(names, 4)], order.due_s)
    assert not order.has_lost(), "of the three that are left nothing is gone"
    device.gone.add(names[2])
    assert order.has_lost()


def test_until_a_long_round_is_over_those_it_comes_to_last_keep_their_places() -> None:
    device = Device()
    order, num = EvictionOrder(device), MOST_AT_ONCE // 2 + 1
    shares = [(keys_of(name, num), num) for name in "abcd"]
    for _ in range(2):
        order.moves(shares, order.due_s)
    assert not order.is_owed
    order.disturb()
    order.moves(shares, order.due_s)
    device.gone.add(keys_of("a", num)[-1])  # the most deserving, which is moved last
    assert order.is_owed and order.num_unexpected(5) == 0
    order.moves(shares, order.due_s)
    device.num_before = 9
    assert order.num_unexpected(5) == 5
