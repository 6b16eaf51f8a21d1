"""Bad and hostile HTTP input: a clear error in the API's own shape, and nobody else harmed."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import aiohttp
import pytest

from gateway.app import Server

from .conftest import MODEL, Gateways, SharedNode

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    body = await response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe\x00",
        b'{"model":"\xff"}',
        b"[" * 100_000,
        b'{"messages":' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
async def test_malformed_bodies(http: aiohttp.ClientSession, path: str, data: bytes) -> None:
    async with http.post(path, data=data) as response:
        assert response.status == 400
        await error_of(response)


async def test_malformed_anthropic_bodies_are_answered_in_its_shape(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/messages", data=b"{") as response:
        assert response.status == 400
        body = await response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "change", "message", "param"),
    [
        (CHAT, {"messages": "hi"}, "`messages` should be a list.", "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": 5}]},
            "`messages[0].content` should be a string or a list.",
            "messages[0].content",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": 5}]},
            "`input[0].content` should be a string or a list.",
            "input[0].content",
        ),
    ],
)
async def test_what_does_not_fit_is_said_in_plain_words(
    http: aiohttp.ClientSession, path: str, change: dict[str, Any], message: str, param: str
) -> None:
    async with http.post(path, json=BODY | change) as response:
        assert response.status == 400
        error = await error_of(response)
    assert (error["message"], error["param"]) == (message, param)


async def test_fields_of_the_wrong_type(http: aiohttp.ClientSession) -> None:
    for change in (
        {"messages": 5},
        {"max_tokens": "x"},
        {"stream": []},
        {"messages": [{"role": 7}]},
        {"session_id": 5},
    ):
        async with http.post(CHAT, json=BODY | change) as response:
            assert response.status == 400, change
            await error_of(response)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (CHAT, {"structured_outputs": "json_object"}),
        (CHAT, {"structured_outputs": 5}),
        (CHAT, {"response_format": "json_object"}),
        (CHAT, {"messages": [{"role": "user", "content": "Hello!"}, False]}),
        (CHAT, {"messages": [None]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": "x"}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": None}]}]}),
        (CHAT, {"tools": [{"type": "function"}], "tool_choice": "required"}),
        (CHAT, {"tools": "x", "tool_choice": {"function": 5}}),
        (CHAT, {"stream_options": "x", "stream": True}),
        (CHAT, {"chat_template_kwargs": {"tokenize": []}, "documents": 5}),
        ("/v1/completions", {"structured_outputs": [1]}),
        ("/v1/completions", {"prompt": None, "prompt_embeds": "x"}),
        ("/v1/completions", {"prompt": [[1], "x"]}),
        ("/v1/responses", {"input": [False]}),
        ("/v1/responses", {"input": [{"type": "function_call_output"}]}),
        ("/v1/responses", {"input": 5}),
        ("/v1/messages", {"messages": [False]}),
    ],
)
async def test_a_field_of_a_form_that_no_code_expects_is_the_clients_fault(
    http: aiohttp.ClientSession, path: str, change: dict[str, Any]
) -> None:
    body = {"model": MODEL, "max_tokens": 4}
    if path in (CHAT, "/v1/messages"):
        body["messages"] = BODY["messages"]
    async with http.post(path, json=body | change) as response:
        assert response.status == 400, await response.text()
        answer = await response.json()
    assert answer["error"]["message"] and "attribute" not in answer["error"]["message"]


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
    ],
)
async def test_heads_that_are_no_text_fail_no_request_by_themselves(
    server: Server, head: bytes, status: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps(BODY).encode() if head.startswith(b"POST") else b""
    writer.write(head + f"\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(60):
        line = await reader.readline()
    assert line.split()[1] == status
    writer.close()


async def test_a_huge_body_is_refused_without_being_read(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {200 << 20}\r\n\r\n".encode())
    writer.write(b"x" * 1000)  # the rest never comes
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
    assert b" 413 " in head.split(b"\r\n")[0]
    writer.close()


async def test_a_huge_chunked_body_is_refused(gateways: Gateways) -> None:
    server = await gateways(max_body_bytes=100_000)

    async def endless():
        for _ in range(200):
            yield b"x" * 10_000

    async with aiohttp.ClientSession(server.url) as http:
        async with http.post(CHAT, data=endless()) as response:
            assert response.status == 413
            assert "100000 bytes" in (await error_of(response))["message"]
        async with http.post(CHAT, json=BODY) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
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
        ("GET", "/static/nope.js", 404),
        ("GET", "/static/../README.md", 404),
        ("GET", "/static/%2e%2e/README.md", 404),
        ("GET", "/static/..%2fREADME.md", 404),
        ("GET", "/static//etc/passwd", 404),
        ("GET", "/static/%00", 404),
        ("GET", "/static/" + "x" * 300, 404),
        ("POST", "/v1/load_lora_adapter", 400),
    ],
)
async def test_wrong_addresses(http: aiohttp.ClientSession, method: str, path: str, status: int) -> None:
    from yarl import URL

    url = URL(str(http._base_url).rstrip("/") + path, encoded=True)
    async with http.request(method, url) as response:
        assert response.status == status
        await error_of(response)


async def test_a_method_that_is_not_allowed_is_answered_with_those_that_are(
    http: aiohttp.ClientSession,
) -> None:
    async with http.put("/api/sessions", json={}) as response:
        assert response.status == 405
        assert {"GET", "POST"} <= set(response.headers["Allow"].split(","))
        await error_of(response)


async def test_sessions_over_rest(http: aiohttp.ClientSession) -> None:
    async with http.post("/api/sessions", json={"title": "Plans"}) as response:
        assert response.status == 201
        session = await response.json()
    url = f"/api/sessions/{session['id']}"
    async with http.patch(url, json={"title": "Better plans"}) as response:
        assert (await response.json())["title"] == "Better plans"
    async with http.get("/api/sessions", params={"q": "better"}) as response:
        assert [item["id"] for item in (await response.json())["sessions"]] == [session["id"]]
    for bad in ({"title": 5}, {"titel": "x"}, [], "x"):
        async with http.patch(url, json=bad) as response:
            assert response.status == 400
    async with http.delete(url) as response:
        assert response.status == 204
    async with http.get(url) as response:
        assert response.status == 404
    async with http.post(url + "/restore") as response:
        assert (await response.json())["title"] == "Better plans"


@pytest.mark.parametrize("path", ["/ws", "/api/sessions", CHAT])
async def test_pages_of_other_origins_are_kept_out(
    http: aiohttp.ClientSession, path: str, server: Server
) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://["):
        async with http.get(path, headers={"Origin": origin}) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers
    # A name that was pointed at this machine agrees with itself, and is refused all the same.
    # Its page sends no Origin when it only reads.
    rebound = {"Host": "evil.example:80"}
    for headers in (rebound, rebound | {"Origin": "http://evil.example:80"}):
        async with http.get("/api/sessions", headers=headers) as response:
            assert response.status == 403
    async with http.get("/api/sessions", headers={"Host": "localhost:8000"}) as response:
        assert response.status == 200
    async with http.get("/api/sessions", headers={"Origin": server.url}) as response:
        assert response.status == 200


async def test_an_allowed_origin_may_use_the_api(gateways: Gateways) -> None:
    server = await gateways(cors_origins=("https://app.example",))
    headers = {"Origin": "https://app.example"}
    # As openai's and anthropic's JavaScript SDKs ask in a browser.
    wanted = "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,x-stainless-arch,x-stainless-lang"
    preflight = headers | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": wanted,
    }
    async with aiohttp.ClientSession(server.url) as http:
        async with http.options(CHAT, headers=preflight) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert response.headers["Access-Control-Allow-Headers"] == wanted
            exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
            assert {"X-Request-Id", "Request-Id", "Retry-After"} <= set(exposed)
        for stream in (False, True):
            async with http.post(CHAT, json=BODY | {"stream": stream}, headers=headers) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
                await response.read()


async def test_every_reply_names_its_request(http: aiohttp.ClientSession) -> None:
    """The client's own name if it is sane, and one made here where there is none or an odd one; errors and streams, too."""
    for path, body, status in ((CHAT, BODY | {"stream": True}, 200), (CHAT, {}, 400), ("/nowhere", {}, 404)):
        async with http.post(path, json=body, headers={"X-Request-Id": "mine-1"}) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (status, "mine-1")
            assert status != 200 or b"chatcmpl-mine-1" in await response.read()
    for odd in ("two words", "x" * 129):
        async with http.get("/healthz", headers={"X-Request-Id": odd}) as response:
            assert response.headers["X-Request-Id"] not in ("", odd)
    async with http.post("/v1/messages", json={}) as response:
        assert response.headers["Request-Id"] == response.headers["X-Request-Id"]


LONG = [{"role": "user", "content": "Where is the harbour? " * 1500}]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "code", "part"),
    [
        (CHAT, {"model": "nope"}, 404, "invalid_request_error", "model_not_found", "pirate"),
        (
            "/v1/completions",
            {"model": "nope", "prompt": "a"},
            404,
            "invalid_request_error",
            "model_not_found",
            MODEL,
        ),
        (CHAT, {"max_tokens": -1}, 400, "invalid_request_error", "bad_request", "max_tokens"),
        (CHAT, {"messages": LONG}, 400, "invalid_request_error", "context_length_exceeded", "4096"),
        (CHAT, {"messages": "x"}, 400, "invalid_request_error", "bad_request", "messages"),
    ],
)
async def test_errors_have_one_form_with_words(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int, kind: str, code: str, part: str
) -> None:
    """What vLLM refuses looks as what the gateway refuses: OpenAI's clients declare `code` as a string."""
    async with http.post(path, json=BODY | body) as response:
        error = await error_of(response)
    assert (response.status, error["type"], error["code"]) == (status, kind, code)
    assert part in error["message"]
    async with http.get("/v1/models/nope") as response:
        assert "pirate" in (await error_of(response))["message"]


async def test_the_page_is_served_with_its_policy(http: aiohttp.ClientSession) -> None:
    async with http.get("/") as response:
        assert response.status == 200 and response.content_type == "text/html"
        assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        page = await response.text()
    assert "<script" in page and "http://" not in page.replace("http://www.w3.org", "")


async def test_health_and_metrics(http: aiohttp.ClientSession) -> None:
    async with http.get("/healthz") as response:
        assert response.status == 200
    async with http.get("/readyz") as response:
        assert (response.status, await response.json()) == (200, {"status": "ready"})
    async with http.post(CHAT, json=BODY) as response:
        assert response.status == 200
    async with http.get("/metrics") as response:
        text = await response.text()
    assert f'overture_http_requests_total{{route="{CHAT}",status="200"}} 1.0' in text


async def test_vllms_own_metrics_are_in_the_default_registry(http: aiohttp.ClientSession) -> None:
    from prometheus_client import REGISTRY, generate_latest

    async with http.post(CHAT, json=BODY) as response:
        assert response.status == 200
    text = generate_latest(REGISTRY).decode()
    for name in (
        "vllm:num_requests_running",
        "vllm:time_to_first_token_seconds_count",
        "vllm:kv_cache_usage_perc",
    ):
        assert name in text


async def test_sse_has_done_and_parses(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=BODY | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(
        json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-1]
    )


async def test_a_silent_stream_is_kept_alive_with_comments(
    http: aiohttp.ClientSession, node: SharedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_bridge.driver.serving.serving.KEEP_ALIVE_S", 0.05)
    # The engine is held for a moment, as by a long prefill of somebody else.
    release = threading.Event()
    held = asyncio.ensure_future(node.run_on_engine(lambda driver: release.wait(30)))
    async with http.post(CHAT, json=BODY | {"stream": True}) as response:
        comment = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60)
        release.set()
        rest = (await response.read()).decode()
    await held
    assert comment.startswith(b":")
    events = [line for line in rest.split("\n\n") if line and not line.startswith(":")]
    assert events[-1] == "data: [DONE]" and len(events) > 2


async def test_a_body_that_is_not_what_its_encoding_says(http: aiohttp.ClientSession) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with http.post(CHAT, data=b"this is not gzip", headers=headers) as response:
        assert response.status == 400


async def test_an_unknown_adapter_is_not_stored(http: aiohttp.ClientSession) -> None:
    async with http.post("/api/sessions", json={"adapter": "nope"}) as response:
        assert response.status == 404 and (await error_of(response))["code"] == "model_not_found"
    async with http.post("/api/sessions", json={"adapter": MODEL}) as response:
        assert (await response.json())["adapter"] is None


async def test_a_refused_call_leaves_no_session(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/responses", json={"model": "nope", "input": "Hello"}) as response:
        assert response.status == 404
    async with http.get("/api/sessions") as response:
        assert (await response.json())["sessions"] == []


async def test_too_many_choices(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=BODY | {"n": 10_000}) as response:
        assert response.status == 400
