"""Advisories as clients send them: the chat socket, REST, hints on a request; what they answer, and what they must not do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import JsonReply
from gateway.advisories import advisories
from gateway.advisories.advisories import BURST, AdvisoryRequest
from gateway.app import Server

from .conftest import Gateways, Seen, SharedNode, Socket, connected, settle, told
from .facts import BODY, CHAT, HELLO, KEYS, MESSAGES, MODEL, RESPONSES, Http, Patch, bearer

ADVISE = "/v1/advisories"
LONG_TEXT = "Please remember all of this: " + " ".join(f"the {n}th is called Anna." for n in range(60))
LONG = BODY | {"messages": [{"role": "user", "content": LONG_TEXT}]}


async def ask(
    socket: Socket, name: str, content: str, session_id: str | None = None, **fields: Any
) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    await socket.ask(name, content, session_id=session_id, sampling=sampling, **fields)
    done = await socket.receive("done", "error")
    assert done["type"] == "done", done
    return done


async def until(socket: Socket, state: str) -> dict[str, Any]:
    while (frame := await socket.receive("advisory"))["state"] != state:
        pass
    return frame


async def settled(http: Http, advisory_id: str, *states: str, **headers: Any) -> Any:
    async def look() -> Any:
        body = await told(http.get(f"{ADVISE}/{advisory_id}", **headers))
        return body if body["state"] in states else None

    return await settle(look)


async def test_another_adapter_gets_the_history_before_a_word_is_typed(server: Server) -> None:
    """What cannot be acted on is no error."""
    async with connected(server) as socket:
        for fields in (
            {"session_id": "nobody knows it"},
            {"session_id": "s", "adapter": "no such adapter"},
            {"session_id": "s", "draft": "my secret draft"},  # drafts are off here
        ):
            await socket.send(type="typing", **fields)
            assert (await socket.receive("advisory", "error"))["state"] == "unknown"
        session_id = (await ask(socket, "one", LONG_TEXT))["session_id"]
        await socket.send(type="typing", session_id=session_id, adapter="pirate")
        # Nothing of it is known under that adapter: its history is computed in idle time.
        await until(socket, "unknown")
        warm = await until(socket, "warm")
        assert warm["tier"] == "device" and warm["device_tokens"] == warm["num_tokens"] > 300
        done = await ask(socket, "two", "And who is the third?", session_id, adapter="pirate")
        assert done["advisory"]["state"] == "hit" and done["advisory"]["lead_ms"] > 0
        assert done["timings"]["kv"]["device"] >= warm["device_tokens"]
        assert (await ask(socket, "three", "And the fourth?", session_id))["advisory"] is None


async def test_drafts_are_computed_ahead_and_stored_nowhere(gateways: Gateways, tmp_path: Path) -> None:
    server = await gateways(draft_prefill=True, data_dir=tmp_path / "drafts")
    secret = "Xanthippe"
    async with connected(server) as socket:
        session_id = (await ask(socket, "one", "Hello!"))["session_id"]
        for end in (100, 300, None):
            draft = f"My friend {secret} says: {LONG_TEXT}"[:end] + " and"
            await socket.send(type="typing", session_id=session_id, draft=draft)
        registry = server.services.metrics.registry
        name, labels = "overture_computed_ahead_tokens_total", {"what": "draft"}
        await settle(lambda: (registry.get_sample_value(name, labels) or 0) > 0)
        for path in (tmp_path / "drafts").rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes()
        done = await ask(socket, "two", f"My friend {secret} says: {LONG_TEXT} and goes.", session_id)
        assert done["timings"]["kv"]["device"] > 300


# As some models' own, it changes the prompt by what the template is told.
TEMPLATE = (
    "<|system|>Be {{ mood or 'plain' }}.<|end|>"
    "{% for each in messages %}<|{{ each.role }}|>{{ each.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(("form", "count"), [("auto", 1), ("string", 1), ("openai", 11)])
async def test_the_operators_form_of_contents_is_what_the_template_gets(
    node: SharedNode, form: Any, count: int
) -> None:
    from engine_bridge.driver.serving.serving import Serving  # which imports vLLM

    # It takes parts, and is not seen to do so.
    template = "{{ messages[0].content[0]['text'] or '.' }}"
    options = replace(node._serving._options, chat_template=template, chat_template_content_format=form)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "one two three four five six"}]}
    reply = await Serving(node._client, options).serve("tokenize", body, {}, EngineRequest())
    assert isinstance(reply, JsonReply) and json.loads(reply.body)["count"] == count


async def test_the_operators_template_arguments_hold_for_every_way_to_a_prompt(
    node: SharedNode, gateways: Gateways, seen: Seen, monkeypatch: Patch
) -> None:
    """So what was advised or drafted is the prompt that comes."""
    from engine_bridge.driver.serving.serving import Serving  # which imports vLLM

    client, options = node._client, node._serving._options
    broken = replace(options, chat_template="{{ 1 / mood }}", default_chat_template_kwargs={"mood": 0})
    with pytest.raises(InvalidRequest, match="default_chat_template_kwargs: the chat template fails"):
        await Serving(client, broken).check_template_arguments()
    kind = replace(options, chat_template=TEMPLATE, default_chat_template_kwargs={"mood": "kind"})
    monkeypatch.setattr(node, "_serving", Serving(client, kind))
    await node._serving.check_template_arguments()
    tokenizer = client.renderer.get_tokenizer()
    server = await gateways(draft_prefill=True)

    def mood() -> str:
        return tokenizer.decode(seen.prompts[-1]).split("Be")[1].split(".")[0].strip()

    async with Http(server.url) as http:
        count = (await told(http.post("/tokenize", json={"model": MODEL, "messages": HELLO})))["count"]
        counted = await told(http.post(f"{MESSAGES}/count_tokens", json={"model": MODEL, "messages": HELLO}))
        for path, body in (
            (CHAT, BODY),
            (MESSAGES, BODY),
            (RESPONSES, {"model": MODEL, "input": "Hello!", "max_output_tokens": 16}),
        ):
            await told(http.post(path, json=body))
            assert (mood(), len(seen.prompts[-1])) == ("kind", count), path
        assert counted["input_tokens"] == count
        await told(http.post(CHAT, json=BODY | {"chat_template_kwargs": {"mood": "sad"}}))
        assert mood() == "sad"

        async with connected(server) as socket:
            session_id = (await ask(socket, "one", LONG_TEXT))["session_id"]
            assert mood() == "kind"
            await socket.send(type="typing", session_id=session_id)
            warm = await until(socket, "warm")
            done = await ask(socket, "two", "And who is the third?", session_id)
            assert done["advisory"]["state"] == "hit"
            assert done["timings"]["kv"]["device"] >= warm["device_tokens"] > 300
            draft = f"My friend says: {LONG_TEXT[::-1]}"
            await socket.send(type="typing", session_id=session_id, draft=f"{draft} and")
            ahead, labels = "overture_computed_ahead_tokens_total", {"what": "draft"}
            registry = server.services.metrics.registry
            await settle(lambda: (registry.get_sample_value(ahead, labels) or 0) > 0)
            drafted = await ask(socket, "three", f"{draft} and goes.", session_id)
            assert drafted["timings"]["kv"]["device"] > done["timings"]["kv"]["device"] + 300


async def test_rest_takes_reads_merges_and_cancels(server: Server, http: Http) -> None:
    await told(http.post(CHAT, json=LONG, headers={"X-Session-Id": "agent-1"}))
    wanted = {"session_id": "agent-1", "expected_arrival_s": 0.0}
    first = await told(http.post(ADVISE, json=wanted), 202)
    assert first["object"] == "advisory" and first["expires_in_s"] > 50
    assert (await settled(http, first["id"], "warm"))["device_tokens"] > 300
    again = await told(http.post(ADVISE, json=wanted), 202)
    assert again["id"] == first["id"] and again["is_merged"]
    other = await told(http.post(ADVISE, json=wanted | {"priority": 5}), 202)
    assert other["id"] != first["id"]
    await settled(http, first["id"], "cancelled")
    await told(http.delete(f"{ADVISE}/{other['id']}"), 204)
    assert (await settled(http, other["id"], "cancelled"))["expires_in_s"] == 0
    brief = await told(http.post(ADVISE, json=wanted | {"ttl_s": 0.05}), 202)
    await settled(http, brief["id"], "expired", "wasted")
    # Over before the node has heard of it: it must not live there for ever.
    services = server.services.advisories
    taken_back = services.submit("local", AdvisoryRequest(session_id="agent-1"), "rest")
    services.cancel("local", taken_back.id)
    await settled(http, taken_back.id, "cancelled")
    fleeting = services.submit("local", AdvisoryRequest(session_id="agent-1", ttl_s=1e-9), "rest")
    await settled(http, fleeting.id, "expired", "wasted")
    text = await told(http.get("/metrics"))
    assert 'overture_advisories_total{source="rest"}' in text
    assert 'overture_advisory_outcomes_total{outcome="cancelled",source="rest"}' in text


def action(kind: str, **payload: str) -> dict[str, Any]:
    return {"action_id": kind, "action_type": kind, "action_version": "1", "payload": payload}


async def test_hints_warm_the_next_agent_and_bad_ones_harm_no_request(http: Http) -> None:
    await told(http.post(CHAT, json=LONG, headers={"X-Session-Id": "qa"}))
    hints: dict[str, Any] = {"protocol_version": "1", "message_id": "m1"}
    hints["actions"] = [action("session.advise", session_id="qa"), action("other.thing")]
    (advisory,) = (await told(http.post(ADVISE, json=hints), 202))["advisories"]
    await settled(http, advisory["id"], "warm")
    for sent in ({"actions": 7}, hints | {"actions": [action("session.advise", session_id="")]}, hints):
        body = LONG | {"kv_hints": sent}
        await told(http.post(CHAT, json=body, headers={"X-Session-Id": "architect"}))


async def test_bad_advisories_are_told_what_is_wrong(http: Http) -> None:
    for body, word in (
        ({}, "session_id"),
        ([], "Expected"),
        ({"session_id": "s", "ttl_s": -1}, "ttl_s"),
        ({"session_id": "s", "expected_arrival_s": 1e9}, "expected_arrival_s"),
        ({"session_id": "s", "colour": "blue"}, "colour"),
        ({"session_id": "s" * 200}, "session_id"),
        ({"actions": [{}]}, "hints"),
    ):
        assert word in (await told(http.post(ADVISE, json=body), 400))["error"]["message"]
    await told(http.post(ADVISE, json={"session_id": "s", "model": "nope"}), 404)
    await told(http.get(f"{ADVISE}/adv-0"), 404)


async def test_keys_see_their_own_and_a_flood_harms_nobody(gateways: Gateways, monkeypatch: Patch) -> None:
    # So slow that the bucket does not fill again meanwhile, however slow the machine is.
    monkeypatch.setattr(advisories, "MAX_PER_S", 0.1)
    server = await gateways(api_keys=KEYS)
    loud, quiet = map(bearer, KEYS)
    async with Http(server.url) as http:
        await told(http.post(CHAT, json=LONG, headers=quiet | {"X-Session-Id": "mine"}))
        for number in range(BURST):
            await told(http.post(ADVISE, json={"session_id": f"x{number}"}, headers=loud), 202)
        for _ in range(4):  # of which the bucket may have had one more meanwhile
            last = http.post(ADVISE, json={"session_id": "mine"}, headers=loud)
            async with last as reply:
                status, body = reply.status, await reply.json()
        assert (status, body["error"]["code"]) == (429, "rate_limited")
        mine = await told(http.post(ADVISE, json={"session_id": "mine"}, headers=quiet), 202)
        await told(http.get(f"{ADVISE}/{mine['id']}", headers=loud), 404)
        await settled(http, mine["id"], "warm", headers=quiet)


async def test_the_gateway_learns_who_follows_whom(gateways: Gateways) -> None:
    server = await gateways(learned_advisories=True)
    registry = server.services.metrics.registry
    async with Http(server.url) as http:
        for run in range(4):
            for agent in ("architect", "engineer") * 2:
                headers = {"X-Session-Id": f"run{run}:{agent}", "X-Agent-Name": agent}
                messages = [{"role": "user", "content": f"You are the {agent} of {run}."}]
                body = {"model": MODEL, "messages": messages, "max_tokens": 2}
                await told(http.post(CHAT, json=body, headers=headers | {"X-Workflow-Id": f"run{run}"}))
    assert (registry.get_sample_value("overture_advisories_total", {"source": "learned"}) or 0) > 0
