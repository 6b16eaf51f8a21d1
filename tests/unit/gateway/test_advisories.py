"""Advisories: merged, replaced, bounded, expired and scored, on a node that says what a test has it say."""

from typing import Any

import pytest

from gateway.advisories.advisories import (
    BURST,
    DEFAULT_TTL_S,
    GRACE_S,
    HINT_ACTION,
    MAX_LIVE,
    MAX_PER_S,
    AdvisoryRecord,
    AdvisoryRequest,
)
from gateway.errors import GatewayError

from .parts import Parts, passes, settled, skip


def submit(
    parts: Parts, session_id: str = "s", owner: str = "ann", follower: Any = None, **fields: Any
) -> AdvisoryRecord:
    return parts.advisories.submit(owner, AdvisoryRequest(session_id=session_id, **fields), "rest", follower)


def code_of(call: Any, *args: Any) -> str:
    with pytest.raises(GatewayError) as raised:
        call(*args)
    return raised.value.code


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("fields", "lifetime_s"),
    [({}, DEFAULT_TTL_S), ({"ttl_s": 5.0}, 5.0), ({"expected_arrival_s": 100.0}, 100.0 + GRACE_S)],
)
async def test_the_same_again_renews_and_is_not_told_twice(
    parts: Parts, fields: dict[str, Any], lifetime_s: float
) -> None:
    record = submit(parts, **fields)
    await parts.node.told(0)
    await passes(lifetime_s - 1)
    assert submit(parts, **fields) is record and record.describe(0)["is_merged"]
    await passes(lifetime_s - 1)
    assert not parts.node.retracted, "renewed"
    await passes(2)
    assert parts.node.retracted == [(record.id, True)]
    assert record.is_over and len(parts.node.advisories) == 1
    assert parts.count("overture_advisories_merged_total") == 1


@pytest.mark.parametrize("fields", [{"model": "shout"}, {"expected_arrival_s": 11.0}, {"priority": 5}])
async def test_one_that_says_something_else_takes_its_place(parts: Parts, fields: dict[str, Any]) -> None:
    old = submit(parts, expected_arrival_s=10.0)
    await parts.node.told(0)
    assert submit(parts, expected_arrival_s=10.4) is old, "less than half a second is nothing else"
    new = submit(parts, **{"expected_arrival_s": 10.0} | fields)
    await parts.node.told(1)
    assert new is not old and old.is_over
    assert parts.node.retracted == [(old.id, False)]
    assert old.report is not None and old.report.state == "cancelled"
    assert not new.is_over


async def test_followers_hear_of_every_change_and_of_what_they_missed_though_others_raise(
    parts: Parts,
) -> None:
    def raises(record: AdvisoryRecord) -> None:
        raise ValueError("a follower of somebody's")

    first: list[str] = []
    second: list[str] = []
    submit(parts, follower=raises)
    submit(parts, follower=lambda record: first.append(record.report.state))
    told = await parts.node.told()
    told.report("staging", num_tokens=32)
    submit(parts, follower=raises)
    record = submit(parts, follower=lambda record: second.append(record.report.state))
    told.report("warm", num_tokens=32, device_tokens=32)
    told.report("wasted", num_tokens=32)
    assert first == second == ["staging", "warm", "wasted"]
    assert record.is_over and not record.followers, "nobody is held on to after the end"
    assert parts.advisories.counts() == {"live": 0, "wasted": 1}


@pytest.mark.virtual_time
@pytest.mark.parametrize("is_heard", [True, False], ids=["heard", "still_on_their_way"])
async def test_a_key_has_so_many_under_way_and_the_oldest_makes_room(parts: Parts, is_heard: bool) -> None:
    records = []
    for number in range(MAX_LIVE + 2):
        records.append(submit(parts, f"s{number}"))
        skip(1 / MAX_PER_S)
        if is_heard:
            await parts.node.told(number)
    others = submit(parts, "s0", owner="bob")
    await parts.node.told(MAX_LIVE + 2)
    await settled()
    assert {name for name, _ in parts.node.retracted} == {record.id for record in records[:2]}
    assert [record.is_over for record in records] == [True, True] + [False] * MAX_LIVE
    assert not others.is_over


@pytest.mark.virtual_time
async def test_new_ones_are_bounded_a_second_and_renewals_are_free(parts: Parts) -> None:
    submitted: list[str] = []

    def submit_many() -> None:
        # A slow machine may take so long that some more are allowed meanwhile.
        for number in range(4 * BURST):
            submit(parts, f"s{number}")
            submitted.append(f"s{number}")

    assert code_of(submit_many) == "rate_limited" and len(submitted) >= BURST
    assert submit(parts, submitted[-1]).num_merged == 1
    submit(parts, "of somebody else", owner="bob")
    skip(BURST / MAX_PER_S)
    submit(parts, "after a while")
    assert parts.count("overture_advisories_refused_total") == 1


async def test_who_is_seldom_right_is_believed_less(parts: Parts) -> None:
    for number in range(20):
        for owner, state, lead_s in (("ann", "hit", 1.0), ("bob", "wasted", None)):
            submit(parts, f"s{number}", owner=owner)
            (await parts.node.told(len(parts.node.advisories))).report(state, lead_s=lead_s)
    right, wrong = (submit(parts, "next", owner=owner) for owner in ("ann", "bob"))
    await parts.node.told(41)
    probability = {told.advisory.advisory_id: told.advisory.probability for told in parts.node.advisories}
    assert probability[right.id] > 0.85 > 0.3 > probability[wrong.id]


def envelope(*payloads: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": HINT_ACTION, "action_version": "1"}
    actions = [action | {"payload": payload} for payload in payloads]
    return {"protocol_version": "1", "message_id": "m", "actions": actions}


async def test_hints_that_are_not_understood_are_refused_whole(parts: Parts) -> None:
    whole = {"session_id": "s"}
    wrong: list[Any] = [7, {}, {"protocol_version": "1", "message_id": "m", "actions": [7]}]
    wrong += [
        envelope(whole, whole | change) for change in ({"session_id": ""}, {"made_up": 1}, {"ttl_s": -1})
    ]
    for hints in (*wrong, envelope({}), envelope(*[whole] * 65)):
        assert code_of(parts.advisories.hint, "ann", hints) == "bad_request", hints
    await settled()
    assert not parts.node.advisories


async def test_a_history_that_no_tier_holds_is_computed_and_then_advised_about(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes.")
    seen: list[str] = []
    submit(parts, turn.session_id, model="pirate", follower=lambda record: seen.append(record.report.state))
    (await parts.node.told()).report("unknown")
    request = await parts.node.prefilled()
    assert request.adapter == "pirate"
    assert [message.content for message in request.messages][:2] == ["Hello!", "Yes."]
    again = await parts.node.told(1)
    again.report("warm", num_tokens=32, device_tokens=32)
    assert seen == ["unknown", "warm"], "who followed the first hears of the second"
    assert parts.count("overture_computed_ahead_tokens_total", what="history") == 16
    again.report("unknown")
    await settled()
    assert len(parts.node.prefills) == 1, "our own advisory computes nothing again"
