"""The chat socket's frames without sockets: how bytes are cut, what is too large, and ours by their types.

The clauses of RFC 6455 are in tests/integration/test_websocket_conformance.py.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gateway.doors.chat.frames import FrameError, FrameReader, Kind, Received
from gateway.errors import GatewayError
from gateway.turns.protocol import Hello, Message, Ping, Resume, Stop, decode

MASK = b"\x11\x92\x03\x84"
LIMIT, HARD = 1000, 4000


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    num_bytes = len(payload)
    length = bytes([0x80 | num_bytes]) if num_bytes < 126 else b"\xfe" + num_bytes.to_bytes(2, "big")
    masked = bytes(byte ^ MASK[place % 4] for place, byte in enumerate(payload))
    return bytes([0x80 * fin | opcode]) + length + MASK + masked


def read(*chunks: bytes, limit: int = LIMIT, hard: int = HARD) -> list[Received]:
    """All messages in these bytes, fragments left out."""
    reader, found = FrameReader(limit, hard), []
    for chunk in chunks:
        reader.feed(chunk)
        while (received := reader.next()) is not None:
            found.append(received)
    return [received for received in found if received.kind is not Kind.PART]


def code_of(*chunks: bytes, **limits: int) -> int:
    with pytest.raises(FrameError) as raised:
        read(*chunks, **limits)
    return raised.value.code


@given(st.lists(st.integers(1, 40), max_size=60))
def test_it_does_not_matter_how_bytes_are_cut(sizes: list[int]) -> None:
    data = frame(1, b"one") + frame(2, b"x" * 300) + frame(1, b"tw", fin=False) + frame(10) + frame(0, b"o")
    data += frame(1, b"y" * (LIMIT + 1)) + frame(8, b"\x03\xe8bye")
    chunks, start = [], 0
    for size in sizes:
        chunks.append(data[start : start + size])
        start += size
    assert read(*chunks, data[start:]) == [
        Received(Kind.TEXT, "one"),
        Received(Kind.BINARY, b"x" * 300),
        Received(Kind.PONG, b""),
        Received(Kind.TEXT, "two"),
        Received(Kind.TOO_LARGE, LIMIT),
        Received(Kind.CLOSE, 1000, "bye"),
    ]


def test_a_message_over_the_limit_is_dropped_as_it_comes_and_over_the_hard_limit_is_an_error() -> None:
    """By the header alone; fragments count together."""
    reader = FrameReader(LIMIT, HARD)
    large = frame(1, b"x" * (LIMIT + 1))
    reader.feed(large[:8])
    assert reader.next() == Received(Kind.TOO_LARGE, LIMIT)
    for start in range(8, len(large), 100):
        reader.feed(large[start : start + 100])
        assert reader.next() is None and reader.num_buffered_bytes == 0
    part = b"x" * 400
    data = frame(1, part, fin=False) + frame(0, part, fin=False) * 2 + frame(9, b"?") + frame(0, part)
    too_large, ping, following = read(data + frame(1, b"next"))
    assert (too_large, ping.kind) == (Received(Kind.TOO_LARGE, LIMIT), Kind.PING)
    assert following == Received(Kind.TEXT, "next")
    assert code_of(frame(1, part, fin=False) + frame(0, part, fin=False) * 10) == 1009
    assert code_of(frame(2, b"x" * (HARD + 1))[:8]) == 1009
    assert code_of(b"\x82\xff" + (1 << 63).to_bytes(8, "big") + MASK) == 1009
    assert code_of(frame(2, b"x" * (LIMIT + 1))[:8], hard=LIMIT) == 1009


def test_frames_are_told_apart_by_type_and_left_out_from_null() -> None:
    assert decode('{"type":"hello"}', LIMIT) == Hello()
    assert decode('{"type":"hello","resume":[{"id":"a","seq":3}]}', LIMIT) == Hello(resume=[Resume("a", 3)])
    assert decode('{"type":"stop","id":"a"}', LIMIT) == Stop("a")
    assert decode('{"type":"ping","t":[1]}', LIMIT) == Ping([1])
    for fields, value in (("", UNSET), (',"adapter":null,"after":null', None)):
        message = decode(f'{{"type":"message","id":"a","content":"x"{fields}}}', LIMIT)
        assert isinstance(message, Message) and message.adapter is value and message.after is value


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_no_text_does_anything_but_decode_or_be_refused(data: str) -> None:
    try:
        frame = decode(data, LIMIT)
    except GatewayError:
        return
    assert isinstance(frame, msgspec.Struct)
