"""The chat socket on the real engine, with real sockets."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from gateway.app import Server
from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta, Done

from .conftest import KEYS, Gateways, SharedNode, ask, bearer, connected, engine_is_empty, told

LONG = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
ENDLESS = LONG | {"max_tokens": 3000}
STORY = "Tell me a long story."


async def turns_of(http: aiohttp.ClientSession, session_id: str) -> list[str]:
    return [turn["id"] for turn in (await told(http.get(f"/api/sessions/{session_id}")))["turns"]]


async def test_a_conversation_is_remembered_and_stored(chat: ChatClient, http: aiohttp.ClientSession) -> None:
    _, first = await ask(chat, "My secret word is Fezin.")
    events = [event async for event in chat.ask("Hello, how are you?", session_id=first.session_id)]
    assert type(events[0]) is Accepted and type(events[-1]) is Done
    assert {type(event) for event in events} == {Accepted, Delta, Done}
    text, second = await ask(chat, "What is my secret word?", session_id=first.session_id)
    assert "Fezin" in text
    assert second.usage.cached_tokens > 0, "the first turns' KV should have been reused"
    assert second.timings.kv.device + second.timings.kv.recomputed == second.usage.prompt_tokens
    turns = (await told(http.get(f"/api/sessions/{first.session_id}")))["turns"]
    assert turns[2]["answer"] == text and turns[0]["content"] == "My secret word is Fezin."


async def test_ready_offers_the_adapters_and_the_first_frame_must_be_hello(server: Server) -> None:
    async with connected(server, hello=False) as socket:
        await socket.ask("x")
        assert (await socket.receive("error"))["code"] == "bad_request"
        await socket.send(type="ping", t=7)
        assert (await socket.receive("pong"))["t"] == 7
        await socket.send(type="hello")
        ready = await socket.receive("ready")
    assert ready["models"][0] == {"id": "overture-demo", "adapter": False}
    assert sorted(model["rank"] for model in ready["models"][1:]) == [8, 16, 32, 64, 128]
    assert ready["server"]["max_model_len"] > 0


async def test_an_adapter_changes_the_style(chat: ChatClient, server: Server) -> None:
    """The session keeps it until another is chosen; the base model may be named, too."""
    shouted, done = await ask(chat, "Hello, how are you?", adapter="shout")
    again, _ = await ask(chat, "What can you do?", session_id=done.session_id)
    assert shouted.isupper() and again.isupper()
    for adapter in (None, "overture-demo"):
        plain, _ = await ask(chat, "What can you do?", session_id=done.session_id, adapter=adapter)
        assert not plain.isupper()
    turns = (await server.services.store.get_session("local", done.session_id)).turns
    assert [turn.adapter for turn in turns] == ["shout", "shout", None, None]


async def test_stop_keeps_what_was_written_even_right_behind_its_message(
    server: Server, http: aiohttp.ClientSession, node: SharedNode
) -> None:
    async with connected(server) as socket:
        await socket.ask("early", "Hello! " * 300, sampling=ENDLESS)
        await socket.send(type="stop", id="early")
        assert (await socket.receive("done"))["finish_reason"] == "stopped"
        await socket.ask("stopped", STORY, sampling=ENDLESS)
        first = (await socket.receive("delta"))["text"]
        await socket.send(type="stop", id="stopped")
        rest, done = await socket.rest()
    assert done["finish_reason"] == "stopped"
    turn = (await told(http.get(f"/api/sessions/{done['session_id']}")))["turns"][0]
    assert (turn["status"], turn["answer"]) == ("stopped", first + rest)
    await engine_is_empty(node)


async def test_a_dropped_socket_resumes_without_loss_or_repetition(server: Server, chat: ChatClient) -> None:
    whole, _ = await ask(chat, STORY, sampling=LONG)
    parts, seq = [], 0
    async with connected(server) as socket:
        await socket.ask("dropped", STORY, sampling=LONG)
        while seq < 3:
            frame = await socket.receive("delta")
            parts.append(frame["text"])
            assert frame["seq"] > seq
            seq = frame["seq"]
        socket.raw.transport.abort()  # no close handshake: as if the cable was cut
    async with connected(server, hello=False) as socket:
        await socket.send(type="hello", resume=[{"id": "dropped", "seq": seq}])
        while (frame := await socket.receive("delta", "done"))["type"] == "delta":
            assert frame["seq"] > seq
            seq = frame["seq"]
            parts.append(frame["text"])
        assert "".join(parts) == whole and frame["finish_reason"] == "length"
        await socket.send(type="hello", resume=[{"id": "dropped", "seq": 10_000}, {"id": "y"}])
        assert [(await socket.receive("error"))["code"] for _ in range(2)] == ["not_found"] * 2


async def test_a_repeated_message_is_answered_once(server: Server, http: aiohttp.ClientSession) -> None:
    """From two sockets, at once, while it is answered and long after."""
    async with connected(server) as first, connected(server) as second:
        await asyncio.gather(*(socket.ask("twin", sampling=LONG) for socket in (first, second)))
        sessions = {(await socket.receive("accepted"))["session_id"] for socket in (first, second)}
        (texts, ends) = zip(*[await socket.rest() for socket in (first, second)], strict=True)
        assert texts[0] == texts[1] != "" and ends[0]["finish_reason"] == ends[1]["finish_reason"] == "length"
        (session_id,) = sessions
        await second.ask("twin", session_id=session_id)  # long over now: the stored answer comes again
        text, done = await second.rest()
        assert (text, done["finish_reason"]) == (texts[0], "length")
        await second.ask("twin", "Something else", session_id=session_id)
        assert (await second.receive("error"))["code"] == "conflict"
    assert await turns_of(http, session_id) == ["twin"]
    assert len((await told(http.get("/api/sessions")))["sessions"]) == 1


async def test_editing_hides_what_came_after_until_it_is_chosen_again(
    chat: ChatClient, http: aiohttp.ClientSession
) -> None:
    _, first = await ask(chat, "My name is Mirel.", turn_id="t1")
    session = first.session_id
    await ask(chat, "What is my name?", session_id=session, turn_id="t2")
    await ask(chat, "Hello there!", session_id=session, turn_id="t3", after="t1")
    assert await turns_of(http, session) == ["t1", "t3"]
    await ask(chat, "My name is Tobar.", session_id=session, turn_id="t4", after=None)
    assert await turns_of(http, session) == ["t4"]
    chosen = await told(http.post(f"/api/sessions/{session}/choose", json={"turn_id": "t2"}))
    assert [turn["id"] for turn in chosen["turns"]] == ["t1", "t2"]
    _, again = await ask(chat, "And yours?", session_id=session, turn_id="t5")
    assert again.usage is not None and again.usage.cached_tokens, "its KV is found again"


async def test_keys_keep_sessions_apart(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    async with connected(server, hello=False) as socket:
        await socket.send(type="hello", api_key="ov-wrong-key-of-enough-length")
        assert (await socket.receive("error"))["code"] == "unauthorized"
        assert await socket.closed() == 4401
    async with (
        ChatClient(server.url, api_key=KEYS[0]) as mine,
        ChatClient(server.url, api_key=KEYS[1]) as theirs,
    ):
        _, done = await ask(mine, "Hello!")
        with pytest.raises(ChatError) as raised:
            await ask(theirs, "Hello!", session_id=done.session_id)
        assert raised.value.code == "not_found"
    async with aiohttp.ClientSession(server.url) as http:
        url = f"/api/sessions/{done.session_id}"
        for key, status in ((KEYS[0], 200), (KEYS[1], 404), ("nope", 401)):
            await told(http.get(url, headers=bearer(key)), status)
        assert (await told(http.get(url), 401))["error"]["type"] == "authentication_error"


async def test_deleting_a_session_ends_its_turn(
    server: Server, http: aiohttp.ClientSession, node: SharedNode
) -> None:
    async with connected(server) as socket:
        await socket.ask("gone", sampling=ENDLESS)
        session_id = (await socket.receive("accepted"))["session_id"]
        await socket.receive("delta")
        await told(http.delete(f"/api/sessions/{session_id}"), 204)
        assert (await socket.receive("error"))["code"] == "not_found"
    await engine_is_empty(node)
    restored = await told(http.post(f"/api/sessions/{session_id}/restore"))
    assert restored["turns"][0]["status"] == "stopped"


async def test_a_half_open_socket_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads on but never answers a ping, as one does whose machine is gone."""
    monkeypatch.setattr("gateway.doors.chat.socket.HEARTBEAT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    await reader.readuntil(b"\r\n\r\n")
    hello = b'{"type":"hello"}'
    writer.write(bytes([0x81, 0x80 | len(hello), 0, 0, 0, 0]) + hello)
    async with asyncio.timeout(60):
        await reader.read(-1)
    assert not server.services.connections
    writer.close()
