from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine_bridge.cluster import peer_wire, peers
from engine_bridge.cluster.peers import PeerConfig, Peering
from engine_bridge.cluster.trust import Trust
from kvtiers.blocks import Stage
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.stats import PeerStats
from tests.unit.cluster.certificates import certified
from tests.unit.kvtiers.stored import SETTLE_S, Stored, key_of

SHAPE = BlockShape(num_layers=4, layer_bytes=512)
TOKEN = b"of the cluster"
TRUST = Trust(token=TOKEN)
KEYS = [key_of(number) for number in range(40)]


class Node(Stored):
    """The tiers of a node, without an engine."""

    def __init__(self, folder: Path, fingerprint: str = "same", trust: Trust = TRUST, **sizes: Any) -> None:
        super().__init__(folder, **{"shape": SHAPE, "host_blocks": 64, "disk_bytes": 8 << 20} | sizes)
        self.peering = Peering(PeerConfig(trust=trust))
        self.address = self.peering.open()
        self.peering.attach(self.store, fingerprint, self.io)

    def to_disk(self) -> None:
        assert self.store.flush()
        self.store.drop_host()

    def stage(self, keys: Sequence[BlockKey], peer: str = "") -> Stage:
        return self.store.stage("b", keys, peer=peer)

    def fetch(self, keys: Sequence[BlockKey], peer: str = "") -> list[str]:
        """Where the leading blocks that came were; every byte of them is checked, and all is let go of."""
        stage = self.stage(keys, peer)
        assert self.store.wait_for_reads(SETTLE_S)
        num_blocks = self.store.progress(stage).num_ready_blocks
        self.check_content(stage, keys, num_blocks)
        origins = stage.origins[:num_blocks]
        self.store.release(stage)
        self.store.check_invariants()
        return list(origins)

    @property
    def figures(self) -> PeerStats:
        return self.peering.snapshot()

    def num_pins(self) -> int:
        return self.store.check_invariants()

    def close(self) -> None:
        self.peering.close()
        super().close()


MakeNode = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeNode]:
    with ExitStack() as stack:

        def made(name: str, **options: Any) -> Node:
            node = Node(tmp_path / name, **options)
            stack.callback(node.close)
            return node

        yield made


@pytest.fixture
def home(make: MakeNode) -> Node:
    """A node that has the first ten blocks."""
    node = make("home")
    node.save("a", KEYS[:10])
    return node


@pytest.fixture
def other(make: MakeNode) -> Node:
    return make("other")


@pytest.mark.parametrize("where", ["memory", "disk", "both"])
def test_what_a_peer_has_comes_from_its_memory_and_its_disk(home: Node, other: Node, where: str) -> None:
    if where != "memory":
        home.to_disk()
    if where == "both":
        assert home.fetch(KEYS[2:5]) == ["disk"] * 3
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10
    assert (other.figures.num_fetched, other.figures.bytes_fetched) == (10, 10 * SHAPE.block_bytes)
    assert (home.figures.num_lent, home.figures.bytes_lent) == (10, 10 * SHAPE.block_bytes)
    assert other.figures.misses == home.figures.refusals == {}
    assert until(lambda: home.num_pins() == other.num_pins() == 0)
    other.to_disk()
    assert other.fetch(KEYS[:10]) == ["disk"] * 10, "what came lies on our own disk, too"


def test_what_a_peer_lacks_is_a_miss_and_may_be_saved_here(home: Node, other: Node) -> None:
    other.save("a", KEYS[:2])
    stage = other.stage(KEYS[:14], home.address)
    assert other.store.wait_for_reads(SETTLE_S)
    num_used = other.store.pool.num_slots - other.store.pool.num_free
    assert num_used == 10 * SHAPE.num_layers, "blocks that the peer lacks take no memory"
    other.store.release(stage)
    assert other.fetch(KEYS[:14], home.address) == ["host"] * 10
    other.save("a", KEYS[8:14])
    assert other.fetch(KEYS[:14]) == ["host"] * 14


def test_two_stages_ask_once(home: Node, other: Node) -> None:
    first = other.stage(KEYS[:10], home.address)
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10 or first.origins == ["peer"] * 10
    other.store.release(first)
    assert other.figures.num_asked == 1


def test_a_conversation_comes_in_pieces(home: Node, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As conversations do that are longer than what is looked up, read or sent at a time."""
    monkeypatch.setattr("kvtiers.store.LEND_AT_ONCE", 4)
    monkeypatch.setattr("kvtiers.lending.BAND_BYTES", 3 * SHAPE.layer_bytes)
    monkeypatch.setattr("kvtiers.lending.CHUNK_BYTES", 2 * SHAPE.layer_bytes)
    assert other.fetch(KEYS[:14], home.address) == ["peer"] * 10
    home.save("a", KEYS[10:30])
    home.to_disk()
    home.fetch(KEYS[4:11])
    assert other.fetch(KEYS[:30], home.address) == ["host"] * 10 + ["peer"] * 20


def test_a_loan_evicts_nothing(make: MakeNode, other: Node) -> None:
    """Though host memory is full, and what is lent is on disk."""
    node = make("full", host_blocks=8)
    for first in (0, 4):  # as much as may wait for the disk
        node.save("old", KEYS[first : first + 4])
        node.to_disk()
    node.save("new", KEYS[8:16])
    assert other.fetch(KEYS[:20], node.address) == ["peer"] * 16
    assert until(lambda: node.num_pins() == 0)
    assert node.fetch(KEYS[8:16]) == ["host"] * 8


def test_a_block_that_the_disk_cannot_give_ends_a_loan(home: Node, other: Node, tmp_path: Path) -> None:
    home.to_disk()
    (segment,) = (tmp_path / "home").glob("segment-*")
    data = bytearray(segment.read_bytes())
    at = data.index(home.content(KEYS[6], 2))
    data[at] ^= 1
    segment.write_bytes(data)
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 6


def test_what_is_no_address_is_not_asked(other: Node) -> None:
    for address in ("", "nonsense", "host:", ":7", "127.0.0.1:99999", "127.0.0.1:-1"):
        assert other.store.peer_bytes_per_s(address) is None
        assert other.fetch(KEYS[:3], address) == []
    assert other.figures.num_asked == 0


@contextmanager
def asked_by(other: Node) -> Iterator[tuple[Stage, socket.socket]]:
    """A peer by hand that `other` asks for three blocks: the stage, and the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stage = other.stage(KEYS[:3], f"127.0.0.1:{listening.getsockname()[1]}")
        connection, _ = listening.accept()
        with connection:
            yield stage, connection


def test_a_peer_that_is_dead_is_a_miss_and_left_alone_for_a_while(other: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    for _ in range(3):
        assert other.fetch(KEYS[:3], address) == []
    assert (other.figures.num_asked, other.figures.misses) == (1, {"dead": 1})
    assert other.store.peer_bytes_per_s(address) is None


@pytest.mark.parametrize(
    ("reason", "options"),
    [("token", {"trust": Trust(token=b"a guess")}), ("foreign", {"fingerprint": "another model"})],
)
def test_strangers_are_lent_nothing(home: Node, make: MakeNode, reason: str, options: dict[str, Any]) -> None:
    stranger = make("stranger", **options)
    assert stranger.fetch(KEYS[:3], home.address) == []
    assert stranger.figures.misses == {reason: 1} and home.figures.bytes_lent == 0
    assert home.figures.refusals == ({"token": 1} if reason == "token" else {})
    with pytest.raises(ValueError, match="token"):
        Peering(PeerConfig(trust=Trust(token=b"")))


@pytest.mark.parametrize("says", [b"", b"\x05\0\0\0\0\0\0\0abcde", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_who_makes_no_sense_or_trickles_is_given_up(
    home: Node, other: Node, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    monkeypatch.setattr(peers, "STALL_S", 0.05)
    with asked_by(other) as (stage, connection):
        connection.sendall(says)
        assert other.store.wait_for_reads(SETTLE_S)
    other.store.release(stage)
    assert other.figures.misses == ({"malformed": 1} if says else {"late": 1})
    assert other.num_pins() == 0
    other.store.check_invariants()
    monkeypatch.setattr(peers, "ANSWER_S", 0.0)
    monkeypatch.setattr(peers, "MIN_BYTES_PER_S", 1e12)
    assert other.fetch(KEYS[:10], home.address) == []
    assert other.figures.misses["late"] == 1 + (not says)


def test_what_nobody_waits_for_any_more_is_not_read_on_and_may_be_computed_and_saved(other: Node) -> None:
    with asked_by(other) as (stage, connection):
        other.store.release(stage)
        other.save("a", KEYS[:3])
        connection.settimeout(SETTLE_S)
        with suppress(ConnectionError):
            while connection.recv(1 << 10):
                pass
    assert other.store.wait_for_reads(SETTLE_S)
    assert other.num_pins() == 0
    assert other.fetch(KEYS[:3]) == ["host"] * 3


def test_what_peers_lack_is_asked_for_again(home: Node, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(other.peering, "clock", lambda: now[0])
    other.fetch(KEYS[:10], home.address)
    assert other.figures.share_found == 1.0
    assert other.fetch(KEYS[20:30], home.address) == [] and other.figures.misses == {"absent": 1}
    assert 0.8 < other.figures.share_found < 0.9, "ten of twenty, beside what was assumed"
    home.save("a", KEYS[20:30])
    assert other.fetch(KEYS[20:30], home.address) == ["peer"] * 10, "it is asked again at once"
    now[0] += 10 * peers.FOUND_HALF_LIFE_S
    assert other.figures.share_found > 0.999


class Asker:
    """A client by hand, as far as the greeting."""

    def __init__(self, node: Node) -> None:
        host, _, port = node.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=SETTLE_S)
        self.frames = peer_wire.PeerFrames(peer_wire.ToAsker)

    def next(self) -> object:
        while (frame := self.frames.next()) is None:
            num_bytes = self.socket.recv_into(self.frames.space())
            if not num_bytes:
                raise ConnectionError("it has hung up")
            self.frames.received(num_bytes)
        return frame[0]

    def greet(self) -> Asker:
        challenge = self.next()
        assert isinstance(challenge, peer_wire.Challenge)
        proof = peer_wire.proof_of(TOKEN, peer_wire.ASKER, challenge.nonce)
        self.socket.sendall(peer_wire.encode(peer_wire.Hello(proof, b"n")))
        assert isinstance(self.next(), peer_wire.PeerWelcome)
        return self

    def ask(self, keys: Sequence[BlockKey], first_layer: int = 0) -> Asker:
        self.socket.sendall(peer_wire.encode(peer_wire.BlocksWanted("same", first_layer, b"".join(keys))))
        return self

    def is_cut_off(self) -> bool:
        try:
            while True:
                self.next()
        except ConnectionError:
            return True


def test_who_reads_nothing_lets_go_of_what_was_lent(make: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "STALL_S", 0.05)
    node = make("wide", shape=BlockShape(num_layers=4, layer_bytes=4 << 20), host_blocks=3, disk_bytes=0)
    node.store.commit(node.store.begin_save("a", KEYS[:3]))
    asker = Asker(node).greet().ask(KEYS[:3])
    assert until(lambda: node.figures.refusals == {"late": 1})
    assert until(lambda: node.num_pins() == 0)
    assert node.figures.num_lent == 0
    asker.socket.close()


def until(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold."""
    ends_at = time.monotonic() + SETTLE_S
    while not (is_so := holds()) and time.monotonic() < ends_at:
        time.sleep(0.01)
    return is_so


@pytest.mark.parametrize(("key", "first_layer"), [(KEYS[0], 4), (KEYS[0], -1), (b"half a key", 0)])
def test_a_question_that_makes_no_sense_is_cut_off(home: Node, key: BlockKey, first_layer: int) -> None:
    assert Asker(home).greet().ask([key], first_layer).is_cut_off()
    assert home.figures.refusals == {"malformed": 1}


def test_there_are_only_so_many_connections(home: Node, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_CONNECTIONS", 3)
    *crowd, last = (Asker(home).greet() for _ in range(3))
    assert Asker(home).is_cut_off()
    assert other.fetch(KEYS[:3], home.address) == []
    assert other.figures.misses == {"busy": 1}
    for each in crowd:
        each.socket.close()
    assert until(lambda: len(home.peering._lender.connections) == 1)
    assert home.figures.refusals == {"busy": 2}
    _, _, port = home.address.rpartition(":")
    with pytest.raises(OSError, match=f"127.0.0.1:{port}; name another"):
        Peering(PeerConfig(trust=TRUST, port=int(port))).open()
    home.peering.close()
    assert last.is_cut_off()
    home.peering.close()


def test_over_tls_the_same_comes_and_plain_bytes_are_refused(
    other: Node, make: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = replace(certified(tmp_path, "cluster"), token=TOKEN)
    first, second = (make(name, trust=trust) for name in ("first", "second"))
    first.save("a", KEYS[:10])
    assert second.fetch(KEYS[:10], first.address) == ["peer"] * 10
    monkeypatch.setattr(peers, "STALL_S", 0.05)
    assert other.fetch(KEYS[:10], first.address) == []


def test_only_much_tells_of_a_peer_s_speed(home: Node, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtiers.reader.MIN_SAMPLE_S", 1e9)  # on a busy machine a few blocks may take as long
    assumed = other.store.peer_bytes_per_s(home.address)
    other.fetch(KEYS[:5], home.address)
    assert other.store.peer_bytes_per_s(home.address) == assumed
    monkeypatch.setattr("kvtiers.reader.READ_BYTES", 1)
    other.fetch(KEYS[5:10], home.address)
    measured = other.store.peer_bytes_per_s(home.address)
    assert assumed is not None and measured is not None and measured < assumed


class HeldTurns:
    """All of a node's turns are taken until `release`."""

    def __init__(self, node: Node) -> None:
        self._turns, self._io = node.peering._lender.turns, node.io
        self._io.start(self._take()).result()

    async def _take(self) -> None:
        for _ in range(peers.MAX_LENT):
            await self._turns.acquire()

    def release(self) -> None:
        for _ in range(peers.MAX_LENT):
            self._io.loop.call_soon_threadsafe(self._turns.release)


def test_who_waits_for_a_turn_is_told_so(home: Node, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "STALL_S", 0.3)
    held = HeldTurns(home)
    stage = other.stage(KEYS[:10], home.address)
    # By hand as well: it has been told for longer than a silence may last, so the other one has, too.
    asker = Asker(home).greet().ask(KEYS[:10])
    for _ in range(8):
        assert isinstance(asker.next(), peer_wire.Queued)
    assert other.figures.misses == {}
    held.release()
    while isinstance(said := asker.next(), peer_wire.Queued):
        pass
    assert isinstance(said, peer_wire.Offer) and len(said.keys) == len(b"".join(KEYS[:10]))
    assert other.store.wait_for_reads(SETTLE_S)
    assert other.store.progress(stage).num_ready_blocks == 10 and other.figures.misses == {}
    other.store.release(stage)


def test_a_turn_that_never_comes_is_a_miss(home: Node, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "QUEUE_S", 0.1)
    held = HeldTurns(home)
    assert other.fetch(KEYS[:10], home.address) == []
    assert other.figures.misses == {"busy": 1}
    held.release()
    monkeypatch.undo()
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10


def test_who_leaves_while_waiting_takes_no_turn_along(home: Node, other: Node) -> None:
    held = HeldTurns(home)
    asker = Asker(home).greet().ask(KEYS[:1])
    assert isinstance(asker.next(), peer_wire.Queued)
    asker.socket.close()
    held.release()
    lender = home.peering._lender
    assert until(lambda: not lender.connections and lender.turns._value == peers.MAX_LENT)
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10
