"""The chat socket's frames as events and requests, for networks that let no websocket through."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway import event_stream
from gateway.errors import GatewayError
from gateway.event_stream import MAX_WAITING, EventStream
from tests.unit.gateway.conftest import Gateway, Gateways

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
    async with aiohttp.ClientSession(gateway.server.url) as http, http.get("/sse") as response:
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
    monkeypatch.setattr(event_stream, "BEAT_S", 0.05)
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
