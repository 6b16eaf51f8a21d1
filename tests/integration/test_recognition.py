"""Loops of unmodified SDKs that name no session: each conversation is one session, its tools' pauses are announced, and nothing of it is stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import openai
import pytest

from gateway.app import Server
from gateway.turns.replies import question_of, shown_in

from .conftest import told
from .facts import BODY, CHAT, MESSAGES, MODEL, Http, Patch

QUESTION = "What is the weather in Paris?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "get_weather", "description": "The weather of a city."}
RESULT = "sunny, 21 degrees"


async def tool(server: Server) -> str:
    """Answer once the node was told that the session comes back: on a busy machine it may be back sooner."""
    async with asyncio.timeout(20):
        while not server.services.advisories.trails.of("local")[0].states:
            await asyncio.sleep(0.01)
    return RESULT


async def chat_loop(server: Server, *, stream: bool) -> None:
    """A conversation of a question, a call of a tool, and an answer from its result."""
    tools: Any = [{"type": "function", "function": ABOUT | {"parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        wish: Any = {"model": MODEL, "temperature": 0, "max_tokens": 96, "tools": tools}
        if stream:
            async with client.chat.completions.stream(messages=messages, **wish) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(messages=messages, **wish)).choices[0].message
        assert message.tool_calls
        messages += [
            message.model_dump(exclude_none=True, exclude={"parsed"}),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": await tool(server)},
        ]
        last = await client.chat.completions.create(messages=messages, **wish)
    assert last.choices[0].message.content


async def messages_loop(server: Server, *, stream: bool) -> None:
    """The same in Anthropic's API."""
    tools: Any = [ABOUT | {"input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    import anthropic  # which is slow to import

    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        wish: Any = {"model": MODEL, "max_tokens": 96, "tools": tools, "extra_body": {"temperature": 0}}
        if stream:
            async with client.messages.stream(messages=messages, **wish) as events:
                said = await events.get_final_message()
        else:
            said = await client.messages.create(messages=messages, **wish)
        call = said.content[-1]
        assert call.type == "tool_use"
        messages += [
            {"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in said.content]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": await tool(server)}],
            },
        ]
        assert (await client.messages.create(messages=messages, **wish)).content


async def stored_responses_loop(server: Server, *, stream: bool) -> None:
    """The same, with each response kept, as that API does by itself."""
    await responses_loop(server, stream=stream, store=True)


async def responses_loop(server: Server, *, stream: bool, store: bool = False) -> None:
    """The same in OpenAI's Responses API, whose client keeps the items."""
    tools: Any = [{"type": "function", **ABOUT, "parameters": SCHEMA}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        wish: Any = {
            "model": MODEL,
            "temperature": 0,
            "max_output_tokens": 96,
            "tools": tools,
            "store": store,
        }
        if stream:
            async with client.responses.stream(input=items, **wish) as events:
                said = await events.get_final_response()
        else:
            said = await client.responses.create(input=items, **wish)
        (call,) = [item for item in said.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in said.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": await tool(server)})
        assert (await client.responses.create(input=items, **wish)).output_text


async def test_the_steps_of_a_loop_that_is_stored_are_versions_of_one_answer(http: Http) -> None:
    """The page shows the question once, with the last answer; whoever asks again begins another turn."""
    asked = {"role": "user", "content": QUESTION}
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    used = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT}
    loops = {
        CHAT: [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        ],
        MESSAGES: [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}],
    }
    for path, step in loops.items():
        name = f"stored{path.replace('/', '-')}"
        for messages in ([asked], [asked, *step], [asked, *step, *step]):
            body = {"model": MODEL, "messages": messages, "max_tokens": 8}
            await told(http.post(path, json=body, headers={"X-Session-Id": name}))
        (turn,) = (await told(http.get(f"/api/sessions/{name}")))["turns"]
        assert (
            turn["content"] == QUESTION and len(turn["versions"]) == 3 and turn["id"] == turn["versions"][-1]
        )
        again = {
            "model": MODEL,
            "messages": [asked, *step, {"role": "assistant", "content": "Sunny."}, asked],
            "max_tokens": 8,
        }
        await told(http.post(path, json=again, headers={"X-Session-Id": name}))
        assert len((await told(http.get(f"/api/sessions/{name}")))["turns"]) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("loop", [chat_loop, messages_loop, responses_loop, stored_responses_loop])
async def test_each_loop_is_one_session_whose_return_is_announced_and_is_shown_as_a_run(
    server: Server, http: Http, loop: Any, stream: bool
) -> None:
    """With what became of its prompts' KV, also where the client asks for no usage: the node tells the gateway."""
    services = server.services
    sessions = await (await http.get("/api/sessions")).json()
    before, known = Counter(services.recognition.counts), len(services.recognition.conversations)
    await loop(server, stream=stream)
    assert services.recognition.counts - before == Counter(new=1, continued=1)
    assert len(services.recognition.conversations) == known + 1
    (trail, *_) = services.advisories.trails.of("local")
    is_stored = loop is stored_responses_loop
    assert trail.source == "tool_pause" and trail.session_id.startswith("auto-") != is_stored
    async with asyncio.timeout(20):
        while trail.states[-1].state not in ("hit", "late"):
            await asyncio.sleep(0.05)
            (trail, *_) = services.advisories.trails.of("local")
    assert (await (await http.get("/api/sessions")).json() == sessions) != is_stored, "nothing else is stored"
    state = await (await http.get("/v1/engine/state")).json()
    assert state["calls_by_session"]["continued"] == services.recognition.counts["continued"]
    run = state["runs"][0]
    assert run["session_id"] == trail.session_id and run["state"] == "rests"
    assert (run["num_turns"], run["num_pauses"]) == (2, 1) and 0 < run["pause_s"] < run["age_s"] + 0.1
    assert run["tokens"]["stayed"] > 0 and run["tokens"]["new"] + run["tokens"]["recomputed"] > 0
    told = await (await http.get("/metrics")).text()
    assert 'overture_agent_run_tokens_total{outcome="stayed"}' in told


async def test_a_reply_says_which_session_its_call_was_found_to_be_part_of(http: Http) -> None:
    """In a head of its own: X-Session-Id is for conversations that are stored."""
    body, found = BODY | {"messages": [{"role": "user", "content": "Which session is this?"}]}, []
    for stream in (False, True):
        async with http.post(CHAT, json=body | {"stream": stream}) as reply:
            assert reply.status == 200 and "X-Session-Id" not in reply.headers
            found.append(reply.headers["X-Overture-Session"])
            await reply.read()
    async with http.post(CHAT, json=body, headers={"X-Session-Id": "named"}) as reply:
        found.append(reply.headers["X-Overture-Session"])
    assert found[0].startswith("auto-") and len(set(found)) == 3 and found[2] == "named"


async def test_a_client_that_sends_its_session_for_routing_has_nothing_stored(http: Http) -> None:
    """As OpenCode and Kilo Code do, whose other header of this name is no wish for a stored conversation."""
    name = {"X-Session-Id": "ses_dd0f", "X-Session-Affinity": "ses_dd0f"}
    async with http.post(CHAT, json=BODY, headers=name) as reply:
        assert reply.headers["X-Overture-Session"] == "ses_dd0f" and "X-Session-Id" not in reply.headers
    assert (await http.get("/api/sessions/ses_dd0f")).status == 404


async def test_a_helper_is_known_to_the_engine_and_shown_with_its_caller(
    server: Server, http: Http, monkeypatch: Patch
) -> None:
    """By the header that its client sends. Which other signs there are is tested without an engine."""
    callers, serve = [], server.services.node.serve

    async def noting(api: Any, body: Any, headers: Any, asker: Any) -> Any:
        callers.append(asker.caller)
        return await serve(api, body, headers, asker)

    monkeypatch.setattr(server.services.node, "serve", noting)
    tools = [{"type": "function", "function": ABOUT | {"parameters": SCHEMA}}]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 96, "tools": tools}
    sessions: list[str] = []
    for question in (QUESTION, "What is the weather in Rome?"):
        messages = [{"role": "user", "content": question}]
        of = {"X-Parent-Session-Id": sessions[0]} if sessions else {}
        async with http.post(CHAT, json=body | {"messages": messages}, headers=of) as reply:
            assert (await reply.json())["choices"][0]["message"]["tool_calls"]
            sessions.append(reply.headers["X-Overture-Session"])
    assert callers == ["", sessions[0]]
    helper, caller, *_ = (await (await http.get("/v1/engine/state")).json())["runs"]
    assert [(each["session_id"], each["caller"]) for each in (helper, caller)] == [
        (sessions[1], sessions[0]),
        (sessions[0], ""),
    ]


def test_the_pictures_shown_are_those_of_the_question_whatever_results_follow() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    asked = {
        "role": "user",
        "content": [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}],
    }
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT}],
    }
    body = {"messages": [asked, {"role": "assistant", "content": "A moment."}, result]}
    assert question_of("messages", body) == QUESTION
    assert shown_in("messages", body) == ["data:image/png;base64,QUJD"]
