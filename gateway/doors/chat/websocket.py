"""The chat's websocket: aiohttp's, with our own reader (`gateway.doors.chat.frames`) in the place of its.

aiohttp parses frames as they arrive and queues the messages. Here bytes wait unparsed until the application asks for a message, so the limits
in force are those of the moment, and what one socket can make us hold is small: the frame that is being read, or BUFFER_BYTES.
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
# Chosen: about half a millisecond of small frames, after which others have their turn.
NUM_MESSAGES_AT_ONCE = 16
# Then so long nothing more of the socket is read. Chosen: a person never meets it; 200,000 fragments of a byte would else keep the interpreter from
# the engine for 0.8 s, as its step asks for the lock between any two operations.
REST_S = 0.001


class StrictWebSocket(web.WebSocketResponse):
    """A websocket whose frames are read by RFC 6455 to the letter, within limits that may change while it is open.

    limit_bytes, hard_limit_bytes: see `FrameReader`. A message over the first comes as `WSMsgType.ERROR` with a `MessageTooLarge` and the
    socket goes on; over the second it is closed with 1009. Other arguments are aiohttp's.
    """

    def __init__(self, *, limit_bytes: int, hard_limit_bytes: int, **options: Any) -> None:
        super().__init__(compress=False, **options)
        self._frames = FrameReader(limit_bytes, hard_limit_bytes)

    def set_limits(self, limit_bytes: int, hard_limit_bytes: int) -> None:
        """For all that has not been read yet."""
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
    """What aiohttp's connection hands bytes to."""

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._inbox.received(data)
        return False, b""

    def feed_eof(self) -> None:
        self._inbox.set_exception(EofStream())


class _Inbox:
    """What aiohttp's websocket reads messages from, in the place of its queue. One reader at a time."""

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
        if self._has_failed:
            return
        self._frames.feed(data)
        if self._frames.num_buffered_bytes >= BUFFER_BYTES:
            # Even when somebody waits for more: uvloop goes on reading, up to 8 MB, before it gives him the turn.
            self._pause()
        self._wake()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._connection.pause_reading()

    def feed_data(self, message: WSMessage, size: int) -> None:
        """A message of aiohttp's own: it wakes the reader when the socket is closed by somebody else."""
        self._put_back.append(message)
        self._wake()

    def set_exception(self, error: BaseException, cause: BaseException | None = None) -> None:
        """The connection has ended."""
        if self._end is None:
            self._end = error
        self._wake()

    def exception(self) -> BaseException | None:
        return self._end

    async def read(self) -> WSMessage:
        """The next message. Raises WebSocketError for a client that breaks a rule, and what ended the connection."""
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
        """The close frame is the last we send, and nothing more is read: a client may send for ever. aiohttp closes when its timeout is over;
        at once, with bytes unread, the client might get a reset in the place of the reason. One that is still sending gets no end of
        stream before that, which some take for a broken connection."""
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
