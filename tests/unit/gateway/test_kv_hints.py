"""Hints of KV acted on: about the call's own session when it is answered, about others at once, and never about another key's."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge.policy.kv.hints import MAX_PINS, KvHint
from gateway.access.shares import Shares
from gateway.advisories.advisories import BURST
from gateway.errors import GatewayError
from gateway.hints.kv_hints import Asker, HintRecord, KvHintRequest, KvHints
from gateway.hints.parsing import CallHints
from gateway.recognition.recognition import Recognition, SessionCall
from gateway.turns.replies import AnswerReader

from .parts import Parts, passes, settled, skip

ANN, EVE = Asker("ann", "ann"), Asker("eve", "eve")
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


class Said:
    """Hints on a fake node."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.node = parts, parts.node
        self.recognition = Recognition(parts.advisories, parts.metrics)
        self.hints = KvHints(
            parts.advisories, self.recognition, parts.node, parts.metrics, parts.advisories._clock
        )

    def count(self, **labels: str) -> float:
        return self.parts.count("overture_kv_hints_total", **labels)

    async def began(self, owner: str = "ann", **body: Any) -> SessionCall:
        call = await self.recognition.began(
            owner, "chat", {}, {"model": "m", "messages": MESSAGES, **body}, None, "", is_named=False
        )
        assert call is not None
        return call

    async def submit(self, action: Any, *, asker: Asker = ANN, **fields: Any) -> HintRecord:
        return await self.hints.submit(asker, KvHintRequest(action=action, **fields))

    def answered(self, call: SessionCall, *hints: KvHint, asker: Asker = ANN) -> str:
        told = self.hints.heard(asker, call, CallHints(hints=list(hints)))
        self.recognition.ended(call, AnswerReader("chat"))
        return told


@pytest.fixture
def said(parts: Parts) -> Said:
    return Said(parts)


async def test_a_hint_about_a_calls_own_session_waits_for_its_answer(said: Said) -> None:
    call = SessionCall("ann", "s", None)
    told = said.hints.heard(ANN, call, CallHints(hints=[KvHint("retain", "openai", ttl_s=1e6)]))
    assert told == "retain=clipped;ttl=86400" and not said.node.session_hints
    said.recognition.ended(call, AnswerReader("chat"))
    (hint,) = said.node.session_hints
    assert (hint.session_id, hint.tenant, hint.keep_s) == ("s", "ann", 86400.0)
    assert said.count(source="openai", action="retain", outcome="clipped") == 1


async def test_what_a_call_without_a_session_says_is_counted_as_unknown(said: Said) -> None:
    assert said.hints.heard(ANN, None, CallHints(hints=[KvHint("pin", "kv_hints")])) == "pin=unknown"
    await settled()
    assert not said.node.session_hints and not said.node.advisories


async def test_each_action_becomes_its_own_advice(said: Said) -> None:
    for action, fields in {
        "retain": {"keep_s": 60.0},
        "share": {"keep_s": 60.0, "is_shared": True},
        "demote": {"keep_s": 60.0, "is_idle": True},
        "evict": {"keep_s": 0.0, "is_idle": True},
    }.items():
        said.answered(SessionCall("ann", action, None), KvHint(action, "kv_hints", ttl_s=60.0))  # type: ignore[arg-type]
        hint = said.node.session_hints[-1]
        assert hint.session_id == action
        assert {name: getattr(hint, name) for name in fields} == fields
    assert said.node.ended_sessions == [("ann", "evict")]
    said.answered(SessionCall("ann", "p", None), KvHint("prefetch", "kv_hints", arrival_s=2.0))
    said.answered(SessionCall("ann", "q", None), KvHint("pin", "kv_hints"))
    prefetch, pin = (await said.node.told(0)).advisory, (await said.node.told(1)).advisory
    assert (prefetch.session_id, prefetch.expected_arrival_s, prefetch.is_pin) == ("p", 2.0, False)
    assert (pin.session_id, pin.lifetime_s, pin.is_pin) == ("q", 300.0, True)


@pytest.mark.virtual_time
async def test_a_pin_is_renewed_by_each_answer_of_its_session_until_its_time_is_over(said: Said) -> None:
    call = SessionCall("ann", "s", None)
    said.answered(call, KvHint("pin", "kv_hints", ttl_s=100.0))
    (await said.node.told(0)).report("hit", lead_s=1.0)
    skip(40.0)
    said.answered(SessionCall("ann", "s", None))
    again = await said.node.told(1)
    assert again.advisory.is_pin and 59.0 < again.advisory.lifetime_s <= 60.0
    await passes(61.0)
    assert again.is_over
    said.answered(SessionCall("ann", "s", None))
    await settled()
    assert len(said.node.advisories) == 2


async def test_a_hint_by_its_messages_finds_the_keys_own_session_alone(said: Said) -> None:
    call = await said.began()
    said.answered(call)
    wanted: Any = {"messages": MESSAGES, "model": "m"}
    assert (await said.submit("retain", asker=EVE, **wanted)).outcome == "unknown"
    assert not said.node.session_hints
    record = await said.submit("retain", **wanted)
    assert (record.sessions, record.outcome) == ([call.session_id], "granted")
    with pytest.raises(GatewayError):
        said.hints.find("eve", record.id)
    said.hints.take_back("ann", record.id)
    assert [hint.keep_s for hint in said.node.session_hints] == [300.0, 0.0]
    with pytest.raises(GatewayError):
        await said.submit("retain")


async def test_a_clients_name_stands_for_the_conversations_of_its_key_under_it(said: Said) -> None:
    one, two = (
        await said.began(agent_hint={"session_id": "w"}),
        await said.began(agent_hint={"session_id": "w"}),
    )
    other = await said.began("eve", agent_hint={"session_id": "w"})
    record = await said.submit("demote", session_id="w")
    assert record.sessions == [one.session_id, two.session_id] and one.session_id != two.session_id
    assert {hint.tenant for hint in said.node.session_hints} == {"ann"}
    for call in (one, two, other):
        said.answered(call)


async def test_what_is_beyond_a_share_is_told_and_not_done(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = said.hints._clock()
    monkeypatch.setattr(said.hints, "_clock", lambda: now)  # or the share fills again on a slow machine
    for number in range(MAX_PINS):
        assert (await said.submit("pin", session_id=f"s{number}")).outcome == "granted"
    before = len(said.node.session_hints)
    record = await said.submit("pin", session_id="more")
    assert (record.outcome, record.ttl_s, record.advisories) == ("full", 0.0, [])
    assert len(said.node.session_hints) == before
    for number in range(BURST):
        await said.submit("prefetch", session_id=f"p{number}")
    assert (await said.submit("prefetch", session_id="p")).outcome == "refused"


async def test_an_envelope_says_all_that_was_passed_over(said: Said) -> None:
    found = CallHints(hints=[KvHint("pin", "kv_hints")], advised=[{"session_id": 7}, {"session_id": "s"}])
    assert not said.hints.submit_all(ANN, found)
    assert [outcome for _, _, outcome in found.noted] == ["malformed", "malformed"]


async def test_many_hints_of_one_key_cost_no_other_keys_record(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(said.hints, "_places", Shares(2, 4))
    eves = await said.submit("retain", asker=EVE, session_id="e")
    anns = [await said.submit("retain", session_id=f"a{n}") for n in range(6)]
    assert said.hints.find("eve", eves.id) is eves and said.hints.find("ann", anns[-1].id) is anns[-1]
    with pytest.raises(GatewayError):
        said.hints.find("ann", anns[0].id)
