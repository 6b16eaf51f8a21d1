"""Which of the device's blocks are put behind the others, how many at a time, and what of waiting requests counts as taken."""

from collections.abc import Collection

from engine_bridge.core.kv.eviction_order import MOST_AT_ONCE, Entries, EvictionOrder, Resident

from .shelf import keys_of


class Device:
    """Has everything but what is `gone`."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.num_before = 0  # blocks that are evicted before any that was moved

    def resident(self, entries: Entries, limit: int) -> Resident:
        num = next((at for at, name in enumerate(entries[:limit]) if name in self.gone), limit)
        return Resident(num, num)

    def holds(self, entries: Entries) -> list[bool]:
        return [entry not in self.gone for entry in entries]

    def num_evicted_before(self, entries: Collection[bytes], limit: int) -> int | None:
        return None if self.gone.intersection(entries) else min(self.num_before, limit)


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
