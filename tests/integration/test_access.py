"""Who may do how much: budgets, keys that are withdrawn while the server runs, and what only an operator may see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_bridge.driver.serving import tokenizer_queue
from gateway.access.key_file import key_file_line, owner_of
from gateway.app import Server
from gateway.doors.http import key_changes
from gateway.settings.config import DEMO_ADAPTERS_DIR

from .conftest import Gateways, SharedNode, connected, engine_has, engine_is_empty, settle, told
from .facts import BODY, CHAT, KEYS, Http, Log, Patch, bearer

LONG_TURN = {"max_tokens": 3000, "ignore_eos": True}
LONG = BODY | LONG_TURN | {"stream": True}
OPERATOR = "ov-operators-key-for-tests-only"


@contextlib.asynccontextmanager
async def client(server: Server, key: str | None = None) -> AsyncIterator[Http]:
    async with Http(server.url, headers=bearer(key) if key else None) as http:
        yield http


async def first_event(response: aiohttp.ClientResponse) -> None:
    async with asyncio.timeout(60):
        while not (await response.content.readuntil(b"\n\n")).startswith(b"data:"):
            pass


async def refusal(asked: Any, *, kind: str = "rate_limit_error", within_s: int = 100) -> dict[str, Any]:
    """The error of a call that came too early, which says when to come back."""
    async with asked as response:
        assert response.status == 429, await response.text()
        assert 1 <= int(response.headers["Retry-After"]) <= within_s
        error = (await response.json())["error"]
    assert error["type"] == kind
    return error


# -- budgets ---------------------------------------------------------------------------------------------------------


async def test_who_is_above_its_rate_is_told_when_to_come_back_others_go_on(gateways: Gateways) -> None:
    """One request or message is what the rate gives. What is refused is not stored."""
    server = await gateways(api_keys=KEYS, max_requests_per_s=0.01)
    async with client(server, KEYS[0]) as loud, client(server, KEYS[1]) as quiet:
        await told(loud.get("/api/sessions"))
        for method, path in (("GET", "/api/sessions"), ("POST", CHAT), ("GET", "/v1/models")):
            assert (await refusal(loud.request(method, path, json=BODY)))["code"] == "rate_limited"
        await told(quiet.post(CHAT, json=BODY))
        await refusal(quiet.post("/v1/messages", json=BODY))
    server = await gateways(max_requests_per_s=0.01)
    async with connected(server) as socket:
        await socket.ask("one", sampling={"max_tokens": 4})
        assert (await socket.receive("done", "error"))["type"] == "done"
        await socket.ask("two")
        error = await socket.receive("error")
    assert (error["id"], error["code"], error["retryable"]) == ("two", "rate_limited", True)
    assert 0 < error["retry_after_s"] <= 100
    sessions, _ = await server.services.store.list_sessions("local")
    assert [session.num_turns for session in sessions] == [1]


async def test_tokens_of_turns_and_calls_count_by_day_also_of_streams_that_do_not_say_them(
    gateways: Gateways,
) -> None:
    """A stream without `include_usage` counts as the same call without a stream; a client that leaves has used what it was sent."""
    server = await gateways(api_keys=KEYS, max_tokens_per_day=200)
    short = BODY | {"max_tokens": 5, "ignore_eos": True}

    async def used(http: Http) -> int:
        (me,) = (await told(http.get("/v1/usage")))["people"]
        tokens: int = me["tokens_today"]
        return tokens

    async with client(server, KEYS[0]) as http, client(server, KEYS[1]) as other:
        whole = (await told(http.post(CHAT, json=short)))["usage"]
        assert await used(http) == whole["total_tokens"] > 5
        async with http.post(CHAT, json=short | {"stream": True}) as response:
            await response.read()
        assert await used(http) == 2 * whole["total_tokens"]
        async with http.post(CHAT, json=short | {"stream": True, "n": 2}) as response:
            await response.read()
        assert await used(http) == 3 * whole["total_tokens"] + 5
        before = await used(http)
        async with http.post(CHAT, json=LONG) as response:
            await first_event(response)
        await settle(lambda: server.services.usage.today(owner_of(KEYS[0])).num_tokens > before)
        await told(http.post(CHAT, json=BODY | {"max_tokens": 200, "ignore_eos": True}))
        error = await refusal(http.post(CHAT, json=short), kind="insufficient_quota", within_s=86_400)
        assert "200 a day are yours" in error["message"]
        assert await used(other) == 0


async def test_calls_and_turns_of_one_key_share_its_places(gateways: Gateways, node: SharedNode) -> None:
    server = await gateways(api_keys=KEYS, max_concurrent_requests=2)
    async with (
        client(server, KEYS[0]) as http,
        client(server, KEYS[1]) as other,
        connected(server, KEYS[0]) as socket,
    ):
        await socket.ask("turn", sampling=LONG_TURN)
        await socket.receive("accepted")
        async with http.post(CHAT, json=LONG) as stream:
            await first_event(stream)
            assert "--max-concurrent-requests" in (await refusal(http.post(CHAT, json=BODY)))["message"]
            await socket.ask("more")
            error = await socket.receive("error")
            assert (error["id"], error["code"]) == ("more", "rate_limited") and error["retry_after_s"] >= 1
            await told(other.post(CHAT, json=BODY))
            await socket.send(type="stop", id="turn")
            await socket.receive("done")
            await told(http.post(CHAT, json=BODY))  # the turn's place is free again
        await engine_is_empty(node)
        for _ in range(3):  # and so are those of calls that ended, failed or were left
            await told(http.post(CHAT, json=BODY | {"model": "nope"}), 404)
        await asyncio.gather(*(told(http.post(CHAT, json=BODY)) for _ in range(2)))


async def test_too_much_to_tokenise_is_refused(
    gateways: Gateways, node: SharedNode, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tokenizer_queue, "MAX_WAITING", 0)
    server = await gateways()
    async with client(server) as http, connected(server) as socket:
        assert (await refusal(http.post(CHAT, json=BODY)))["code"] == "rate_limited"
        await socket.ask("x")
        error = await socket.receive("error")
        assert (error["id"], error["code"]) == ("x", "rate_limited")
    assert node.figures().tokenizer_stats.num_waiting == 0


async def test_guessing_keys_is_slowed_and_closes_the_socket(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    async with client(server) as http, connected(server, hello=False) as socket:
        for number in range(20):
            await told(http.get("/v1/models", headers=bearer(f"ov-wrong-key-number-{number}")), 401)
        await told(http.get("/v1/models", headers=bearer("ov-wrong-key-number-20")), 429)
        await socket.send(type="hello", api_key="ov-wrong-key-on-a-socket")
        assert (await socket.receive("error"))["code"] in ("rate_limited", "unauthorized")
        assert await socket.closed() == 4401
        await told(http.get("/v1/models", headers=bearer(KEYS[0])))


# -- keys that are withdrawn -----------------------------------------------------------------------------------------


def write_keys(path: Path, *lines: str) -> None:
    """Replace the file whole, as docs/operations/people.md asks for."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.chmod(0o600)
    new.rename(path)


async def comes_in(http: Http) -> None:
    async with asyncio.timeout(60):
        while (await http.get("/api/sessions")).status != 200:
            await asyncio.sleep(0.05)


async def test_a_withdrawn_key_loses_its_sockets_streams_and_answers(
    gateways: Gateways, node: SharedNode, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(key_changes, "LOOK_EVERY_S", 0.05)
    keys = tmp_path / "keys"
    kept, lost = (key_file_line(name, key) for name, key in zip(("kept", "lost"), KEYS, strict=True))
    write_keys(keys, kept, lost)
    server = await gateways(api_key_file=keys)
    async with (
        client(server, KEYS[0]) as mine,
        client(server, KEYS[1]) as theirs,
        connected(server, KEYS[0]) as my_socket,
        connected(server, KEYS[1]) as their_socket,
        mine.post(CHAT, json=LONG | {"max_tokens": 100}) as my_stream,
        theirs.post(CHAT, json=LONG) as their_stream,
    ):
        await their_socket.ask("turn", sampling=LONG_TURN)
        accepted = await their_socket.receive("accepted")
        whole = asyncio.create_task(told(theirs.post(CHAT, json=LONG | {"stream": False}), 401))
        await first_event(their_stream)
        await engine_has(node, 3)  # the answer that comes whole among them: it was let in
        write_keys(keys, kept)
        assert (await their_socket.receive("error"))["code"] == "unauthorized"
        assert await their_socket.closed() == 4401
        with pytest.raises(aiohttp.ClientError):
            await their_stream.read()
        assert "withdrawn" in (await whole)["error"]["message"]
        await told(theirs.get("/api/sessions"), 401)
        assert b"[DONE]" in await my_stream.read()
        await my_socket.send(type="ping", t=1)
        assert (await my_socket.receive("pong"))["t"] == 1
        await engine_is_empty(node)
        write_keys(keys, kept, lost)
        await comes_in(theirs)
        session = await told(theirs.get(f"/api/sessions/{accepted['session_id']}"))
        assert [turn["status"] for turn in session["turns"]] == ["stopped"]


async def test_a_broken_key_file_keeps_the_keys_and_is_reported_once(
    gateways: Gateways, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.setattr(key_changes, "LOOK_EVERY_S", 0.02)
    keys, line = tmp_path / "keys", key_file_line("me", KEYS[0])
    write_keys(keys, line)
    server = await gateways(api_key_file=keys)
    async with client(server, KEYS[0]) as http, client(server, KEYS[1]) as new, client(server) as stranger:
        for lines in ((line, "not a key"), ("",), None):
            caplog.clear()
            if lines is None:
                keys.unlink()
            else:
                write_keys(keys, *lines)
            await settle(lambda: "stay as they were" in caplog.text)
            if lines == (line, "not a key"):
                assert "line 2" in caplog.text and "not a key" not in caplog.text.replace("has no key", "")
            await told(http.get("/api/sessions"))
            await told(stranger.get("/api/sessions"), 401)
            assert caplog.text.count("stay as they were") == 1
        write_keys(keys, line, key_file_line("new", KEYS[1]))
        await comes_in(new)


# -- operators -------------------------------------------------------------------------------------------------------


async def test_what_concerns_everybody_is_the_operators_to_see_and_to_change(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS, operator_keys=(OPERATOR,), allow_adapter_loading=True)
    async with client(server, KEYS[0]) as http, client(server, OPERATOR) as operator:
        error = (await told(http.get("/metrics"), 403))["error"]
        assert (error["code"], error["type"]) == ("forbidden", "permission_error")
        assert "--operator" in error["message"]
        assert "overture_http_requests_total" in await told(operator.get("/metrics"))
        seen, known = [await told(each.get("/v1/adapters")) for each in (http, operator)]
        assert seen["stats"] is None and known["stats"]["num_adapters"] > 0
        for mine, theirs in zip(seen["adapters"], known["adapters"], strict=True):
            assert set(mine) == set(theirs) and mine["name"] == theirs["name"]
            assert mine["num_uses"] is mine["last_used_at"] is None and theirs["num_uses"] >= 0
        for path in ("/v1/models", "/v1/models/shout"):
            assert str(DEMO_ADAPTERS_DIR.parent) not in str(await told(http.get(path)))
            assert str(DEMO_ADAPTERS_DIR) in str(await told(operator.get(path)))
        for method, path, body in (
            ("POST", "/v1/adapters/shout/pin", None),
            ("DELETE", "/v1/adapters/shout/pin", None),
            ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
            ("POST", "/v1/unload_lora_adapter", {"lora_name": "shout"}),
        ):
            await told(http.request(method, path, json=body), 403)
        assert (await told(operator.post("/v1/adapters/shout/pin")))["is_pinned"] is True
        assert (await told(operator.delete("/v1/adapters/shout/pin")))["is_pinned"] is False


async def test_the_path_of_an_adapter_may_be_relative_or_in_the_home_and_is_looked_for_on_no_hub(
    gateways: Gateways, monkeypatch: Patch
) -> None:
    """Where there are no keys, each client is the operator."""
    server = await gateways(allow_adapter_loading=True)
    asked: list[str] = []

    def no_names(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        raise OSError("there is no network in this test")

    monkeypatch.setenv("HOME", str(DEMO_ADAPTERS_DIR))
    monkeypatch.chdir(DEMO_ADAPTERS_DIR.parent)
    async with client(server) as http:
        await told(http.get("/metrics"))
        for path in ("~/shout", f"{DEMO_ADAPTERS_DIR.name}/shout"):
            await told(http.post("/v1/load_lora_adapter", json={"lora_name": "again", "lora_path": path}))
            await told(http.post("/v1/unload_lora_adapter", json={"lora_name": "again"}))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("socket.getaddrinfo", no_names)
        for path in ("org/adapter", "of-the-hub", "~/nothing", "https://hub.example/org/adapter", "a\0b"):
            body = {"lora_name": "fetched", "lora_path": path}
            await told(http.post("/v1/load_lora_adapter", json=body), 404)
    assert asked == []
