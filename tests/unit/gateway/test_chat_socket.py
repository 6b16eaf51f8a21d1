"""The chat socket and its frames as events, in front of a node without a model: docs/protocol.md, frame by frame."""

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.advisories import advisories
from gateway.advisories.drafts import MAX_ACTIVE_OF_ONE, PAUSE_S
from gateway.doors.chat import server_events
from gateway.doors.chat.server_events import EventStream
from gateway.doors.chat.socket import MAX_QUEUED_BYTES
from gateway.errors import GatewayError
from gateway.sessions import SessionStore

from .fake_node import PATIENCE_S
from .front import Gateway, Gateways
from .parts import KEYS, passes, settled, until


async def test_a_socket_keeps_the_key_of_its_first_good_hello(gateways: Gateways) -> None:
    """Later hellos open and resume without it, as the page's do; another key is refused, and the socket goes on with its own."""
    gateway = await gateways(api_keys=KEYS)
    async with gateway.socket(hello={"api_key": KEYS[0]}) as socket:
        accepted = await socket.ask("a")
        assert accepted["type"] == "accepted"
        await socket.send(type="hello", session_id=accepted["session_id"], resume=[{"id": "a", "seq": 0}])
        ready = await socket.next()
        assert [turn["id"] for turn in ready["session"]["turns"]] == ["a"]
        assert (await socket.next())["type"] == "accepted"
        await socket.send(type="hello", api_key=KEYS[1])
        assert (await socket.next())["code"] == "bad_request"
        assert (await socket.ask("a"))["type"] == "accepted"


@pytest.mark.virtual_time
async def test_a_hello_while_the_engine_starts_is_told_so_and_may_be_sent_again(gateway: Gateway) -> None:
    gateway.node.state = "starting"
    async with gateway.socket() as socket:
        await socket.send(type="hello")
        error = await socket.next()
        assert (error["code"], error["retryable"]) == ("starting", True)
        await passes(60)  # it has greeted: waiting is no offence
        gateway.node.state = "ready"
        await socket.send(type="hello")
        assert (await socket.next())["type"] == "ready"


ASKING = {"type": "message", "id": "x", "content": "a"}


WRONG: list[tuple[Any, str, str | None]] = [
    ("not JSON", "bad_request", None),
    ([1], "bad_request", None),
    ({"type": "nobody knows"}, "bad_request", None),
    (ASKING | {"content": 7}, "bad_request", "x"),
    (ASKING | {"content": ""}, "bad_request", "x"),
    (ASKING | {"id": 7}, "bad_request", None),
    (ASKING | {"sampling": {"temperature": 9}}, "bad_request", "x"),
    (ASKING | {"sampling": {"made_up": 1}}, "bad_request", "x"),
    (ASKING | {"priority": -5}, "bad_request", "x"),
    (ASKING | {"adapter": "nobody"}, "unknown_model", "x"),
    (ASKING | {"session_id": "nowhere"}, "not_found", "x"),
    (ASKING | {"id": "x y"}, "bad_request", "x y"),
    ({"type": "stop"}, "bad_request", None),
]


async def test_wrong_frames_end_no_socket(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket:
        for frame, code, name in WRONG:
            await socket.raw.send(frame if isinstance(frame, str) else json.dumps(frame))
            error = await socket.next()
            assert (error["type"], error["code"], error.get("id")) == ("error", code, name), frame
    assert not gateway.node.answers


async def test_who_takes_nothing_is_not_read_from_either_and_costs_others_nothing(gateway: Gateway) -> None:
    async with gateway.socket(hello={}) as socket, gateway.socket(hello={}) as other:
        transport = socket.raw.transport
        transport.pause_reading()

        async def flood() -> None:
            # Far more than the sockets of both sides, the transport and the server's own queue hold.
            for _ in range(1000):
                await socket.send(type="ping", t="x" * 60_000)

        writing = asyncio.ensure_future(flood())
        await other.ask("a")
        (await gateway.node.asked()).finish("Quickly.")
        assert (await other.rest())[0] == "Quickly."
        connections = gateway.server.services.connections
        await until(lambda: any(each.blocked_since is not None for each in connections))
        turns = 0
        # What is on its way when the server stops reading still leaves, and the server rests for a moment between frames.
        while turns < 100 and not writing.done():
            await asyncio.sleep(0.001)
            turns = turns + 1 if transport.get_write_buffer_size() > 0 else 0
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert transport.get_write_buffer_size() > 0, "the server reads no more of who does not read"
        transport.abort()


@pytest.mark.virtual_time
async def test_a_server_that_goes_down_says_so_to_sockets(gateways: Gateways, store: SessionStore) -> None:
    gateway = await gateways()
    async with gateway.socket(hello={}) as socket:
        await socket.ask("a")
        (await gateway.node.asked()).say("For ever")
        await socket.next()
        closing = asyncio.ensure_future(gateway.server.__aexit__(None, None, None))
        await settled()
        await passes(1.1)  # as long as it waits for answers here
        assert await socket.closed() == 1001
        await closing


@pytest.mark.virtual_time
async def test_of_all_who_type_without_keys_nobody_stops_anothers_draft(gateways: Gateways) -> None:
    gateway = await gateways(draft_prefill=True)
    gateway.node.gate.clear()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(MAX_ACTIVE_OF_ONE + 3):
            socket = await stack.enter_async_context(gateway.socket(hello={}))
            await socket.send(type="typing", draft=f"draft {number} of a new chat ")
            await socket.send(type="typing", session_id=f"s{number}", draft=f"draft {number} of a session ")
            await socket.send(type="ping")
            while (await socket.next())["type"] != "pong":
                pass
        await passes(PAUSE_S + 0.01)
        await gateway.node.prefilled(2 * (MAX_ACTIVE_OF_ONE + 3) - 1)
        assert gateway.node.cancelled_prefills == 0
        # The last one has two already: it stops its own, and those only.
        for number in range(MAX_ACTIVE_OF_ONE):
            await socket.send(type="typing", session_id=f"more {number}", draft="and another one ")
        await gateway.node.until(lambda: gateway.node.cancelled_prefills == 2)


async def test_advisories_of_one_address_without_keys_leave_a_pages_alone(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So slow that the bucket does not fill again meanwhile, however slow the machine is.
    monkeypatch.setattr(advisories, "MAX_PER_S", 0.1)
    gateway = await gateways()
    action = {"action_id": "a", "action_type": advisories.HINT_ACTION, "action_version": "1"}
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="typing", session_id="mine")
        advised = await gateway.node.told()
        statuses = []
        for round_ in range(5):
            actions = [action | {"payload": {"session_id": f"{round_}-{n}"}} for n in range(64)]
            body = {"protocol_version": "1", "message_id": "m", "actions": actions}
            statuses.append((await gateway.call("POST", "/v1/advisories", body)).status)
        assert statuses[0] == 202 and statuses[-1] == 429, "the address has had its share"
        await socket.send(type="typing", session_id="mine, too")
        told = gateway.node.advisories
        await gateway.node.until(lambda: any(each.advisory.session_id == "mine, too" for each in told))
        assert not advised.is_over


class Stream:
    """A page's side of one stream."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

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


async def test_only_who_knows_a_stream_may_send_while_it_is_open_and_a_page_that_is_gone_is_found_out(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_events, "BEAT_S", 0.05)
    connections = gateway.server.services.connections
    for is_cut in (True, False):
        async with aiohttp.ClientSession(gateway.server.url) as http, http.get("/sse") as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            stream = Stream(response)
            name, data = await stream.event()
            assert name == "stream"
            path = f"/sse/{data['id']}"
            reply = await gateway.call("POST", path, {"type": "hello"})
            assert (reply.status, reply.body) == (204, None)
            assert (await stream.event())[1]["type"] == "ready"
            assert (await gateway.call("POST", "/sse/guessed", {})).status == 404
            if is_cut:
                await connections.copy().pop().close(1001, "going away")
                assert [(await stream.event())[0] for _ in range(2)] == ["close", "end"]
                assert (await gateway.call("POST", path, {})).status == 404
                continue
            async with asyncio.timeout(PATIENCE_S):
                assert b": still here" in await response.content.readuntil(b"\n")
            assert len(connections) == 1
    await until(lambda: not connections)


async def test_waiting_frames_are_bounded_by_their_size_too() -> None:
    stream = EventStream(web.StreamResponse(), MAX_QUEUED_BYTES)
    for _ in range(2):
        stream.put("x" * (MAX_QUEUED_BYTES + 1))
        with pytest.raises(GatewayError, match="Too many frames are waiting"):
            stream.put("{}")
        await anext(stream)
