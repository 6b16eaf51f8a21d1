"""The chat socket's frames as events and requests, for networks that let no websocket through."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.doors.chat import server_events
from gateway.doors.chat.server_events import MAX_WAITING, EventStream
from gateway.doors.chat.socket import MAX_QUEUED_BYTES
from gateway.errors import GatewayError
from tests.unit.gateway.conftest import Gateway, Gateways
from tests.unit.gateway.parts import passes

PATIENCE_S = 10.0


class Stream:
    """A page's side of one stream."""

    def __init__(self, http: aiohttp.ClientSession, response: aiohttp.ClientResponse) -> None:
        self.http = http
        self.response = response
        self.path = ""

    async def event(self) -> tuple[str, Any]:
        """The next event's name and data; `end` where there is none."""
        name, data = "message", None
        async with asyncio.timeout(PATIENCE_S):
            async for raw in self.response.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                elif not line and data is not None:
                    return name, data
        return "end", None

    async def next(self) -> dict[str, Any]:
        name, data = await self.event()
        assert name == "message", (name, data)
        return dict(data)

    async def post(self, body: str | bytes) -> tuple[int, str]:
        async with self.http.post(self.path, data=body) as reply:
            return reply.status, await reply.text()

    async def send(self, **frame: Any) -> None:
        assert await self.post(json.dumps(frame)) == (204, "")


@contextlib.asynccontextmanager
async def stream_of(gateway: Gateway, *, greeted: bool = True) -> AsyncIterator[Stream]:
    http = aiohttp.ClientSession(gateway.server.url, read_bufsize=1 << 26)  # a line may be a whole answer
    async with http, http.get("/sse") as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        stream = Stream(http, response)
        name, data = await stream.event()
        assert name == "stream"
        stream.path = f"/sse/{data['id']}"
        if greeted:
            await stream.send(type="hello")
            assert (await stream.next())["type"] == "ready"
        yield stream


async def test_a_turn_is_asked_and_answered_as_on_a_socket(gateways: Gateways) -> None:
    gateway = await gateways()
    async with stream_of(gateway) as stream:
        session = await gateway.store.create_session("local", now=1.0)
        await stream.send(type="message", id="a", session_id=session.id, content="Hello!")
        assert (await stream.next())["type"] == "accepted"
        answer = await gateway.node.asked(0)
        answer.say("Hel")
        assert (await stream.next())["text"] == "Hel"
        answer.finish("lo.")
        frames = [await stream.next(), await stream.next()]
        assert [each["type"] for each in frames] == ["delta", "done"] and frames[0]["text"] == "lo."
        await stream.send(type="ping", t=7)
        assert await stream.next() == {"type": "pong", "t": 7}


async def test_an_answer_is_stopped_by_events_and_what_there_is_of_it_is_kept(gateways: Gateways) -> None:
    gateway = await gateways()
    async with stream_of(gateway) as stream:
        await stream.send(type="message", id="a", content="Hello!")
        session_id = (await stream.next())["session_id"]
        answer = await gateway.node.asked(0)
        answer.say("Once upon")
        assert (await stream.next())["text"] == "Once upon"
        await stream.send(type="stop", id="a")
        done = await stream.next()
        assert (done["type"], done["finish_reason"]) == ("done", "stopped") and answer.is_cancelled
        (turn,) = (await gateway.store.get_session("local", session_id)).turns
        assert (turn.status, turn.answer) == ("stopped", "Once upon")
        await stream.send(type="stop", id="never asked")
        assert (await stream.next())["code"] == "not_found"


@contextlib.asynccontextmanager
async def unread_stream(gateway: Gateway) -> AsyncIterator[Stream]:
    """A greeted stream whose further events the page does not read, and whose socket holds little of them."""
    async with aiohttp.ClientSession(gateway.server.url) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port, limit=4096)
        writer.write(b"GET /sse HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"event: stream\n")
            line = await reader.readuntil(b"data: {") + await reader.readuntil(b"}")
        stream = Stream(http, None)  # type: ignore[arg-type]  # nothing is read of it
        stream.path = f"/sse/{json.loads(line[line.index(b'{') :])['id']}"
        await stream.send(type="hello")
        try:
            yield stream
        finally:
            writer.transport.abort()


async def test_who_reads_no_events_is_not_listened_to_either_and_costs_others_nothing(
    gateways: Gateways,
) -> None:
    gateway = await gateways()
    async with unread_stream(gateway) as slow, stream_of(gateway) as other:
        ping = json.dumps({"type": "ping", "t": "x" * 60_000})
        num_taken = 0
        # The kernel holds some 10 MB for both sides, the server 2 MiB.
        while num_taken < 400 and (await slow.post(ping))[0] == 204:
            num_taken += 1
        assert num_taken < 400, "what waits for a page that reads nothing is bounded"
        status, reply = await slow.post(ping)
        assert status == 429 and "rate_limited" in reply
        await other.send(type="message", id="b", content="Hello!")
        assert (await other.next())["type"] == "accepted"
        (await gateway.node.asked(0)).finish("Quickly.")
        assert (await other.next())["text"] == "Quickly."


async def test_a_slow_reader_of_events_is_cut_off_and_may_resume(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is held once, in the turn, and not again for the page that does not read it."""
    monkeypatch.setattr("gateway.doors.chat.socket.SLOW_READER_S", 0.0)
    gateway = await gateways()
    async with unread_stream(gateway) as slow:
        await slow.send(type="message", id="a", content="Hello!")
        answer = await gateway.node.asked(0)
        piece = "x" * 100_000
        answer.say(*[piece] * 200)
        async with asyncio.timeout(PATIENCE_S):
            while gateway.server.services.connections:
                await passes(1.0)
                await asyncio.sleep(0.001)  # the kernel's buffers fill up
        assert gateway.count("overture_slow_readers_total") == 1
        assert (await slow.post("{}"))[0] == 404
    async with stream_of(gateway, greeted=False) as stream:
        await stream.send(type="hello", resume=[{"id": "a", "seq": 0}])
        assert [(await stream.next())["type"] for _ in range(2)] == ["ready", "accepted"]
        answer.finish("end")
        text = ""
        while (frame := await stream.next())["type"] == "delta":
            text += frame["text"]
        assert frame["type"] == "done" and text == piece * 200 + "end"


async def test_a_page_that_comes_back_goes_on_where_it_was(gateways: Gateways) -> None:
    gateway = await gateways()
    session = await gateway.store.create_session("local", now=1.0)
    async with stream_of(gateway) as stream:
        await stream.send(type="message", id="a", session_id=session.id, content="Hello!")
        await stream.next()
        answer = await gateway.node.asked(0)
        answer.say("one")
        seq = (await stream.next())["seq"]
    answer.say(" two")
    async with stream_of(gateway, greeted=False) as stream:
        await stream.send(type="hello", session_id=session.id, resume=[{"id": "a", "seq": seq}])
        frames = [await stream.next() for _ in range(3)]
        assert [each["type"] for each in frames] == ["ready", "accepted", "delta"]
        assert frames[2]["text"] == " two"
        answer.finish()
        assert (await stream.next())["type"] == "done"


async def test_frames_that_cannot_be_read_are_errors_and_the_stream_goes_on(gateways: Gateways) -> None:
    gateway = await gateways(max_frame_bytes=4096)
    async with stream_of(gateway) as stream:
        assert (await stream.post("{"))[0] == 204
        assert (await stream.next())["code"] == "bad_request"
        assert (await stream.post('{"type": "ping", "t": ' + " " * 5000 + "1}"))[0] == 204
        assert (await stream.next())["code"] == "frame_too_large"
        assert (await stream.post(b"\xff"))[0] == 400
        await stream.send(type="ping", t=1)
        assert await stream.next() == {"type": "pong", "t": 1}


async def test_only_who_knows_the_stream_may_send_and_only_while_it_is_open(gateways: Gateways) -> None:
    gateway = await gateways()
    async with stream_of(gateway) as stream:
        path, stream.path = stream.path, "/sse/guessed"
        assert (await stream.post("{}"))[0] == 404
        stream.path = path
        await gateway.server.services.connections.copy().pop().close(1001, "going away")
        assert (await stream.event())[0] == "close" and (await stream.event())[0] == "end"
        assert (await stream.post("{}"))[0] == 404


async def test_a_key_is_asked_for_in_the_first_frame(gateways: Gateways) -> None:
    gateway = await gateways(api_keys=("a-key-of-many-characters",))
    async with stream_of(gateway, greeted=False) as stream:
        await stream.send(type="hello", api_key="another-key-of-many-characters")
        assert (await stream.next())["code"] == "unauthorized"
        name, data = await stream.event()
        assert name == "close" and data["code"] == 4401
        assert (await stream.event())[0] == "end"
        assert (await stream.post("{}"))[0] == 404
    async with stream_of(gateway, greeted=False) as stream:
        await stream.send(type="hello", api_key="a-key-of-many-characters")
        assert (await stream.next())["type"] == "ready"


async def test_no_more_pages_than_sockets_are_let_in(gateways: Gateways) -> None:
    gateway = await gateways(max_sockets=1)
    async with (
        stream_of(gateway),
        aiohttp.ClientSession(gateway.server.url) as http,
        http.get("/sse") as reply,
    ):
        assert (reply.status, (await reply.json())["error"]["code"]) == (503, "overloaded")


async def test_a_page_that_is_gone_is_found_out(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is silent and nothing is sent to it: a line that says nothing is, now and then."""
    monkeypatch.setattr(server_events, "BEAT_S", 0.05)
    gateway = await gateways()
    async with stream_of(gateway) as stream:
        async with asyncio.timeout(PATIENCE_S):
            assert b": still here" in await stream.response.content.readuntil(b"\n")
        assert len(gateway.server.services.connections) == 1
    async with asyncio.timeout(PATIENCE_S):
        while gateway.server.services.connections:
            await asyncio.sleep(0.01)


async def test_more_frames_than_are_read_are_refused() -> None:
    stream = EventStream(web.StreamResponse(), 100)
    for _ in range(MAX_WAITING):
        stream.put("{}")
    with pytest.raises(GatewayError) as refused:
        stream.put("{}")
    assert (refused.value.code, refused.value.retry_after_s) == ("rate_limited", 1.0)


async def test_waiting_frames_are_bounded_by_their_size_too() -> None:
    stream = EventStream(web.StreamResponse(), MAX_QUEUED_BYTES)
    for _ in range(2):
        stream.put("x" * (MAX_QUEUED_BYTES + 1))
        with pytest.raises(GatewayError, match="Too many frames are waiting"):
            stream.put("{}")
        await anext(stream)
