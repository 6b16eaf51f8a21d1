from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.cluster import peer_wire
from engine_bridge.cluster.peer_wire import Cut, Done, Offer, Parts, PeerFault, PeerFrames, WireError
from kvtiers.io.block_read import BlockRead
from kvtiers.keys import BlockKey, BlockShape

SHAPE = BlockShape(num_layers=2, layer_bytes=16)
KEYS = [BlockKey(hashlib.sha256(bytes([number])).digest()) for number in range(4)]
TOKEN, NONCE = b"token", b"nonce"


class Asking:
    """A question, and what it makes of messages."""

    def __init__(self) -> None:
        self.memory = {(block, layer): bytearray(16) for block in range(4) for layer in range(2)}
        self.layers: list[int] = []
        self.bytes: list[int] = []
        self.bad: list[int] = []
        self.frames = PeerFrames(peer_wire.ToAsker)
        hears = (self.layers.append, self.bad.append, self.bytes.append)
        wanted = BlockRead(KEYS, self._part, 0, None, *hears)
        self.question = peer_wire.BorrowerSide(TOKEN, NONCE, "same", SHAPE, wanted)

    def _part(self, block: int, layer: int) -> memoryview:
        return memoryview(self.memory[block, layer])

    def take(self, message: peer_wire.Message, raw: bytes = b"") -> bytes:
        return self.question.take(message, memoryview(raw), self.frames)

    def welcome(self, **other: Any) -> peer_wire.PeerWelcome:
        proof = peer_wire.proof_of(TOKEN, peer_wire.LENDER, NONCE)
        usual = {"proof": proof, "fingerprint": "same", "num_layers": 2, "layer_bytes": 16}
        return peer_wire.PeerWelcome(**usual | other)

    def offered(self, num_blocks: int = 4) -> Asking:
        self.take(peer_wire.Challenge(b"theirs", peer_wire.PEER_PROTOCOL))
        wanted = peer_wire.BlocksWanted("same", 0, b"".join(KEYS))
        assert self.take(self.welcome()) == peer_wire.encode(wanted)
        self.take(Offer(b"".join(KEYS[:num_blocks])))
        return self

    def parts(self, layer: int, first: int, num: int, fault: int | None = None) -> None:
        blocks = [bytes([first + at, layer]) * 8 for at in range(num)]
        sums = peer_wire.sums_of([memoryview(block) for block in blocks])
        raw = bytearray(b"".join(blocks))
        if fault is not None:
            raw[fault * 16] ^= 1
        self.take(Parts(layer, first, sums), bytes(raw))


def test_blocks_come_layer_by_layer_and_then_it_is_over() -> None:
    asking = Asking().offered()
    asking.parts(0, 0, 3)
    assert asking.layers == []
    asking.parts(0, 3, 1)
    assert asking.layers == [0] and not asking.question.is_over and asking.question.num_whole == 0
    asking.parts(1, 0, 4)
    assert asking.question.num_whole == 4, "also for who goes before the other end is done"
    asking.take(Done())
    assert asking.layers == [0, 1] and asking.question.is_over and asking.bad == []
    assert all(bytes(data) == bytes(place) * 8 for place, data in asking.memory.items())
    assert sum(asking.bytes) == asking.question.num_bytes == 4 * SHAPE.block_bytes


def test_blocks_that_are_damaged_not_offered_or_cut_off_are_bad_at_once_and_once_and_others_come() -> None:
    asking = Asking().offered(3)
    assert asking.bad == [3]
    asking.parts(0, 0, 2)
    asking.take(Cut(2))
    assert asking.bad == [3, 2] and asking.layers == [0]
    asking.parts(1, 0, 2)
    asking.take(Done())
    assert asking.layers == [0, 1] and asking.question.num_damaged == 0
    asking = Asking().offered()
    asking.parts(0, 0, 4, fault=3)
    asking.take(Cut(3))
    asking.parts(1, 0, 3, fault=1)
    assert asking.bad == [3, 1] and asking.layers == [0, 1] and asking.question.num_damaged == 2
    assert asking.memory[3, 0] == asking.memory[1, 1] == bytes(16) != asking.memory[1, 0]
    assert Asking().offered(0).question.is_over


CHALLENGE = peer_wire.Challenge(NONCE, peer_wire.PEER_PROTOCOL)
OWN_PROOF = peer_wire.proof_of(TOKEN, peer_wire.ASKER, NONCE)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([peer_wire.Challenge(b"", 99)], "foreign"),
        ([peer_wire.Refused("foreign")], "foreign"),
        ([peer_wire.Refused("whatever")], "busy"),
        ([CHALLENGE, {"proof": b"a guess"}], "token"),
        ([CHALLENGE, {"proof": OWN_PROOF}], "token"),
        ([CHALLENGE, {"fingerprint": "another"}], "foreign"),
        ([CHALLENGE, {"num_layers": 3}], "foreign"),
        ([CHALLENGE, {"layer_bytes": 1 << 40}], "foreign"),
        ([CHALLENGE, {}, Offer(KEYS[1])], ""),
        ([CHALLENGE, {}, Offer(KEYS[0][:-1])], ""),
        ([CHALLENGE, {}, Offer(b"".join((*KEYS, KEYS[0])))], ""),
    ],
)
def test_who_is_not_of_our_cluster_or_kind_is_told_no_key_and_offers_only_what_was_asked_for(
    messages: list[peer_wire.Message | dict[str, Any]], reason: str
) -> None:
    """A dictionary stands for a welcome with other fields; no reason: the wire's error."""
    asking = Asking()
    *first, last = (asking.welcome(**each) if isinstance(each, dict) else each for each in messages)
    for message in first:
        asking.take(message)
    with pytest.raises(PeerFault if reason else WireError) as fault:
        asking.take(last)
    assert getattr(fault.value, "reason", "") == reason


# Parts that are not the next ones, more than there are, and of another size.
WRONG_PARTS = [(0, 1, 8, 16), (1, 0, 8, 16), (0, 0, 40, 80), (0, 0, 8, 15), (0, 0, 7, 16), (0, 0, 0, 0)]
OUT_OF_TURN = [Cut(4), Cut(-1), Done(), Offer(KEYS[0]), peer_wire.Challenge(b"again")]


@pytest.mark.parametrize(
    ("message", "num_raw"),
    [
        *((Parts(layer, first, bytes(sums)), num_raw) for layer, first, sums, num_raw in WRONG_PARTS),
        *((message, 0) for message in OUT_OF_TURN),
    ],
)
def test_what_is_out_of_turn_or_does_not_fit_is_refused(message: peer_wire.Message, num_raw: int) -> None:
    asking = Asking().offered()
    with pytest.raises(WireError):
        asking.take(message, bytes(num_raw))
    assert asking.layers == [] and all(data == bytes(16) for data in asking.memory.values())


def fed(frames: PeerFrames, data: bytes, sizes: list[int]) -> list[tuple[Any, bytes]]:
    found = []
    while data:
        room = frames.space()
        size = min(len(room), len(data), sizes.pop(0) if sizes else len(data))
        room[:size] = data[:size]
        data = data[size:]
        frames.received(size)
        while (frame := frames.next()) is not None:
            found.append((frame[0], bytes(frame[1])))
    return found


@given(st.lists(st.integers(0, 900), max_size=40), st.lists(st.integers(1, 700)))
def test_frames_are_the_same_however_their_bytes_come(raws: list[int], sizes: list[int]) -> None:
    messages = [(Parts(number, 0, b"s"), bytes([number]) * size) for number, size in enumerate(raws)]
    data = b"".join(peer_wire.encode(message, len(raw)) + raw for message, raw in messages)
    frames = PeerFrames(peer_wire.ToAsker)
    frames.allow(1000)
    assert fed(frames, data, sizes) == messages


@given(st.binary(max_size=3000), st.lists(st.integers(1, 700)))
def test_any_bytes_are_frames_or_an_error_and_never_more_memory(data: bytes, sizes: list[int]) -> None:
    frames = PeerFrames(peer_wire.ToLender)
    try:
        fed(frames, data, sizes)
    except WireError:
        pass
    assert len(frames.space().obj) == 2 * peer_wire.MAX_GREETING_BYTES  # type: ignore[arg-type]
    with pytest.raises(WireError):  # too large, before it comes
        fed(PeerFrames(peer_wire.ToLender), (1 << 20).to_bytes(4, "little") + bytes(4), [])


small = st.integers(-1, 5)
PARTS = st.builds(Parts, layer=small, first=small, sums=st.binary(max_size=40))
OFFERS = st.builds(Offer, keys=st.integers(0, 5).map(lambda num: b"".join(KEYS[:num])))
MESSAGES: st.SearchStrategy[tuple[peer_wire.Message, bytes]] = st.one_of(
    st.tuples(PARTS, st.binary(max_size=70)),
    st.tuples(st.builds(Cut, num_blocks=small) | OFFERS | st.just(Done()), st.just(b"")),
)


@given(st.integers(0, 4), st.lists(MESSAGES, max_size=12), st.lists(st.booleans(), max_size=12))
def test_whatever_a_peer_says_nothing_unchecked_is_written_and_each_layer_is_told_once_in_order(
    num_offered: int, said: list[tuple[peer_wire.Message, bytes]], honest: list[bool]
) -> None:
    """Honest parts among nonsense."""
    asking = Asking().offered(num_offered)
    place = [0, 0]
    try:
        for message, raw in said:
            if asking.question.is_over:
                break
            if honest and honest.pop() and place[0] < 2:
                asking.parts(place[0], place[1], 1)
                place = [place[0], place[1] + 1] if place[1] + 1 < num_offered else [place[0] + 1, 0]
            asking.take(message, raw)
    except (WireError, PeerFault):
        pass
    assert asking.layers == list(range(len(asking.layers))) and len(asking.layers) <= 2
    assert len(asking.bad) == len(set(asking.bad))
    for (block, layer), data in asking.memory.items():
        assert bytes(data) in (bytes(16), bytes([block, layer]) * 8)
