"""Requests that would hurt others are refused in their API's shape, or ended alone, on the real engine."""

from __future__ import annotations

import asyncio
import json
import zlib
from functools import partial
from typing import Any

import pytest

from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError

from .conftest import SharedNode, ask, engine_is_empty, told
from .facts import BODY, CHAT, COMPLETIONS, HELLO, MESSAGES, MODEL, RESPONSES, Http, Log, Patch, events

PROMPT = {"model": MODEL, "prompt": "Hello"}
AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "x" | "y"'
CHOICE = BODY | {"structured_outputs": {"choice": ["yes", "no"]}}


def references(num: int) -> dict[str, Any]:
    """A schema on which the compiler of grammars overflows its stack, from some hundreds on."""
    defs: dict[str, Any] = {
        f"d{number}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(num)
    }
    return {"$defs": defs | {f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


FATAL = references(1000)
FORM = {"type": "json_schema", "name": "x", "schema": FATAL}
TOOL = {"type": "function", "function": {"name": "f", "parameters": FATAL, "strict": True}}


async def test_a_grammar_that_ends_its_helper_process_is_a_bad_request_and_the_server_lives_on(
    http: Http, node: SharedNode
) -> None:
    """By each API, and some of them streamed."""
    num_rebuilds = node.figures().num_rebuilds
    for path, body in (
        (CHAT, BODY | {"response_format": schema_format(FATAL), "stream": True}),
        (CHAT, BODY | {"tools": [TOOL], "tool_choice": "required"}),
        (COMPLETIONS, PROMPT | {"structured_outputs": {"json": FATAL}}),
        (RESPONSES, {"model": MODEL, "input": "Hello", "text": {"format": FORM}, "stream": True}),
        (MESSAGES, BODY | {"output_config": {"format": FORM}, "stream": True}),
    ):
        assert "too deeply" in (await told(http.post(path, json=body), 400))["error"]["message"]
        await told(http.post(CHAT, json=BODY))
    assert node.figures().num_rebuilds == num_rebuilds
    await engine_is_empty(node)


async def test_structured_output_is_what_its_schema_says(http: Http) -> None:
    known = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    body = BODY | {"response_format": schema_format({"type": "object"} | known), "max_tokens": 64}
    whole = (await told(http.post(CHAT, json=body)))["choices"][0]["message"]["content"]
    pieces = events(await told(http.post(CHAT, json=body | {"stream": True})))
    streamed = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    assert {json.loads(said)["a"] for said in (whole, streamed)} <= {1, 2}


async def test_an_answer_with_a_slow_grammar_ends_alone(
    http: Http, node: SharedNode, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(
        "engine_bridge.policy.limits.matcher_budget.MatcherBudget.next_token", lambda self: None
    )

    async def content() -> str:
        reply = await told(http.post(CHAT, json=BODY | {"temperature": 0}))
        return str(reply["choices"][0]["message"]["content"])

    body = BODY | {"structured_outputs": {"grammar": AMBIGUOUS}, "max_tokens": 2000, "min_tokens": 2000}
    other = asyncio.create_task(content())
    assert "too ambiguous" in (await told(http.post(CHAT, json=body), 400))["error"]["message"]
    assert await other == await content()
    await engine_is_empty(node)


async def test_grammars_beyond_their_memory_wait_for_others_to_end(http: Http, node: SharedNode) -> None:
    def let_grammars_have(num_bytes: int, driver: Any) -> int:
        backend = driver.engine.engine_core.engine_core.scheduler.structured_output_manager.backend
        before: int = backend._room._total_bytes
        backend._room._total_bytes = num_bytes
        return before

    await engine_is_empty(node)
    room_bytes = await node.run_on_engine(partial(let_grammars_have, 1 << 20))
    try:
        error = (await told(http.post(CHAT, json=CHOICE), 429))["error"]
        assert error["code"] == "rate_limited" and "grammar_memory_mib" in error["message"]
    finally:
        await node.run_on_engine(partial(let_grammars_have, room_bytes))
    await told(http.post(CHAT, json=CHOICE))


async def test_more_than_a_limit_allows_is_a_bad_request_that_names_the_setting(http: Http) -> None:
    for path, body, setting in (
        (COMPLETIONS, {"model": MODEL, "prompt": ["a"] * 100, "n": 64}, "max_sequences"),
        (COMPLETIONS, PROMPT | {"prompt": "x" * 100_000, "truncate_prompt_tokens": 5}, "max_prompt_chars"),
        (CHAT, BODY | {"bad_words": [f"w{number}" for number in range(300)]}, "max_bad_words"),
        (CHAT, BODY | {"logit_bias": {str(number): 1 for number in range(1100)}}, "max_logit_bias"),
        (CHAT, BODY | {"structured_outputs": {"choice": ["x"] * 1100}}, "max_choices"),
        (CHAT, BODY | {f"f{number}": 1 for number in range(60_000)}, "max_json_values"),
        (MESSAGES, BODY | {"messages": HELLO * 3000}, "max_messages"),
    ):
        assert setting in (await told(http.post(path, json=body), 400))["error"]["message"]


async def test_too_many_log_probabilities_come_only_in_a_stream(
    http: Http, node: SharedNode, monkeypatch: Patch
) -> None:
    client = node._client
    monkeypatch.setattr(client, "limits", type(client.limits)(max_answer_logprobs=100))
    body = BODY | {"logprobs": True, "top_logprobs": 5, "max_tokens": 20, "ignore_eos": True}
    assert "max_answer_logprobs" in (await told(http.post(CHAT, json=body), 400))["error"]["message"]
    assert "max_answer_logprobs" not in await told(http.post(CHAT, json=body | {"stream": True}))


async def test_a_failure_of_the_server_is_told_without_its_insides_and_logged_with_them(
    chat: ChatClient, http: Http, node: SharedNode, monkeypatch: Patch, caplog: Log
) -> None:
    async def breaks(*args: Any, **options: Any) -> None:
        raise KeyError("a parser's secret")

    monkeypatch.setattr(node._serving._renderer, "render_chat", breaks)
    for path, body in ((CHAT, BODY), (CHAT, BODY | {"stream": True}), (MESSAGES, BODY)):
        message = (await told(http.post(path, json=body), 500))["error"]["message"]
        assert "secret" not in message
        assert message.rstrip(".").rsplit(" ", 1)[-1] in caplog.text
    with pytest.raises(ChatError) as refused:
        await ask(chat, "Hello!")
    assert (refused.value.code, refused.value.retryable) == ("internal", False)
    assert "secret" not in str(refused.value)
    assert caplog.text.count("in breaks\n") >= 3, "the log says where each came from"
    assert "parser's secret" in caplog.text, "with where it came from; our own format leaves texts out"


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"required": 5}}}
LAZY = {"grammar": 'start: a "x"\na[lazy]: /.*/\n'}
ODD_ARGUMENTS = ("[]", "5", "null", '"x"', "{", "", {})
ODD_MESSAGES: list[dict[str, Any]] = [
    *(
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
        for call in ({"name": "f", "arguments": told} for told in ODD_ARGUMENTS)
    ),
    {"role": "nobody", "content": "x"},
    {"role": "tool", "content": "x"},
    {"role": "user", "content": [{"type": "nothing"}]},
    {"role": "assistant", "tool_calls": [{}]},
]


async def test_odd_fields_are_bad_requests_that_name_nothing_of_the_inside(http: Http) -> None:
    """A field that is of no use may also be left out."""
    for path, more, part in (
        (CHAT, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"conversation": 1, "tools": 2}}, ""),
        (CHAT, {"tools": [FUNCTION]}, ""),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"required": 5}}]}, ""),
        (CHAT, {"structured_outputs": LAZY}, "the compiler of grammars cannot work with it"),
        (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
        *((CHAT, {"messages": [message]}, "") for message in ODD_MESSAGES),
    ):
        async with http.post(path, json=BODY | more) as response:
            text = await response.text()
        assert response.status == 400 or (response.status == 200 and not part), text
        if response.status == 400:
            assert part in text
            for inside in ("TokenizerPool", "iterable", "panic", "object", "()", "NoneType", "triggers'"):
                assert inside not in text


async def test_a_message_too_long_for_the_model_is_not_stored(chat: ChatClient, http: Http) -> None:
    for num_words in (20_000, 50_000):
        with pytest.raises(ChatError, match="tokens" if num_words == 20_000 else "") as refused:
            await ask(chat, "word " * num_words)
        assert refused.value.code == "prompt_too_long"
    assert (await told(http.get("/api/sessions")))["sessions"] == []
    assert (await ask(chat, "Hello!"))[0]


async def test_a_compressed_body_is_taken_up_to_the_limit_of_what_it_holds(http: Http) -> None:
    headers = {"Content-Encoding": "deflate", "Content-Type": "application/json"}
    packed, bomb = zlib.compress(json.dumps(BODY).encode()), zlib.compress(b" " * (64 << 20))
    await told(http.post(CHAT, data=packed, headers=headers))
    await told(http.post(CHAT, data=bomb, headers=headers), 413)
    await told(http.post(CHAT, data=b"x", headers=headers | {"Content-Encoding": "br"}), 415)
