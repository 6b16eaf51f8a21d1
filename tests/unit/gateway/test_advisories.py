"""Advisories: merged, replaced, bounded, expired and scored, on a node that says what a test has it say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_bridge.protocol.errors import EngineUnavailable, NotSupported
from engine_bridge.protocol.node import pack_token_ids
from gateway.advisories.advisories import (
    BURST,
    DEFAULT_TTL_S,
    GRACE_S,
    MAX_LIFETIMES,
    MAX_LIVE,
    MAX_PER_S,
    Advisories,
    AdvisoryRecord,
    AdvisoryRequest,
)
from gateway.errors import GatewayError

from .fake_node import PATIENCE_S
from .parts import Parts, passes, settled, skip


def submit(
    parts: Parts, session_id: str = "s", owner: str = "ann", follower: Any = None, **fields: Any
) -> AdvisoryRecord:
    return parts.advisories.submit(owner, AdvisoryRequest(session_id=session_id, **fields), "rest", follower)


def code_of(call: Any, *args: Any, **fields: Any) -> str:
    with pytest.raises(GatewayError) as raised:
        call(*args, **fields)
    return raised.value.code


async def started(parts: Parts, number: int) -> None:
    """Wait until the node was told of so many advisories: each asks the store first."""
    await parts.node.until(lambda: len(parts.node.advisories) >= number)


# -- one advisory ----------------------------------------------------------------------------------------------------


async def test_an_advisory_reaches_the_node_with_what_the_session_ends_in(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes", ".")
    record = submit(parts, turn.session_id, model="shout", expected_arrival_s=5.0, ordered=True, priority=3)
    advisory = (await parts.node.told()).advisory
    assert (advisory.advisory_id, advisory.session_id) == (record.id, turn.session_id)
    assert (advisory.adapter, advisory.tenant) == ("shout", "ann")
    assert (advisory.expected_arrival_s, advisory.priority, advisory.is_ordered) == (5.0, 3, True)
    assert advisory.token_ids == pack_token_ids([7, 8, 9, 1, 2])
    assert 0 < advisory.probability < 1


async def test_what_is_under_way_for_a_session_ends_when_it_shows_other_turns(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes", ".")
    first = submit(parts, turn.session_id)
    await started(parts, 1)
    parts.advisories.end_session("ann", turn.session_id)
    assert parts.node.retracted == [(first.id, False)]
    second = submit(parts, turn.session_id)
    assert second is not first and first.num_merged == 0
    parts.advisories.end_session("ann", "another")
    assert parts.node.retracted == [(first.id, False)]


async def test_a_session_that_nobody_stored_is_advised_about_all_the_same(parts: Parts) -> None:
    submit(parts, "an-agents-first")
    assert (await parts.node.told()).advisory.token_ids == b""


async def test_what_the_node_reports_can_be_asked_for(parts: Parts) -> None:
    record = submit(parts)
    now = asyncio.get_running_loop().time
    assert record.describe(now())["state"] == "accepted"
    told = await parts.node.told()
    told.report("staging", num_tokens=64)
    assert parts.advisories.find("ann", record.id).describe(now())["state"] == "staging"
    told.report("warm", num_tokens=64, device_tokens=64, host_bytes=1000)
    body = record.describe(now())
    assert (body["state"], body["tier"], body["host_bytes"]) == ("warm", "device", 1000)
    assert 0 < body["expires_in_s"] <= DEFAULT_TTL_S
    told.report("hit", num_tokens=64, device_tokens=64, lead_s=2.0)
    body = record.describe(now())
    assert (body["state"], body["lead_ms"], body["expires_in_s"]) == ("hit", 2000.0, 0.0)


async def test_an_advisory_of_another_key_does_not_exist(parts: Parts) -> None:
    record = submit(parts)
    assert code_of(parts.advisories.find, "bob", record.id) == "not_found"
    assert code_of(parts.advisories.cancel, "bob", record.id) == "not_found"
    assert code_of(parts.advisories.find, "ann", "adv-unheard-of") == "not_found"


async def test_the_base_model_by_name_is_no_adapter_and_an_unknown_one_is_refused(parts: Parts) -> None:
    submit(parts, model="fake-model")
    assert (await parts.node.told()).advisory.adapter is None
    assert code_of(submit, parts, "t", model="nobody") == "unknown_model"


@pytest.mark.parametrize("priority", [-1, 1001])
async def test_a_priority_that_is_not_its_client_s_to_set_is_refused(parts: Parts, priority: int) -> None:
    assert code_of(submit, parts, priority=priority) == "bad_request"
    await passes(1)
    assert not parts.node.advisories


async def test_where_the_operator_allows_it_an_advisory_may_be_urgent(parts: Parts) -> None:
    parts.advisories = Advisories(
        parts.node,
        parts.store,
        parts.metrics,
        parts.drafts,
        may_hurry=True,
        clock=asyncio.get_running_loop().time,
    )
    submit(parts, priority=-1)
    assert (await parts.node.told()).advisory.priority == -1


# -- merging, replacing, ending --------------------------------------------------------------------------------------


async def test_the_same_again_renews_and_is_not_told_twice(parts: Parts) -> None:
    record = submit(parts)
    await started(parts, 1)
    await passes(DEFAULT_TTL_S - 1)
    assert submit(parts) is record
    assert record.describe(0)["is_merged"]
    await passes(DEFAULT_TTL_S - 1)
    assert not parts.node.retracted, "renewed"
    await passes(2)
    assert parts.node.retracted == [(record.id, True)]
    assert record.is_over and len(parts.node.advisories) == 1
    assert parts.count("overture_advisories_merged_total") == 1


async def test_nobody_types_for_ever(parts: Parts) -> None:
    """After MAX_LIFETIMES the next word begins a new advisory."""
    record = submit(parts)
    await started(parts, 1)
    for _ in range(MAX_LIFETIMES * 2):
        await passes(DEFAULT_TTL_S / 2)
        if record.is_over:
            break
        assert submit(parts) is record
    assert record.is_over
    assert submit(parts) is not record


@pytest.mark.parametrize(
    "fields", [{"model": "shout"}, {"expected_arrival_s": 30.0}, {"priority": 5}], ids=lambda f: next(iter(f))
)
async def test_one_that_says_something_else_takes_its_place(parts: Parts, fields: dict[str, Any]) -> None:
    old = submit(parts)
    await started(parts, 1)
    new = submit(parts, **fields)
    await started(parts, 2)
    assert new is not old and old.is_over
    assert parts.node.retracted == [(old.id, False)]
    assert old.report is not None and old.report.state == "cancelled"
    assert not new.is_over


async def test_an_arrival_that_differs_by_less_than_half_a_second_is_the_same(parts: Parts) -> None:
    record = submit(parts, expected_arrival_s=10.0)
    assert submit(parts, expected_arrival_s=10.4) is record
    assert submit(parts, expected_arrival_s=11.0) is not record


async def test_sessions_and_owners_do_not_merge(parts: Parts) -> None:
    records = {id(submit(parts, s, owner=owner)) for s in ("s", "t") for owner in ("ann", "bob")}
    assert len(records) == 4
    await started(parts, 4)


@pytest.mark.parametrize(
    ("fields", "lifetime_s"),
    [({}, DEFAULT_TTL_S), ({"ttl_s": 5.0}, 5.0), ({"expected_arrival_s": 100.0}, 100.0 + GRACE_S)],
)
async def test_its_time_runs_out(parts: Parts, fields: dict[str, Any], lifetime_s: float) -> None:
    record = submit(parts, **fields)
    await started(parts, 1)
    await passes(lifetime_s - 0.5)
    assert not record.is_over
    await passes(1.0)
    assert record.is_over and record.report is not None and record.report.state == "expired"


async def test_one_that_is_taken_back_is_cancelled_and_stays_so(parts: Parts) -> None:
    record = submit(parts)
    await started(parts, 1)
    parts.advisories.cancel("ann", record.id)
    assert record.is_over and parts.node.retracted == [(record.id, False)]
    parts.advisories.cancel("ann", record.id)
    assert len(parts.node.retracted) == 1
    assert submit(parts) is not record


async def test_one_that_is_taken_back_before_the_node_heard_of_it_is_taken_back_again(parts: Parts) -> None:
    parts.node.gate.clear()
    record = submit(parts)
    await settled()
    parts.advisories.cancel("ann", record.id)
    assert not record.is_over, "the node did not know it yet"
    again = submit(parts)
    assert again is not record, "one that is on its way out renews nobody"
    parts.node.gate.set()
    await started(parts, 2)
    await settled()
    assert record.is_over and record.report is not None and record.report.state == "cancelled"
    assert not again.is_over


async def test_one_that_expires_before_the_node_heard_of_it_is_over_as_expired(parts: Parts) -> None:
    parts.node.gate.clear()
    record = submit(parts, ttl_s=1.0)
    await passes(2.0)
    parts.node.gate.set()
    await started(parts, 1)
    await settled()
    assert record.report is not None and record.report.state == "expired"


@pytest.mark.parametrize("error", [NotSupported("no tiers"), EngineUnavailable("it is being rebuilt")])
async def test_what_the_node_cannot_act_on_is_unknown_and_over(parts: Parts, error: Any) -> None:
    parts.node.advise_error = error
    seen: list[str] = []
    record = submit(parts, follower=lambda r: seen.append(r.report.state))
    async with asyncio.timeout(PATIENCE_S):
        while not record.is_over:
            await asyncio.sleep(0)
    assert seen == ["unknown"]
    parts.node.advise_error = None
    assert submit(parts) is not record


# -- followers -------------------------------------------------------------------------------------------------------


async def test_followers_hear_of_every_change_and_of_what_they_missed(parts: Parts) -> None:
    seen: dict[str, list[str]] = {"first": [], "second": []}

    def listen(name: str) -> Any:
        return lambda record: seen[name].append(record.report.state)

    submit(parts, follower=listen("first"))
    told = await parts.node.told()
    told.report("staging", num_tokens=32)
    record = submit(parts, follower=listen("second"))
    told.report("warm", num_tokens=32, device_tokens=32)
    told.report("wasted", num_tokens=32)
    assert seen == {"first": ["staging", "warm", "wasted"], "second": ["staging", "warm", "wasted"]}
    assert not record.followers, "nobody is held on to after the end"


# -- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_heard", [True, False], ids=["heard", "still_on_their_way"])
async def test_a_key_has_so_many_under_way_and_the_oldest_makes_room(parts: Parts, is_heard: bool) -> None:
    records = []
    for number in range(MAX_LIVE + 2):
        records.append(submit(parts, f"s{number}"))
        skip(1 / MAX_PER_S)
        if is_heard:
            await started(parts, number + 1)
    others = submit(parts, "s0", owner="bob")
    await started(parts, MAX_LIVE + 3)
    await settled()
    assert {name for name, _ in parts.node.retracted} == {record.id for record in records[:2]}
    assert [record.is_over for record in records] == [True, True] + [False] * MAX_LIVE
    assert not others.is_over


async def test_new_ones_are_bounded_a_second_and_renewals_are_free(parts: Parts) -> None:
    submitted: list[str] = []

    def submit_many() -> None:
        for number in range(
            4 * BURST
        ):  # a slow machine may take so long that some more are allowed meanwhile
            submit(parts, f"s{number}")
            submitted.append(f"s{number}")

    assert code_of(submit_many) == "rate_limited" and len(submitted) >= BURST
    assert submit(parts, submitted[-1]).num_merged == 1
    submit(parts, "of somebody else", owner="bob")
    skip(BURST / MAX_PER_S)
    submit(parts, "after a while")
    assert parts.count("overture_advisories_refused_total") == 1


# -- what they were worth --------------------------------------------------------------------------------------------


async def test_an_outcome_is_told_once(parts: Parts) -> None:
    submit(parts)
    (await parts.node.told()).report("late", num_tokens=64, device_tokens=32, lead_s=0.5, late_s=0.1)
    outcome = parts.advisories.take_outcome("ann", "s")
    assert outcome is not None and (outcome["state"], outcome["late_ms"]) == ("late", 100.0)
    assert parts.advisories.take_outcome("ann", "s") is None
    assert parts.advisories.take_outcome("bob", "s") is None


async def test_one_without_a_request_has_no_outcome(parts: Parts) -> None:
    submit(parts)
    (await parts.node.told()).report("expired")
    assert parts.advisories.take_outcome("ann", "s") is None


async def test_who_is_seldom_right_is_believed_less(parts: Parts) -> None:
    for number in range(20):
        for owner, state in (("ann", "hit"), ("bob", "wasted")):
            submit(parts, f"s{number}", owner=owner)
            await started(parts, len(parts.node.advisories) + 1)
            parts.node.advisories[-1].report(state, lead_s=1.0 if state == "hit" else None)  # type: ignore[arg-type]
    right, wrong = (submit(parts, "next", owner=owner) for owner in ("ann", "bob"))
    await started(parts, 42)
    probability = {told.advisory.advisory_id: told.advisory.probability for told in parts.node.advisories}
    assert probability[right.id] > 0.85 > 0.3 > probability[wrong.id]


@pytest.mark.parametrize("state", ["cancelled", "unknown"])
async def test_what_says_nothing_about_its_sender_does_not_count(parts: Parts, state: Any) -> None:
    for number in range(10):
        submit(parts, f"s{number}")
        await started(parts, number + 1)
        parts.node.advisories[-1].report(state)
    submit(parts, "next")
    await started(parts, 11)
    assert parts.node.advisories[-1].advisory.probability == parts.node.advisories[0].advisory.probability


# -- hints -----------------------------------------------------------------------------------------------------------


def envelope(*payloads: Any, kind: str = "session.advise") -> dict[str, Any]:
    actions = [
        {"action_id": str(n), "action_type": kind, "action_version": "1", "payload": payload}
        for n, payload in enumerate(payloads)
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": actions}


async def test_an_envelope_of_hints_is_acted_on(parts: Parts) -> None:
    records = parts.advisories.hint(
        "ann", envelope({"session_id": "s"}, {"session_id": "t", "model": "shout"})
    )
    assert [(record.wanted.session_id, record.adapter) for record in records] == [("s", None), ("t", "shout")]
    await started(parts, 2)
    assert parts.count("overture_advisories_total", source="hint") == 2


async def test_hints_of_other_kinds_are_not_ours_to_judge(parts: Parts) -> None:
    assert parts.advisories.hint("ann", envelope({"whatever": 1}, kind="block.pin")) == []


@pytest.mark.parametrize(
    "hints",
    [
        7,
        {},
        {"protocol_version": "1", "message_id": "m", "actions": [7]},
        envelope({}),
        envelope({"session_id": ""}),
        envelope({"session_id": "s", "made_up": 1}),
        envelope({"session_id": "s", "ttl_s": -1}),
        envelope(*[{"session_id": "s"}] * 65),
    ],
)
async def test_hints_that_are_not_understood_are_refused_whole(parts: Parts, hints: Any) -> None:
    assert code_of(parts.advisories.hint, "ann", hints) == "bad_request"
    await settled()
    assert not parts.node.advisories


# -- what is computed ahead ------------------------------------------------------------------------------------------


async def test_a_history_that_no_tier_holds_is_computed_and_then_advised_about(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes.")
    seen: list[str] = []
    submit(parts, turn.session_id, model="pirate", follower=lambda record: seen.append(record.report.state))
    (await parts.node.told()).report("unknown")
    request = await parts.node.prefilled()
    assert request.context.adapter == "pirate" and [m.content for m in request.messages][:2] == [
        "Hello!",
        "Yes.",
    ]
    again = await parts.node.told(1)
    again.report("warm", num_tokens=32, device_tokens=32)
    assert seen == ["unknown", "warm"], "who followed the first hears of the second"
    assert parts.count("overture_computed_ahead_tokens_total", what="history") == 16
    again.report("unknown")
    await settled()
    assert len(parts.node.prefills) == 1, "our own advisory computes nothing again"


async def test_a_draft_is_not_kept_with_its_advisory(parts: Parts) -> None:
    """A client may have hundreds of advisories under way, and thousands that are over, each with a draft as long as a body."""
    record = submit(parts, draft="a word " * 1000)
    await started(parts, 1)
    parts.advisories.cancel("ann", record.id)
    await settled()
    kept = parts.advisories.find("ann", record.id)
    assert kept.wanted.session_id == "s" and kept.wanted.draft is None


async def test_a_draft_goes_along_with_its_advisory_and_away_with_it(parts: Parts) -> None:
    parts.node.gate.clear()
    record = submit(parts, draft="What is the capital of ")
    await passes(1.0)
    assert (await parts.node.prefilled()).messages[-1].content == "What is the capital of"
    parts.advisories.cancel("ann", record.id)
    await parts.node.until(lambda: parts.node.cancelled_prefills == 1)


async def test_a_follower_that_raises_keeps_no_other_from_hearing(parts: Parts) -> None:
    def raises(record: AdvisoryRecord) -> None:
        raise ValueError("a follower of somebody's")

    heard: list[str] = []
    record = submit(parts, follower=raises)
    submit(parts, follower=lambda record: heard.append(record.describe(0.0)["state"]))
    told = await parts.node.told()
    told.report("warm", num_tokens=32)
    submit(parts, follower=raises)
    told.report("hit", num_tokens=32)
    assert heard == ["warm", "hit"]
    assert record.is_over and not record.followers
    assert parts.advisories.counts() == {"live": 0, "hit": 1}
