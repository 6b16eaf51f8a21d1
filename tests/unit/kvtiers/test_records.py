"""The record format: what was encoded comes back, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.io.records import (
    SEGMENT_HEADER_BYTES,
    Record,
    RecordHead,
    RecordStream,
    checksum,
    decode_head,
    decode_keys,
    decode_segment_header,
    decode_sums,
    encode_prelude,
    encode_segment_header,
    owner_tag,
)
from kvtiers.keys import BlockKey, BlockShape

SHAPE = BlockShape(3, 10)
KEYS = [BlockKey(bytes([i]) * 32) for i in (1, 2)]
# Layer-major: [layer][block].
PARTS = [memoryview(bytes([10 * layer + block]) * 10) for layer in range(3) for block in range(2)]
SUMS = [checksum(part) for part in PARTS]


def part(block: int, layer: int) -> memoryview:
    return PARTS[layer * len(KEYS) + block]


def record(buffer_bytes: int = 1000, owner: int = 0) -> bytes:
    stream = RecordStream([Record(KEYS, part, owner)], SHAPE)
    buffer = memoryview(bytearray(buffer_bytes))
    data = b""
    while used := stream.fill(buffer):
        data += buffer[:used]
    assert len(data) == stream.num_bytes
    return data


def test_a_record_comes_back_as_it_was_written() -> None:
    data = record()
    head = decode_head(data)
    assert head == RecordHead(2, SHAPE)
    assert len(data) == head.record_bytes
    assert decode_keys(head, data) == KEYS
    assert decode_sums(head, data) == tuple(SUMS)
    for layer in range(3):
        for block in range(2):
            start = head.part_offset(layer, block)
            assert data[start : start + 10] == PARTS[layer * 2 + block]


def test_a_record_says_whose_it_is() -> None:
    owner = owner_tag("k_0123456789abcdef")
    head = decode_head(record(owner=owner))
    assert head == RecordHead(2, SHAPE, owner)
    assert owner_tag("") == 0 < owner < 1 << 32


@given(st.integers(1, 300))
def test_a_record_is_the_same_bytes_whatever_the_buffer(buffer_bytes: int) -> None:
    assert record(buffer_bytes) == record()


def test_every_damaged_byte_of_head_and_keys_is_noticed() -> None:
    data = record()
    head = RecordHead(2, SHAPE)
    for i in range(head.keys_end):
        damaged = bytearray(data)
        damaged[i] ^= 1
        found = decode_head(bytes(damaged))
        assert found is None or decode_keys(found, bytes(damaged)) is None


@given(st.integers(0, RecordHead(2, SHAPE).keys_end - 1))
def test_a_record_cut_off_within_its_keys_is_none(length: int) -> None:
    data = record()[:length]
    head = decode_head(data)
    assert head is None or decode_keys(head, data) is None


@given(st.binary(max_size=100))
def test_noise_is_no_record_and_no_segment(data: bytes) -> None:
    assert decode_head(data) is None
    assert decode_segment_header(data) is None


def test_a_record_of_nothing_is_none() -> None:
    assert decode_head(encode_prelude([], SHAPE, [])) is None


def test_a_segment_header_gives_its_fingerprint_unless_a_byte_is_damaged() -> None:
    header = encode_segment_header("tiny-1234")
    assert len(header) == SEGMENT_HEADER_BYTES
    assert decode_segment_header(header) == "tiny-1234"
    assert len(header.rstrip(b"\0")) == 128
    for i in range(128):
        damaged = bytearray(header)
        damaged[i] ^= 0x80
        assert decode_segment_header(bytes(damaged)) is None


def test_a_fingerprint_too_long_for_the_header_is_refused() -> None:
    encode_segment_header("x" * 108)
    with pytest.raises(ValueError, match="108 bytes"):
        encode_segment_header("x" * 109)
