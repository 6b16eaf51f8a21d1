"""Who may do how much: budgets, keys that are withdrawn while the server runs, and what only an operator may see."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_bridge.driver.serving import tokenizer_queue
from gateway.access.auth import key_file_line
from gateway.app import Server
from gateway.doors.http import key_changes
from gateway.settings.config import DEMO_ADAPTERS_DIR

from .conftest import KEYS, MODEL, Gateways, SharedNode, engine_has, engine_is_empty

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
LONG = BODY | {"max_tokens": 3000, "ignore_eos": True, "stream": True}
OPERATOR = "ov-operators-key-for-tests-only"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def client(server: Server, key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url, headers=bearer(key) if key else None) as http:
        yield http


@contextlib.asynccontextmanager
async def socket(http: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A chat socket that was greeted."""
    async with http.ws_connect("/ws") as ws:
        await ws.send_json({"type": "hello"})
        assert (await ws.receive_json())["type"] == "ready"
        yield ws


async def frame(ws: aiohttp.ClientWebSocketResponse, kind: str) -> dict[str, Any]:
    """The next frame of this type."""
    async with asyncio.timeout(60):
        while (found := await ws.receive_json())["type"] != kind:
            pass
    return found


async def first_event(response: aiohttp.ClientResponse) -> None:
    async with asyncio.timeout(60):
        while not (await response.content.readuntil(b"\n\n")).startswith(b"data:"):
            pass


async def refusal(response: aiohttp.ClientResponse) -> dict[str, Any]:
    assert response.status == 429, await response.text()
    assert int(response.headers["Retry-After"]) >= 1
    error = (await response.json())["error"]
    assert error["type"] == "rate_limit_error"
    return error


# -- budgets ---------------------------------------------------------------------------------------------------------


async def test_a_key_above_its_rate_is_told_when_to_come_back_and_others_are_served(
    gateways: Gateways,
) -> None:
    server = await gateways(
        api_keys=KEYS, max_requests_per_s=0.01
    )  # five seconds' worth of that: one request
    async with client(server, KEYS[0]) as loud, client(server, KEYS[1]) as quiet:
        async with loud.get("/api/sessions") as response:
            assert response.status == 200
        for method, path in (("GET", "/api/sessions"), ("POST", CHAT), ("GET", "/v1/models")):
            async with loud.request(method, path, json=BODY) as response:
                assert (await refusal(response))["code"] == "rate_limited"
                assert 1 < int(response.headers["Retry-After"]) <= 100
        async with quiet.post(CHAT, json=BODY) as response:
            assert response.status == 200
        async with quiet.post("/v1/messages", json=BODY) as response:
            assert response.status == 429 and response.headers["Retry-After"]
            assert (await response.json())["error"]["type"] == "rate_limit_error"


async def test_messages_above_the_rate_are_refused_and_not_stored(gateways: Gateways) -> None:
    server = await gateways(max_requests_per_s=0.01)
    async with client(server) as http, socket(http) as ws:
        await ws.send_json(
            {"type": "message", "id": "one", "content": "Hello!", "sampling": {"max_tokens": 4}}
        )
        assert (await frame(ws, "done"))["id"] == "one"
        await ws.send_json({"type": "message", "id": "two", "content": "Again!"})
        error = await frame(ws, "error")
        assert (error["id"], error["code"], error["retryable"]) == ("two", "rate_limited", True)
        assert 0 < error["retry_after_s"] <= 100
        sessions, _ = await server.services.store.list_sessions("local")
        assert [session.num_turns for session in sessions] == [1]


async def test_calls_and_turns_of_one_key_share_its_places(gateways: Gateways, node: SharedNode) -> None:
    server = await gateways(api_keys=KEYS, max_concurrent_requests=2)
    async with client(server, KEYS[0]) as http, client(server, KEYS[1]) as other, socket(http) as ws:
        await ws.send_json(
            {"type": "message", "id": "turn", "content": "Tell me a story."}
            | {"sampling": {"max_tokens": 3000, "ignore_eos": True}}
        )
        await frame(ws, "accepted")
        async with http.post(CHAT, json=LONG) as stream:
            await first_event(stream)
            async with http.post(CHAT, json=BODY) as response:
                assert "--max-concurrent-requests" in (await refusal(response))["message"]
            await ws.send_json({"type": "message", "id": "more", "content": "Hello!"})
            error = await frame(ws, "error")
            assert (error["id"], error["code"]) == ("more", "rate_limited") and error["retry_after_s"] >= 1
            async with other.post(CHAT, json=BODY) as response:
                assert response.status == 200
            await ws.send_json({"type": "stop", "id": "turn"})
            await frame(ws, "done")
            async with http.post(CHAT, json=BODY) as response:
                assert response.status == 200, "the turn's place is free again"
        await engine_is_empty(node)
        for _ in range(3):  # and so are those of calls that ended, failed or were left
            async with http.post(CHAT, json=BODY | {"model": "nope"}) as response:
                assert response.status == 404
        tasks = [asyncio.create_task(http.post(CHAT, json=BODY)) for _ in range(2)]
        assert [(await task).status for task in tasks] == [200, 200]


async def test_a_key_with_too_much_to_tokenise_is_refused(
    gateways: Gateways, node: SharedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_queue, "MAX_WAITING", 0)
    server = await gateways()
    async with client(server) as http, socket(http) as ws:
        async with http.post(CHAT, json=BODY) as response:
            assert (await refusal(response))["code"] == "rate_limited"
        await ws.send_json({"type": "message", "id": "x", "content": "Hello!"})
        error = await frame(ws, "error")
        assert (error["id"], error["code"]) == ("x", "rate_limited")
    assert node.tokenizer_stats().num_waiting == 0


async def test_guessing_keys_is_slowed_and_closes_the_socket(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    async with client(server) as http:
        statuses = []
        for number in range(25):
            async with http.get("/v1/models", headers=bearer(f"ov-wrong-key-number-{number}")) as response:
                statuses.append(response.status)
        assert statuses[:20] == [401] * 20 and 429 in statuses[20:]
        async with http.ws_connect("/ws") as ws:
            await ws.send_json({"type": "hello", "api_key": "ov-wrong-key-on-a-socket"})
            assert (await frame(ws, "error"))["code"] in ("rate_limited", "unauthorized")
            await ws.receive()
            assert ws.close_code == 4401
        async with http.get("/v1/models", headers=bearer(KEYS[0])) as response:
            assert response.status == 200


# -- keys that are withdrawn -----------------------------------------------------------------------------------------


def write_keys(path: Path, *lines: str) -> None:
    """Replace the file whole, as docs/operations.md asks for."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.chmod(0o600)
    new.rename(path)


async def test_a_withdrawn_key_loses_its_sockets_streams_and_answers(
    gateways: Gateways, node: SharedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_changes, "LOOK_EVERY_S", 0.05)
    keys = tmp_path / "keys"
    kept, lost = (key_file_line(name, key) for name, key in zip(("kept", "lost"), KEYS, strict=True))
    write_keys(keys, kept, lost)
    server = await gateways(api_key_file=keys)
    async with (
        client(server, KEYS[0]) as mine,
        client(server, KEYS[1]) as theirs,
        socket(mine) as my_socket,
        socket(theirs) as their_socket,
        mine.post(CHAT, json=LONG | {"max_tokens": 600}) as my_stream,
        theirs.post(CHAT, json=LONG) as their_stream,
    ):
        await their_socket.send_json(
            {"type": "message", "id": "turn", "content": "Tell me a story."}
            | {"sampling": {"max_tokens": 3000, "ignore_eos": True}}
        )
        accepted = await frame(their_socket, "accepted")
        whole = asyncio.create_task(theirs.post(CHAT, json=LONG | {"stream": False}))
        await first_event(their_stream)
        await engine_has(node, 4)  # the answer that comes whole among them: it was let in
        write_keys(keys, kept)
        assert (await frame(their_socket, "error"))["code"] == "unauthorized"
        await their_socket.receive()
        assert their_socket.close_code == 4401
        with pytest.raises(aiohttp.ClientError):
            await their_stream.read()
        async with await whole as response:
            assert response.status == 401 and "withdrawn" in await response.text()
        async with theirs.get("/api/sessions") as response:
            assert response.status == 401
        assert b"[DONE]" in await my_stream.read()
        await my_socket.send_json({"type": "ping", "t": 1})
        assert (await frame(my_socket, "pong"))["t"] == 1
        await engine_is_empty(node)
        write_keys(keys, kept, lost)
        await comes_in(theirs)
        url = f"/api/sessions/{accepted['session_id']}"
        async with theirs.get(url) as response:
            assert [turn["status"] for turn in (await response.json())["turns"]] == ["stopped"]


async def comes_in(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            async with http.get("/api/sessions") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


async def test_a_broken_key_file_keeps_the_keys_and_is_reported_once(
    gateways: Gateways, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_changes, "LOOK_EVERY_S", 0.02)
    keys = tmp_path / "keys"
    line = key_file_line("me", KEYS[0])
    write_keys(keys, line)
    server = await gateways(api_key_file=keys)
    async with client(server, KEYS[0]) as http, client(server, KEYS[1]) as new, client(server) as nobody:
        for lines in ((line, "not a key"), ("",), None):
            caplog.clear()
            if lines is None:
                keys.unlink()
            else:
                write_keys(keys, *lines)
            async with asyncio.timeout(60):
                while "stay as they were" not in caplog.text:
                    await asyncio.sleep(0.02)
            if lines == (line, "not a key"):
                assert "line 2" in caplog.text and "not a key" not in caplog.text.replace("has no key", "")
            async with http.get("/api/sessions") as response:
                assert response.status == 200
            async with nobody.get("/api/sessions") as response:
                assert response.status == 401
            assert caplog.text.count("stay as they were") == 1
        write_keys(keys, line, key_file_line("new", KEYS[1]))
        await comes_in(new)


# -- operators -------------------------------------------------------------------------------------------------------


async def test_what_concerns_everybody_is_the_operators_to_see_and_to_change(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS, operator_keys=(OPERATOR,), allow_adapter_loading=True)
    async with client(server, KEYS[0]) as http, client(server, OPERATOR) as operator:
        async with http.get("/metrics") as response:
            assert response.status == 403
            error = (await response.json())["error"]
        assert (error["code"], error["type"]) == ("forbidden", "permission_error")
        assert "--operator" in error["message"]
        async with operator.get("/metrics") as response:
            assert response.status == 200 and "overture_http_requests_total" in await response.text()
        async with http.get("/v1/adapters") as response:
            seen = await response.json()
        async with operator.get("/v1/adapters") as response:
            known = await response.json()
        assert [item["name"] for item in seen["adapters"]] == [item["name"] for item in known["adapters"]]
        assert seen["stats"] is None and known["stats"]["num_adapters"] > 0
        for mine, theirs in zip(seen["adapters"], known["adapters"], strict=True):
            assert set(mine) == set(theirs)
            assert mine["num_uses"] is mine["last_used_at"] is None and theirs["num_uses"] >= 0
        for path in ("/v1/models", "/v1/models/shout"):
            async with http.get(path) as response:
                assert str(DEMO_ADAPTERS_DIR.parent) not in await response.text()
            async with operator.get(path) as response:
                assert str(DEMO_ADAPTERS_DIR) in await response.text()
        for method, path, body in (
            ("POST", "/v1/adapters/shout/pin", None),
            ("DELETE", "/v1/adapters/shout/pin", None),
            ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
            ("POST", "/v1/unload_lora_adapter", {"lora_name": "shout"}),
        ):
            async with http.request(method, path, json=body) as response:
                assert response.status == 403, path
        async with operator.post("/v1/adapters/shout/pin") as response:
            assert response.status == 200
        async with operator.delete("/v1/adapters/shout/pin") as response:
            assert json.loads(await response.text())["is_pinned"] is False


@pytest.mark.parametrize(
    "path", ["org/adapter", "pirate-of-the-hub", "~/nothing-here", "https://hub.example/org/adapter", "a\0b"]
)
async def test_the_path_of_an_adapter_is_never_looked_for_on_a_hub(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    asked: list[str] = []

    def no_names(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        raise OSError("there is no network in this test")

    server = await gateways(allow_adapter_loading=True)
    async with client(server) as http:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("socket.getaddrinfo", no_names)
        body = {"lora_name": "fetched", "lora_path": path}
        async with http.post("/v1/load_lora_adapter", json=body) as response:
            assert response.status == 404, await response.text()
    assert asked == []


async def test_the_path_of_an_adapter_may_be_relative_or_in_the_home(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await gateways(allow_adapter_loading=True)
    monkeypatch.setenv("HOME", str(DEMO_ADAPTERS_DIR))
    monkeypatch.chdir(DEMO_ADAPTERS_DIR.parent)
    async with client(server) as http:
        for path in ("~/shout", f"{DEMO_ADAPTERS_DIR.name}/shout"):
            async with http.post(
                "/v1/load_lora_adapter", json={"lora_name": "again", "lora_path": path}
            ) as response:
                assert response.status == 200, await response.text()
            async with http.post("/v1/unload_lora_adapter", json={"lora_name": "again"}) as response:
                assert response.status == 200


async def test_without_keys_whoever_is_there_is_the_operator(http: aiohttp.ClientSession) -> None:
    async with http.get("/metrics") as response:
        assert response.status == 200
    async with http.get("/v1/adapters") as response:
        assert (await response.json())["stats"] is not None
