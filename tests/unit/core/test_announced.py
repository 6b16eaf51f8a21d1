"""Adapters that advisories name: how near they come, who gives way, and the account of their bytes (E4, E6)."""

from __future__ import annotations

from collections import Counter

import pytest

from engine_bridge.core.adapters.adapter_moves import DropHost, Fill, LeaveSlot, LoadToHost
from engine_bridge.core.adapters.announced import EXPECTED_FOR_S, Announcements
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


# -- how near it comes ---------------------------------------------------------------------------------------------------


def test_an_announced_adapter_comes_to_a_slot_that_is_free() -> None:
    places = make()
    announce(places, 1)
    assert places.table[1].is_filled
    assert places.advance(NOBODY, 0.0) == []
    assert not places.has_work(0.0), "it is not looked after any more"


def test_one_that_is_only_guessed_stays_in_host_memory() -> None:
    places = make()
    bring(places, 1)
    assert places.advance(NOBODY, 0.0) == []
    announce(places, 2, probability=0.4)
    assert (places.table[2].place, places.table.slots) == ("host", [None, None])


def test_it_takes_the_slot_of_an_adapter_that_nobody_uses() -> None:
    places = make(num_slots=1)
    bring(places, 1)
    serve(places, 1)
    announce(places, 2)
    assert places.table.slots == [2]


def test_it_takes_no_slot_from_a_request_that_runs_or_waits() -> None:
    places = make(num_slots=1)
    bring(places, 1)
    places.requested("r", 1, 0.0)
    lay_out(places, places.enter([1], {1}, 0.0))
    bring(places, 2)
    places.announce("adv2", 2, 1.0)
    assert places.advance({1}, 0.0) == [], "it runs"
    assert places.advance(NOBODY, 0.0) == [], "it waits: preempted"
    assert not places.has_work(0.0)
    places.released("r", 1, 1.0)
    assert places.advance(NOBODY, 1.0) == [LeaveSlot(1, 0), Fill(2, 0, "host")]


def test_announced_adapters_hold_half_of_the_slots_at_most() -> None:
    places = make(num_adapters=6, num_slots=4, host_bytes=6 * SIZE)
    for adapter_id in (4, 5, 6):
        bring(places, adapter_id)
        serve(places, adapter_id)
    for adapter_id in (1, 2, 3):
        announce(places, adapter_id)
    ahead = {adapter_id for adapter_id in places.table.slots if adapter_id in (1, 2, 3)}
    assert ahead == {1, 2}
    assert places.table[3].place == "host"


def test_a_guess_pushes_no_announced_adapter_out_of_host_memory() -> None:
    places = make(host_bytes=SIZE, num_slots=1)
    places.announce("adv1", 1, 1.0)
    places.advance(NOBODY, 0.0)
    places.loaded(1, SIZE, "disk", 1.0, 0.0)
    places.prefetch(2)
    assert not any(isinstance(move, DropHost | LoadToHost) for move in places.advance(NOBODY, 0.0))
    places.requested("r", 2, 0.0)
    lay_out(places, [Fill(1, 0, "host")])
    assert LoadToHost(2, "disk") in places.advance(NOBODY, 0.0), "a request does"


def test_who_announces_something_unknown_changes_nothing() -> None:
    places = make()
    places.announce("adv", 99, 1.0)
    assert not places.has_work(0.0)


def test_of_an_unknown_session_a_request_is_not_expected_for_ever() -> None:
    places = make(num_slots=1)
    announce(places, 1)
    places.announced.accounted("adv1", False, told("unknown"), 0.0)
    bring(places, 2)
    places.announce("adv2", 2, 1.0)
    assert places.advance(NOBODY, EXPECTED_FOR_S - 1) == [], "the slot is the first one's"
    places.wanted.something_moved()
    assert Fill(2, 0, "host") in places.advance(NOBODY, EXPECTED_FOR_S)


# -- the account ---------------------------------------------------------------------------------------------------------


def test_bytes_are_those_that_were_read_and_laid_out() -> None:
    places = make()
    announce(places, 1)
    places.requested("r", 1, 1.0)
    report = places.announced.accounted("adv1", False, told("hit"), 1.0)
    assert (report.state, report.adapter_bytes) == ("hit", 2 * SIZE)
    assert places.counts["announced_bytes:used"] == 2 * SIZE
    assert places.counts["load_bytes:disk"] + places.counts["slot_bytes"] == 2 * SIZE


def test_what_is_there_already_costs_nothing() -> None:
    places = make()
    bring(places, 1)
    serve(places, 1)
    announce(places, 1)
    assert places.announced.accounted("adv1", False, told("cancelled"), 1.0).adapter_bytes == 0


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
def test_the_adapter_counts_in_how_an_advisory_stands(
    state: AdvisoryState, is_late: bool, expected: str
) -> None:
    announced = Announcements(Counter())
    announced.begin("adv1", 1, 1.0)
    announced.moved(1, SIZE)
    assert announced.accounted("adv1", is_late, told(state), 1.0).state == expected


def test_an_advisory_of_an_adapter_that_did_not_move_expires_as_before() -> None:
    announced = Announcements(Counter())
    announced.begin("adv1", 1, 1.0)
    assert announced.accounted("adv1", False, told("expired"), 1.0).state == "expired"


def test_bytes_in_vain_are_told_apart_and_none_is_counted_twice() -> None:
    counts: Counter[str] = Counter()
    announced = Announcements(counts)
    announced.begin("adv1", 1, 1.0)
    announced.begin("adv2", 1, 1.0)
    announced.moved(1, 7)
    announced.begin("adv3", 2, 1.0)
    announced.moved(2, 5)
    announced.requested(1)
    announced.moved(1, 100)  # for the request
    for advisory_id, state in (("adv1", "hit"), ("adv2", "cancelled"), ("adv3", "expired")):
        announced.accounted(advisory_id, False, told(state, advisory_id), 1.0)
    assert counts == {"announced_bytes:used": 7, "announced_bytes:in_vain": 5}
    assert not announced.is_expected(1) and not announced.is_expected(2)


def test_an_adapter_is_waited_for_where_no_tier_knows_its_session() -> None:
    counts: Counter[str] = Counter()
    announced = Announcements(counts)
    announced.begin("adv1", 1, 1.0)
    announced.accounted("adv1", True, told("unknown"), 0.0)
    announced.moved(1, SIZE)
    assert announced.is_expected(1)
    announced.expire(EXPECTED_FOR_S)
    assert not announced.is_expected(1)
    assert counts == {"announced_bytes:in_vain": SIZE}


def test_while_its_advisory_is_renewed_an_adapter_is_expected() -> None:
    announced = Announcements(Counter())
    announced.begin("adv1", 1, 1.0)
    announced.moved(1, SIZE)
    announced.accounted("adv1", False, told("warm"), 0.0)
    announced.expire(10 * EXPECTED_FOR_S)
    assert announced.is_expected(1)
    assert announced.accounted("adv1", False, told("hit"), 10 * EXPECTED_FOR_S).adapter_bytes == SIZE
