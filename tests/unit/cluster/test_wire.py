from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.cluster import wire
from engine_bridge.protocol import errors
from engine_bridge.protocol.engine_request import EngineRequest, RequestId
from engine_bridge.protocol.errors import EngineUnavailable, InternalFailure, InvalidRequest, NotSupported

STREAM = (
    wire.encode(wire.Generate(EngineRequest(request_id=RequestId("a"))), 1)
    + wire.encode(wire.Call("cancel", wire.raw(("a",))), 2)
    + wire.encode(wire.Stop(), 1)
    + wire.encode(wire.Notice("retract", wire.raw(("b", True))))
)


def trusting(direction: Any) -> wire.Frames:
    frames = wire.Frames(direction)
    frames.trust()
    return frames


@given(st.binary(min_size=1, max_size=4), st.integers(8, len(STREAM) - 1))
def test_any_bytes_are_frames_or_an_error_of_the_wire(damage: bytes, place: int) -> None:
    data = STREAM[:place] + damage + STREAM[place + len(damage) :]
    try:
        for frame in trusting(wire.ToNode).feed(data):
            if isinstance(frame.message, wire.Call | wire.Notice):
                wire.arguments_of(frame.message)
    except wire.WireError:
        pass


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_frames_are_whole_wherever_they_were_cut(cuts: list[int]) -> None:
    frames = trusting(wire.ToNode)
    edges = [0, *sorted(cuts), len(STREAM)]
    found = [frame for start, end in pairwise(edges) for frame in frames.feed(STREAM[start:end])]
    another = wire.encode(wire.Call("cancel", wire.raw(("b" * 99,))), 2)
    list(frames.feed(another))  # arguments outlive the buffer that they came in
    assert [frame.number for frame in found] == [1, 2, 1, 0]
    assert wire.arguments_of(found[1].message) == ("a",)
    assert wire.arguments_of(found[3].message) == ("b", True)


def test_only_messages_of_a_gateways_are_taken_and_of_a_stranger_no_more_than_a_greeting() -> None:
    unreadable = wire.encode(wire.Notice("retract", wire.raw(("b", True)))).replace(b"retract", b"retr\xffct")
    no_msgpack = (9).to_bytes(4, "little") + bytes(4) + b"\xc1\xc1\xc1\xc1\xc1"
    of_nodes = wire.encode(wire.Challenge(b""))
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), of_nodes, no_msgpack, unreadable):
        with pytest.raises(wire.WireError):
            list(trusting(wire.ToNode).feed(data))
    with pytest.raises(wire.WireError):
        list(wire.Frames(wire.ToNode).feed(wire.encode(wire.Hello(b"x" * wire.MAX_GREETING_BYTES, b""))[:8]))
    for value in (1 << 64, "\ud800", -(1 << 63) - 1):
        with pytest.raises(InvalidRequest):
            wire.raw(({"temperature": value},))


def test_a_proof_is_of_one_challenge_one_token_and_one_end() -> None:
    proven = (b"token", "gateway", b"nonce")
    proof = wire.proof_of(*proven)
    assert wire.is_proof(proof, *proven)
    for place, other in enumerate((b"other", "node", b"another")):
        assert not wire.is_proof(proof, *proven[:place], other, *proven[place + 1 :])


NO_ARGUMENTS = (b"\xc1", b"\x91\xa2\xff\xfe", b"\x91" * 5000 + b"\x01")


@pytest.mark.parametrize(
    "message",
    [
        *(wire.Call(name, wire.raw(())) for name in ("close", "start", "__class__")),
        wire.Notice("drain", wire.raw((1.0,))),
        wire.Call("cancel", wire.raw((1,))),
        *(wire.Call("load_adapter", msgspec.Raw(arguments)) for arguments in NO_ARGUMENTS),
    ],
)
def test_methods_are_those_of_the_table_with_their_arguments(message: wire.Call | wire.Notice) -> None:
    with pytest.raises(wire.WireError):
        wire.arguments_of(message)


ERRORS = [InvalidRequest("no", param="prompt", code="prompt_too_long"), NotSupported("never")]
ERRORS += [InternalFailure("failure 7")]
ERRORS += [EngineUnavailable("later", code="draining"), errors.TooBusy("later", retry_after_s=1.5)]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_the_same_at_the_other_end_and_bugs_say_nothing(error: errors.BridgeError) -> None:
    sent = msgspec.msgpack.encode(wire.problem_of(error))
    there = wire.error_of(msgspec.msgpack.decode(sent, type=wire.Problem))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
    bug = wire.error_of(wire.problem_of(KeyError("/secret/path")))
    assert isinstance(bug, InternalFailure) and "secret" not in str(bug)


def test_what_is_larger_than_a_frame_is_refused_before_it_is_sent() -> None:
    """The other end would hang up, and with it all answers of the link."""
    with pytest.raises(InvalidRequest, match="too large to be passed on"):
        wire.encode(wire.Call("serve", wire.raw("x" * wire.MAX_FRAME_BYTES)), 1)
