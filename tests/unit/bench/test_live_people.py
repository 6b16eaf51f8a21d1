"""How often people ask in the bench of several nodes, against what it says."""

from __future__ import annotations

import random

import pytest

from bench.live.cluster.people import LEAD_S, NUM_PEOPLE, Capacity


@pytest.mark.parametrize("repeat", [0, 3])
@pytest.mark.parametrize("load", [0.5, 0.75, 1.5])
@pytest.mark.parametrize("turns_per_s", [0.5, 4.0, 40.0])
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


def test_people_who_cannot_ask_as_often_do_not_pause() -> None:
    assert Capacity(100.0, 1.0).pause_s(1.5, 0) < 1e-9
