"""Hints of KV through the SDKs that send them: each is accepted, acted on as docs/agents.md says, and counted; answers stay as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.app import Server

from .conftest import settle, told
from .facts import KEYS, MODEL, Http, bearer

# Several blocks of the demo model's, so that some of it is cached.
LONG = "My name is {name} and my city is Trondar. " * 8


def asked(name: str) -> Any:
    return [{"role": "user", "content": LONG.format(name=name)}]


def metric(server: Server, **labels: str) -> float:
    return server.services.metrics.registry.get_sample_value("overture_kv_hints_total", labels) or 0.0


@pytest.fixture
async def gpt(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(server: Server) -> AsyncIterator[Any]:
    import anthropic  # which is slow to import

    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


async def said(gpt: openai.AsyncOpenAI, name: str, **fields: Any) -> tuple[Any, str]:
    """A chat completion, and what its header tells of its hints."""
    wish: Any = {"model": MODEL, "messages": asked(name), "temperature": 0, "max_tokens": 8}
    raw = await gpt.chat.completions.with_raw_response.create(**wish | fields)
    return raw.parse(), raw.headers.get("X-Overture-KV-Hints", "")


def kept(server: Server) -> dict[Any, Any]:
    """The sessions that host memory keeps, by tenant and name."""
    tiers = server.services.node._tiers  # type: ignore[attr-defined]
    return dict(tiers.store._host._kept)


async def test_openais_retention_keeps_the_session_in_host_memory(server: Server, gpt: Any) -> None:
    before = len(kept(server))
    plain, none = await said(gpt, "Ada")
    assert none == "" and len(kept(server)) == before
    answer, heard = await said(gpt, "Ada", prompt_cache_retention="24h")
    assert heard == "retain=granted;ttl=86400"
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert len(kept(server)) > before
    _, heard = await said(gpt, "Bea", extra_body={"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}})
    assert heard == "retain=granted;ttl=1800"
    assert metric(server, source="openai", action="retain", outcome="granted") == 2
    part = {"type": "text", "text": LONG.format(name="Cam"), "prompt_cache_breakpoint": {"mode": "explicit"}}
    _, heard = await said(gpt, "", messages=[{"role": "user", "content": [part]}])
    assert heard == "retain=granted;ttl=1800"
    response = await gpt.responses.with_raw_response.create(
        model=MODEL, input=LONG, max_output_tokens=4, store=False, prompt_cache_retention="in_memory"
    )
    assert response.headers["X-Overture-KV-Hints"] == "retain=granted;ttl=600"


@pytest.mark.parametrize("place", ["block", "system", "tools", "top"])
async def test_anthropics_marks_are_kept_and_counted_truthfully(
    server: Server, claude: Any, place: str
) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    text = {"type": "text", "text": LONG.format(name=f"Zed of {place}")}
    tool = {"name": "f", "description": "It does.", "input_schema": {"type": "object", "properties": {}}}
    wish: Any = {"model": MODEL, "max_tokens": 4, "extra_body": {"temperature": 0}}
    wish["messages"] = [{"role": "user", "content": [text]}]
    if place == "block":
        text["cache_control"] = mark
    elif place == "system":
        wish["system"] = [{"type": "text", "text": f"You are Zed. {place}", "cache_control": mark}]
    elif place == "tools":
        wish["tools"] = [tool | {"cache_control": mark}]
    else:
        wish["extra_body"] = wish["extra_body"] | {"cache_control": mark}
    before = metric(server, source="anthropic", action="retain", outcome="granted")
    counted = (
        await claude.messages.count_tokens(
            **{k: v for k, v in wish.items() if k not in ("max_tokens", "extra_body")}
        )
    ).input_tokens
    first = (await claude.messages.create(**wish)).usage
    assert first.cache_creation_input_tokens > 0, "what was computed and kept"
    again = (await claude.messages.create(**wish)).usage
    assert again.cache_read_input_tokens == first.cache_read_input_tokens + first.cache_creation_input_tokens
    assert again.cache_creation_input_tokens == 0
    async with claude.messages.stream(**wish) as events:
        streamed = (await events.get_final_message()).usage
    for usage in (first, again, streamed):
        parts = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        assert parts == counted
    assert (streamed.input_tokens, streamed.cache_read_input_tokens) == (
        again.input_tokens,
        again.cache_read_input_tokens,
    )
    assert metric(server, source="anthropic", action="retain", outcome="granted") == before + 3


async def test_without_marks_nothing_is_told_as_written(claude: Any) -> None:
    wish: Any = {"model": MODEL, "max_tokens": 4, "messages": asked("Unmarked")}
    for stream in (False, True):
        wish["messages"] = asked(f"Unmarked {stream}")
        if stream:
            async with claude.messages.stream(**wish) as events:
                usage = (await events.get_final_message()).usage
        else:
            usage = (await claude.messages.create(**wish)).usage
        assert usage.cache_creation_input_tokens == 0 and usage.input_tokens > 16


# -- envelopes, agents, Dynamo -------------------------------------------------------------------------------------------


def envelope(action: str, **payload: Any) -> dict[str, Any]:
    one = {"action_id": "a", "action_type": action, "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [one]}


async def named(gpt: Any, session: str, **fields: Any) -> str:
    """A call of a session with this name; returns what its header tells."""
    body = {"agent_hint": {"session_id": session}} | fields
    return (await said(gpt, session, extra_body=body))[1]


async def advised(server: Server, session: str, *states: str) -> Any:
    """The session's advisory, once it is in one of these states."""

    async def look() -> Any:
        found = [each for each in server.services.advisories.trails.of("local") if each.session_id == session]
        return found[0] if found and found[0].states and found[0].states[-1].state in states else None

    return await settle(look)


async def test_a_pin_is_on_the_device_for_its_time_and_comes_back_after_each_answer(
    server: Server, gpt: Any
) -> None:
    assert await named(gpt, "pin", kv_hints=envelope("kv.pin", ttl_s=3600)) == "pin=clipped;ttl=600"
    pin = await advised(server, "pin", "warm")
    assert pin.source == "hint"
    assert await named(gpt, "pin") == ""
    assert (await advised(server, "pin", "warm")).id != pin.id, "its request has ended the first one as a hit"


async def test_a_prefetch_is_an_advisory(server: Server, gpt: Any) -> None:
    await named(gpt, "ahead")
    assert (
        await named(gpt, "other", kv_hints=envelope("kv.prefetch", session_id="ahead"))
        == "prefetch=granted;ttl=60"
    )
    await advised(server, "ahead", "warm")
    await named(gpt, "ahead")
    assert (await advised(server, "ahead", "hit")).source == "hint"


async def test_speculative_prefill_announces_the_next_turn(server: Server, gpt: Any) -> None:
    hints = {"priority": 5, "osl": 4, "speculative_prefill": True}
    assert await named(gpt, "next", nvext={"agent_hints": hints}) == (
        "osl=granted, priority=clipped, prefetch=granted;ttl=60"
    )
    await advised(server, "next", "warm")
    assert metric(server, source="nvext", action="priority", outcome="clipped") == 1


async def first_evicted(server: Server) -> bytes | None:
    """The hash of the block that the device takes next."""
    queue = await run(server, lambda driver: driver.promoter._pool.free_block_queue)
    return await run(server, lambda driver: queue.fake_free_list_head.next_free_block.block_hash)


async def run(server: Server, act: Any) -> Any:
    return await server.services.node.run_on_engine(act)  # type: ignore[attr-defined]


async def last_block(server: Server, session: str) -> bytes:
    """The hash of the last block that a session's next prompt begins with."""
    entries = await run(server, lambda driver: driver.promoter._core.idle_entries((session, None)))
    return entries[0]


async def test_what_is_demoted_leaves_the_device_first_and_comes_back_from_host_memory(
    server: Server, gpt: Any
) -> None:
    heard = await named(
        gpt, "idle", agent_hint={"session_id": "idle", "context_management": {"edits": [{"type": "offload"}]}}
    )
    assert heard == "demote=granted;ttl=300"
    assert await first_evicted(server) == await last_block(server, "idle")
    assert ("", "idle") in kept(server)
    await run(server, lambda driver: driver.engine.reset_prefix_cache())
    answer, _ = await said(gpt, "idle", extra_body={"agent_hint": {"session_id": "idle"}})
    assert answer.usage.prompt_tokens_details.cached_tokens > 0, "KV from host memory counts as cached"


@pytest.mark.parametrize("how", ["agent_hint", "session_final", "deref"])
async def test_what_is_evicted_is_forgotten(server: Server, gpt: Any, how: str) -> None:
    name = f"gone by {how}"
    bodies: Any = {
        "agent_hint": {
            "agent_hint": {"session_id": name, "context_management": {"edits": [{"type": "evict"}]}}
        },
        "session_final": {"nvext": {"agent_context": {"session_id": name, "session_final": True}}},
        "deref": {"kv_hints": {"deref": {"action_id": "c"}}},
    }
    assert await named(gpt, name, kv_hints=envelope("kv.retain")) == "retain=granted;ttl=300"
    assert ("", name) in kept(server)
    assert await run(server, lambda driver: driver.promoter.remembers(name, None))
    assert (await said(gpt, name, extra_body={"agent_hint": {"session_id": name}} | bodies[how]))[
        1
    ] == "evict=granted"
    assert ("", name) not in kept(server)
    assert not await run(server, lambda driver: driver.promoter.remembers(name, None))


async def test_a_prefix_that_others_share_stays_with_its_session(server: Server, gpt: Any) -> None:
    assert await named(gpt, "common", kv_hints=envelope("kv.share", ttl_s=60)) == "share=granted;ttl=60"
    assert kept(server)["", "common"].is_shared


async def test_a_waiting_parent_is_kept_for_as_long_as_its_agents(server: Server, gpt: Any) -> None:
    await named(gpt, "boss")
    hint = {
        "session_id": "worker",
        "parent_session_id": "boss",
        "cache_control": {"type": "ephemeral", "ttl": 30},
    }
    assert await named(gpt, "worker", agent_hint=hint) == "retain=granted;ttl=30, retain=granted;ttl=30"
    assert {("", "boss"), ("", "worker")} <= kept(server).keys()


@pytest.mark.parametrize(
    "body",
    [
        {"kv_hints": 7},
        {"kv_hints": {"actions": [{"action_type": "kv.sing", "payload": {}}] * 5000}},
        {"agent_hint": ["x"], "nvext": {"agent_hints": {"osl": {"a": [1]}}}},
        {"prompt_cache_retention": {"for": "ever"}, "prompt_cache_options": [1]},
    ],
)
async def test_hints_that_are_wrong_fail_no_call_in_any_api(gpt: Any, claude: Any, body: Any) -> None:
    assert (await said(gpt, "Wrong", extra_body=body))[1]
    wish: Any = {"model": MODEL, "extra_body": body}
    await gpt.completions.create(prompt="x", max_tokens=1, **wish)
    await gpt.responses.create(input="x", max_output_tokens=1, **wish)
    await claude.messages.create(messages=asked("Wrong"), max_tokens=1, **wish)
    marked = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 1000
    assert (
        await claude.messages.create(
            messages=[{"role": "user", "content": marked}], max_tokens=1, model=MODEL
        )
    ).usage


# -- without a request ---------------------------------------------------------------------------------------------------


async def test_hints_without_a_request(server: Server, http: Http, gpt: Any) -> None:
    await said(gpt, "Rest")
    about = {"messages": asked("Rest"), "model": MODEL}
    hint = await told(http.post("/v1/kv_hints", json=about | {"action": "retain", "ttl_s": 1e6}), 202)
    assert (hint["outcome"], hint["granted_ttl_s"], hint["scope"]) == ("clipped", 86400.0, "session")
    assert ("", hint["session_id"]) in kept(server)
    assert (await told(http.get(f"/v1/kv_hints/{hint['id']}")))["expires_in_s"] > 86000
    async with http.delete(f"/v1/kv_hints/{hint['id']}") as reply:
        assert reply.status == 204
    assert ("", hint["session_id"]) not in kept(server)
    await told(http.get(f"/v1/kv_hints/{hint['id']}"), 404)
    pin = await told(http.post("/v1/kv_hints", json={"action": "pin", "session_id": hint["session_id"]}), 202)
    assert await advised(server, hint["session_id"], "warm") and len(pin["advisories"]) == 1
    unknown = await told(
        http.post("/v1/kv_hints", json=about | {"action": "pin", "messages": asked("Nobody")}), 202
    )
    assert (unknown["outcome"], unknown["granted_ttl_s"]) == ("unknown", 0.0)
    batch = envelope("kv.demote", session_id="x") | {"message_id": "batch"}
    batch["actions"].append({"action_type": "kv.sing", "payload": {}})
    reply = await told(http.post("/v1/kv_hints", json=batch), 202)
    assert (reply["message_id"], len(reply["hints"]), reply["num_ignored"]) == ("batch", 1, 1)
    for wrong in (
        {"action": "retain"},
        {"action": "sing", "session_id": "s"},
        {"action": "pin", "session_id": "s", "ttl_s": -1},
    ):
        assert (await told(http.post("/v1/kv_hints", json=wrong), 400))["error"][
            "type"
        ] == "invalid_request_error"


async def test_no_key_reaches_another_keys_sessions(gateways: Any) -> None:
    server = await gateways(api_keys=KEYS)
    clients = [openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) for key in KEYS]
    async with clients[0] as mine, clients[1] as other, Http(server.url, headers=bearer(KEYS[1])) as http:
        await named(mine, "secret", kv_hints=envelope("kv.retain"))
        (own,) = [name for name in kept(server) if name[1] == "secret" and name[0]]
        body = {"action": "evict", "session_id": "secret"}
        await told(http.post("/v1/kv_hints", json=body), 202)
        await told(
            http.post("/v1/kv_hints", json={"action": "evict", "messages": asked("secret"), "model": MODEL}),
            202,
        )
        await named(other, "mine", kv_hints=envelope("kv.deref", session_id="secret"))
        assert own in kept(server)
    async with Http(server.url) as stranger:
        await told(stranger.post("/v1/kv_hints", json=body), 401)
