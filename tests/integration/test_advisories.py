"""Advisories as clients send them: the chat socket, REST, hints on a request; what they answer, and what they must not do."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from gateway.advisories import advisories
from gateway.advisories.advisories import BURST, AdvisoryRequest
from gateway.app import Server

from .conftest import KEYS, MODEL, Gateways
from .test_chat_socket import raw

SHORT = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
LONG_TEXT = "Please remember all of this: " + " ".join(f"the {n}th is called Anna." for n in range(60))


async def ask(
    socket: Any, name: str, content: str, session_id: str | None = None, **fields: Any
) -> dict[str, Any]:
    await socket.send(
        type="message", id=name, content=content, session_id=session_id, sampling=SHORT, **fields
    )
    done: dict[str, Any] = await socket.receive("done", "error")
    assert done["type"] == "done", done
    return done


async def until(socket: Any, *states: str) -> dict[str, Any]:
    while True:
        frame: dict[str, Any] = await socket.receive("advisory")
        if frame["state"] in states:
            return frame


async def settled(http: aiohttp.ClientSession, advisory_id: str, *states: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            async with http.get(f"/v1/advisories/{advisory_id}") as reply:
                assert reply.status == 200
                body: dict[str, Any] = await reply.json()
            if body["state"] in states:
                return body
            await asyncio.sleep(0.02)


async def test_typing_warms_a_session_and_done_says_what_it_was_worth(server: Server) -> None:
    async with raw(server) as socket:
        session_id = (await ask(socket, "one", LONG_TEXT))["session_id"]
        await socket.send(type="typing", session_id=session_id)
        warm = await until(socket, "warm")
        assert warm["tier"] == "device" and warm["device_tokens"] == warm["num_tokens"] > 300
        await socket.send(type="typing", session_id=session_id)  # renews it, says nothing new
        done = await ask(socket, "two", "And who is the third?", session_id)
        assert done["advisory"]["state"] == "hit"
        assert done["advisory"]["lead_ms"] > 0
        assert done["timings"]["kv"]["device"] >= warm["device_tokens"]
        assert (await ask(socket, "three", "And the fourth?", session_id))["advisory"] is None


async def test_another_adapter_gets_the_history_before_a_word_is_typed(server: Server) -> None:
    async with raw(server) as socket:
        session_id = (await ask(socket, "one", LONG_TEXT + " Again."))["session_id"]
        await socket.send(type="typing", session_id=session_id, adapter="pirate")
        # Nothing of it is known under that adapter: its history is computed in idle time.
        await until(socket, "unknown")
        warm = await until(socket, "warm")
        assert warm["device_tokens"] > 300
        done = await ask(socket, "two", "And who is the third?", session_id, adapter="pirate")
        assert done["timings"]["kv"]["device"] > 300


async def test_what_cannot_be_acted_on_is_no_error(server: Server) -> None:
    async with raw(server) as socket:
        await socket.send(type="typing", session_id="nobody knows it")
        assert (await socket.receive("advisory", "error"))["state"] == "unknown"
        await socket.send(type="typing", session_id="s", adapter="no such adapter")
        assert (await socket.receive("advisory", "error"))["state"] == "unknown"
        await socket.send(type="typing", session_id="s", draft="my secret draft")  # drafts are off here
        assert (await socket.receive("advisory", "error"))["type"] == "advisory"


async def test_drafts_are_computed_while_they_are_typed_and_stored_nowhere(
    gateways: Gateways, tmp_path: Any
) -> None:
    server = await gateways(draft_prefill=True, data_dir=tmp_path / "drafts")
    secret = "Xanthippe"
    async with raw(server) as socket:
        session_id = (await ask(socket, "one", "Hello!"))["session_id"]
        for end in (100, 300, None):
            draft = f"My friend {secret} says: {LONG_TEXT}"[:end] + " and"
            await socket.send(type="typing", session_id=session_id, draft=draft)
        counter = server.services.metrics.computed_ahead.labels("draft")
        async with asyncio.timeout(60):
            while not counter._value.get():
                await asyncio.sleep(0.05)
        for path in (tmp_path / "drafts").rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes()
        done = await ask(socket, "two", f"My friend {secret} says: {LONG_TEXT} and goes.", session_id)
        assert done["timings"]["kv"]["device"] > 300


async def test_rest_takes_reads_merges_and_cancels(server: Server, http: aiohttp.ClientSession) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": LONG_TEXT}], **SHORT}
    for key in ("ignore_eos",):
        body.pop(key)
    async with http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": "agent-1"}) as reply:
        assert reply.status == 200
    wanted = {"session_id": "agent-1", "expected_arrival_s": 0.0}
    async with http.post("/v1/advisories", json=wanted) as reply:
        assert reply.status == 202
        first = await reply.json()
    assert first["object"] == "advisory" and first["expires_in_s"] > 50
    warm = await settled(http, first["id"], "warm")
    assert warm["device_tokens"] > 300
    async with http.post("/v1/advisories", json=wanted) as reply:
        again = await reply.json()
    assert again["id"] == first["id"] and again["is_merged"]
    async with http.post("/v1/advisories", json=wanted | {"priority": 5}) as reply:
        other = await reply.json()
    assert other["id"] != first["id"]
    await settled(http, first["id"], "cancelled")
    async with http.delete(f"/v1/advisories/{other['id']}") as reply:
        assert reply.status == 204
    assert (await settled(http, other["id"], "cancelled"))["expires_in_s"] == 0
    async with http.post("/v1/advisories", json=wanted | {"ttl_s": 0.05}) as reply:
        brief = await reply.json()
    await settled(http, brief["id"], "expired", "wasted")
    # Over before the node has heard of it: it must not live there for ever.
    services = server.services.advisories
    wish = AdvisoryRequest(session_id="agent-1")
    taken_back = services.submit("local", wish, "rest")
    services.cancel("local", taken_back.id)
    await settled(http, taken_back.id, "cancelled")
    fleeting = services.submit("local", AdvisoryRequest(session_id="agent-1", ttl_s=1e-9), "rest")
    await settled(http, fleeting.id, "expired", "wasted")
    async with http.get("/metrics") as reply:
        text = await reply.text()
    assert 'overture_advisories_total{source="rest"}' in text
    assert 'overture_advisory_outcomes_total{outcome="cancelled",source="rest"}' in text


async def test_hints_on_a_request_warm_the_next_agent(http: aiohttp.ClientSession) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 4}
    async with http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": "qa"}) as reply:
        assert reply.status == 200
    hints = {
        "protocol_version": "1",
        "message_id": "m1",
        "actions": [
            {
                "action_id": "1",
                "action_type": "session.advise",
                "action_version": "1",
                "payload": {"session_id": "qa"},
            },
            {"action_id": "2", "action_type": "other.thing", "action_version": "1", "payload": {}},
        ],
    }
    async with http.post("/v1/advisories", json=hints) as reply:
        assert reply.status == 202
        (advisory,) = (await reply.json())["advisories"]
    await settled(http, advisory["id"], "warm")
    for bad in ({"actions": 7}, hints | {"actions": [hints["actions"][0] | {"payload": {"session_id": ""}}]}):  # type: ignore[index]
        async with http.post(
            "/v1/chat/completions", json=body | {"kv_hints": bad}, headers={"X-Session-Id": "x"}
        ) as reply:
            assert reply.status == 200
    async with http.post(
        "/v1/chat/completions", json=body | {"kv_hints": hints}, headers={"X-Session-Id": "architect"}
    ) as reply:
        assert reply.status == 200


async def test_bad_advisories_are_told_what_is_wrong(http: aiohttp.ClientSession) -> None:
    for body, word in (
        ({}, "session_id"),
        ([], "Expected"),
        ({"session_id": "s", "ttl_s": -1}, "ttl_s"),
        ({"session_id": "s", "expected_arrival_s": 1e9}, "expected_arrival_s"),
        ({"session_id": "s", "colour": "blue"}, "colour"),
        ({"session_id": "s" * 200}, "session_id"),
        ({"actions": [{}]}, "hints"),
    ):
        async with http.post("/v1/advisories", json=body) as reply:
            assert reply.status == 400
            assert word in (await reply.json())["error"]["message"]
    async with http.post("/v1/advisories", json={"session_id": "s", "model": "nope"}) as reply:
        assert reply.status == 404
    async with http.get("/v1/advisories/adv-0") as reply:
        assert reply.status == 404


async def test_keys_see_their_own_and_a_flood_harms_nobody(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So slow that the bucket does not fill again meanwhile, however slow the machine is.
    monkeypatch.setattr(advisories, "MAX_PER_S", 0.1)
    server = await gateways(api_keys=KEYS)
    loud, quiet = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    async with aiohttp.ClientSession(server.url) as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 4}
        headers = quiet | {"X-Session-Id": "mine"}
        async with http.post("/v1/chat/completions", json=body, headers=headers) as reply:
            assert reply.status == 200
        statuses = set()
        for number in range(BURST + 20):
            async with http.post("/v1/advisories", json={"session_id": f"x{number}"}, headers=loud) as reply:
                statuses.add(reply.status)
                last = await reply.json()
        assert statuses == {202, 429}
        assert last["error"]["code"] == "rate_limited"
        async with http.post("/v1/advisories", json={"session_id": "mine"}, headers=loud) as reply:
            assert reply.status in (202, 429)
        async with http.post("/v1/advisories", json={"session_id": "mine"}, headers=quiet) as reply:
            assert reply.status == 202
            mine = await reply.json()
        async with http.get(f"/v1/advisories/{mine['id']}", headers=loud) as reply:
            assert reply.status == 404
        async with asyncio.timeout(60):
            while True:
                async with http.get(f"/v1/advisories/{mine['id']}", headers=quiet) as reply:
                    if (await reply.json())["state"] == "warm":
                        break
                await asyncio.sleep(0.02)


async def test_the_gateway_learns_who_follows_whom(gateways: Gateways) -> None:
    server = await gateways(learned_advisories=True)
    async with aiohttp.ClientSession(server.url) as http:

        async def call(run: int, agent: str) -> None:
            headers = {
                "X-Session-Id": f"run{run}:{agent}",
                "X-Agent-Name": agent,
                "X-Workflow-Id": f"run{run}",
            }
            messages = [{"role": "user", "content": f"{LONG_TEXT} for {agent} in {run}"}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 2}
            async with http.post("/v1/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200

        learned = server.services.metrics.advisories.labels("learned")
        for run in range(12):
            for _ in range(2):
                for agent in ("architect", "engineer"):
                    await call(run, agent)
        assert learned._value.get() > 0
