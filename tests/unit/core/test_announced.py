"""Adapters that advisories name: how near they come, who gives way, and the account of their bytes (E4, E6)."""

from collections import Counter

import pytest

from engine_bridge.core.adapters.adapter_moves import LoadToHost
from engine_bridge.core.adapters.announced import Announcements
from engine_bridge.core.adapters.residency import AdapterPlaces
from engine_bridge.protocol.node import AdvisoryReport, AdvisoryState
from tests.unit.core.test_residency import NOBODY, SIZE, bring, lay_out, make, serve


def announce(places: AdapterPlaces, adapter_id: int, probability: float = 1.0, now: float = 0.0) -> None:
    """By an advisory of the adapter's own, read into host memory and laid out as far as it may come."""
    places.announce(f"adv{adapter_id}", adapter_id, probability)
    if LoadToHost(adapter_id, "disk") in places.advance(NOBODY, now):
        places.loaded(adapter_id, SIZE, "disk", 1.0, now)
    lay_out(places, places.advance(NOBODY, now))


def told(state: AdvisoryState, advisory_id: str = "adv1") -> AdvisoryReport:
    return AdvisoryReport(advisory_id=advisory_id, session_id="s", state=state)


def test_one_that_is_only_guessed_stays_in_host_memory() -> None:
    places = make()
    bring(places, 1)
    assert places.advance(NOBODY, 0.0) == []
    announce(places, 2, probability=0.4)
    assert (places.table[2].place, places.table.slots) == ("host", [None, None])
    places.announce("adv", 99, 1.0)
    assert not places.has_work(0.0), "nobody knows what that is"


def test_it_takes_the_slot_of_an_adapter_that_nobody_uses() -> None:
    places = make(num_slots=1)
    bring(places, 1)
    serve(places, 1)
    announce(places, 2)
    assert places.table.slots == [2]


@pytest.mark.parametrize(
    "state, is_late, expected",
    [
        ("hit", False, "hit"),
        ("hit", True, "late"),
        ("late", True, "late"),
        ("warm", True, "warm"),
        ("expired", False, "wasted"),
        ("cancelled", False, "cancelled"),
    ],
)
def test_the_adapter_counts_in_an_advisorys_state(state: AdvisoryState, is_late: bool, expected: str) -> None:
    announced = Announcements(Counter())
    announced.begin("adv1", 1, 1.0)
    announced.moved(1, SIZE)
    assert announced.accounted("adv1", is_late, told(state), 1.0).state == expected
