"""The chat socket: a thin shell around `turns/protocol.py` (frames) and `turns/turns.py` (work). Source: docs/protocol.md."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from aiohttp import ClientConnectionError, WSCloseCode, WSMessage, WSMsgType, web
from msgspec import to_builtins

from engine_bridge.protocol.engine_request import EngineRequest
from gateway.access.auth import Principal, extract_key, withdrawn
from gateway.advisories.advisories import AdvisoryRecord, AdvisoryRequest, outcome_of
from gateway.doors.chat.websocket import MessageTooLarge, StrictWebSocket
from gateway.doors.http import connections as gate
from gateway.doors.http.admission import RareLine
from gateway.errors import CloseCode, GatewayError, as_gateway_error, to_frame
from gateway.services import SERVICES, OpenSocket, Services
from gateway.settings.priorities import checked_priority
from gateway.turns.failures import unavailable
from gateway.turns.live_turn import LiveTurn
from gateway.turns.protocol import (
    PROTOCOL_VERSION,
    Allow,
    Hello,
    Message,
    Ping,
    Stop,
    Typing,
    WatchEngine,
    WatchList,
    decode,
    encode,
    frame_id,
)
from overture_client import __version__

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
HEARTBEAT_S = 30.0  # aiohttp closes when no pong comes within half of this
SLOW_READER_S = 20.0
HARD_FRAME_BYTES = 16 << 20
# Chosen: a hello with a key and 64 turns to resume takes a quarter of it. Before its hello a socket may not send, or be owed, more than this.
GREETING_BYTES = 64 << 10
CLOSE_TIMEOUT_S = 2.0
# Chosen: replies that may wait for a peer before no more of its frames are read.
MAX_QUEUED_BYTES = 1 << 20
MAX_READ = 64  # Chosen: conversations that a page has looked at since it was loaded.


async def chat_socket(request: web.Request) -> web.StreamResponse:
    """Handle `GET /ws`."""
    services = request.app[SERVICES]
    limit = min(GREETING_BYTES, services.config.max_frame_bytes)
    socket = StrictWebSocket(
        limit_bytes=limit, hard_limit_bytes=limit, heartbeat=HEARTBEAT_S, timeout=CLOSE_TIMEOUT_S
    )
    try:
        async with services.upgrading:
            await socket.prepare(request)
            await asyncio.sleep(0)  # hundreds that come at once leave the event loop to others in between
    except ValueError as error:  # aiohttp's, for a key that is not ASCII
        raise web.HTTPBadRequest(reason="The Sec-WebSocket-Key is not Base64.") from error
    except ConnectionError:  # the page left while this waited, as pages do that a stalled server kept waiting
        return web.Response()
    if not make_room(request):
        await socket.close(code=CloseCode.TOO_MANY_SOCKETS, message=b"too many sockets")
        return socket
    await serve(socket, request)
    return socket


def make_room(request: web.Request) -> bool:
    """Return whether this request may connect one more page, which counts as a socket that has not said hello yet."""
    services = request.app[SERVICES]
    return gate.opened(request) and len(services.connections) < services.config.max_sockets


async def serve(socket: Socket, request: web.Request) -> None:
    """Talk to a page until it or the server closes the connection."""
    services = request.app[SERVICES]
    connections = services.connections
    connection = ChatConnection(socket, services, extract_key(request.headers), request)
    connections.add(connection)
    services.metrics.sockets.inc()
    try:
        await connection.run()
    finally:
        connections.discard(connection)
        services.metrics.sockets.dec()
        connection.leave()


class Socket(Protocol):
    """The connection that frames come and go by: a websocket, or server-sent events (`gateway.doors.chat.server_events`)."""

    def __aiter__(self) -> AsyncIterator[WSMessage]: ...

    def set_limits(self, limit_bytes: int, hard_limit_bytes: int) -> None:
        """Change the limits of all frames that have not been read yet."""

    async def send_frame(self, frame: bytes, kind: WSMsgType) -> None:
        """Send a frame. Raises ConnectionError, ClientConnectionError or RuntimeError when the peer has disconnected."""

    async def close(self, *, code: int, message: bytes) -> Any:
        """Send the reason, and close. Raises as `send_frame` does."""


def _who_says(
    hello: Hello, known: Principal | None, key: str | None, services: Services, request: web.Request
) -> Principal:
    """Return the holder of the key of a hello.

    A socket stays with the key of its first good hello, whose holder is `known`: a later hello need not repeat the key.

    Args:
        hello: the frame, which may hold a key.
        known: the holder of the socket's key, if there was a good hello before.
        key: from the upgrade request.
        services: have the keys.
        request: that opened the socket, which may have the cookie of a browser that is signed in, or a trusted proxy's word of who asks.

    Raises:
        GatewayError: `unauthorized` for a wrong or missing key, and for one that was withdrawn meanwhile.
    """
    if not hello.api_key and known is not None:
        return services.keys.current(known)
    if not hello.api_key and (signed_in := services.signed_in(request)) is not None:
        return signed_in
    return services.gatekeeper.authenticate(hello.api_key or key, request.remote)


class ChatConnection:
    """One socket. It holds no text, only how many pieces of each turn that it follows it has sent."""

    __slots__ = (
        "_is_gone",
        "_is_greeted",
        "_key",
        "_outbox",
        "_principal",
        "_queued_bytes",
        "_read",
        "_request",
        "_said_hello",
        "_sent",
        "_services",
        "_socket",
        "_told",
        "_waiting",
        "_writer",
        "blocked_since",
        "is_given_up",
    )

    def __init__(self, socket: Socket, services: Services, key: str | None, request: web.Request) -> None:
        self._socket = socket
        self._request = request
        self._services = services
        self._key = key
        self._principal: Principal | None = None
        self._is_greeted = False  # a hello with a good key came, whatever was answered
        self._said_hello = False
        self._sent: dict[LiveTurn, int] = {}
        self._waiting: dict[LiveTurn, None] = {}  # an ordered set: turns with more to send
        self._outbox: list[bytes] = []
        self._queued_bytes = 0
        self._writer: asyncio.Task[None] | None = None
        self._told: dict[str, str] = {}  # by session: the state of its advisory that was sent last
        self._read: dict[str, None] = {}  # an ordered set: sessions that the client may show, by their ids
        self._is_gone = False
        self.blocked_since: float | None = None
        self.is_given_up = False  # it reads too slowly and is being closed

    async def run(self) -> None:
        """Read frames until the socket closes."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S) as hello_timeout:
                async for message in self._socket:
                    if message.type is WSMsgType.TEXT:
                        await self._on_text(message.data)
                    elif message.type is WSMsgType.BINARY:
                        self._send_error(GatewayError("bad_request", "Frames must be text, not binary."))
                    elif message.type is WSMsgType.ERROR and isinstance(message.data, MessageTooLarge):
                        self._send_error(GatewayError("frame_too_large", str(message.data)))
                    if self._is_greeted:
                        hello_timeout.reschedule(None)
                    most = MAX_QUEUED_BYTES if self._is_greeted else GREETING_BYTES
                    while self._queued_bytes > most and self._writer is not None:
                        await asyncio.wait({self._writer})
        except TimeoutError:
            await self.close(CloseCode.NO_HELLO, "the first frame must be hello")

    # -- frames in ---------------------------------------------------------------------------------------------------

    async def _on_text(self, data: str) -> None:
        turn_id = None
        try:
            try:
                frame = decode(data, self._services.config.max_frame_bytes)
            except GatewayError:
                turn_id = frame_id(data) if len(data) <= self._services.config.max_frame_bytes else None
                raise
            turn_id = getattr(frame, "id", None)
            if isinstance(frame, Hello):
                await self._on_hello(frame)
            elif isinstance(frame, Ping):
                self.tell({"type": "pong", "t": frame.t})
            elif not self._said_hello:
                raise GatewayError("bad_request", "The first frame must be hello.")
            elif isinstance(frame, Message):
                await self._on_message(frame)
            elif isinstance(frame, Stop):
                await self._on_stop(frame)
            elif isinstance(frame, Allow):
                self._services.turns.allow(self._owner, frame)
            elif isinstance(frame, Typing):
                self._on_typing(frame)
            elif isinstance(frame, WatchEngine):
                self._on_watch_engine(frame)
            elif isinstance(frame, WatchList):
                self._services.list_feed.add(self)
        except GatewayError as error:
            await self._fail(error, turn_id)
        except Exception as error:
            log.exception("a frame failed")
            await self._fail(as_gateway_error(error), turn_id)

    async def _on_hello(self, frame: Hello) -> None:
        principal = _who_says(frame, self._principal, self._key, self._services, self._request)
        self._greeted()
        if self._principal is not None and principal.owner != self._principal.owner:
            raise GatewayError("bad_request", "A socket belongs to one key: open one for each key.")
        self._principal = principal
        progress = self._services.node.progress
        if progress.state in ("starting", "failed"):
            raise unavailable(progress.state, progress.stage)
        session = None
        # The first is free: the server comes back to thousands of sockets of one key at once.
        if self._said_hello:
            self._services.budgets.count(principal.owner)
        if frame.session_id is not None:
            session = to_builtins(await self._services.store.get_session(principal.owner, frame.session_id))
            self._note_read(frame.session_id)
        self._principal = self._services.keys.current(principal)  # it may have been withdrawn meanwhile
        self._said_hello = True
        self.tell(
            {"type": "ready", "protocol": PROTOCOL_VERSION, "session": session}
            | {"models": self._services.models(), "server": self._services.server_info(__version__)}
            | {"user": self._services.user_info(principal)}
        )
        for resume in frame.resume:
            live = self._services.turns.find(principal.owner, resume.id)
            if live is None or not live.can_resume(resume.seq):
                self._send_error(
                    GatewayError("not_found", "This turn is not under way any more: read the session."),
                    resume.id,
                )
            else:
                # Again, in case the socket dropped before the first one arrived: the client needs the session's id.
                self._send_accepted(live)
                self._follow(live, resume.seq)

    def _greeted(self) -> None:
        if not self._is_greeted:
            self._is_greeted = True
            self._socket.set_limits(self._services.config.max_frame_bytes, HARD_FRAME_BYTES)
            gate.greeted(self._request, has_key=not self._services.keys.is_open)

    async def _on_message(self, frame: Message) -> None:
        assert self._principal is not None
        self._principal = self._services.keys.current(self._principal)  # shares may have changed, too
        self._services.budgets.count(self._owner)
        priority = checked_priority(frame.priority, may_hurry=self._services.config.client_priority)
        self._services.drafts.stop(self._owner, self._new_chat)
        request = EngineRequest(
            weight=self._principal.weight,
            priority=priority,
            traceparent=frame.traceparent,
            accepted_s=time.time(),
        )
        is_known = self._services.turns.find(self._owner, frame.id) is not None
        live = await self._services.turns.ask(self._owner, frame, request)
        self._send_accepted(live)
        self._follow(live, 0)
        self._note_read(live.session_id)
        if not is_known or frame.continues:
            self._services.tell_shown(
                self._owner, live.session_id, live.id, but=self, is_changed=frame.continues
            )

    def _note_read(self, session_id: str) -> None:
        self._read.pop(session_id, None)
        self._read[session_id] = None
        if len(self._read) > MAX_READ:
            del self._read[next(iter(self._read))]

    def has_read(self, session_id: str) -> bool:
        """Return whether the page has read a session; see `OpenSocket.has_read`. The last MAX_READ sessions are remembered."""
        return session_id in self._read

    def _send_accepted(self, live: LiveTurn) -> None:
        self.tell(
            {"type": "accepted", "id": live.id, "session_id": live.session_id}
            | {"title": live.title, "versions": live.versions}
        )

    async def _on_stop(self, frame: Stop) -> None:
        if not await self._services.turns.stop(self._owner, frame.id) and not self._services.turns.find(
            self._owner, frame.id
        ):
            raise GatewayError("not_found", "This turn is not under way.", param="id")

    def _on_typing(self, frame: Typing) -> None:
        """Handle a typing frame. It is advice, so it never fails: it is answered with `off` (typing has no use here) or `unknown`."""
        services = self._services
        services.metrics.typing.inc()
        if not services.config.kv_host_gib:
            self.tell({"type": "advisory", "session_id": frame.session_id, "state": "off"})
            return
        client = services.client_of(self._owner, self._request, self)
        try:
            # A new chat: there is nothing to bring up, but a draft may be computed.
            if frame.session_id is None:
                adapter = services.turns.known_adapter(frame.adapter)
                draft = frame.draft or ""
                services.drafts.update(self._owner, self._new_chat, adapter or None, draft, client=client)
                return
            wanted = AdvisoryRequest(session_id=frame.session_id, model=frame.adapter, draft=frame.draft)
            services.advisories.submit(self._owner, wanted, "typing", self._on_advisory, client=client)
        except GatewayError:
            self.tell({"type": "advisory", "session_id": frame.session_id, "state": "unknown"})

    def _on_watch_engine(self, frame: WatchEngine) -> None:
        feed = self._services.engine_feed
        if frame.on:
            feed.add(self)
        else:
            feed.remove(self)

    @property
    def _new_chat(self) -> str:
        """Return the key of a draft whose conversation has no id yet."""
        return f"new chat of socket {id(self)}"

    def _on_advisory(self, record: AdvisoryRecord) -> None:
        """Tell the page whether the session typed in is warm."""
        if self._is_gone or record.report is None:
            return
        told = self._told.get(record.wanted.session_id)
        if told != record.report.state:
            self._told[record.wanted.session_id] = record.report.state
            named = {"session_id": record.wanted.session_id, "adapter": record.adapter}
            self.tell({"type": "advisory"} | named | outcome_of(record.report))
        if record.is_over:
            self._told.pop(record.wanted.session_id, None)

    @property
    def _owner(self) -> str:
        assert self._principal is not None
        return self._principal.owner

    # -- frames out --------------------------------------------------------------------------------------------------

    def wake(self, turn: LiveTurn) -> None:
        """Note that a turn that this socket follows has more to send."""
        self._waiting[turn] = None
        self._start_writer()

    def _follow(self, live: LiveTurn, num_sent: int) -> None:
        if live in self._sent:
            return  # this socket has had all up to here: going back would repeat text
        self._sent[live] = num_sent
        self._services.turns.follow(live, self)
        if live.is_over or live.seq > num_sent:
            self.wake(live)

    def tell(self, frame: dict[str, Any]) -> None:
        """Send a frame."""
        data = encode(frame)
        self._outbox.append(data)
        self._queued_bytes += len(data)
        self._start_writer()

    def show(self, picture: bytes) -> None:
        """Send the engine's figures to a page that watches them. They are skipped while the peer is behind, because newer ones will follow."""
        if self._writer is None:
            self._outbox.append(picture)
            self._queued_bytes += len(picture)
            self._start_writer()

    def _send_error(self, error: GatewayError, turn_id: str | None = None) -> None:
        self._services.metrics.socket_errors.labels(error.code).inc()
        self.tell(to_frame(error, turn_id))

    async def _fail(self, error: GatewayError, turn_id: str | None) -> None:
        self._send_error(error, turn_id)
        if error.close_code is not None:
            if self._writer is not None:
                await asyncio.wait({self._writer}, timeout=CLOSE_TIMEOUT_S)
            await self.close(error.close_code, error.code)

    def _start_writer(self) -> None:
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Send waiting frames, then end, so that an idle socket has no task besides the reader."""
        try:
            while self._outbox or self._waiting:
                frames, self._outbox = self._outbox, []
                self._queued_bytes = sum(map(len, frames))
                waiting, self._waiting = self._waiting, {}
                for turn in waiting:
                    frames.extend(self._frames_of(turn))
                for frame in frames:
                    # Noted before the write: when the peer takes nothing, the sweeper sees for how long.
                    self.blocked_since = time.monotonic()
                    await self._socket.send_frame(frame, WSMsgType.TEXT)
                self.blocked_since = None
        except (ConnectionError, ClientConnectionError, RuntimeError):
            pass  # the peer has disconnected; the reader's loop ends by itself
        except Exception:
            # Lost frames are sent again when the client connects anew and resumes; on this socket it would wait for ever.
            log.exception("a chat socket could not be written to; it is cut")
            self.abort()
        finally:
            self._writer = None
            self._queued_bytes = sum(map(len, self._outbox))

    def _frames_of(self, turn: LiveTurn) -> list[bytes]:
        num_sent = self._sent.get(turn)
        if num_sent is None:
            return []
        frames = []
        # Before its first piece a turn that is asked again has nothing to tell, whatever its `seq` begins with.
        seq = turn.seq if turn.pieces else num_sent
        if seq > num_sent:
            more = turn.after(num_sent)
            frame = {"type": "delta", "id": turn.id, "seq": seq, "text": more.text}
            frame |= {"reasoning": more.reasoning} if more.reasoning else {}
            frames.append(encode(frame | ({"calls": more.calls} if more.calls else {})))
            self._sent[turn] = seq
        if turn.is_over:
            del self._sent[turn]
            turn.followers.discard(self)
            if turn.error is not None:
                frames.append(encode(to_frame(turn.error, turn.id)))
            elif turn.done is not None:
                frames.append(encode({"type": "done", "id": turn.id, "seq": seq} | turn.done))
        return frames

    # -- the end -----------------------------------------------------------------------------------------------------

    async def close(self, code: int, reason: str) -> None:
        """Close with a reason; a peer that does not answer is cut off after CLOSE_TIMEOUT_S."""
        with contextlib.suppress(ConnectionError, ClientConnectionError, RuntimeError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.close(code=code, message=reason.encode())

    @property
    def owner(self) -> str | None:
        """The owner of the socket's sessions; None before a hello with a good key."""
        return self._principal.owner if self._principal is not None else None

    @property
    def key(self) -> str | None:
        """Which of its owner's keys opened the socket; None before a hello with a good key."""
        return self._principal.key if self._principal is not None else None

    @property
    def principal(self) -> Principal | None:
        """The holder of the socket's key, as of its last hello or message."""
        return self._principal

    async def revoke(self) -> None:
        """Say that the key was withdrawn, and close."""
        await self._fail(withdrawn(), None)

    def leave(self) -> None:
        """Unfollow everything; the turns continue for a while without this socket."""
        self._is_gone = True
        self._services.engine_feed.remove(self)
        self._services.list_feed.remove(self)
        if self._writer is not None:
            self._writer.cancel()
        for turn in list(self._sent):
            self._services.turns.unfollow(turn, self)
        self._sent.clear()
        self._waiting.clear()

    def abort(self) -> None:
        """Cut the connection without waiting for the peer."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()


async def sweep_slow_readers(services: Services) -> None:
    """Run until cancelled: close sockets whose peer has taken no bytes for SLOW_READER_S while frames waited, each in a separate task."""
    line = RareLine()
    async with asyncio.TaskGroup() as closing:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            _sweep(services, closing, line, now)
            if num := line.due(now):
                log.info("closed %d chat sockets that read too slowly", num)


def _sweep(services: Services, closing: asyncio.TaskGroup, line: RareLine, now: float) -> None:
    """Close slow sockets once. Separate from the loop, whose variables would hold the last socket until another one comes."""
    for connection in services.connections:
        blocked_since = connection.blocked_since
        if blocked_since and now - blocked_since > SLOW_READER_S and not connection.is_given_up:
            connection.is_given_up = True
            services.metrics.slow_readers.inc()
            line.add()
            closing.create_task(_close_slow(connection))


async def _close_slow(connection: OpenSocket) -> None:
    try:
        await connection.close(CloseCode.SLOW_READER, "slow reader")
    except Exception:
        log.exception("a chat socket that reads too slowly could not be closed in good order")
    connection.abort()


async def close_all(services: Services) -> None:
    """Tell every socket that the server goes away."""
    async with asyncio.TaskGroup() as group:
        for connection in list(services.connections):
            group.create_task(connection.close(WSCloseCode.GOING_AWAY, "the server is going away"))
