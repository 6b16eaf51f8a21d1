"""Frames of the chat socket, good and bad."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gateway.errors import GatewayError
from gateway.turns.protocol import Hello, Message, Ping, Resume, Stop, decode, frame_id

LIMIT = 1000


def test_frames_are_told_apart_by_type() -> None:
    assert decode('{"type":"hello"}', LIMIT) == Hello()
    assert decode('{"type":"hello","resume":[{"id":"a","seq":3}]}', LIMIT) == Hello(resume=[Resume("a", 3)])
    assert decode('{"type":"stop","id":"a"}', LIMIT) == Stop("a")
    assert decode('{"type":"ping","t":[1]}', LIMIT) == Ping([1])


def test_left_out_differs_from_null() -> None:
    left_out = decode('{"type":"message","id":"a","content":"x"}', LIMIT)
    null = decode('{"type":"message","id":"a","content":"x","adapter":null,"after":null}', LIMIT)
    assert isinstance(left_out, Message) and left_out.adapter is UNSET and left_out.after is UNSET
    assert isinstance(null, Message) and null.adapter is None and null.after is None


def test_unknown_fields_are_ignored_so_that_clients_may_be_newer() -> None:
    assert decode('{"type":"stop","id":"a","reason":"bored"}', LIMIT) == Stop("a")


@pytest.mark.parametrize(
    "data",
    [
        "",
        "null",
        "[]",
        "{",
        '{"type":"nope"}',
        '{"id":"a"}',
        '{"type":"message","id":1,"content":"x"}',
        '{"type":"message","id":"","content":"x"}',
        '{"type":"message","id":"a","content":""}',
        '{"type":"message","id":"a","content":"x","sampling":{"temperature":-1}}',
        '{"type":"message","id":"a","content":"x","sampling":{"temperatur":1}}',
        '{"type":"message","id":"a","content":"x","sampling":{"max_tokens":0}}',
        '{"type":"hello","resume":[{"id":"a","seq":-1}]}',
        '{"type":"hello","resume":{}}',
        "[" * 900,
    ],
)
def test_a_bad_frame_is_a_clear_error(data: str) -> None:
    with pytest.raises(GatewayError) as raised:
        decode(data, LIMIT)
    assert raised.value.code == "bad_request" and raised.value.message


def test_size_is_counted_in_bytes() -> None:
    with pytest.raises(GatewayError) as raised:
        decode('{"type":"ping","t":"' + "é" * 500 + '"}', LIMIT)
    assert raised.value.code == "frame_too_large"


def test_the_error_of_a_bad_message_can_name_its_turn() -> None:
    assert frame_id('{"type":"message","id":"a","content":5}') == "a"
    assert frame_id("{") is None and frame_id('{"id":7}') is None


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_no_text_does_anything_but_decode_or_be_refused(data: str) -> None:
    try:
        frame = decode(data, LIMIT)
    except GatewayError:
        return
    assert isinstance(frame, msgspec.Struct)
