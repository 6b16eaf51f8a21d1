"""The chat's websocket: aiohttp's, with our own reader (`gateway.doors.chat.frames`) in place of its.

aiohttp parses frames as they arrive and queues the messages. Here bytes wait unparsed until the application asks for a message, so the limits in
force are the present ones, and one socket buffers little: the frame that is being read, or BUFFER_BYTES.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import WebSocketError, WSCloseCode, WSMessage, WSMsgType, web
from aiohttp.http import WebSocketWriter
from aiohttp.streams import EofStream

from gateway.doors.chat.frames import FrameError, FrameReader, Kind, Received

# Chosen: with this much unread no more is taken from the socket. uvloop reads up to 256 kB at once, which can come on top.
BUFFER_BYTES = 64 << 10
# Chosen: about half a millisecond of small frames, after which other sockets have their turn.
NUM_MESSAGES_AT_ONCE = 16
# For how long the socket is not read after that. Chosen: a person never meets it. Without it 200,000 fragments of a byte would keep the
# interpreter from the engine for 0.8 s, because its step asks for the lock between any two operations.
REST_S = 0.001


class StrictWebSocket(web.WebSocketResponse):
    """A websocket whose frames are read strictly by RFC 6455, within limits that may change while it is open.

    limit_bytes, hard_limit_bytes: see `FrameReader`. A message over the first becomes `WSMsgType.ERROR` with a `MessageTooLarge` and the socket
    stays open; over the second it is closed with 1009. Other arguments are aiohttp's.
    """

    def __init__(self, *, limit_bytes: int, hard_limit_bytes: int, **options: Any) -> None:
        super().__init__(compress=False, **options)
        self._frames = FrameReader(limit_bytes, hard_limit_bytes)

    def set_limits(self, limit_bytes: int, hard_limit_bytes: int) -> None:
        """Change the limits of all messages that have not been read yet."""
        self._frames.limit_bytes = limit_bytes
        self._frames.hard_limit_bytes = hard_limit_bytes

    def _post_start(self, request: web.BaseRequest, protocol: str | None, writer: WebSocketWriter) -> None:
        connection = request.protocol
        # Taken away first: aiohttp would give what came right behind the request to its own reader.
        tail, connection._message_tail = connection._message_tail, b""
        super()._post_start(request, protocol, writer)
        inbox = _Inbox(connection, self._frames)
        parser: Any = _Parser(inbox)
        self._reader = inbox  # type: ignore[assignment]
        self._parser = connection._payload_parser = parser
        inbox.received(tail)


class MessageTooLarge(Exception):
    """A message over the limit was dropped."""


class _Parser:
    """The parser that aiohttp's connection gives bytes to."""

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Pass bytes on. Returns that the parser is not finished and leaves no bytes."""
        self._inbox.received(data)
        return False, b""

    def feed_eof(self) -> None:
        """Note that the client has closed the connection."""
        self._inbox.set_exception(EofStream())


class _Inbox:
    """The queue that aiohttp's websocket reads messages from. Only one task reads at a time."""

    def __init__(self, connection: Any, frames: FrameReader) -> None:
        self._connection = connection
        self._frames = frames
        self._put_back: list[WSMessage] = []
        self._waiter: asyncio.Future[None] | None = None
        self._end: BaseException | None = None
        self._has_failed = False
        self._may_be_sending = False
        self._is_paused = False
        self._num_read = 0

    def received(self, data: bytes) -> None:
        """Take bytes, and pause the connection if too many are unread."""
        if self._has_failed:
            return
        self._frames.feed(data)
        if self._frames.num_buffered_bytes >= BUFFER_BYTES:
            # Pause even while `read` waits for more: uvloop would read up to 8 MB before `read` has its turn.
            self._pause()
        self._wake()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._connection.pause_reading()

    def feed_data(self, message: WSMessage, size: int) -> None:
        """Take a message of aiohttp's own, which wakes the reader when another task closes the socket."""
        self._put_back.append(message)
        self._wake()

    def set_exception(self, error: BaseException, cause: BaseException | None = None) -> None:
        """Note that the connection has ended."""
        if self._end is None:
            self._end = error
        self._wake()

    def exception(self) -> BaseException | None:
        """Return the error that ended the connection; None while it is open."""
        return self._end

    async def read(self) -> WSMessage:
        """Return the next message. Raises WebSocketError for a client that breaks a rule, or the error that ended the connection."""
        while True:
            self._num_read += 1
            if self._num_read % NUM_MESSAGES_AT_ONCE == 0:
                await asyncio.sleep(REST_S)
            if self._put_back:
                return self._put_back.pop()
            received = self._next()
            if received is None:
                await self._wait()
            elif received.kind is not Kind.PART:
                return _as_message(received)

    def _next(self) -> Received | None:
        if self._has_failed:
            return None
        try:
            return self._frames.next()
        except FrameError as error:
            self._has_failed = True
            self._may_be_sending = error.code == WSCloseCode.MESSAGE_TOO_BIG
            self._frames.clear()
            self._pause()
            raise WebSocketError(error.code, str(error)) from error

    async def _wait(self) -> None:
        if self._end is not None:
            raise self._end
        if self._has_failed:
            self._hang_up()
        elif self._is_paused:
            self._is_paused = False
            self._connection.resume_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _hang_up(self) -> None:
        """Shut down our side after the close frame, and read nothing more, because a client may send for ever.

        aiohttp closes the connection after its timeout. Closing at once, with bytes unread, might reset the connection before the client has
        read the reason. A client that is still sending gets no end of stream before that, because some take it for a broken connection.
        """
        transport = self._connection.transport
        if transport is not None and not transport.is_closing() and not self._may_be_sending:
            transport.write_eof()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_TYPES = {
    Kind.TEXT: WSMsgType.TEXT,
    Kind.BINARY: WSMsgType.BINARY,
    Kind.PING: WSMsgType.PING,
    Kind.PONG: WSMsgType.PONG,
    Kind.CLOSE: WSMsgType.CLOSE,
}


def _as_message(received: Received) -> WSMessage:
    if received.kind is Kind.TOO_LARGE:
        return WSMessage(
            WSMsgType.ERROR, MessageTooLarge(f"A frame may hold {received.data!r} bytes at most."), None
        )
    return WSMessage(_TYPES[received.kind], received.data, received.reason)
