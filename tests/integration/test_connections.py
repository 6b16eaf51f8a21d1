"""Connections that send too slowly, too much or too many: real sockets against a real server whose engine has not been started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from engine_bridge.protocol.node import SseReply
from gateway.app import Server, build_services
from gateway.doors.http.admission import RareLine
from gateway.doors.http.connections import Connection, State
from gateway.metrics.metrics import Metrics

from .conftest import KEYS, demo_config

HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127."
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
KEYED_UPGRADE = UPGRADE.replace(b"\r\n\r\n", f"\r\nX-Api-Key: {KEYS[0]}\r\n\r\n".encode())
HELLO = b'{"type":"hello"}'
Servers = Callable[..., Awaitable[Server]]


class Peer:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def cut(self) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)

    async def rest(self) -> bytes:
        """All until the server closes."""
        return await asyncio.wait_for(self.reader.read(), 60)

    async def frame(self) -> tuple[int, bytes]:
        """Opcode and payload of the next frame."""
        async with asyncio.timeout(60):
            first, length = await self.reader.readexactly(2)
            if length == 126:
                length = int.from_bytes(await self.reader.readexactly(2), "big")
            return first & 0x0F, await self.reader.readexactly(length)

    async def close_code(self) -> int:
        while True:
            opcode, payload = await self.frame()
            if opcode == 8:
                return int.from_bytes(payload[:2], "big")

    async def error_code(self) -> str:
        while True:
            opcode, payload = await self.frame()
            if opcode == 1 and (frame := json.loads(payload))["type"] == "error":
                return frame["code"]


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


def text_head(num_bytes: int) -> bytes:
    """The head of a masked text frame of that size; the mask is zeros."""
    return b"\x81\xff" + num_bytes.to_bytes(8, "big") + bytes(4)


def text(payload: bytes) -> bytes:
    return text_head(len(payload)) + payload


@pytest_asyncio.fixture(loop_scope="session")
async def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    """Makes servers that answer everything but questions."""
    monkeypatch.setattr("gateway.doors.http.connections.SWEEP_EVERY_S", 0.02)
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> Server:
            config = demo_config(tmp_path / "data", device="cpu", **changes)
            services = await build_services(config, metrics=Metrics(CollectorRegistry()))
            return await stack.enter_async_context(Server(services))

        yield make


Peers = Callable[[Server], Awaitable[Peer]]


@pytest_asyncio.fixture(loop_scope="session")
async def connect() -> AsyncIterator[Peers]:
    async with AsyncExitStack() as stack:

        async def make(server: Server) -> Peer:
            peer = Peer(*await asyncio.open_connection("127.0.0.1", server.port))
            stack.callback(peer.cut)  # it keeps the peer as well: a stream that nobody holds is closed
            return peer

        yield make


async def socket(connect: Peers, server: Server, *, hello: bool = False) -> Peer:
    peer = await connect(server)
    await peer.send(UPGRADE)
    assert b" 101 " in await peer.head()
    if hello:
        await peer.send(text(HELLO))
        assert await peer.error_code() == "starting", (
            "the engine has not been started, and a key is not asked for"
        )
    return peer


def figure(server: Server, name: str, **labels: str) -> float:
    return server.services.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_head_that_does_not_arrive_is_answered_with_408(servers: Servers, connect: Peers) -> None:
    server = await servers(head_timeout_s=0.3)
    half, silent = await connect(server), await connect(server)
    await half.send(HALF_A_HEAD)
    head, _, body = (await half.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"Connection: close" in head
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert await silent.rest() == b""
    assert figure(server, "overture_connections_closed_total", reason="head_timeout") == 2


async def test_a_head_that_dribbles_in_has_no_more_time(servers: Servers, connect: Peers) -> None:
    server = await servers(head_timeout_s=0.3)
    peer = await connect(server)
    await peer.send(HALF_A_HEAD)
    async with dribbling(peer, b"0"):
        assert (await peer.head()).startswith(b"HTTP/1.1 408 ")


async def test_the_next_requests_head_has_its_own_time(servers: Servers, connect: Peers) -> None:
    server = await servers(head_timeout_s=0.3)
    peer = await connect(server)
    await peer.send(HEALTH)
    assert b" 200 " in await peer.head()
    await peer.reader.readexactly(len(b'{"status":"ok"}'))
    await peer.send(HALF_A_HEAD)
    assert (await peer.rest()).startswith(b"HTTP/1.1 408 ")


async def test_the_rest_of_a_body_that_was_answered_early_is_no_head(
    servers: Servers, connect: Peers
) -> None:
    server = await servers(head_timeout_s=0.3, api_keys=KEYS)
    peer = await connect(server)
    await peer.send(b"POST /api/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 20\r\n\r\n{")
    head = await peer.head()
    assert b" 401 " in head
    await peer.reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))  # type: ignore[index]
    await peer.send(b" " * 19)
    await asyncio.sleep(0.6)  # it is the time that is tested
    await peer.send(HEALTH)
    assert b" 200 " in await peer.head()


async def test_an_idle_connection_is_closed(servers: Servers, connect: Peers) -> None:
    server = await servers(keepalive_timeout_s=0.2, head_timeout_s=60)
    peer = await connect(server)
    await peer.send(HEALTH)
    assert b" 200 " in await peer.rest()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/sessions"])
async def test_a_body_that_stops_is_answered_with_408_in_the_apis_shape(
    servers: Servers, connect: Peers, path: str
) -> None:
    server = await servers(body_timeout_s=0.3)
    peer = await connect(server)
    await peer.send(f'POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999\r\n\r\n{{"a":'.encode())
    head, _, body = (await peer.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"Connection: close" in head
    error = json.loads(body)["error"]
    assert "body" in error["message"] and ("code" in error) != path.startswith("/v1/messages")


async def test_a_body_that_keeps_coming_is_waited_for(servers: Servers, connect: Peers) -> None:
    server = await servers(body_timeout_s=1.0)
    peer = await connect(server)
    await peer.send(b"POST /api/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n")
    for _ in range(100):
        await peer.send(b" ")
        await asyncio.sleep(0.02)
    assert b" 400 " in await peer.head(), "100 blanks are no JSON"


async def test_a_body_that_is_too_slow_all_along(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.http.admission.BODY_GRACE_S", 0.3)
    server = await servers()
    peer = await connect(server)
    await peer.send(b"POST /api/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999\r\n\r\n")
    async with dribbling(peer, b"x"):
        assert b" 408 " in await peer.head()
    assert figure(server, "overture_connections_closed_total", reason="body_too_slow") == 1


async def test_those_who_hold_a_connection_for_nothing_make_room(servers: Servers, connect: Peers) -> None:
    server = await servers(max_connections=20, head_timeout_s=600)
    for _ in range(100):
        await (await connect(server)).send(HALF_A_HEAD)
        async with aiohttp.ClientSession(server.url) as http, http.get("/healthz") as response:
            assert response.status == 200
    assert figure(server, "overture_connections_closed_total", reason="scarce") > 70


async def test_what_is_kept_back_is_for_health_and_for_keys(servers: Servers, connect: Peers) -> None:
    server = await servers(max_connections=20, api_keys=KEYS)  # 18 for all, 2 kept back
    for _ in range(18):
        peer = await socket(connect, server)
        await peer.send(text(json.dumps({"type": "hello", "api_key": KEYS[0]}).encode()))
        assert await peer.error_code() == "starting"
    async with aiohttp.ClientSession(server.url) as http:
        for path, key, status in (
            ("/api/sessions", KEYS[1], 200),
            ("/readyz", "", 503),
            ("/healthz", "", 200),
        ):
            async with http.get(path, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == status
    stranger = await connect(server)
    await stranger.send(b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    reply = await stranger.rest()
    assert b" 503 " in reply and b"Retry-After" in reply


async def test_above_all_limits_a_connection_is_refused_in_words(servers: Servers, connect: Peers) -> None:
    server = await servers(max_connections=20, api_keys=KEYS)
    for _ in range(20):
        peer = await connect(server)
        await peer.send(KEYED_UPGRADE + text(HELLO))
        assert b" 101 " in await peer.head() and await peer.error_code() == "starting"
    reply = await (await connect(server)).rest()
    assert reply.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 3" in reply


async def test_one_address_has_its_share(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.http.connections.is_shared", lambda address, proxies: False)
    server = await servers(max_connections_per_address=8)
    peers = [await socket(connect, server, hello=True) for _ in range(8)]
    reply = await (await connect(server)).rest()
    assert reply.startswith(b"HTTP/1.1 429 ") and b"Retry-After" in reply
    peers[0].writer.close()
    await peers[0].rest()
    async with asyncio.timeout(60):
        while b" 200 " not in (await health(connect, server)):
            pass


async def health(connect: Peers, server: Server) -> bytes:
    peer = await connect(server)
    await peer.send(HEALTH)
    return await peer.head()


async def test_a_key_frees_its_holder_from_the_limit_of_the_address(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.http.connections.is_shared", lambda address, proxies: False)
    server = await servers(max_connections_per_address=4, api_keys=KEYS)
    for _ in range(12):
        peer = await connect(server)
        await peer.send(
            f"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Api-Key: {KEYS[0]}\r\n\r\n".encode()
        )
        assert b" 200 " in await peer.head()


async def test_sockets_without_hello_are_few(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.http.connections.is_shared", lambda address, proxies: False)
    server = await servers(max_connections_per_address=16)
    for _ in range(4):
        await socket(connect, server)
    assert await (await socket(connect, server)).close_code() == 4429


async def test_a_request_before_the_upgrade_does_not_stand_for_hello(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.http.connections.is_shared", lambda address, proxies: False)
    server = await servers(max_connections_per_address=16)
    for number in range(5):
        peer = await connect(server)
        await peer.send(HEALTH)
        assert b" 200 " in await peer.head()
        await peer.reader.readexactly(len(b'{"status":"ok"}'))
        await peer.send(UPGRADE)
        assert b" 101 " in await peer.head()
        if number == 4:
            assert await peer.close_code() == 4429


async def test_a_key_that_could_be_guessed_does_not_open_what_is_kept_back(
    servers: Servers, connect: Peers
) -> None:
    server = await servers(max_connections=20, api_keys=("short-key", KEYS[0]))
    for _ in range(18):
        peer = await connect(server)
        await peer.send(KEYED_UPGRADE + text(HELLO))
        assert b" 101 " in await peer.head() and await peer.error_code() == "starting"
    for key, status in (("short-key", b" 503 "), ("wrong-key", b" 503 "), (KEYS[0], b" 200 ")):
        peer = await connect(server)
        await peer.send(f"GET /api/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Api-Key: {key}\r\n\r\n".encode())
        assert status in await peer.head()
        if status == b" 503 ":
            await peer.rest()


async def test_a_connection_is_idle_only_when_its_answer_has_been_written(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []

    async def note(request: web.Request, response: web.StreamResponse) -> None:
        """The handler has ended; nothing has been written."""
        states.append(cast(Connection, request.protocol).state)

    monkeypatch.setattr("gateway.doors.http.web_policy.add_headers", note)
    server = await servers()
    peer = await connect(server)
    await peer.send(HEALTH.replace(b"/healthz", b"/static/vendor/dompurify/purify.es.js"))
    assert b" 200 " in await peer.head()
    assert states == [State.REQUEST]
    async with asyncio.timeout(60):
        while not figure(server, "overture_connections", state="idle"):
            await asyncio.sleep(0.02)


async def test_files_are_counted_again_after_a_failure(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = iter([OSError("no such folder")])

    def count() -> int:
        for error in counts:
            raise error
        return 7

    monkeypatch.setattr("gateway.doors.http.connections.COUNT_FILES_EVERY_S", 0.02)
    monkeypatch.setattr("gateway.doors.http.connections.num_open_files", count)
    server = await servers()
    async with asyncio.timeout(60):
        while figure(server, "overture_open_files") != 7:
            await asyncio.sleep(0.02)
    assert "were not counted" in caplog.text


def test_the_same_on_the_loop_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.doors.http.connections.SWEEP_EVERY_S", 0.02)

    async def scenario() -> None:
        config = demo_config(
            tmp_path / "data", device="cpu", max_connections=20, api_keys=KEYS, head_timeout_s=0.3
        )
        services = await build_services(config, metrics=Metrics(CollectorRegistry()))
        async with Server(services) as server:
            half = Peer(*await asyncio.open_connection("127.0.0.1", server.port))
            await half.send(HALF_A_HEAD)
            assert (await half.rest()).startswith(b"HTTP/1.1 408 ")
            peers = []
            for _ in range(20):
                peers.append(Peer(*await asyncio.open_connection("127.0.0.1", server.port)))
                await peers[-1].send(KEYED_UPGRADE + text(HELLO))
                assert b" 101 " in await peers[-1].head() and await peers[-1].error_code() == "starting"
            refused = Peer(*await asyncio.open_connection("127.0.0.1", server.port))
            assert (await refused.rest()).startswith(b"HTTP/1.1 503 ")
            await peers[0].send(b"\x81\x01x")
            assert await peers[0].close_code() == 1002
            for peer in peers:
                peer.cut()

    uvloop.run(scenario())


# -- the chat socket -------------------------------------------------------------------------------------------------


async def test_a_large_frame_before_hello_is_refused_by_its_header(servers: Servers, connect: Peers) -> None:
    peer = await socket(connect, await servers())
    await peer.send(text_head(70_000))
    assert await peer.close_code() == 1009


async def test_a_large_frame_after_hello_is_refused_by_its_header_and_the_socket_goes_on(
    servers: Servers, connect: Peers
) -> None:
    peer = await socket(connect, await servers(max_frame_bytes=100_000), hello=True)
    await peer.send(text_head(200_000))
    assert await peer.error_code() == "frame_too_large"
    await peer.send(b"x" * 200_000 + text(b"{"))
    assert await peer.error_code() == "bad_request"
    await peer.send(text_head((16 << 20) + 1))
    assert await peer.close_code() == 1009


async def test_a_large_frame_right_behind_hello_is_taken(servers: Servers, connect: Peers) -> None:
    peer = await connect(await servers())
    await peer.send(UPGRADE + text(HELLO) + text(b'{"type":"' + b"x" * 500_000))
    await peer.head()
    assert [await peer.error_code(), await peer.error_code()] == ["starting", "bad_request"]


async def test_half_frames_before_hello_cost_next_to_nothing(servers: Servers, connect: Peers) -> None:
    server = await servers()
    peers = [await socket(connect, server) for _ in range(50)]
    for peer in peers:
        peer.writer.write(text_head(60_000) + b"x" * 59_999)
    codes = await asyncio.gather(*(hold_and_send(peer) for peer in peers[:5]))
    assert set(codes) == {1009}
    for connection in server.services.connections:
        assert connection._socket._frames.num_buffered_bytes <= 64 << 10


async def hold_and_send(peer: Peer) -> int:
    await peer.send(b"x" + text_head(1 << 20))
    return await peer.close_code()


async def test_a_partial_frame_does_not_put_off_hello(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.chat.socket.HELLO_TIMEOUT_S", 0.3)
    peer = await socket(connect, await servers())
    await peer.send(text_head(60_000))
    async with dribbling(peer, b"x"):
        assert await peer.close_code() == 4400


async def test_a_frame_without_a_mask_is_a_protocol_error(servers: Servers, connect: Peers) -> None:
    for hello in (False, True):
        peer = await socket(connect, await servers(), hello=hello)
        await peer.send(b"\x81" + bytes([len(HELLO)]) + HELLO)
        assert await peer.close_code() == 1002


async def test_the_reason_reaches_a_client_that_is_still_sending(servers: Servers, connect: Peers) -> None:
    peer = await socket(connect, await servers())
    sending = asyncio.create_task(peer.send(text(b"x" * (17 << 20))))
    assert await peer.close_code() == 1009
    sending.cancel()


async def test_slow_readers_are_closed_each_once_and_told_of_in_one_line(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.doors.chat.socket.SLOW_READER_S", 0.5)
    caplog.set_level("INFO", "gateway.doors.chat.socket")
    server = await servers()
    slow = [await socket(connect, server) for _ in range(4)]
    ping = text(json.dumps({"type": "ping", "t": "x" * 60_000}).encode())
    for peer in slow:
        peer.reader._limit = 1024  # it takes no more from the system than that
        peer.writer.write(text(HELLO) + ping * 400)
    async with asyncio.timeout(60):
        while server.services.connections:
            await asyncio.sleep(0.05)
    assert figure(server, "overture_slow_readers_total") == 4
    assert len([record for record in caplog.records if "slowly" in record.getMessage()]) == 1


async def test_who_does_not_read_an_answer_does_not_keep_the_connection(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.doors.http.connections.UNREAD_TIMEOUT_S", 1.0)
    server = await servers()
    peer = await connect(server)
    peer.reader._limit = 1024
    assert server._runner is not None and server._runner.server is not None
    peer.writer.write(HEALTH.replace(b"/healthz", b"/static/vendor/dompurify/purify.es.js") * 3000)
    async with asyncio.timeout(60):
        await many_answers(server)
        while server._runner.server.connections:
            await asyncio.sleep(0.05)


async def many_answers(server: Server) -> None:
    while figure(server, "overture_http_requests_total", route="/static/{path}", status="200") < 10:
        await asyncio.sleep(0.01)


async def test_streams_that_nobody_reads_are_cut_off_and_told_of_in_one_line(
    servers: Servers, connect: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.doors.api.openai_routes.SLOW_READER_S", 0.3)
    monkeypatch.setattr("gateway.doors.api.openai_routes._slow_line", RareLine())
    caplog.set_level("INFO", "gateway.doors.api.openai_routes")
    server = await servers()
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
        peer = await connect(server)
        peer.reader._limit = 1024
        await peer.send(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}")
    async with asyncio.timeout(60):
        while num_ended < 4:
            await asyncio.sleep(0.05)
    assert figure(server, "overture_slow_readers_total") == 4
    assert len([record for record in caplog.records if "do not read" in record.getMessage()]) == 1
