"""Bad and hostile HTTP input: a clear error in the API's own shape, and nobody else harmed."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import traceback
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.engine.output_processor import RequestOutputCollector
from yarl import URL

from gateway.app import Server

from .conftest import Gateways, SharedNode, told
from .facts import BODY, CHAT, COMPLETIONS, HELLO, MESSAGES, MODEL, RESPONSES, Http, Patch
from .test_connections import peer_of


async def refused(http: Http, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error in the reply to a body, which is JSON or bytes; it has OpenAI's form."""
    sent = {"data": body} if isinstance(body, bytes) else {"json": body}
    error: dict[str, Any] = (await told(http.post(path, **sent), status))["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


async def test_malformed_bodies(http: Http) -> None:
    for data in (
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe\x00",
        b'{"model":"\xff"}',
        b"[" * 100_000,
        b'{"messages":' + b"9" * 5000 + b"}",
    ):
        for path in (CHAT, COMPLETIONS, RESPONSES):
            await refused(http, path, data)
    body = await told(http.post(MESSAGES, data=b"{"), 400)
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    await told(http.post(CHAT, data=b"this is not gzip", headers=headers), 400)


BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": []}}
ODD_CALL = [{"role": "assistant", "tool_calls": [_CALL]}]
ODD_PART = [{"role": "user", "content": ["hi"]}]
CHATS_PART = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
NO_TEXT = [{"role": "user", "content": 5}]
LONG = {"messages": [{"role": "user", "content": "Where is the harbour? " * 1500}]}


async def test_errors_have_one_form_with_plain_words(http: Http) -> None:
    """What vLLM refuses looks as what the gateway refuses: OpenAI's clients declare `code` as a string."""
    for path, change, part, param in (
        (CHAT, {"messages": "hi"}, "`messages` should be a list.", "messages"),
        (CHAT, {"messages": NO_TEXT}, "` should be a string or a list.", "messages[0].content"),
        (RESPONSES, {"input": NO_TEXT}, "` should be a string or a list.", "input[0].content"),
        (
            CHAT,
            {"messages": ODD_CALL},
            "` should be a string.",
            "messages[…].tool_calls[0].function.arguments",
        ),
        (CHAT, {"messages": ODD_PART}, "` should be an object.", "messages[…].content[0]"),
        (RESPONSES, {"input": CHATS_PART}, "'input_text'", "input[0].content[0].type"),
        (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "'user'", "input[0].role"),
        (CHAT, {"max_tokens": -1}, "max_tokens", "max_tokens"),
    ):
        error = await refused(http, path, BODY | change)
        assert (error["code"], error["param"]) == ("bad_request", param)
        assert error["type"] == "invalid_request_error"
        assert part in error["message"] and param in error["message"]
    error = await refused(http, CHAT, BODY | LONG)
    assert error["code"] == "context_length_exceeded" and "4096" in error["message"]
    for path, part in ((CHAT, "pirate"), (COMPLETIONS, MODEL)):
        error = await refused(http, path, BODY | {"model": "nope", "prompt": "a"}, 404)
        assert error["code"] == "model_not_found" and part in error["message"]


async def test_what_vllm_refuses_on_purpose_is_told_in_its_own_words(http: Http) -> None:
    """By plain errors of Python's, too, which are told from mistakes by where they were raised."""
    prompts = await refused(http, COMPLETIONS, {"model": MODEL, "prompt": []})
    assert "at least one prompt" in prompts["message"]
    choice = {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "nope"}}
    body = await told(http.post(MESSAGES, json=BODY | {"messages": HELLO} | choice), 400)
    assert body["error"]["type"] == "invalid_request_error" and "nope" in body["error"]["message"]


async def test_a_field_of_a_form_that_no_code_expects_is_the_clients_fault(http: Http) -> None:
    """Before any stream begins, too."""
    for path, change in (
        (CHAT, {"messages": 5}),
        (CHAT, {"messages": [{"role": 7}]}),
        (CHAT, {"messages": [{"role": "user", "content": "Hello!"}, False]}),
        (CHAT, {"messages": [None]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": "x"}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": None}]}]}),
        (CHAT, {"max_tokens": "x"}),
        (CHAT, {"n": 10_000}),
        (CHAT, {"n": 0}),
        (CHAT, {"temperature": -1}),
        (CHAT, {"logit_bias": {"99999999": 1}}),
        (CHAT, {"stream": []}),
        (CHAT, {"session_id": 5}),
        (CHAT, {"structured_outputs": "json_object"}),
        (CHAT, {"structured_outputs": 5}),
        (CHAT, {"response_format": "json_object"}),
        (CHAT, {"response_format": BAD_SCHEMA}),
        (CHAT, {"tools": [{"type": "function"}], "tool_choice": "required"}),
        (CHAT, {"tools": "x", "tool_choice": {"function": 5}}),
        (CHAT, {"stream_options": "x", "stream": True}),
        (CHAT, {"chat_template_kwargs": {"tokenize": []}, "documents": 5}),
        (COMPLETIONS, {"structured_outputs": [1]}),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": "x"}),
        (COMPLETIONS, {"prompt": [[1], "x"]}),
        (RESPONSES, {"input": [False]}),
        (RESPONSES, {"input": [{"type": "function_call_output"}]}),
        (RESPONSES, {"input": 5}),
        (MESSAGES, {"messages": [False]}),
        (MESSAGES, {"messages": "x"}),
    ):
        body = {"model": MODEL, "max_tokens": 4}
        body |= {"messages": HELLO} if path in (CHAT, MESSAGES) else {}
        for more in ({}, {"stream": True}):
            error = (await told(http.post(path, json=body | more | change), 400))["error"]
            assert error["message"] and error.get("code", "none") and "attribute" not in error["message"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nX-Request-Id: \xff\xfe", b"200"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nX-Session-Id: \xff\xfe", b"400"),
        (
            b"GET /ws HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: " + b"\xff" * 16,
            b"400",
        ),
        # Too large, and the rest never comes: it is refused without being read.
        (f"POST {CHAT} HTTP/1.1\r\nContent-Length: {200 << 20}".encode(), b"413"),
    ],
)
async def test_heads_that_are_no_text_or_promise_too_much(server: Server, head: bytes, status: bytes) -> None:
    body = json.dumps(BODY).encode() if head.startswith(b"POST") else b""
    if b"Content-Length" not in head:
        head += f"\r\nContent-Length: {len(body)}".encode()
    peer = await peer_of(server)
    reply = await peer.head(head + b"\r\nHost: 127.0.0.1\r\n\r\n" + body)
    assert reply.split()[1] == status
    peer.cut()


async def test_a_huge_chunked_body_is_refused(gateways: Gateways) -> None:
    server = await gateways(max_body_bytes=100_000)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 10_000

    async with Http(server.url) as http:
        error = (await told(http.post(CHAT, data=endless()), 413))["error"]
        assert "100000 bytes" in error["message"]
        await told(http.post(CHAT, json=BODY))


async def test_wrong_addresses_and_methods(http: Http, server: Server) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("GET", "/api/sessions/nope", 404),
        ("DELETE", "/api/sessions/nope", 404),
        ("POST", "/api/sessions/nope/restore", 404),
        ("POST", "/api/sessions/nope/choose", 400),
        ("GET", "/api/sessions?limit=x", 400),
        ("GET", "/api/sessions?limit=100000", 400),
        ("GET", "/api/sessions?before=garbage", 400),
        ("GET", "/v1/models/nope", 404),
        ("GET", "/static/../README.md", 404),
        ("GET", "/static//etc/passwd", 404),
        ("POST", "/v1/load_lora_adapter", 400),
    ):
        error = (await told(http.request(method, URL(server.url + path, encoded=True)), status))["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "pirate" in (await told(http.get("/v1/models/nope"), 404))["error"]["message"]
    async with http.put("/api/sessions", json={}) as response:
        assert response.status == 405
        assert {"GET", "POST"} <= set(response.headers["Allow"].split(","))


async def test_sessions_over_rest(http: Http) -> None:
    session = await told(http.post("/api/sessions", json={"title": "Plans"}), 201)
    url = f"/api/sessions/{session['id']}"
    assert (await told(http.patch(url, json={"title": "Better plans"})))["title"] == "Better plans"
    found = await told(http.get("/api/sessions", params={"q": "better"}))
    assert [item["id"] for item in found["sessions"]] == [session["id"]]
    for bad in ({"title": 5}, {"titel": "x"}, [], "x"):
        await told(http.patch(url, json=bad), 400)
    await told(http.delete(url), 204)
    await told(http.get(url), 404)
    assert (await told(http.post(f"{url}/restore")))["title"] == "Better plans"
    error = await refused(http, "/api/sessions", {"adapter": "nope"}, 404)
    assert error["code"] == "model_not_found"
    assert (await told(http.post("/api/sessions", json={"adapter": MODEL}), 201))["adapter"] is None


async def test_a_refused_call_leaves_no_session(http: Http) -> None:
    await refused(http, RESPONSES, {"model": "nope", "input": "Hello"}, 404)
    assert (await told(http.get("/api/sessions")))["sessions"] == []


async def test_pages_of_other_origins_are_kept_out(http: Http, server: Server) -> None:
    for path in ("/ws", "/api/sessions", CHAT):
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://["):
            async with http.get(path, headers={"Origin": origin}) as response:
                assert response.status == 403
                assert "Access-Control-Allow-Origin" not in response.headers
    # A name that was pointed at this machine agrees with itself, and is refused all the same.
    # Its page sends no Origin when it only reads.
    rebound = {"Host": "evil.example:80"}
    for headers in (rebound, rebound | {"Origin": "http://evil.example:80"}):
        await told(http.get("/api/sessions", headers=headers), 403)
    for headers in ({"Host": "localhost:8000"}, {"Origin": server.url}):
        await told(http.get("/api/sessions", headers=headers))


async def test_an_allowed_origin_may_use_the_api(gateways: Gateways) -> None:
    server = await gateways(cors_origins=("https://app.example",))
    headers = {"Origin": "https://app.example"}
    # As openai's and anthropic's JavaScript SDKs ask in a browser.
    wanted = "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,x-stainless-arch,x-stainless-lang"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
    async with Http(server.url, headers=headers) as http:
        async with http.options(CHAT, headers=preflight) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert response.headers["Access-Control-Allow-Headers"] == wanted
            exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
            assert {"X-Request-Id", "Request-Id", "Retry-After"} <= set(exposed)
        for stream in (False, True):
            async with http.post(CHAT, json=BODY | {"stream": stream}) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
                await response.read()


async def test_every_reply_names_its_request(http: Http) -> None:
    """The client's own name if it is sane, and one made here where there is none or an odd one; errors and streams, too."""
    for path, body, status in ((CHAT, BODY | {"stream": True}, 200), (CHAT, {}, 400), ("/nowhere", {}, 404)):
        async with http.post(path, json=body, headers={"X-Request-Id": "mine-1"}) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (status, "mine-1")
            assert status != 200 or b"chatcmpl-mine-1" in await response.read()
    for odd in ("two words", "x" * 129):
        async with http.get("/healthz", headers={"X-Request-Id": odd}) as response:
            assert response.headers["X-Request-Id"] not in ("", odd)
    async with http.post(MESSAGES, json={}) as response:
        assert response.headers["Request-Id"] == response.headers["X-Request-Id"]


async def test_the_page_health_and_metrics(http: Http) -> None:
    """vLLM's own figures are in the default registry."""
    async with http.get("/") as response:
        assert response.status == 200 and response.content_type == "text/html"
        assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        page = await response.text()
    assert "<script" in page and "http://" not in page.replace("http://www.w3.org", "")
    await told(http.get("/healthz"))
    assert await told(http.get("/readyz")) == {"status": "ready"}
    await told(http.post(CHAT, json=BODY))
    text = await told(http.get("/metrics"))
    assert f'overture_http_requests_total{{route="{CHAT}",status="200"}} 1.0' in text
    text = generate_latest(REGISTRY).decode()
    for name in ("num_requests_running", "time_to_first_token_seconds_count", "kv_cache_usage_perc"):
        assert f"vllm:{name}" in text


async def test_a_silent_stream_is_kept_alive(http: Http, node: SharedNode, monkeypatch: Patch) -> None:
    monkeypatch.setattr("engine_bridge.driver.serving.api_events.KEEP_ALIVE_S", 0.05)
    # The engine is held for a moment, as by a long prefill of somebody else.
    release = threading.Event()
    held = asyncio.ensure_future(node.run_on_engine(lambda driver: release.wait(30)))
    async with http.post(CHAT, json=BODY | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        comment = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60)
        release.set()
        rest = (await response.read()).decode()
    await held
    assert comment.startswith(b":")
    *events, last = [line for line in rest.split("\n\n") if line and not line.startswith(":")]
    assert last == "data: [DONE]" and len(events) > 1
    kinds = {json.loads(event.removeprefix("data: "))["object"] for event in events}
    assert kinds == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (CHAT, BODY, 1),
        (COMPLETIONS, {"model": MODEL, "prompt": "Hello!", "max_tokens": 4}, 2),
        (MESSAGES, BODY, 3),
        (RESPONSES, {"model": MODEL, "input": "Hello!", "max_output_tokens": 4}, 4),
    ],
)
async def test_an_event_goes_through_few_generators(
    http: Http, monkeypatch: Patch, path: str, body: dict[str, Any], most: int
) -> None:
    """Counted where an output is taken over: docs/decisions/0023."""
    numbers: list[int] = []

    def counted(collector: RequestOutputCollector) -> Any:
        frames = [frame for frame, _ in traceback.walk_stack(None)]
        numbers.append(sum(bool(frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR) for frame in frames))
        return get_nowait(collector)

    get_nowait = RequestOutputCollector.get_nowait
    monkeypatch.setattr(RequestOutputCollector, "get_nowait", counted)
    await told(http.post(path, json=body | {"stream": True}))
    assert max(numbers) == most
