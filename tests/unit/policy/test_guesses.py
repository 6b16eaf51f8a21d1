"""Which guess deserves the device's memory."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine_bridge.policy.kv.guesses import MARGIN_SHARE, MIN_LEAD_S, PIN_SHARE, GuessFacts, due_s, plan


def guess(name: str, **fields: Any) -> GuessFacts:
    defaults: dict[str, Any] = {"tenant": "", "num_blocks": 10, "probability": 0.7, "priority": 0}
    defaults |= {"arrival_s": None, "issued_s": 0.0, "saved_s": 0.1, "copy_s": 0.01}
    return GuessFacts(name=name, **(defaults | fields))


guesses = st.lists(
    st.builds(
        guess,
        name=st.uuids().map(str),
        tenant=st.sampled_from("abc"),
        num_blocks=st.integers(1, 50),
        probability=st.floats(0, 1),
        priority=st.integers(-1, 1),
        is_ordered=st.booleans(),
        arrival_s=st.none() | st.floats(0, 100),
        saved_s=st.floats(0, 10),
    ),
    max_size=12,
)


@given(guesses, st.integers(0, 200), st.floats(0, 100))
def test_guesses_get_no_more_than_is_free(facts: list[GuessFacts], num_free: int, now: float) -> None:
    targets = plan(facts, num_free, 200, now)
    assert sorted(target.name for target in targets) == sorted(fact.name for fact in facts)
    assert sum(target.num_device_blocks for target in targets) <= max(num_free - int(200 * MARGIN_SHARE), 0)
    wanted = {fact.name: fact for fact in facts}
    for target in targets:
        assert 0 <= target.num_device_blocks <= wanted[target.name].num_blocks
        assert wanted[target.name].priority <= 0 or target.num_device_blocks == 0
    is_urgent = [wanted[target.name].priority < 0 for target in targets]
    assert is_urgent == sorted(is_urgent, reverse=True)


def names(facts: list[GuessFacts], now: float = 0.0) -> list[str]:
    return [target.name for target in plan(facts, 1000, 1000, now)]


def test_what_saves_more_for_its_size_goes_first() -> None:
    assert names([guess("small gain"), guess("large gain", saved_s=1.0)]) == ["large gain", "small gain"]
    assert names([guess("unlikely", probability=0.1), guess("likely")]) == ["likely", "unlikely"]
    assert names([guess("big", num_blocks=100), guess("little")]) == ["little", "big"]
    assert names([guess("new", issued_s=2.0), guess("old", issued_s=1.0)]) == ["old", "new"]
    flood = [guess(f"flood{n}", tenant="loud", saved_s=9.0) for n in range(50)]
    order = names([*flood, guess("modest", tenant="quiet")])
    assert order.index("modest") <= 1, "a flood goes behind the first one of another tenant"


def test_a_known_arrival_takes_the_device_shortly_before() -> None:
    late = guess("late", arrival_s=10.0)
    due = due_s(late)
    assert due == 10.0 - MIN_LEAD_S
    assert plan([late], 100, 100, due - 0.01)[0].num_device_blocks == 0
    assert plan([late], 100, 100, due)[0].num_device_blocks == 10


def test_ordered_guesses_share_their_places_in_the_order_in_which_they_were_issued() -> None:
    facts = [
        guess("third", issued_s=3.0, saved_s=9.0, is_ordered=True),
        guess("alone", issued_s=4.0, saved_s=3.0),
        guess("first", issued_s=1.0, saved_s=0.1, is_ordered=True),
        guess("second", issued_s=2.0, saved_s=1.0, is_ordered=True),
        guess("can wait", issued_s=0.0, saved_s=9.0, is_ordered=True, priority=1),
    ]
    assert names(facts) == ["first", "alone", "second", "third", "can wait"]
    assert names([structs.replace(fact, is_ordered=False) for fact in facts])[0] == "third"


def test_pins_of_a_tenant_share_a_part_of_the_device_and_leave_the_rest_to_other_guesses() -> None:
    facts = [guess(name, tenant="t", num_blocks=15, is_pin=True) for name in ("p", "q")]
    facts += [
        guess("other", tenant="u", num_blocks=15, is_pin=True),
        guess("plain", tenant="t", num_blocks=50),
    ]
    granted = {target.name: target.num_device_blocks for target in plan(facts, 100, 100, 0.0)}
    assert granted["p"] + granted["q"] == 100 * PIN_SHARE
    assert granted["other"] == 15 and granted["plain"] == 50
