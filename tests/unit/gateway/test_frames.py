"""The websocket's frame reader, by the clauses of RFC 6455. No sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.doors.chat.frames import FrameError, FrameReader, Kind, Received

MASK = b"\x11\x92\x03\x84"
LIMIT, HARD = 1000, 4000


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True) -> bytes:
    num_bytes, mask_bit = len(payload), 0x80 if masked else 0
    if num_bytes < 126:
        length = bytes([mask_bit | num_bytes])
    elif num_bytes < 1 << 16:
        length = bytes([mask_bit | 126]) + num_bytes.to_bytes(2, "big")
    else:
        length = bytes([mask_bit | 127]) + num_bytes.to_bytes(8, "big")
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode]) + length
    if not masked:
        return head + payload
    return head + MASK + bytes(byte ^ MASK[place % 4] for place, byte in enumerate(payload))


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


def test_messages_of_every_length_encoding() -> None:
    for num_bytes in (0, 1, 125, 126, 127, 65_535, 65_536):
        payload = bytes(range(256)) * (num_bytes // 256) + bytes(range(num_bytes % 256))
        assert read(frame(2, payload), limit=1 << 20) == [Received(Kind.BINARY, payload)]


def test_text_is_decoded_and_control_frames_come_between_its_fragments() -> None:
    data = (
        frame(1, "Grü".encode(), fin=False)
        + frame(9, b"?")
        + frame(0, b"", fin=False)
        + frame(0, "ße".encode())
    )
    assert read(data) == [Received(Kind.PING, b"?"), Received(Kind.TEXT, "Grüße")]


@given(st.lists(st.integers(1, 40), max_size=60))
def test_it_does_not_matter_how_bytes_are_cut(sizes: list[int]) -> None:
    data = (
        frame(1, b"one")
        + frame(2, b"x" * 300)
        + frame(1, b"tw", fin=False)
        + frame(10)
        + frame(0, b"o")
        + frame(1, b"y" * (LIMIT + 1))
        + frame(8, b"\x03\xe8bye")
    )
    chunks, start = [], 0
    for size in sizes:
        chunks.append(data[start : start + size])
        start += size
    assert (
        read(*chunks, data[start:])
        == read(data)
        == [
            Received(Kind.TEXT, "one"),
            Received(Kind.BINARY, b"x" * 300),
            Received(Kind.PONG, b""),
            Received(Kind.TEXT, "two"),
            Received(Kind.TOO_LARGE, LIMIT),
            Received(Kind.CLOSE, 1000, "bye"),
        ]
    )


@pytest.mark.parametrize("opcode", [1, 2, 9, 8])
def test_a_frame_without_a_mask_is_a_protocol_error(opcode: int) -> None:
    assert code_of(frame(opcode, b"", masked=False)) == 1002
    assert code_of(frame(opcode, b"", masked=False)[:2]) == 1002


@pytest.mark.parametrize(
    "data",
    [
        *(frame(1, b"x", rsv=rsv) for rsv in (1, 2, 4, 7)),
        frame(9, rsv=4),
        *(frame(opcode) for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)),
        frame(9, b"x" * 126),
        frame(8, fin=False),
        frame(9, fin=False),
        frame(0, b"x"),
        frame(1, b"", fin=False) + frame(1, b"x"),
        frame(1, b"x", fin=False) + frame(2, b"x", fin=False),
        frame(1, b"x") + frame(0, b"x", fin=False),
        frame(8, b"\x03"),
        *(frame(8, code.to_bytes(2, "big")) for code in (0, 999, 1004, 1005, 1006, 1015, 2999, 5000, 65_535)),
    ],
)
def test_what_breaks_the_protocol(data: bytes) -> None:
    assert code_of(data) == 1002


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1011, 1014, 3000, 3999, 4000, 4999])
def test_codes_that_a_client_may_close_with(code: int) -> None:
    assert read(frame(8, code.to_bytes(2, "big") + b"why")) == [Received(Kind.CLOSE, code, "why")]
    assert read(frame(8)) == [Received(Kind.CLOSE, 0)]


def test_text_that_is_not_utf8() -> None:
    assert code_of(frame(1, b"\xce\xba\xed\xa0\x80")) == 1007
    assert code_of(frame(8, b"\x03\xe8\xff")) == 1007
    assert code_of(frame(1, b"\xf4", fin=False) + frame(0, b"\x90\x80\x80")) == 1007


def test_a_message_over_the_limit_is_dropped_as_it_comes_and_the_next_one_is_read() -> None:
    reader = FrameReader(LIMIT, HARD)
    large = frame(1, b"x" * (LIMIT + 1))
    reader.feed(large[:8])
    assert reader.next() == Received(Kind.TOO_LARGE, LIMIT), "said at once, by its header"
    for start in range(8, len(large), 100):
        reader.feed(large[start : start + 100])
        assert reader.next() is None and reader.num_buffered_bytes == 0
    reader.feed(frame(1, b"next"))
    assert reader.next() == Received(Kind.TEXT, "next")


def test_fragments_count_together() -> None:
    part = b"x" * 400
    data = (
        frame(1, part, fin=False)
        + frame(0, part, fin=False) * 2
        + frame(9, b"?")
        + frame(0, part)
        + frame(1, b"next")
    )
    assert read(data) == [
        Received(Kind.TOO_LARGE, LIMIT),
        Received(Kind.PING, b"?"),
        Received(Kind.TEXT, "next"),
    ]
    assert code_of(frame(1, part, fin=False) + frame(0, part, fin=False) * 10) == 1009


def test_a_message_over_the_hard_limit_is_an_error_by_its_header_alone() -> None:
    assert code_of(frame(2, b"x" * (HARD + 1))[:8]) == 1009
    assert code_of(b"\x82\xff" + (1 << 63).to_bytes(8, "big") + MASK) == 1009
    assert code_of(frame(2, b"x" * (LIMIT + 1))[:8], hard=LIMIT) == 1009


def test_a_limit_that_is_raised_counts_for_what_has_not_been_read() -> None:
    reader = FrameReader(10, 10)
    reader.feed(frame(1, b"hello") + frame(1, b"x" * 500))
    assert reader.next() == Received(Kind.TEXT, "hello")
    reader.limit_bytes = reader.hard_limit_bytes = 1000
    assert reader.next() == Received(Kind.TEXT, "x" * 500)
