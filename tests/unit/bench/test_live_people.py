"""When people ask, and which of their questions count."""

from __future__ import annotations

import random

import pytest

from bench.live.cluster.people import LEAD_S, NUM_PEOPLE, Capacity
from bench.live.kv.advisory_disk import counted
from bench.live.kv.people import script, times_of


@pytest.mark.parametrize(
    ("turns_per_s", "load", "repeat"), [(0.5, 0.5, 0), (4.0, 0.75, 3), (4.0, 1.5, 0), (40.0, 1.5, 3)]
)
def test_people_ask_as_often_as_the_load_says(turns_per_s: float, load: float, repeat: int) -> None:
    """Played in virtual time, each on their own: nobody has to wait."""
    node = Capacity(turns_per_s, 16 / turns_per_s)
    pause_s = node.pause_s(load, repeat)
    for_s, num_asked = 3000 / turns_per_s, 0
    for number in range(NUM_PEOPLE):
        person = random.Random(f"person {number} of {repeat}")
        mean_s = pause_s * person.lognormvariate(-(1.3**2) / 2, 1.3)
        now = 0.0
        while (now := now + mean_s * person.expovariate(1) + LEAD_S + node.answer_s) < for_s:
            num_asked += 1
    expected = min(load * turns_per_s, NUM_PEOPLE / (LEAD_S + node.answer_s))
    assert num_asked / for_s == pytest.approx(expected, rel=0.1)


def test_a_question_that_was_being_typed_when_the_round_began_does_not_count() -> None:
    times = times_of([f"person{n}" for n in range(40)], 100, 60.0, 0)
    is_cut = [each.is_cut for each in times]
    assert any(is_cut) and not all(is_cut)
    asked = [
        {"session": each.session, "turn": turn, "is_announced_late": asks_s < lead_s}
        for each in times
        for turn, (asks_s, lead_s) in enumerate(zip(each.asks_s, each.leads_s, strict=True))
    ]
    left = counted(asked, times)
    assert left == [item for item in asked if not item["is_announced_late"]]
    assert len(left) == len(asked) - sum(is_cut)
    assert any(item["turn"] > 0 for item in left)


def test_without_advisories_the_same_is_asked_at_the_same_times() -> None:
    times = times_of(["anna", "ben", "carl"], 100, 90.0, 1)
    with_, without = (script(times, lambda is_so=is_so: is_so) for is_so in (True, False))
    assert [each["leads_s"] for each in with_] == [each.leads_s for each in times]
    assert all(lead_s is None for each in without for lead_s in each["leads_s"])
    assert [(each["session"], each["asks_s"]) for each in with_] == [
        (each["session"], each["asks_s"]) for each in without
    ]
