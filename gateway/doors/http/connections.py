"""The server's connections: which ones are let in, how long a request may take to arrive, and the operator's view of them.

`gateway.doors.http.admission` decides; here aiohttp's connections are counted, classified and closed. One timer looks after all of them:
connections with a deadline are kept in order of time, so a sweep costs as much as there is overdue, not as much as is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from enum import StrEnum
from typing import Any, cast

import orjson
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler

from gateway.access.addresses import address_of
from gateway.access.auth import MIN_KEY_CHARS, KeyRing, extract_key
from gateway.doors.http.admission import (
    FILES_KEPT_BACK,
    Admission,
    BodyFacts,
    Limits,
    NewConnection,
    RareLine,
    Reason,
    Watermark,
    admit,
    body_overdue,
    is_shared,
    limits_for,
)
from gateway.errors import GatewayError, to_openai_body
from gateway.metrics.metrics import Metrics
from gateway.settings.config import Config

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 1.0
# Chosen: to end a connection, or to answer a request whose body stopped, costs up to 0.2 ms. Thousands that came together are overdue together.
MOST_ENDED_AT_ONCE = 32
COUNT_FILES_EVERY_S = 5.0
RETRY_AFTER_S = 3
# Chosen: longer than the 20 s after which streams and chat sockets tell a slow reader why it is cut off.
UNREAD_TIMEOUT_S = 60.0
# Linux's name; other systems keep such a connection as long as they see fit.
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
FEW_FILES = 4096  # Chosen: below this the operator is told at the start how few connections that allows.

_TEXTS: dict[Reason, tuple[int, str, str]] = {
    "head_timeout": (408, "request_timeout", "The request's head did not arrive in time."),
    "body_timeout": (408, "request_timeout", "The request's body stopped arriving: send it again."),
    "body_too_slow": (408, "request_timeout", "The request's body came too slowly: send it again."),
    "scarce": (503, "overloaded", "The server has no more connections to give. Try again soon."),
    "limit": (503, "overloaded", "The server has no more connections to give. Try again soon."),
    "address_limit": (429, "rate_limited", "This address has too many connections open: close some."),
}


class State(StrEnum):
    """The activity of a connection."""

    HEAD = "head"  # has sent nothing, or part of a request's head
    REQUEST = "request"
    IDLE = "idle"  # between two requests: the last answer has been written
    GREETING = "greeting"  # a chat socket before hello
    SOCKET = "socket"


class Connection(RequestHandler):
    """One client's connection, with its state and the time since when it has it."""

    __slots__ = (
        "address",
        "body",
        "has_key",
        "heard_at_s",
        "is_counted",
        "is_reserved",
        "num_bytes",
        "registry",
        "since_s",
        "state",
    )

    def __init__(self, manager: web.Server, registry: Connections, **options: Any) -> None:
        super().__init__(manager, **options)
        self.registry = registry
        self.address = ""
        self.state = State.HEAD
        self.since_s = 0.0
        self.heard_at_s = 0.0
        self.num_bytes = 0  # that came since
        self.has_key = False
        self.is_counted = False  # against its address
        self.is_reserved = False
        self.body: web.BaseRequest | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, or refuse it with a reply."""
        refused = self.registry.arrived(self, transport)
        _limit_unread(transport)
        if refused is None:
            super().connection_made(transport)
            return
        self._force_close = True
        refusing = cast(asyncio.Transport, transport)  # uvloop's are none by name
        refusing.write(_reply(refused))
        refusing.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        self.registry.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Note when bytes came and whether a request's head has begun, then let aiohttp parse them."""
        if not data:  # aiohttp calls itself, to parse its buffer
            super().data_received(data)
            return
        if self.state is State.IDLE and self._waiter is not None:
            # Without the waiter it is the rest of a body whose request was answered early.
            self.registry.enter(self, State.HEAD)
        self.num_bytes += len(data)
        self.heard_at_s = self._loop.time()
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count != num_requests and self.state is State.HEAD:
            self.registry.enter(self, State.REQUEST)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer. Until it is written, which may take long for a file, the connection is in use."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.registry.enter(self, State.IDLE)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a head that is not HTTP or too large. aiohttp would log its bytes, which may hold a key, and answer in plain text.

        Raises:
            ConnectionError: the client has left, which is not worth a traceback in the log.
        """
        if isinstance(exc, ConnectionError) and has_left(request):
            log.debug("a client left before its answer was sent (%s)", type(exc).__name__)
            raise ConnectionError from exc
        if status != 400:
            return super().handle_error(request, status, exc, message)
        log.debug("a request's head was not understood")
        status, error = self._error_of(exc)
        response = web.Response(
            body=orjson.dumps(to_openai_body(error)), status=status, content_type="application/json"
        )
        response.headers["Server"] = "Overture"  # as `web_policy.add_headers`, which no such answer passes
        response.force_close()
        return response

    def _error_of(self, error: BaseException | None) -> tuple[int, GatewayError]:
        """Return status and error for a head that aiohttp refused. Source of 431: RFC 6585 §5."""
        if isinstance(error, LineTooLong):
            text = (
                f"The request's address or one of its headers has more than {self.max_field_size:,} bytes: send less "
                "(cookies of other pages, perhaps)."
            )
            return 431, GatewayError("frame_too_large", text)
        if isinstance(error, BadHttpMessage) and "Too many headers" in error.message:
            text = f"The request has more than {self.max_headers} headers: send fewer."
            return 431, GatewayError("frame_too_large", text)
        return 400, GatewayError("bad_request", "The request's head is not valid HTTP.")

    @property
    def is_held_back(self) -> bool:
        """Whether the server itself has paused reading, so that the client is not to blame for silence."""
        return self._reading_paused or self._buffer_paused

    def end(self, reason: Reason) -> None:
        """Close now. A client in the middle of a request is told why."""
        transport = self.transport
        if transport is not None and self.state is State.HEAD and self.num_bytes:
            transport.write(_reply(reason))
        if self.state is State.GREETING and transport is not None:
            transport.abort()  # the handler ends as it does when the client leaves
        else:
            self.force_close()

    def end_body(self, reason: Reason) -> None:
        """Let the request's handler fail with 408, and close after its answer."""
        request, self.body = self.body, None
        if request is not None:
            status_and_text = _TEXTS[reason]
            self.close()
            request.content.set_exception(GatewayError(status_and_text[1], status_and_text[2]))
            request.content.feed_eof()  # aiohttp would otherwise wait for the rest after the answer


class Connections:
    """The connections of one server, by state and by address."""

    def __init__(self, config: Config, keys: KeyRing, metrics: Metrics, max_files: int) -> None:
        self.limits: Limits = limits_for(
            max_files, config.max_sockets, config.max_connections, config.max_connections_per_address
        )
        self._config = config
        self._keys = keys
        self._metrics = metrics
        self._max_files = max_files
        self._scarce_fd = max_files - min(FILES_KEPT_BACK, max_files // 2) // 2
        self._proxies = [ipaddress.ip_network(proxy, strict=False) for proxy in config.trusted_proxies]
        # Each in order of time: the first has waited longest.
        self._by_state: dict[State, dict[Connection, None]] = {state: {} for state in State}
        self._bodies: dict[Connection, None] = {}
        self._unfinished: dict[str, dict[Connection, None]] = {}  # by address: no request completed, no hello
        self._num_counted: dict[str, int] = {}
        self._ended = dict.fromkeys(_TEXTS, 0)
        self._line = RareLine()
        self._files_mark, self._room_mark = Watermark(), Watermark()
        if max_files < FEW_FILES:
            log.warning(
                "This process may open %d files only, so it takes %d connections. Raise the limit (ulimit -n).",
                max_files,
                self.limits.num_total,
            )

    def __len__(self) -> int:
        return sum(map(len, self._by_state.values()))

    # -- in and out ------------------------------------------------------------------------------------------------------

    def arrived(self, connection: Connection, transport: asyncio.BaseTransport) -> Reason | None:
        """Count a new connection, which may replace another. Return why it is refused, or None."""
        # A pair or more for TCP; a path or nothing for a Unix socket.
        peer = transport.get_extra_info("peername")
        address = address_of(str(peer[0])) if isinstance(peer, tuple) else ""
        admission = self._admission(address, transport)
        if admission.reason is not None:
            self._closed(admission.reason)
            return admission.reason
        self._make_room(admission, address)
        connection.address = address
        connection.is_reserved = admission.is_reserved
        connection.since_s = asyncio.get_running_loop().time()
        if not is_shared(address, self._proxies):
            connection.is_counted = True
            self._num_counted[address] = self._num_counted.get(address, 0) + 1
            self._unfinished.setdefault(address, {})[connection] = None
        self._by_state[State.HEAD][connection] = None
        return None

    def _admission(self, address: str, transport: asyncio.BaseTransport) -> Admission:
        ours = transport.get_extra_info("socket")
        return admit(
            NewConnection(
                num_all=len(self),
                num_of_address=None
                if is_shared(address, self._proxies)
                else self._num_counted.get(address, 0),
                has_unfinished_of_address=bool(self._unfinished.get(address)),
                has_unfinished=bool(self._by_state[State.HEAD] or self._by_state[State.GREETING]),
                has_idle=bool(self._by_state[State.IDLE]),
                # The system assigns the lowest free number, so at least this many files are open.
                are_files_scarce=ours is not None and ours.fileno() >= self._scarce_fd,
            ),
            self.limits,
        )

    def _make_room(self, admission: Admission, address: str) -> None:
        if admission.victim is None:
            return
        if admission.victim == "oldest_of_address":
            victim = next(iter(self._unfinished[address]))
            self.end(victim, "address_limit")
        elif admission.victim == "oldest_unfinished":
            firsts = [next(iter(self._by_state[state]), None) for state in (State.HEAD, State.GREETING)]
            self.end(min((c for c in firsts if c is not None), key=lambda c: c.since_s), "scarce")
        else:
            self.end(next(iter(self._by_state[State.IDLE])), "scarce")

    def left(self, connection: Connection) -> None:
        """Forget a connection. A second call does no harm."""
        self._by_state[connection.state].pop(connection, None)
        self._bodies.pop(connection, None)
        self._finished(connection)
        if connection.is_counted:
            connection.is_counted = False
            self._num_counted[connection.address] -= 1
            if not self._num_counted[connection.address]:
                del self._num_counted[connection.address]

    def end(self, connection: Connection, reason: Reason) -> None:
        """Close a connection and count why."""
        self._closed(reason)
        self.left(connection)
        connection.end(reason)

    def _closed(self, reason: Reason) -> None:
        self._metrics.connections_closed.labels(reason).inc()
        self._ended[reason] += 1
        self._line.add()

    def _finished(self, connection: Connection) -> None:
        """Note that a connection has completed a request, has said hello, or is closed."""
        of_address = self._unfinished.get(connection.address)
        if of_address is not None and connection in of_address:
            del of_address[connection]
            if not of_address:
                del self._unfinished[connection.address]

    # -- what a connection does --------------------------------------------------------------------------------------------

    def enter(self, connection: Connection, state: State) -> None:
        """Change a connection's state. A connection that was closed meanwhile stays forgotten."""
        if state is connection.state or connection not in self._by_state[connection.state]:
            return
        del self._by_state[connection.state][connection]
        connection.state = state
        connection.since_s = asyncio.get_running_loop().time()
        connection.num_bytes = 0
        self._by_state[state][connection] = None

    def begin(self, connection: Connection, request: web.BaseRequest) -> None:
        """Note that a request's head is complete. Raises GatewayError `overloaded` if only reserved places are left and it has no key."""
        self.enter(connection, State.REQUEST)
        self._check_reserve(connection, request)
        if not request.content.is_eof():
            connection.body = request
            self._bodies[connection] = None

    def over(self, connection: Connection) -> None:
        """Note that a request's handler has ended; its answer may still be on its way."""
        self._bodies.pop(connection, None)
        connection.body = None
        self._finished(connection)

    def opened(self, connection: Connection) -> bool:
        """Note that a connection has become a chat socket; return False if its address has too many without a hello."""
        self.enter(connection, State.GREETING)
        greeting = self._by_state[State.GREETING]
        if connection in greeting and not is_shared(connection.address, self._proxies):
            # Anew: a request that it completed before the upgrade does not stand for hello.
            self._unfinished.setdefault(connection.address, {})[connection] = None
        if len(greeting) > self.limits.num_greeting:
            self.end(next(iter(greeting)), "scarce")
        of_address = self._unfinished.get(connection.address, {})
        num_greeting = sum(other.state is State.GREETING for other in of_address)
        return num_greeting <= self.limits.num_greeting_per_address

    def greeted(self, connection: Connection, *, has_key: bool) -> None:
        """Note that a chat socket has said hello."""
        self._finished(connection)
        self.enter(connection, State.SOCKET)
        if has_key:
            self._know(connection)

    def _know(self, connection: Connection) -> None:
        """Note that a connection has shown a key: its address no longer counts, so that people behind one address do not shut each other out."""
        connection.has_key = True
        connection.is_reserved = False
        if connection.is_counted:
            connection.is_counted = False
            self._num_counted[connection.address] -= 1
            if not self._num_counted[connection.address]:
                del self._num_counted[connection.address]

    def _check_reserve(self, connection: Connection, request: web.BaseRequest) -> None:
        if not connection.has_key and not self._keys.is_open and self._shows_key(request):
            self._know(connection)
        if connection.is_reserved and len(self) <= self.limits.num_general:
            connection.is_reserved = False
        if connection.is_reserved and request.path not in OPEN_PATHS:
            connection.close()  # after the answer
            self._closed("limit")
            raise GatewayError(*_TEXTS["limit"][1:])

    def _shows_key(self, request: web.BaseRequest) -> bool:
        """Return whether a request has a good key.

        A key short enough to be guessed does not count: letting it in would tell whether the guess is right, and wrong keys are not counted here
        (`gateway.access.budgets.Gatekeeper` counts them).
        """
        key = extract_key(request.headers)
        if key is None or len(key) < MIN_KEY_CHARS:
            return False
        try:
            self._keys.authenticate(key, may_take_long=False)
        except GatewayError:
            return False
        return True

    # -- the timer ---------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Run until cancelled: close overdue connections, and count."""
        while True:
            try:
                await self.sweep(asyncio.get_running_loop().time())
            except Exception:
                log.exception("the look at the connections failed; the next one comes in a second")
            await asyncio.sleep(SWEEP_EVERY_S)

    async def watch_files(self) -> None:
        """Run until cancelled: count open files. A separate task, because a busy thread pool must not delay `watch`."""
        while True:
            try:
                self._note_files(await asyncio.to_thread(num_open_files))
            except Exception:
                log.exception("open files were not counted; the next look comes in some seconds")
            await asyncio.sleep(COUNT_FILES_EVERY_S)

    async def sweep(self, now_s: float) -> None:
        """Close connections that are overdue at `now_s`, a time of the event loop. Other work of the loop runs after every few of them."""
        for number, _ in enumerate(self._end_overdue(now_s), 1):
            if number % MOST_ENDED_AT_ONCE == 0:
                await asyncio.sleep(0)
        for state, connections in self._by_state.items():
            self._metrics.connections.labels(state).set(len(connections))
        self._note_room()
        if num := self._line.due(time.monotonic()):
            why = ", ".join(f"{reason} {count}" for reason, count in self._ended.items() if count)
            self._ended = dict.fromkeys(self._ended, 0)
            log.info("closed %d connections that arrived too slowly or were too many (%s)", num, why)

    def _end_overdue(self, now_s: float) -> Iterator[None]:
        """End one overdue connection or body at each step. Others may come and go between two steps."""
        waiting = self._by_state[State.HEAD]
        while waiting and now_s - (oldest := next(iter(waiting))).since_s >= self._config.head_timeout_s:
            self.end(oldest, "head_timeout")
            yield
        for connection in list(self._bodies):
            if connection in self._bodies:
                self._look_at_body(connection, now_s)
                yield

    def _look_at_body(self, connection: Connection, now_s: float) -> None:
        request = connection.body
        if request is None or request.content.is_eof():
            self._bodies.pop(connection, None)
            connection.body = None
            return
        if connection.is_held_back:
            connection.heard_at_s = now_s
        heard_at_s = max(connection.heard_at_s, connection.since_s)
        facts = BodyFacts(connection.since_s, heard_at_s, connection.num_bytes)
        reason = body_overdue(facts, now_s, self._config.body_timeout_s)
        if reason is not None:
            self._closed(reason)
            self._bodies.pop(connection, None)
            connection.end_body(reason)

    def _note_files(self, num_files: int) -> None:
        self._metrics.open_files.set(num_files)
        if self._files_mark.crossed(num_files, self._max_files):
            if self._files_mark.is_high:
                log.warning(
                    "%d of %d files are open: raise the limit (ulimit -n)", num_files, self._max_files
                )
            else:
                log.info("open files are no longer scarce: %d of %d", num_files, self._max_files)

    def _note_room(self) -> None:
        if self._room_mark.crossed(len(self), self.limits.num_total):
            if self._room_mark.is_high:
                log.warning(
                    "%d of at most %d connections are open (overture_connections tells what they do)",
                    len(self),
                    self.limits.num_total,
                )
            else:
                log.info("connections are no longer scarce: %d of %d", len(self), self.limits.num_total)


CONNECTIONS = web.AppKey("connections", Connections)


def has_left(request: web.BaseRequest) -> bool:
    """Return whether the connection that a request came on has ended, or is ending without an answer."""
    return request.transport is None or request.transport.is_closing()


def watched(connections: Connections) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the outermost middleware, which notes when a request begins and ends."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Note the beginning and the end of a request around its handler."""
        connection = request.protocol
        if not isinstance(connection, Connection):
            return await handler(request)
        try:
            connections.begin(connection, request)
            return await handler(request)
        finally:
            connections.over(connection)

    return middleware


class Runner(web.AppRunner):
    """aiohttp's runner, with our connections."""

    def __init__(self, app: web.Application, connections: Connections, **options: Any) -> None:
        super().__init__(app, **options)
        self._connections = connections

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._connections)


class _Server(web.Server):
    def __init__(self, made: web.Server, connections: Connections) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
        self._all = connections

    def __call__(self) -> RequestHandler:
        return Connection(self, self._all, loop=self._loop, **self._kwargs)


def opened(request: web.Request) -> bool:
    """Note that this request has become a chat socket; return False if its address has too many without a hello."""
    connection = request.protocol
    return not isinstance(connection, Connection) or connection.registry.opened(connection)


def greeted(request: web.Request, *, has_key: bool) -> None:
    """Note that the chat socket of this request has said hello."""
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.registry.greeted(connection, has_key=has_key)


def _reply(reason: Reason) -> bytes:
    """Return an HTTP answer for a client that has not sent a request."""
    status, code, message = _TEXTS[reason]
    phrase = {408: "Request Timeout", 429: "Too Many Requests", 503: "Service Unavailable"}[status]
    body = orjson.dumps(to_openai_body(GatewayError(code, message)))
    retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if status != 408 else ""
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{retry}"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def _limit_unread(transport: asyncio.BaseTransport) -> None:
    """Let the system end the connection when its client takes no bytes for UNREAD_TIMEOUT_S. Closing a transport waits for that, too."""
    ours = transport.get_extra_info("socket")
    if ours is not None and _USER_TIMEOUT is not None:
        with contextlib.suppress(OSError):  # the socket is closed already
            ours.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(UNREAD_TIMEOUT_S * 1000))


def raise_open_files() -> int:
    """Let the process open as many files as the system allows, and return that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        log.info("the limit of open files stays %d: %s", soft, error)
        return soft
    return hard


def max_open_files() -> int:
    """Return how many files the process may open now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def num_open_files() -> int:
    """Return how many files the process has open; 0 if the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
