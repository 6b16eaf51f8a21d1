"""Connections that send too slowly, too much or too many: real sockets against a real server whose engine has not been started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import uvloop
from aiohttp import web

from engine_bridge.protocol.node import SseReply
from gateway.app import Server
from gateway.doors.http.admission import RareLine
from gateway.doors.http.connections import MOST_ENDED_AT_ONCE, Connection, State

from .conftest import demo_config, served, settle, told
from .facts import CHAT, COMPLETIONS, KEYS, MESSAGES, Http, Log, Patch, bearer

HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127."
STATIC = "/static/vendor/dompurify/purify.es.js"


def request(path: str, key: str = "", *, body_bytes: int | None = None) -> bytes:
    """The head of a GET, or of a POST that promises so many bytes."""
    lines = [f"{'GET' if body_bytes is None else 'POST'} {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"X-Api-Key: {key}"] if key else []
    lines += [f"Content-Length: {body_bytes}"] if body_bytes is not None else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


HEALTH = request("/healthz")
UPGRADE = request("/ws")[:-2] + (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
KEYED_UPGRADE = UPGRADE[:-2] + f"X-Api-Key: {KEYS[0]}\r\n\r\n".encode()


def text_head(num_bytes: int) -> bytes:
    """The head of a masked text frame of that size; the mask is zeros."""
    return b"\x81\xff" + num_bytes.to_bytes(8, "big") + bytes(4)


def text(payload: bytes) -> bytes:
    return text_head(len(payload)) + payload


HELLO = text(b'{"type":"hello"}')


class Peer:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def cut(self) -> None:
        self.writer.transport.abort()

    def reads_slowly(self) -> None:
        """Take no more from the system than little."""
        self.reader._limit = 1024

    async def send(self, data: bytes) -> None:
        if data:
            self.writer.write(data)
            await self.writer.drain()

    async def head(self, sent: bytes = b"") -> bytes:
        """The head of the reply to what is sent."""
        await self.send(sent)
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)

    async def whole(self, sent: bytes) -> bytes:
        """The head; its body has been read as well."""
        head = await self.head(sent)
        found = re.search(rb"Content-Length: (\d+)", head)
        await self.reader.readexactly(int(found[1]) if found else 0)
        return head

    async def rest(self, sent: bytes = b"") -> bytes:
        """All until the server closes."""
        await self.send(sent)
        return await asyncio.wait_for(self.reader.read(), 60)

    async def upgrade(self, data: bytes = UPGRADE) -> None:
        assert b" 101 " in await self.head(data)

    async def frame(self) -> tuple[int, bytes]:
        """Opcode and payload of the next frame."""
        async with asyncio.timeout(60):
            first, length = await self.reader.readexactly(2)
            if length == 126:
                length = int.from_bytes(await self.reader.readexactly(2), "big")
            return first & 0x0F, await self.reader.readexactly(length)

    async def close_code(self, sent: bytes = b"") -> int:
        await self.send(sent)
        while True:
            opcode, payload = await self.frame()
            if opcode == 8:
                return int.from_bytes(payload[:2], "big")

    async def error_code(self, sent: bytes = b"") -> str:
        await self.send(sent)
        while True:
            opcode, payload = await self.frame()
            if opcode == 1 and (frame := json.loads(payload))["type"] == "error":
                return str(frame["code"])


async def peer_of(server: Server) -> Peer:
    return Peer(*await asyncio.open_connection("127.0.0.1", server.port))


@asynccontextmanager
async def dribbling(peer: Peer, byte: bytes) -> AsyncIterator[None]:
    """Meanwhile it sends one byte after the other."""

    async def dribble() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await peer.send(byte)
                await asyncio.sleep(0.01)

    task = asyncio.create_task(dribble())
    yield
    task.cancel()


class Net:
    """Servers that answer everything but questions, and clients of theirs."""

    def __init__(self, folder: Path, patch: Patch, stack: AsyncExitStack) -> None:
        self._folder, self._patch, self._stack = folder, patch, stack
        patch.setattr("gateway.doors.http.connections.SWEEP_EVERY_S", 0.02)
        patch.setattr("gateway.doors.chat.socket.CLOSE_TIMEOUT_S", 0.2)

    async def server(self, *, has_addresses: bool = False, **changes: Any) -> Server:
        """has_addresses: addresses of this machine count as one's own."""
        if has_addresses:
            self._patch.setattr("gateway.doors.http.connections.is_shared", lambda *args: False)
        config = demo_config(self._folder / "data", device="cpu", **changes)
        return await self._stack.enter_async_context(served(config))

    async def connect(self, server: Server) -> Peer:
        peer = await peer_of(server)
        self._stack.callback(peer.cut)  # it keeps the peer as well: a stream that nobody holds is closed
        return peer

    async def socket(self, server: Server, *, hello: bool = False) -> Peer:
        peer = await self.connect(server)
        await peer.upgrade()
        if hello:
            # The engine has not been started, and a key is not asked for.
            assert await peer.error_code(HELLO) == "starting"
        return peer


@pytest_asyncio.fixture(loop_scope="session")
async def net(tmp_path: Path, monkeypatch: Patch) -> AsyncIterator[Net]:
    async with AsyncExitStack() as stack:
        yield Net(tmp_path, monkeypatch, stack)


def figure(server: Server, name: str, **labels: str) -> float:
    return server.services.metrics.registry.get_sample_value(name, labels) or 0.0


def num_closed(server: Server, reason: str) -> float:
    return figure(server, "overture_connections_closed_total", reason=reason)


def check_timeout(reply: bytes) -> Any:
    """The error in a reply that says 408 and closes."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"Connection: close" in head
    return json.loads(body)["error"]


# -- time ------------------------------------------------------------------------------------------------------------


async def test_a_head_that_does_not_arrive_is_answered_with_408(net: Net) -> None:
    """Nor has one more time that dribbles in; the next request's has its own, and the rest of a body is none."""
    server = await net.server(head_timeout_s=0.3, api_keys=KEYS)
    half, silent, slow, next_one, early = [await net.connect(server) for _ in range(5)]
    assert b" 401 " in await early.whole(request("/api/sessions", body_bytes=20) + b"{")
    await early.send(b" " * 19)
    assert b" 200 " in await next_one.whole(HEALTH)
    for peer in (half, next_one, slow):
        await peer.send(HALF_A_HEAD)
    async with dribbling(slow, b"0"):
        assert (await slow.head()).startswith(b"HTTP/1.1 408 ")
    for peer in (half, next_one):
        assert check_timeout(await peer.rest())["code"] == "request_timeout"
    assert await silent.rest() == b""
    assert num_closed(server, "head_timeout") == 4
    assert b" 200 " in await early.head(HEALTH), "more time than a head's has gone by"


async def test_many_overdue_together_do_not_hold_up_the_loop(net: Net) -> None:
    server = await net.server(head_timeout_s=1)
    num_peers, num_ended = 4 * MOST_ENDED_AT_ONCE, [0.0]

    async def count() -> None:
        while num_ended[-1] < num_peers:
            await asyncio.sleep(0)
            num_ended.append(num_closed(server, "head_timeout"))

    # From before the first is overdue: on a slow machine that is while others still connect.
    counting = asyncio.create_task(count())
    for _ in range(num_peers):
        with contextlib.suppress(ConnectionError):
            await (await net.connect(server)).send(HALF_A_HEAD)
    await counting
    assert max(after - before for before, after in pairwise(num_ended)) <= MOST_ENDED_AT_ONCE


async def test_an_idle_connection_is_closed(net: Net) -> None:
    server = await net.server(keepalive_timeout_s=0.2, head_timeout_s=60)
    assert b" 200 " in await (await net.connect(server)).rest(HEALTH)


async def test_a_body_that_stops_is_answered_with_408_and_one_that_comes_is_not(net: Net) -> None:
    server = await net.server(body_timeout_s=0.4)
    for path in (CHAT, MESSAGES, "/api/sessions"):
        error = check_timeout(
            await (await net.connect(server)).rest(request(path, body_bytes=999) + b'{"a":')
        )
        assert "body" in error["message"] and ("code" in error) != (path == MESSAGES)
    peer = await net.connect(server)
    await peer.send(request("/api/sessions", body_bytes=30))
    for _ in range(30):
        await peer.send(b" ")
        await asyncio.sleep(0.02)  # it is the time that is tested
    assert b" 400 " in await peer.head(), "30 blanks are no JSON"


async def test_a_body_too_slow_all_along(net: Net, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.doors.http.admission.BODY_GRACE_S", 0.3)
    server = await net.server()
    peer = await net.connect(server)
    await peer.send(request("/api/sessions", body_bytes=9999))
    async with dribbling(peer, b"x"):
        assert b" 408 " in await peer.head()
    assert num_closed(server, "body_too_slow") == 1


# -- number ----------------------------------------------------------------------------------------------------------


async def test_those_who_hold_a_connection_for_nothing_make_room(net: Net) -> None:
    server = await net.server(max_connections=20, head_timeout_s=600)
    for _ in range(50):
        await (await net.connect(server)).send(HALF_A_HEAD)
        async with Http(server.url) as http:
            await told(http.get("/healthz"))
    assert num_closed(server, "scarce") > 20


async def test_what_is_kept_back_is_for_health_and_good_keys(net: Net) -> None:
    """Above all limits a connection is refused in words."""
    server = await net.server(max_connections=20, api_keys=("short-key", *KEYS))  # 18 for all, 2 kept back
    hello = text(json.dumps({"type": "hello", "api_key": KEYS[0]}).encode())
    for number in range(18):
        peer = await net.connect(server)
        await peer.upgrade(UPGRADE if number % 2 else KEYED_UPGRADE)
        assert await peer.error_code(hello if number % 2 else HELLO) == "starting"
    async with Http(server.url) as http:
        for path, key, status in (
            ("/api/sessions", KEYS[1], 200),
            ("/readyz", "", 503),
            ("/healthz", "", 200),
        ):
            await told(http.get(path, headers=bearer(key)), status)
    for key in ("", "short-key", "wrong-key"):
        reply = await (await net.connect(server)).rest(request("/api/models", key))
        assert b" 503 " in reply and b"Retry-After" in reply
    for _ in range(2):
        peer = await net.connect(server)
        await peer.upgrade(KEYED_UPGRADE)
        assert await peer.error_code(HELLO) == "starting"
    reply = await (await net.connect(server)).rest()
    assert reply.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 3" in reply


async def test_one_address_has_its_share(net: Net) -> None:
    server = await net.server(has_addresses=True, max_connections_per_address=8)
    peers = [await net.socket(server, hello=True) for _ in range(8)]
    reply = await (await net.connect(server)).rest()
    assert reply.startswith(b"HTTP/1.1 429 ") and b"Retry-After" in reply
    peers[0].writer.close()
    await peers[0].rest()

    async def comes_in() -> bool:
        return b" 200 " in await (await net.connect(server)).head(HEALTH)

    await settle(comes_in)


async def test_a_key_frees_its_holder_from_the_limit_of_the_address(net: Net) -> None:
    server = await net.server(has_addresses=True, max_connections_per_address=4, api_keys=KEYS)
    for _ in range(12):
        assert b" 200 " in await (await net.connect(server)).head(request("/api/models", KEYS[0]))


@pytest.mark.parametrize("asks_before", [False, True])
async def test_sockets_without_hello_are_few(net: Net, asks_before: bool) -> None:
    """A request before the upgrade does not stand for it."""
    server = await net.server(has_addresses=True, max_connections_per_address=16)
    for _ in range(5):
        peer = await net.connect(server)
        if asks_before:
            assert b" 200 " in await peer.whole(HEALTH)
        await peer.upgrade()
    assert await peer.close_code() == 4429


async def test_a_connection_is_idle_only_when_its_answer_has_been_written(
    net: Net, monkeypatch: Patch
) -> None:
    states: list[str] = []

    async def note(request: web.Request, response: web.StreamResponse) -> None:
        """The handler has ended; nothing has been written."""
        states.append(cast(Connection, request.protocol).state)

    monkeypatch.setattr("gateway.doors.http.web_policy.add_headers", note)
    server = await net.server()
    peer = await net.connect(server)
    assert b" 200 " in await peer.head(request(STATIC))
    assert states == [State.REQUEST]
    await settle(lambda: figure(server, "overture_connections", state="idle") > 0)


async def test_files_are_counted_again_after_a_failure(net: Net, monkeypatch: Patch, caplog: Log) -> None:
    counts = iter([OSError("no such folder")])

    def count() -> int:
        for error in counts:
            raise error
        return 7

    monkeypatch.setattr("gateway.doors.http.connections.COUNT_FILES_EVERY_S", 0.02)
    monkeypatch.setattr("gateway.doors.http.connections.num_open_files", count)
    server = await net.server()
    await settle(lambda: figure(server, "overture_open_files") == 7)
    assert "were not counted" in caplog.text


def test_the_same_on_the_loop_that_serves(tmp_path: Path, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            net = Net(tmp_path, monkeypatch, stack)
            server = await net.server(max_connections=20, api_keys=KEYS, head_timeout_s=0.3)
            assert (await (await net.connect(server)).rest(HALF_A_HEAD)).startswith(b"HTTP/1.1 408 ")
            peers = []
            for _ in range(20):
                peers.append(await net.connect(server))
                await peers[-1].upgrade(KEYED_UPGRADE)
                assert await peers[-1].error_code(HELLO) == "starting"
            assert (await (await net.connect(server)).rest()).startswith(b"HTTP/1.1 503 ")
            assert await peers[0].close_code(b"\x81\x01x") == 1002

    uvloop.run(scenario())


# -- the chat socket -------------------------------------------------------------------------------------------------


async def test_a_large_frame_is_refused_by_its_header(net: Net) -> None:
    """Before hello the socket is closed, also while its client still sends; after it the socket goes on."""
    server = await net.server(max_frame_bytes=100_000)
    assert await (await net.socket(server)).close_code(text_head(70_000)) == 1009
    peer = await net.socket(server)
    sending = asyncio.create_task(peer.send(text(b"x" * (17 << 20))))
    assert await peer.close_code() == 1009
    sending.cancel()
    peer = await net.socket(server, hello=True)
    assert await peer.error_code(text_head(200_000)) == "frame_too_large"
    assert await peer.error_code(b"x" * 200_000 + text(b"{")) == "bad_request"
    assert await peer.close_code(text_head((16 << 20) + 1)) == 1009


async def test_a_large_frame_right_behind_hello_is_taken(net: Net) -> None:
    peer = await net.connect(await net.server())
    await peer.upgrade(UPGRADE + HELLO + text(b'{"type":"' + b"x" * 500_000))
    assert [await peer.error_code(), await peer.error_code()] == ["starting", "bad_request"]


async def test_half_frames_before_hello_cost_next_to_nothing(net: Net) -> None:
    server = await net.server()
    peers = [await net.socket(server) for _ in range(50)]
    for peer in peers:
        peer.writer.write(text_head(60_000) + b"x" * 59_999)
    ended = (peer.close_code(b"x" + text_head(1 << 20)) for peer in peers[:5])
    assert set(await asyncio.gather(*ended)) == {1009}
    for connection in server.services.connections:
        assert connection._socket._frames.num_buffered_bytes <= 64 << 10


async def test_a_partial_frame_puts_off_no_hello(net: Net, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.doors.chat.socket.HELLO_TIMEOUT_S", 0.3)
    peer = await net.socket(await net.server())
    await peer.send(text_head(60_000))
    async with dribbling(peer, b"x"):
        assert await peer.close_code() == 4400


# -- slow readers ----------------------------------------------------------------------------------------------------


async def test_slow_readers_are_closed_each_once_and_told_of_in_one_line(
    net: Net, monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.setattr("gateway.doors.chat.socket.SLOW_READER_S", 0.5)
    caplog.set_level("INFO", "gateway.doors.chat.socket")
    server = await net.server()
    ping = text(json.dumps({"type": "ping", "t": "x" * 60_000}).encode())
    for peer in [await net.socket(server) for _ in range(4)]:
        peer.reads_slowly()
        peer.writer.write(HELLO + ping * 400)
    await settle(lambda: not server.services.connections)
    assert figure(server, "overture_slow_readers_total") == 4
    assert len([record for record in caplog.records if "slowly" in record.getMessage()]) == 1


async def test_who_does_not_read_an_answer_does_not_keep_the_connection(net: Net, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.doors.http.connections.UNREAD_TIMEOUT_S", 1.0)
    server = await net.server()
    peer = await net.connect(server)
    peer.reads_slowly()
    peer.writer.write(request(STATIC) * 3000)
    answers = {"route": "/static/{path}", "status": "200"}
    await settle(lambda: figure(server, "overture_http_requests_total", **answers) >= 10)
    runner = server._runner.server
    await settle(lambda: not runner.connections)


async def test_streams_that_nobody_reads_are_cut_off_and_told_of_in_one_line(
    net: Net, monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.setattr("gateway.doors.api.openai_routes.SLOW_READER_S", 0.3)
    monkeypatch.setattr("gateway.doors.api.openai_routes._slow_line", RareLine())
    caplog.set_level("INFO")
    server = await net.server()
    num_ended = 0

    async def events() -> AsyncIterator[bytes]:
        nonlocal num_ended
        try:
            while True:
                yield b"data: " + b"x" * 100_000 + b"\n\n"
        finally:
            num_ended += 1

    async def serve(*_: Any) -> SseReply:
        return SseReply(events())

    monkeypatch.setattr(server.services.node, "serve", serve)
    for _ in range(4):
        peer = await net.connect(server)
        peer.reads_slowly()
        await peer.send(request(COMPLETIONS, body_bytes=2) + b"{}")
    await settle(lambda: num_ended == 4)
    assert figure(server, "overture_slow_readers_total") == 4
    assert len([record for record in caplog.records if "do not read" in record.getMessage()]) == 1
    await settle(lambda: not server.services.connections)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
