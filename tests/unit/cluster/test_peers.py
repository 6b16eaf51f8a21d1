"""KV from node to node over real sockets: what comes is what was computed, or nothing; and nobody is hurt by who asks, or by who answers."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine_bridge.cluster import peer_wire, peers
from engine_bridge.cluster.peers import PeerConfig, Peering
from kvtiers.blocks import Stage
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.lending import Loan
from kvtiers.policy.eviction import ByValue
from kvtiers.stats import PeerStats
from kvtiers.store import KvStore

SHAPE = BlockShape(num_layers=4, layer_bytes=512)
SETTLE_S = 10.0
TOKEN = "of the cluster"


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


KEYS = [key_of(number) for number in range(40)]


def content(key: BlockKey, layer: int) -> bytes:
    return hashlib.shake_128(key + bytes([layer])).digest(SHAPE.layer_bytes)


class Node:
    """The tiers of a node, without an engine."""

    def __init__(
        self,
        folder: Path,
        *,
        token: str = TOKEN,
        fingerprint: str = "same",
        host_blocks: int = 64,
        shape: BlockShape = SHAPE,
        has_disk: bool = True,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self.io = IoThread("test-io")
        disk = self.io.start(DiskLog.open(folder, "test", shape, 8 << 20)).result() if has_disk else None
        self.store = KvStore(shape, host_blocks * shape.block_bytes, self.io, disk, ByValue())
        self.peering = Peering(PeerConfig(token=token, certificate=certificate, key=key))
        self.address = self.peering.open()
        self.peering.attach(self.store, fingerprint, self.io)

    def save(self, keys: Sequence[BlockKey], *, group: str = "a") -> None:
        save = self.store.begin_save(group, keys)
        for position, slots in zip(save.positions, save.slots, strict=True):
            for layer, slot in enumerate(slots):
                self.store.pool.slot(slot)[:] = content(keys[position], layer)
        self.store.commit(save)

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
        for key, slots in zip(keys, stage.slots[:num_blocks], strict=False):
            assert [bytes(self.store.pool.slot(slot)) for slot in slots] == [
                content(key, layer) for layer in range(SHAPE.num_layers)
            ]
        origins = stage.origins[:num_blocks]
        self.store.release(stage)
        self.store.check_invariants()
        return list(origins)

    @property
    def figures(self) -> PeerStats:
        return self.peering.snapshot()

    def num_pins(self) -> int:
        return sum(block.pins for block in self.store._host.blocks.values())

    def close(self) -> None:
        self.peering.close()
        self.store.close()
        self.io.close()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def home(tmp_path: Path, opened: ExitStack) -> Node:
    """A node that has the first ten blocks."""
    node = Node(tmp_path / "home")
    opened.callback(node.close)
    node.save(KEYS[:10])
    return node


@pytest.fixture
def other(tmp_path: Path, opened: ExitStack) -> Node:
    node = Node(tmp_path / "other")
    opened.callback(node.close)
    return node


# -- what comes --------------------------------------------------------------------------------------------------------


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
    assert home.num_pins() == other.num_pins() == 0


def test_what_a_peer_lacks_is_a_miss_and_may_be_saved_here(home: Node, other: Node) -> None:
    other.save(KEYS[:2])
    assert other.fetch(KEYS[:14], home.address) == ["host"] * 2 + ["peer"] * 8
    other.save(KEYS[8:14])
    assert other.fetch(KEYS[:14]) == ["host"] * 14


def test_what_a_peer_lacks_takes_no_memory_while_the_rest_is_waited_for(home: Node, other: Node) -> None:
    stage = other.stage(KEYS[:14], home.address)
    assert other.store.wait_for_reads(SETTLE_S)
    pool = other.store.pool
    assert pool.num_slots - pool.num_free == 10 * SHAPE.num_layers
    other.store.release(stage)
    other.store.check_invariants()


def test_a_long_conversation_is_looked_up_in_pieces(
    home: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.store.LEND_AT_ONCE", 4)
    assert other.fetch(KEYS[:14], home.address) == ["peer"] * 10
    home.save(KEYS[10:16])
    assert other.fetch(KEYS[:16], home.address) == ["host"] * 10 + ["peer"] * 6


def test_what_came_lies_on_our_own_disk_too(home: Node, other: Node) -> None:
    other.fetch(KEYS[:10], home.address)
    other.to_disk()
    assert other.fetch(KEYS[:10]) == ["disk"] * 10


def test_only_the_layers_that_are_lacking_are_asked_for(home: Node, other: Node) -> None:
    """Blocks whose last layers were dropped, and whose file has gone."""
    other.save(KEYS[:10])
    assert other.store.flush()
    for block in other.store._host.blocks.values():
        other.store._host.trim(block, 3)
    disk = other.store._disk
    assert disk is not None
    disk.forget(KEYS[:10])
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10
    assert other.figures.bytes_fetched == 10 * SHAPE.layer_bytes


def test_two_stages_ask_once(home: Node, other: Node) -> None:
    first = other.stage(KEYS[:10], home.address)
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10 or first.origins == ["peer"] * 10
    other.store.release(first)
    assert other.figures.num_asked == 1


def test_a_chat_goes_on_layer_by_layer_in_pieces_of_any_size(
    home: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As conversations have that are longer than what is read or sent at a time."""
    monkeypatch.setattr("kvtiers.lending.BAND_BYTES", 3 * SHAPE.layer_bytes)
    monkeypatch.setattr("kvtiers.lending.CHUNK_BYTES", 2 * SHAPE.layer_bytes)
    home.save(KEYS[:30])
    home.to_disk()
    home.fetch(KEYS[4:11])
    assert other.fetch(KEYS[:30], home.address) == ["peer"] * 30


# -- lending -----------------------------------------------------------------------------------------------------------


def lent(node: Node, loan: Loan) -> dict[tuple[int, int], bytes]:
    """All of a loan, by block and layer."""

    async def read() -> dict[tuple[int, int], bytes]:
        parts = {}
        async for chunk in loan.chunks(0):
            for at, view in enumerate(peer_wire.split(chunk.views, SHAPE.layer_bytes)):
                parts[chunk.first + at, chunk.layer] = bytes(view)
        return parts

    return node.io.start(read()).result()


def test_a_loan_neither_touches_nor_evicts(tmp_path: Path, opened: ExitStack) -> None:
    """Though host memory is full, and what is lent is on disk."""
    node = Node(tmp_path, host_blocks=8)
    opened.callback(node.close)
    for first in (0, 4):  # as much as may wait for the disk
        node.save(KEYS[first : first + 4], group="old")
        node.to_disk()
    node.save(KEYS[8:16], group="new")
    before = {name: group.last_used_s for name, group in node.store._host.groups.items()}
    loan = node.store.lend(KEYS[:20])
    assert loan.num_blocks == 16
    parts = lent(node, loan)
    assert parts == {(b, layer): content(KEYS[b], layer) for b in range(16) for layer in range(4)}
    loan.release()
    assert {name: group.last_used_s for name, group in node.store._host.groups.items()} == before
    assert set(node.store._host.blocks) == set(KEYS[8:16]) and node.num_pins() == 0
    node.store.check_invariants()


def test_a_block_that_the_disk_cannot_give_ends_a_loan_before_it(
    home: Node, other: Node, tmp_path: Path
) -> None:
    home.to_disk()
    (segment,) = (tmp_path / "home").glob("segment-*")
    data = bytearray(segment.read_bytes())
    at = data.index(content(KEYS[6], 2))
    data[at] ^= 1
    segment.write_bytes(data)
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 6


# -- who gives nothing -------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("address", ["", "nonsense", "host:", ":7", "127.0.0.1:99999", "127.0.0.1:-1"])
def test_what_is_no_address_is_not_asked(other: Node, address: str) -> None:
    assert other.store.peer_bytes_per_s(address) is None
    assert other.fetch(KEYS[:3], address) == []
    assert other.figures.num_asked == 0


def test_a_peer_that_is_dead_is_a_miss_and_left_alone_for_a_while(other: Node) -> None:
    address = f"127.0.0.1:{free_port()}"
    for _ in range(3):
        assert other.fetch(KEYS[:3], address) == []
    assert (other.figures.num_asked, other.figures.misses) == (1, {"dead": 1})
    assert other.store.peer_bytes_per_s(address) is None


def test_without_the_token_nothing_is_lent(home: Node, tmp_path: Path, opened: ExitStack) -> None:
    stranger = Node(tmp_path / "stranger", token="a guess")
    opened.callback(stranger.close)
    assert stranger.fetch(KEYS[:3], home.address) == []
    assert stranger.figures.misses == {"token": 1}
    assert home.figures.refusals == {"token": 1} and home.figures.bytes_lent == 0
    with pytest.raises(ValueError, match="token"):
        Peering(PeerConfig(token=""))


def test_another_kind_of_node_is_foreign(home: Node, tmp_path: Path, opened: ExitStack) -> None:
    stranger = Node(tmp_path / "stranger", fingerprint="another model")
    opened.callback(stranger.close)
    assert stranger.fetch(KEYS[:3], home.address) == []
    assert stranger.figures.misses == {"foreign": 1}


def test_a_peer_that_has_none_of_it_says_so(home: Node, other: Node) -> None:
    assert other.fetch(KEYS[20:30], home.address) == []
    assert other.figures.misses == {"absent": 1}
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10, "and is asked again at once"


def test_what_peers_lack_is_reckoned_with_and_forgotten_in_time(
    home: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(other.peering, "clock", lambda: now[0])
    assert other.peering.snapshot().share_found == 1.0
    other.fetch(KEYS[:10], home.address)
    assert other.peering.snapshot().share_found == 1.0
    other.fetch(KEYS[20:30], home.address)
    lacking = other.peering.snapshot().share_found
    assert 0.8 < lacking < 0.9, "ten of twenty, beside what was assumed"
    now[0] += 10 * peers.FOUND_HALF_LIFE_S
    assert other.peering.snapshot().share_found > 0.999


@pytest.mark.parametrize("says", [b"", b"\x05\0\0\0\0\0\0\0abcde", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_who_says_nothing_or_nonsense_is_given_up(
    other: Node, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    monkeypatch.setattr(peers, "STALL_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stage = other.stage(KEYS[:3], f"127.0.0.1:{listening.getsockname()[1]}")
        connection, _ = listening.accept()
        with connection:
            connection.sendall(says)
            assert other.store.wait_for_reads(SETTLE_S)
        other.store.release(stage)
    assert set(other.figures.misses) == {"malformed" if says else "late"}
    assert other.num_pins() == 0
    other.store.check_invariants()


def test_what_is_computed_after_all_is_saved_though_its_fetch_has_not_ended(other: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stage = other.stage(KEYS[:3], f"127.0.0.1:{listening.getsockname()[1]}")
        connection, _ = listening.accept()
        with connection:
            other.store.release(stage)
            other.save(KEYS[:3])
        assert other.store.wait_for_reads(SETTLE_S)
    assert other.fetch(KEYS[:3]) == ["host"] * 3


def test_a_peer_that_trickles_is_given_up(home: Node, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_S", 0.0)
    monkeypatch.setattr(peers, "MIN_BYTES_PER_S", 1e12)
    assert other.fetch(KEYS[:10], home.address) == []
    assert other.figures.misses == {"late": 1}


def test_an_address_that_is_taken_is_told_with_what_to_do(home: Node) -> None:
    _, _, port = home.address.rpartition(":")
    with pytest.raises(OSError, match=f"127.0.0.1:{port}; name another"):
        Peering(PeerConfig(token=TOKEN, port=int(port))).open()


def test_what_nobody_waits_for_any_more_is_not_read_on(other: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stage = other.stage(KEYS[:3], f"127.0.0.1:{listening.getsockname()[1]}")
        connection, _ = listening.accept()
        with connection:
            other.store.release(stage)
            connection.settimeout(SETTLE_S)
            with pytest.raises(ConnectionError):
                while connection.recv(1 << 10):
                    pass
                raise ConnectionError("it has hung up")
    assert other.store.wait_for_reads(SETTLE_S)
    assert other.num_pins() == 0
    other.store.check_invariants()


# -- who asks ----------------------------------------------------------------------------------------------------------


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
        proof = peer_wire.proof_of(TOKEN.encode(), peer_wire.ASKER, challenge.nonce)
        self.socket.sendall(peer_wire.encode(peer_wire.Hello(proof, b"n")))
        assert isinstance(self.next(), peer_wire.PeerWelcome)
        return self

    def is_cut_off(self) -> bool:
        try:
            while True:
                self.next()
        except ConnectionError:
            return True


def test_who_reads_nothing_lets_go_of_what_was_lent(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "STALL_S", 0.05)
    node = Node(tmp_path, shape=BlockShape(num_layers=4, layer_bytes=4 << 20), host_blocks=3, has_disk=False)
    opened.callback(node.close)
    node.store.commit(node.store.begin_save("a", KEYS[:3]))
    asker = Asker(node).greet()
    asker.socket.sendall(peer_wire.encode(peer_wire.BlocksWanted("same", 0, b"".join(KEYS[:3]))))
    assert until(lambda: node.figures.refusals == {"late": 1})
    assert until(lambda: node.num_pins() == 0)
    assert node.figures.num_lent == 0


def until(holds: object) -> bool:
    """Whether it comes to hold."""

    async def watch() -> bool:
        async with asyncio.timeout(SETTLE_S):
            while not holds():  # type: ignore[operator]
                await asyncio.sleep(0.01)
        return True

    return asyncio.run(watch())


@pytest.mark.parametrize(
    "ask",
    [
        peer_wire.BlocksWanted("same", 4, KEYS[0]),
        peer_wire.BlocksWanted("same", -1, KEYS[0]),
        peer_wire.BlocksWanted("same", 0, b"half a key"),
    ],
)
def test_a_question_that_makes_no_sense_is_cut_off(home: Node, ask: peer_wire.BlocksWanted) -> None:
    asker = Asker(home).greet()
    asker.socket.sendall(peer_wire.encode(ask))
    assert asker.is_cut_off()
    assert home.figures.refusals == {"malformed": 1}


def test_any_bytes_at_all_hurt_nobody(home: Node, other: Node) -> None:
    """Before and after the greeting; whole frames with nonsense in them, too."""
    rng = random.Random(7)
    for number in range(60):
        with Asker(home).socket if number % 2 else Asker(home).greet().socket as stranger:
            noise = rng.randbytes(rng.randrange(1, 300))
            if number % 3:
                noise = struct.pack("<II", len(noise), rng.randrange(3)) + noise
            stranger.sendall(noise)
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10
    assert until(lambda: not home.peering._lender.connections)  # type: ignore[union-attr]
    assert home.num_pins() == 0


def test_there_are_only_so_many_connections(home: Node, other: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_CONNECTIONS", 3)
    crowd = [Asker(home).greet() for _ in range(3)]
    assert Asker(home).is_cut_off()
    assert other.fetch(KEYS[:3], home.address) == []
    assert other.figures.misses == {"busy": 1}
    for each in crowd:
        each.socket.close()
    assert until(lambda: not home.peering._lender.connections)  # type: ignore[union-attr]
    assert home.figures.refusals == {"busy": 2}


def test_a_node_that_closes_cuts_off_who_is_there(home: Node) -> None:
    asker = Asker(home).greet()
    home.peering.close()
    assert asker.is_cut_off()
    home.peering.close()


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    subprocess.run(
        (
            "openssl",
            "req",
            "-x509",
            *curve,
            "-nodes",
            "-subj",
            "/CN=overture",
            "-keyout",
            key,
            "-out",
            certificate,
        ),
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_over_tls_the_same_comes_and_plain_bytes_are_refused(
    certificate: tuple[Path, Path],
    other: Node,
    tmp_path: Path,
    opened: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (
        Node(tmp_path / name, certificate=certificate[0], key=certificate[1]) for name in ("first", "second")
    )
    opened.callback(first.close)
    opened.callback(second.close)
    first.save(KEYS[:10])
    assert second.fetch(KEYS[:10], first.address) == ["peer"] * 10
    monkeypatch.setattr(peers, "STALL_S", 0.05)
    assert other.fetch(KEYS[:10], first.address) == []


# -- how fast it is ----------------------------------------------------------------------------------------------------


def test_little_tells_nothing_of_a_peer_s_speed_and_much_does(
    home: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assumed = other.store.peer_bytes_per_s(home.address)
    other.fetch(KEYS[:5], home.address)
    assert other.store.peer_bytes_per_s(home.address) == assumed
    monkeypatch.setattr("kvtiers.reader.READ_BYTES", 1)
    other.fetch(KEYS[5:10], home.address)
    measured = other.store.peer_bytes_per_s(home.address)
    assert assumed is not None and measured is not None and measured < assumed


# -- turns -------------------------------------------------------------------------------------------------------------


class HeldTurns:
    """All of a node's turns are taken until `release`."""

    def __init__(self, node: Node) -> None:
        assert node.peering._lender is not None
        self._turns, self._io = node.peering._lender.turns, node.io
        self._io.start(self._take()).result()

    async def _take(self) -> None:
        for _ in range(peers.MAX_LENT):
            await self._turns.acquire()

    def release(self) -> None:
        for _ in range(peers.MAX_LENT):
            self._io.loop.call_soon_threadsafe(self._turns.release)


def test_who_waits_for_a_turn_is_told_so_again_and_again(home: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "STALL_S", 0.04)
    held = HeldTurns(home)
    asker = Asker(home).greet()
    asker.socket.sendall(peer_wire.encode(peer_wire.BlocksWanted("same", 0, b"".join(KEYS[:10]))))
    for _ in range(12):
        assert isinstance(asker.next(), peer_wire.Queued)
    held.release()
    while isinstance(said := asker.next(), peer_wire.Queued):
        pass
    assert isinstance(said, peer_wire.Offer) and len(said.keys) == len(b"".join(KEYS[:10]))


def test_a_peer_at_which_a_question_queues_is_not_taken_for_dead(
    home: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "STALL_S", 0.4)
    held = HeldTurns(home)
    stage = other.stage(KEYS[:10], home.address)
    # By hand as well: it has been told for longer than a silence may last, so the other one has, too.
    asker = Asker(home).greet()
    asker.socket.sendall(peer_wire.encode(peer_wire.BlocksWanted("same", 0, KEYS[0])))
    for _ in range(10):
        assert isinstance(asker.next(), peer_wire.Queued)
    assert other.figures.misses == {}
    held.release()
    assert other.store.wait_for_reads(SETTLE_S)
    assert other.store.progress(stage).num_ready_blocks == 10 and other.figures.misses == {}
    other.store.release(stage)


def test_a_turn_that_does_not_come_is_a_miss_and_the_peer_is_asked_again(
    home: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "QUEUE_S", 0.1)
    held = HeldTurns(home)
    assert other.fetch(KEYS[:10], home.address) == []
    assert other.figures.misses == {"busy": 1}
    held.release()
    monkeypatch.undo()
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10


def test_who_leaves_while_waiting_takes_no_turn_along(home: Node, other: Node) -> None:
    held = HeldTurns(home)
    asker = Asker(home).greet()
    asker.socket.sendall(peer_wire.encode(peer_wire.BlocksWanted("same", 0, KEYS[0])))
    assert isinstance(asker.next(), peer_wire.Queued)
    asker.socket.close()
    held.release()
    assert home.peering._lender is not None
    lender = home.peering._lender
    assert until(lambda: not lender.connections and lender.turns._value == peers.MAX_LENT)
    assert other.fetch(KEYS[:10], home.address) == ["peer"] * 10
