"""The host tier's memory."""

from kvtiers.io.host_pool import HostPool


def test_slots_come_in_runs_and_go_back() -> None:
    pool = HostPool(slot_bytes=8, capacity_bytes=80)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(6) == [4, 5, 6, 7, 8, 9]
    assert pool.allocate(1) is None
    pool.free([5, 1, 2])
    assert sorted(pool.allocate(3) or []) == [1, 2, 5]
    pool.check_invariants()
