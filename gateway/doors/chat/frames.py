"""A client's websocket bytes as messages: RFC 6455 §5 without I/O, strict, and with a bound on buffered bytes.

`gateway.doors.chat.websocket` puts it on a connection. aiohttp's own reader takes frames without a mask and has one limit for the socket's whole
life; here the limit may change between two frames, because a socket gets less room before its hello. Decision 24 says why `websockets` does not
serve in its place.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from aiohttp._websocket.helpers import websocket_mask

PROTOCOL_ERROR, INVALID_TEXT, TOO_LARGE = 1002, 1007, 1009  # RFC 6455 §7.4.1
MAX_CONTROL_BYTES = 125  # §5.5
# §7.4 and IANA's registry; 1004 to 1006 and 1015 must not be sent in a frame.
CLOSE_CODES = frozenset({1000, 1001, 1002, 1003, *range(1007, 1015)})


class Kind(IntEnum):
    """The kind of a received message; up to 0xA the opcodes of §5.2."""

    PART = 0x0  # a fragment of a message of which more will come
    TEXT = 0x1
    BINARY = 0x2
    CLOSE = 0x8
    PING = 0x9
    PONG = 0xA
    TOO_LARGE = (
        0x100  # a message over the limit: its bytes are dropped as they come, what follows is read as usual
    )


class Received(NamedTuple):
    """A received message.

    data: str for TEXT; bytes for BINARY, PING and PONG; for CLOSE the code, 0 without one; for TOO_LARGE the limit in bytes.
    """

    kind: Kind
    data: str | bytes | int
    reason: str = ""


class FrameError(Exception):
    """The client broke the protocol or a limit, and the socket must be closed with `code`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Frame(NamedTuple):
    is_final: bool
    opcode: int
    mask: bytes
    num_bytes: int


class FrameReader:
    """Turns bytes into messages: feed it bytes, then call `next` until it returns None.

    Args:
        limit_bytes: the largest message, its fragments together; a larger one is reported as TOO_LARGE when its header is read.
        hard_limit_bytes: a message above this is an error. Both may be changed between two calls.
    """

    def __init__(self, limit_bytes: int, hard_limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hard_limit_bytes = hard_limit_bytes
        self._buffer = bytearray()
        self._frame: _Frame | None = None  # its payload is awaited
        self._parts = bytearray()  # of a fragmented message
        self._opcode = 0  # of that message; 0: none is under way
        self._is_dropping = False  # that message, or the frame that is awaited, is too large
        self._num_message_bytes = 0

    @property
    def num_buffered_bytes(self) -> int:
        """Number of bytes received that are not yet part of a message."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take bytes from the connection."""
        self._buffer += data

    def clear(self) -> None:
        """Drop all buffered bytes; nothing can be read after that."""
        self._buffer = bytearray()
        self._parts = bytearray()

    def next(self) -> Received | None:
        """Return the next message, or None if more bytes are needed. Raises FrameError; nothing can be read after that."""
        while True:
            if self._frame is None:
                self._frame = self._take_header()
                if self._frame is None:
                    return None
                if self._admit(self._frame):
                    return Received(Kind.TOO_LARGE, self.limit_bytes)
            if self._is_dropping and self._frame.opcode <= Kind.BINARY:
                if not self._drop(self._frame):
                    return None
                continue
            payload = self._take_payload(self._frame)
            if payload is None:
                return None
            frame, self._frame = self._frame, None
            return self._control(frame, payload) if frame.opcode >= Kind.CLOSE else self._data(frame, payload)

    def _take_header(self) -> _Frame | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        first, second = buffer[0], buffer[1]
        opcode, length = first & 0x0F, second & 0x7F
        self._check_header(first, second)
        num_length_bytes = {126: 2, 127: 8}.get(length, 0)
        end = 2 + num_length_bytes + 4
        if len(buffer) < end:
            return None
        if num_length_bytes:
            length = int.from_bytes(buffer[2 : 2 + num_length_bytes], "big")
        mask = bytes(buffer[end - 4 : end])
        del buffer[:end]
        return _Frame(bool(first & 0x80), opcode, mask, length)

    def _check_header(self, first: int, second: int) -> None:
        opcode = first & 0x0F
        if first & 0x70:
            # §5.2: no extension was agreed on that would give them a meaning.
            raise FrameError(PROTOCOL_ERROR, "a reserved bit is set")
        if not second & 0x80:
            # §5.1: a server must close the connection upon a frame that is not masked.
            raise FrameError(PROTOCOL_ERROR, "a client's frame must be masked")
        if opcode >= Kind.CLOSE:
            # §5.5
            if opcode > Kind.PONG:
                raise FrameError(PROTOCOL_ERROR, "an unknown opcode")
            if not first & 0x80 or second & 0x7F > MAX_CONTROL_BYTES:
                raise FrameError(PROTOCOL_ERROR, "a control frame must be whole and small")
        elif opcode > Kind.BINARY:
            raise FrameError(PROTOCOL_ERROR, "an unknown opcode")
        elif (opcode == Kind.PART) == (self._opcode == 0):
            # §5.4: fragments of two messages must not be mixed.
            raise FrameError(PROTOCOL_ERROR, "a fragment is out of place")

    def _admit(self, frame: _Frame) -> bool:
        """Count a data frame's bytes towards its message; return True if that makes the message too large."""
        if frame.opcode >= Kind.CLOSE:
            return False
        self._num_message_bytes += frame.num_bytes
        if self._num_message_bytes > max(self.hard_limit_bytes, self.limit_bytes):
            raise FrameError(TOO_LARGE, f"a message may hold {self.limit_bytes} bytes at most")
        if self._is_dropping or self._num_message_bytes <= self.limit_bytes:
            return False
        self._is_dropping = True
        self._parts = bytearray()
        return True

    def _drop(self, frame: _Frame) -> bool:
        """Drop the bytes of a frame's payload that have come; return True once all of it is dropped."""
        dropped = min(frame.num_bytes, len(self._buffer))
        del self._buffer[:dropped]
        if dropped < frame.num_bytes:
            self._frame = frame._replace(num_bytes=frame.num_bytes - dropped)
            return False
        self._frame = None
        self._opcode = 0 if frame.is_final else frame.opcode or self._opcode
        if frame.is_final:
            self._is_dropping = False
            self._num_message_bytes = 0
        return True

    def _take_payload(self, frame: _Frame) -> bytearray | None:
        if len(self._buffer) < frame.num_bytes:
            return None
        payload = self._buffer[: frame.num_bytes]
        del self._buffer[: frame.num_bytes]
        websocket_mask(frame.mask, payload)  # §5.3; in C: 0.02 ms a MB where plain Python takes 4
        return payload

    def _control(self, frame: _Frame, payload: bytearray) -> Received:
        if frame.opcode != Kind.CLOSE:
            return Received(Kind(frame.opcode), bytes(payload))
        if not payload:
            return Received(Kind.CLOSE, 0)
        code = int.from_bytes(payload[:2], "big")
        if len(payload) == 1 or not (code in CLOSE_CODES or 3000 <= code < 5000):
            raise FrameError(PROTOCOL_ERROR, "an invalid close code")
        return Received(Kind.CLOSE, code, _text(payload[2:]))

    def _data(self, frame: _Frame, payload: bytearray) -> Received:
        if not frame.is_final:
            self._parts += payload
            self._opcode = frame.opcode or self._opcode
            return Received(Kind.PART, b"")
        kind = Kind(frame.opcode or self._opcode)
        if self._parts:
            self._parts += payload
            payload, self._parts = self._parts, bytearray()
        self._opcode = 0
        self._num_message_bytes = 0
        return Received(kind, _text(payload) if kind is Kind.TEXT else bytes(payload))


def _text(payload: bytearray) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise FrameError(INVALID_TEXT, "text must be UTF-8") from error
