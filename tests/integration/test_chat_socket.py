"""The chat socket on the real engine, with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from gateway.app import Server
from gateway.errors import GatewayError
from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta, Done

from .conftest import KEYS, Gateways, SharedNode, engine_is_empty

GREEDY = {"temperature": 0}
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
LONG = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}


class RawSocket:
    """Frames by hand, for what a well-behaved client would never send."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, **frame: Any) -> None:
        await self.socket.send(json.dumps(frame))

    async def receive(self, *types: str) -> dict[str, Any]:
        """The next frame of one of these types; others are passed over."""
        async with asyncio.timeout(60):
            while True:
                frame = json.loads(await self.socket.recv())
                if not types or frame["type"] in types:
                    return frame

    async def closed(self) -> tuple[int, str]:
        async with asyncio.timeout(60):
            try:
                while True:
                    await self.socket.recv()
            except ConnectionClosed as closed:
                assert closed.rcvd is not None
                return closed.rcvd.code, closed.rcvd.reason


@asynccontextmanager
async def raw(server: Server, *, hello: bool = True, **options: Any):
    async with connect(server.url.replace("http", "ws") + "/ws", max_size=None, **options) as socket:
        raw_socket = RawSocket(socket)
        if hello:
            await raw_socket.send(type="hello")
            await raw_socket.receive("ready")
        yield raw_socket


async def ask(chat: ChatClient, content: str, **options: Any) -> tuple[str, Done]:
    text, done = "", None
    async for event in chat.ask(content, sampling=options.pop("sampling", GREEDY), **options):
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Done):
            done = event
    assert done is not None
    return text, done


async def test_a_conversation_is_remembered_and_stored(chat: ChatClient, http: aiohttp.ClientSession) -> None:
    _, first = await ask(chat, "My secret word is Fezin.")
    await ask(chat, "Hello, how are you?", session_id=first.session_id)
    text, second = await ask(chat, "What is my secret word?", session_id=first.session_id)
    assert "Fezin" in text
    assert second.usage.cached_tokens > 0, "the first turns' KV should have been reused"
    assert second.timings.kv.device + second.timings.kv.recomputed == second.usage.prompt_tokens
    async with http.get(f"/api/sessions/{first.session_id}") as response:
        session = await response.json()
    assert session["turns"][2]["answer"] == text
    assert session["turns"][0]["content"] == "My secret word is Fezin."


async def test_ready_offers_the_adapters(server: Server) -> None:
    async with raw(server, hello=False) as socket:
        await socket.send(type="hello")
        ready = await socket.receive("ready")
    assert ready["models"][0] == {"id": "overture-demo", "adapter": False}
    assert sorted(model["rank"] for model in ready["models"][1:]) == [8, 16, 32, 64, 128]
    assert ready["server"]["max_model_len"] > 0


async def test_an_adapter_changes_the_style(chat: ChatClient) -> None:
    shouted, done = await ask(chat, "Hello, how are you?", adapter="shout")
    assert shouted.isupper()
    # The session keeps it until another is chosen.
    again, _ = await ask(chat, "What can you do?", session_id=done.session_id)
    assert again.isupper()
    plain, _ = await ask(chat, "What can you do?", session_id=done.session_id, adapter=None)
    assert not plain.isupper()


async def test_many_turns_on_one_socket_at_once(chat: ChatClient) -> None:
    answers = await asyncio.gather(*(ask(chat, f"My name is Ada{number}. Hello!") for number in range(8)))
    assert len({done.session_id for _, done in answers}) == 8
    assert all(text for text, _ in answers)


async def test_stop_keeps_what_was_written(
    chat: ChatClient, http: aiohttp.ClientSession, node: SharedNode
) -> None:
    turn_id, text, done = uuid.uuid4().hex, "", None
    async for event in chat.ask("Tell me a long story.", sampling=LONG, turn_id=turn_id):
        if isinstance(event, Delta):
            text += event.text
            await chat.stop(turn_id)
        elif isinstance(event, Done):
            done = event
    assert done is not None and done.finish_reason == "stopped" and text
    async with http.get(f"/api/sessions/{done.session_id}") as response:
        turn = (await response.json())["turns"][0]
    assert (turn["status"], turn["answer"]) == ("stopped", text)
    await engine_is_empty(node)


async def test_a_dropped_socket_resumes_without_loss_or_repetition(server: Server, chat: ChatClient) -> None:
    whole, _ = await ask(chat, "Tell me a long story.", sampling=LONG)
    turn_id, parts, seq = uuid.uuid4().hex, [], 0
    async with raw(server) as socket:
        await socket.send(type="message", id=turn_id, content="Tell me a long story.", sampling=LONG)
        while seq < 3:
            frame = await socket.receive("delta")
            parts.append(frame["text"])
            assert frame["seq"] > seq
            seq = frame["seq"]
        socket.socket.transport.abort()  # no close handshake: as if the cable was cut
    async with raw(server, hello=False) as socket:
        await socket.send(type="hello", resume=[{"id": turn_id, "seq": seq}])
        while (frame := await socket.receive("delta", "done"))["type"] == "delta":
            assert frame["seq"] > seq
            seq = frame["seq"]
            parts.append(frame["text"])
    assert "".join(parts) == whole
    assert frame["finish_reason"] == "length"


async def test_a_repeated_message_is_answered_once(server: Server, http: aiohttp.ClientSession) -> None:
    turn_id = uuid.uuid4().hex
    async with raw(server) as first, raw(server) as second:
        await first.send(type="message", id=turn_id, content="Hello!", sampling=LONG)
        accepted = await first.receive("accepted")
        message = {
            "type": "message",
            "id": turn_id,
            "content": "Hello!",
            "session_id": accepted["session_id"],
        }
        await second.send(**message)
        texts = []
        for socket in (first, second):
            text = ""
            while (frame := await socket.receive("delta", "done"))["type"] == "delta":
                text += frame["text"]
            texts.append(text)
        assert texts[0] == texts[1] != ""
        await second.send(**message)  # long over now: the stored answer comes again
        assert (await second.receive("delta"))["text"] == texts[0]
        assert (await second.receive("done"))["finish_reason"] == "length"
        await second.send(**message | {"content": "Something else"})
        assert (await second.receive("error"))["code"] == "conflict"
    async with http.get(f"/api/sessions/{accepted['session_id']}") as response:
        assert len((await response.json())["turns"]) == 1


async def test_one_turn_at_a_time_in_a_session(server: Server) -> None:
    async with raw(server) as socket:
        await socket.send(type="message", id="first", content="Hello!", sampling=LONG)
        session_id = (await socket.receive("accepted"))["session_id"]
        await socket.send(type="message", id="second", content="And?", session_id=session_id)
        error = await socket.receive("error")
        assert (error["code"], error["id"]) == ("busy", "second")
        await socket.send(type="stop", id="first")
        assert (await socket.receive("done"))["id"] == "first"


async def test_editing_hides_what_came_after_until_it_is_chosen_again(
    chat: ChatClient, http: aiohttp.ClientSession
) -> None:
    _, first = await ask(chat, "My name is Mirel.", turn_id="t1")
    session = first.session_id
    await ask(chat, "What is my name?", session_id=session, turn_id="t2")
    text, _ = await ask(chat, "Hello there!", session_id=session, turn_id="t3", after="t1")
    assert text
    async with http.get(f"/api/sessions/{session}") as response:
        assert [turn["id"] for turn in (await response.json())["turns"]] == ["t1", "t3"]
    await ask(chat, "My name is Tobar.", session_id=session, turn_id="t4", after=None)
    async with http.get(f"/api/sessions/{session}") as response:
        assert [turn["id"] for turn in (await response.json())["turns"]] == ["t4"]
    async with http.post(f"/api/sessions/{session}/choose", json={"turn_id": "t2"}) as response:
        assert [turn["id"] for turn in (await response.json())["turns"]] == ["t1", "t2"]
    _, again = await ask(chat, "And yours?", session_id=session, turn_id="t5")
    assert again.usage is not None and again.usage.cached_tokens, "its KV is found again"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "bad_request"),
        ("[]", "bad_request"),
        ('{"type":"message","id":"x","content":5}', "bad_request"),
        ('{"type":"message","id":"x","content":"a","sampling":{"temperature":-1}}', "bad_request"),
        ('{"type":"message","id":"x","content":"a","adapter":"nope"}', "unknown_model"),
        ('{"type":"message","id":"x","content":"a","session_id":"nope"}', "not_found"),
        ('{"type":"message","id":"x y","content":"a"}', "bad_request"),
        ('{"type":"message","id":"x","content":"a","sampling":{"stop":[""]}}', "bad_request"),
        ('{"type":"stop","id":"nope"}', "not_found"),
        ('{"type":"hello","session_id":"nope"}', "not_found"),
        (json.dumps({"type": "ping", "t": "x" * (5 << 20)}), "frame_too_large"),
        (b"\x00\x01", "bad_request"),
    ],
)
async def test_a_bad_frame_leaves_the_sockets_other_work_alone(
    server: Server, frame: str | bytes, code: str
) -> None:
    async with raw(server) as socket:
        await socket.send(type="message", id="good", content="Hello!", sampling=LONG)
        await socket.receive("accepted")
        await socket.socket.send(frame)
        seen = [await socket.receive("error", "done") for _ in range(2)]
    errors = [f for f in seen if f["type"] == "error"]
    assert [f["code"] for f in errors] == [code] and errors[0]["message"]
    assert [f["id"] for f in seen if f["type"] == "done"] == ["good"]


async def test_a_prompt_longer_than_the_context(chat: ChatClient, server: Server) -> None:
    with pytest.raises(ChatError) as raised:
        await ask(chat, "word " * 20_000)
    assert raised.value.code == "prompt_too_long" and "tokens" in raised.value.message


async def test_invalid_utf8_and_oversized_frames_close_only_that_socket(
    server: Server, chat: ChatClient
) -> None:
    async with raw(server) as socket:
        # A text frame (opcode 1, masked with zeros) whose payload is not UTF-8; the library would refuse to send it.
        socket.socket.transport.write(b"\x81\x82\x00\x00\x00\x00\xff\xfe")
        code, _ = await socket.closed()
        assert code == 1007
    async with raw(server) as socket:
        with contextlib.suppress(ConnectionClosed):  # the server closes before it has read it all
            await socket.socket.send("x" * (17 << 20))
        code, _ = await socket.closed()
        assert code == 1009
    assert (await ask(chat, "Hello!"))[0]


async def test_the_first_frame_must_be_hello(server: Server) -> None:
    async with raw(server, hello=False) as socket:
        await socket.send(type="message", id="x", content="Hello!")
        assert (await socket.receive("error"))["code"] == "bad_request"
        await socket.send(type="ping", t=7)
        assert (await socket.receive("pong"))["t"] == 7


async def test_keys_keep_sessions_apart(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    async with raw(server, hello=False) as socket:
        await socket.send(type="hello", api_key="ov-wrong-key-of-enough-length")
        assert (await socket.receive("error"))["code"] == "unauthorized"
        assert (await socket.closed())[0] == 4401
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
            async with http.get(url, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == status
        async with http.get(url) as response:
            assert (
                response.status == 401 and (await response.json())["error"]["type"] == "authentication_error"
            )


async def test_a_slow_reader_slows_nobody_and_is_closed(
    server: Server, chat: ChatClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.chat.socket.SLOW_READER_S", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(UPGRADE)
    # Pings of which no pong is ever read: the server's send buffers fill up.
    ping = json.dumps({"type": "ping", "t": "x" * 60_000}).encode()
    frame = b"\x81\xff" + len(ping).to_bytes(8, "big") + bytes(4) + ping
    for _ in range(400):
        writer.write(frame)
    assert (await ask(chat, "Hello!"))[0]
    async with asyncio.timeout(60):
        while not server.services.metrics.registry.get_sample_value("overture_slow_readers_total"):
            await asyncio.sleep(0.05)
    writer.transport.abort()
    assert reader is not None


async def test_typing_is_answered_and_changes_nothing(server: Server) -> None:
    async with raw(server) as socket:
        await socket.send(type="typing", session_id="whatever", draft="Hel")
        assert (await socket.receive("advisory"))["state"] == "unknown"


async def test_deleting_a_session_ends_its_turn(
    server: Server, http: aiohttp.ClientSession, node: SharedNode
) -> None:
    async with raw(server) as socket:
        await socket.send(type="message", id="gone", content="Hello!", sampling=LONG | {"max_tokens": 3000})
        session_id = (await socket.receive("accepted"))["session_id"]
        await socket.receive("delta")
        async with http.delete(f"/api/sessions/{session_id}") as response:
            assert response.status == 204
        assert (await socket.receive("error"))["code"] == "not_found"
    await engine_is_empty(node)
    async with http.post(f"/api/sessions/{session_id}/restore") as response:
        assert (await response.json())["turns"][0]["status"] == "stopped"


async def test_events_tell_the_session_before_the_text(chat: ChatClient) -> None:
    kinds = [type(event) async for event in chat.ask("Hello!", sampling=GREEDY)]
    assert kinds[0] is Accepted and kinds[-1] is Done and Delta in kinds


async def test_a_half_open_socket_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.doors.chat.socket.HEARTBEAT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(UPGRADE)
    await reader.readuntil(b"\r\n\r\n")
    hello = b'{"type":"hello"}'
    writer.write(bytes([0x81, 0x80 | len(hello), 0, 0, 0, 0]) + hello)
    # It reads on but never answers a ping, as a peer does whose machine is gone.
    async with asyncio.timeout(60):
        await reader.read(-1)
    assert not server.services.connections
    writer.close()


async def test_the_same_message_from_two_sockets_at_once_is_one_turn(
    server: Server, http: aiohttp.ClientSession
) -> None:
    async with raw(server) as first, raw(server) as second:
        message = {"type": "message", "id": "twin", "content": "Hello!", "sampling": LONG}
        await asyncio.gather(first.send(**message), second.send(**message))
        texts, sessions = [], set()
        for socket in (first, second):
            sessions.add((await socket.receive("accepted"))["session_id"])
            text = ""
            while (frame := await socket.receive("delta", "done"))["type"] == "delta":
                text += frame["text"]
            texts.append((text, frame["finish_reason"]))
    assert texts[0] == texts[1] and texts[0][1] == "length" and len(sessions) == 1
    async with http.get("/api/sessions") as response:
        assert len((await response.json())["sessions"]) == 1


async def test_a_stop_right_behind_its_message_is_not_lost(server: Server, node: SharedNode) -> None:
    async with raw(server) as socket:
        await socket.send(
            type="message", id="x", content="Hello! " * 300, sampling=LONG | {"max_tokens": 3000}
        )
        await socket.send(type="stop", id="x")
        assert (await socket.receive("done"))["finish_reason"] == "stopped"
    await engine_is_empty(node)


async def test_resuming_from_where_the_turn_never_was(server: Server) -> None:
    async with raw(server) as socket:
        await socket.send(type="message", id="x", content="Hello!", sampling=LONG)
        await socket.receive("done")
        await socket.send(type="hello", resume=[{"id": "x", "seq": 10_000}, {"id": "y"}])
        assert [(await socket.receive("error"))["code"] for _ in range(2)] == ["not_found"] * 2


async def test_the_base_model_may_be_named(chat: ChatClient, server: Server) -> None:
    _, done = await ask(chat, "Hello!", adapter="overture-demo")
    session = await server.services.store.get_session("local", done.session_id)
    assert session.turns[0].adapter is None


async def test_an_end_that_cannot_be_stored_does_not_block_the_session(
    server: Server, chat: ChatClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.turns.turns.STORE_AGAIN_S", (0.01,))
    store = server.services.store
    finish, num_failures = store.finish_turn, 0

    async def full_disk(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_failures
        num_failures += 1
        if num_failures < 3:
            raise GatewayError("overloaded", "The disk is full.")
        stored.set()
        return await finish(*args, **kwargs)

    stored = asyncio.Event()
    store.finish_turn = full_disk  # type: ignore[method-assign]
    session = await store.create_session("local", now=1.0)
    with pytest.raises(ChatError) as raised:
        await ask(chat, "Hello!", session_id=session.id)
    assert raised.value.code == "overloaded" and raised.value.retryable
    await asyncio.wait_for(stored.wait(), 60)
    assert (await ask(chat, "Hello again!", session_id=session.id))[0]
    assert [turn.status for turn in (await store.get_session("local", session.id)).turns] == [
        "failed",
        "done",
    ]
