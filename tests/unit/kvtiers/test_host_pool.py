"""The host tier's memory."""

from __future__ import annotations

from kvtiers.io.host_pool import HUGE_PAGE_BYTES, HostPool


def test_populating_changes_no_byte_and_stops_when_unwanted() -> None:
    pool = HostPool(slot_bytes=4096, capacity_bytes=3 * HUGE_PAGE_BYTES)
    pool.region[:] = 7
    answers = iter([True, True, True, True])
    pool.populate(lambda: next(answers))
    assert next(answers)  # three pieces were asked for
    assert (pool.region == 7).all()
    pool.populate(lambda: False)


def test_slots_come_in_runs_and_go_back() -> None:
    pool = HostPool(slot_bytes=8, capacity_bytes=80)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(6) == [4, 5, 6, 7, 8, 9]
    assert pool.allocate(1) is None
    pool.free([5, 1, 2])
    assert sorted(pool.allocate(3) or []) == [1, 2, 5]
    pool.check_invariants()
