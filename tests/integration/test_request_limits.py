"""Requests that would hurt others are refused in their API's shape, or ended alone, on the real engine."""

from __future__ import annotations

import asyncio
import json
import zlib
from functools import partial
from typing import Any

import aiohttp
import pytest

from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError, Done

from .conftest import MODEL, Gateways, SharedNode, engine_is_empty

HELLO = [{"role": "user", "content": "Hello!"}]
CHAT = {"model": MODEL, "messages": HELLO, "max_tokens": 8}
AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "x" | "y"'


def references(num: int) -> dict[str, Any]:
    """A schema on which the compiler of grammars overflows its stack, from some hundreds on."""
    defs: dict[str, Any] = {
        f"d{number}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(num)
    }
    return {"$defs": defs | {f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"}


FATAL = references(1000)
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT
    | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FATAL}}},
    "/v1/completions": {"model": MODEL, "prompt": "Hello", "structured_outputs": {"json": FATAL}},
    "/v1/responses": {
        "model": MODEL,
        "input": "Hello",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": FATAL}},
    },
    "/v1/messages": CHAT | {"output_config": {"format": {"type": "json_schema", "schema": FATAL}}},
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", list(CALLS))
async def test_a_grammar_that_ends_its_helper_process_is_a_bad_request_and_the_server_lives_on(
    http: aiohttp.ClientSession, node: SharedNode, path: str, is_stream: bool
) -> None:
    num_rebuilds = node.num_rebuilds
    async with http.post(path, json=CALLS[path] | {"stream": is_stream}) as response:
        assert response.status == 400
        body = await response.json()
    assert "too deeply" in body["error"]["message"]
    assert node.num_rebuilds == num_rebuilds
    async with http.post("/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
    await engine_is_empty(node)


async def test_a_schema_of_a_tool_is_checked_like_any_other(http: aiohttp.ClientSession) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": FATAL, "strict": True}}
    async with http.post(
        "/v1/chat/completions", json=CHAT | {"tools": [tool], "tool_choice": "required"}
    ) as response:
        assert response.status == 400


@pytest.mark.parametrize("is_stream", [False, True])
async def test_structured_output_is_what_its_schema_says(
    http: aiohttp.ClientSession, is_stream: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with http.post(
        "/v1/chat/completions", json=CHAT | {"response_format": form, "stream": is_stream, "max_tokens": 64}
    ) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    if is_stream:
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        content = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    else:
        content = json.loads(text)["choices"][0]["message"]["content"]
    assert json.loads(content) in ({"a": 1}, {"a": 2})


async def test_an_answer_whose_grammar_takes_too_long_ends_alone(
    http: aiohttp.ClientSession, node: SharedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "engine_bridge.policy.limits.matcher_budget.MatcherBudget.next_token", lambda self: None
    )
    body = CHAT | {"structured_outputs": {"grammar": AMBIGUOUS}, "max_tokens": 2000, "min_tokens": 2000}
    other = asyncio.create_task(_content(http, CHAT | {"temperature": 0}))
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        assert "too ambiguous" in (await response.json())["error"]["message"]
    assert await other == await _content(http, CHAT | {"temperature": 0})
    await engine_is_empty(node)


async def _content(http: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    async with http.post("/v1/chat/completions", json=body) as response:
        return (await response.json())["choices"][0]["message"]["content"]


async def test_equal_grammars_give_independent_answers_and_go_with_them(
    http: aiohttp.ClientSession, node: SharedNode
) -> None:
    body = CHAT | {"structured_outputs": {"choice": ["yes", "no"]}, "n": 3}
    async with http.post("/v1/chat/completions", json=body) as response:
        answers = [choice["message"]["content"] for choice in (await response.json())["choices"]]
    assert set(answers) <= {"yes", "no"} and len(answers) == 3
    await engine_is_empty(node)

    def num_compiled(driver: Any) -> int:
        manager = driver.engine.engine_core.engine_core.scheduler.structured_output_manager
        return int(manager.backend.num_compiled)

    assert await node.run_on_engine(num_compiled) == 0


async def test_a_pattern_that_is_used_often_goes_on_working(
    http: aiohttp.ClientSession, node: SharedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for so few states, each answer fills up what its grammar may have."""
    monkeypatch.setattr("engine_bridge.policy.limits.grammar_room.FIRST_STATES", 150)
    street = {"json": {"type": "string", "pattern": "^.{1,60} .{1,40}$"}}
    body = CHAT | {"structured_outputs": street, "max_tokens": 30, "n": 4}

    async def ask() -> int:
        async with http.post("/v1/chat/completions", json=body) as response:
            return response.status

    assert await asyncio.gather(*(ask() for _ in range(6))) == [200] * 6


async def test_grammars_that_take_all_the_memory_are_refused_until_some_have_ended(
    http: aiohttp.ClientSession, node: SharedNode
) -> None:
    def let_grammars_have(num_bytes: int, driver: Any) -> int:
        backend = driver.engine.engine_core.engine_core.scheduler.structured_output_manager.backend
        before: int = backend._room._total_bytes
        backend._room._total_bytes = num_bytes
        return before

    body = CHAT | {"structured_outputs": {"choice": ["yes", "no"]}}
    await engine_is_empty(node)
    room_bytes = await node.run_on_engine(partial(let_grammars_have, 1 << 20))
    try:
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 429
            error = (await response.json())["error"]
        assert error["code"] == "rate_limited" and "grammar_memory_mib" in error["message"]
    finally:
        await node.run_on_engine(partial(let_grammars_have, room_bytes))
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("path", "body", "setting"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 100, "n": 64}, "max_sequences"),
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "x" * 100_000, "truncate_prompt_tokens": 5},
            "max_prompt_chars",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"bad_words": [f"w{number}" for number in range(300)]},
            "max_bad_words",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"logit_bias": {str(number): 1 for number in range(1100)}},
            "max_logit_bias",
        ),
        ("/v1/chat/completions", CHAT | {"structured_outputs": {"choice": ["x"] * 1100}}, "max_choices"),
        ("/v1/chat/completions", CHAT | {f"f{number}": 1 for number in range(60_000)}, "max_json_values"),
        ("/v1/messages", CHAT | {"messages": HELLO * 3000}, "max_messages"),
    ],
)
async def test_more_than_a_limit_allows_is_a_bad_request_that_names_the_setting(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], setting: str
) -> None:
    async with http.post(path, json=body) as response:
        assert response.status == 400
        assert setting in (await response.json())["error"]["message"]


async def test_log_probabilities_beyond_the_limit_come_only_in_a_stream(
    gateways: Gateways, node: SharedNode
) -> None:
    server = await gateways()
    body = CHAT | {"logprobs": True, "top_logprobs": 5, "max_tokens": 20, "ignore_eos": True}
    assert node._client is not None
    limits = node._client._limits
    node._client._limits = type(limits)(max_logprobs=100)
    try:
        async with aiohttp.ClientSession(server.url) as http:
            async with http.post("/v1/chat/completions", json=body) as response:
                assert response.status == 400
                assert "max_logprobs" in (await response.json())["error"]["message"]
            async with http.post("/v1/chat/completions", json=body | {"stream": True}) as response:
                assert response.status == 200
                assert b"max_logprobs" not in await response.read()
    finally:
        node._client._limits = limits


async def test_a_failure_of_the_server_is_told_without_its_insides_and_logged_with_them(
    chat: ChatClient,
    http: aiohttp.ClientSession,
    node: SharedNode,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def breaks(*args: Any, **options: Any) -> None:
        raise KeyError("a parser's secret")

    assert node._serving is not None
    monkeypatch.setattr(node._serving._renderer, "render_chat", breaks)
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/messages", CHAT),
    ):
        async with http.post(path, json=body) as response:
            assert response.status == 500
            message = (await response.json())["error"]["message"]
        assert "secret" not in message
        assert message.rstrip(".").rsplit(" ", 1)[-1] in caplog.text
    with pytest.raises(ChatError) as told:
        async for _ in chat.ask("Hello!"):
            pass
    assert (told.value.code, told.value.retryable) == ("internal", False)
    assert "secret" not in str(told.value)
    assert "parser's secret" in caplog.text, "with where it came from; our own format leaves texts out"


@pytest.mark.parametrize(
    ("path", "more", "part"),
    [
        ("/v1/chat/completions", {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"conversation": 1, "tools": 2}}, ""),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": 5}}}]},
            "",
        ),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {"required": 5}}]}, ""),
        (
            "/v1/chat/completions",
            {"structured_outputs": {"grammar": 'start: a "x"\na[lazy]: /.*/\n'}},
            "the compiler of grammars cannot work with it",
        ),
        ("/v1/chat/completions", {"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
    ],
)
async def test_odd_fields_are_bad_requests_that_name_nothing_of_the_inside(
    http: aiohttp.ClientSession, path: str, more: dict[str, Any], part: str
) -> None:
    async with http.post(path, json=CHAT | more) as response:
        text = await response.text()
        # A field that is of no use may also be left out.
        assert response.status == 400 or (response.status == 200 and not part), text
    if response.status == 400:
        assert part in text
        for inside in ("TokenizerPool", "iterable", "panic", "object", "()", "NoneType", "triggers'"):
            assert inside not in text


async def test_a_message_that_no_model_could_read_is_refused_and_not_stored(
    chat: ChatClient, http: aiohttp.ClientSession
) -> None:
    with pytest.raises(ChatError) as refused:
        async for _ in chat.ask("word " * 50_000):
            pass
    assert refused.value.code == "prompt_too_long"
    async with http.get("/api/sessions") as response:
        assert (await response.json())["sessions"] == []
    events = [event async for event in chat.ask("Hello!", sampling={"max_tokens": 4})]
    assert isinstance(events[-1], Done)


async def test_a_compressed_body_is_taken_up_to_the_limit_of_what_it_holds(
    http: aiohttp.ClientSession,
) -> None:
    packed = zlib.compress(json.dumps(CHAT).encode())
    headers = {"Content-Encoding": "deflate", "Content-Type": "application/json"}
    async with http.post("/v1/chat/completions", data=packed, headers=headers) as response:
        assert response.status == 200
    bomb = zlib.compress(b" " * (64 << 20))
    async with http.post("/v1/chat/completions", data=bomb, headers=headers) as response:
        assert response.status == 413
    async with http.post(
        "/v1/chat/completions", data=b"x", headers=headers | {"Content-Encoding": "br"}
    ) as response:
        assert response.status == 415
