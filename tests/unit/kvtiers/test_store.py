"""The two tiers behind the device: what is saved comes back, byte for byte, from wherever it is, or not at all."""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtiers.blocks import Stage
from kvtiers.io import log_reader
from kvtiers.io.block_read import BlockRead
from kvtiers.io.files import Files
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import ByValue, EvictionPolicy, Lru
from tests.unit.kvtiers.stored import SETTLE_S, Stored, key_of

SHAPE = BlockShape(num_layers=6, layer_bytes=64)


class Tiers(Stored):
    """A store on a folder, with what tests do to it."""

    def __init__(self, folder: Path, host_blocks: int = 8, disk_bytes: int = 1 << 20, **options: Any) -> None:
        super().__init__(folder, SHAPE, host_blocks, disk_bytes, **options)

    def restore(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "") -> tuple[int, int]:
        """(blocks that came, those of them that the disk gave); every byte of them is checked."""
        stage = self.store.stage(group, keys, tenant=tenant)
        num_blocks = self.check(stage, keys)
        num_read = stage.origins[:num_blocks].count("disk")
        self.store.release(stage)
        return num_blocks, num_read

    def put_on_disk(self, group: str, keys: Sequence[BlockKey]) -> None:
        """Four at a time, as many as fit host memory with room for others."""
        for start in range(0, len(keys), 4):
            self.save(group, keys[start : start + 4])
            assert self.store.flush()

    def end_reads(self) -> None:
        assert self.store.wait_for_reads(SETTLE_S)

    def check(self, stage: Stage, keys: Sequence[BlockKey]) -> int:
        num_layers = SHAPE.num_layers
        num_blocks = len(stage.blocks)
        for layer in range(num_layers):
            num_blocks = min(num_blocks, self.store.wait_for_layer(stage, num_blocks, layer, SETTLE_S))
        self.check_content(stage, keys, num_blocks)
        return num_blocks


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Tiers]]:
    made: list[Tiers] = []

    def make(**options: Any) -> Tiers:
        made.append(Tiers(tmp_path, **options))
        return made[-1]

    yield make
    for tiers in made:
        tiers.store.check_invariants()
        tiers.close()


@pytest.fixture
def tiers(make: Callable[..., Tiers]) -> Tiers:
    return make()


KEYS = [key_of(number) for number in range(64)]


def test_a_stage_that_gives_way_leaves_its_memory_to_requests_and_to_saves(tiers: Tiers) -> None:
    tiers.put_on_disk("a", KEYS[:16])
    guess = tiers.store.stage("a", KEYS[:6], gives_way=True)
    tiers.check(guess, KEYS[:6])
    tiers.end_reads()
    other = tiers.store.stage("b", KEYS[6:12], gives_way=True)
    assert not guess.is_revoked, "one guess displaces no other"
    tiers.store.release(other)
    tiers.end_reads()
    assert tiers.restore("a", KEYS[8:16])[0] == 8
    assert guess.is_revoked
    tiers.store.release(guess)
    tiers.end_reads()
    again = tiers.store.stage("a", KEYS[:8], gives_way=True)
    assert tiers.check(again, KEYS[:8]) == 8
    tiers.end_reads()
    assert tiers.save("c", KEYS[20:24]) == 4 and again.is_revoked
    tiers.store.release(again)


def test_what_a_device_copies_stays_until_it_has_and_goes_first_then(make: Callable[..., Tiers]) -> None:
    tiers = make(host_blocks=8)
    tiers.put_on_disk("a", KEYS[:16])
    stages = []
    for group, keys in (("a", KEYS[:4]), ("b", KEYS[4:8])):
        stages.append(tiers.store.stage(group, keys, gives_way=True))
        tiers.check(stages[-1], keys)
        tiers.store.expect(group, time.monotonic())
    has_copied = tiers.store.begin_copy(stages[1].blocks[:2])
    for stage in stages:
        tiers.store.release(stage)
    tiers.end_reads()
    held = tiers.store.stage("c", KEYS[8:16])
    assert len(held.blocks) == 6, "all but those that are being copied"
    tiers.store.release(held)
    tiers.end_reads()
    has_copied()
    for group, keys in (("a", KEYS[:4]), ("b", KEYS[4:8])):
        again = tiers.store.stage(group, keys, gives_way=True)
        tiers.check(again, keys)
        tiers.store.expect(group, time.monotonic())
        if group == "b":
            tiers.store.begin_copy(again.blocks[:2])()
        tiers.store.release(again)
    tiers.end_reads()
    tiers.store.use_device(KEYS[4:6].__contains__)
    assert tiers.save("c", KEYS[20:22]) == 2
    lacks = [tiers.store.bytes_to_read([key]) > 0 for key in KEYS[:8]]
    assert lacks == [False] * 4 + [True] * 2 + [False] * 2


def test_what_goes_through_in_pieces_makes_room_for_itself(make: Callable[..., Tiers]) -> None:
    tiers = make(host_blocks=8)
    tiers.put_on_disk("a", KEYS[:12])
    tiers.put_on_disk("b", KEYS[12:16])
    tiers.restore("b", KEYS[12:16])
    tiers.store.use_device(KEYS[:12].__contains__)
    for start in range(0, 12, 2):
        tiers.end_reads()
        piece = tiers.store.stage("a", KEYS[start : start + 2])
        assert tiers.check(piece, KEYS[start : start + 2]) == 2
        tiers.store.begin_copy(piece.blocks)()
        tiers.store.release(piece)
    num_lost = tiers.store.bytes_to_read(KEYS[12:16]) / SHAPE.block_bytes
    assert num_lost <= 2, "others make room for the first piece alone"


class HeldReads(Files):
    """A disk whose reads wait until they are let through."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.has_begun.set()
        assert self.may_go_on.wait(SETTLE_S)
        return super().preadv(fd, buffers, offset)


def test_a_stage_that_joins_a_reading_as_it_is_stopped_gets_all_blocks(make: Callable[..., Tiers]) -> None:
    files = HeldReads()
    tiers = make(files=files)
    tiers.put_on_disk("a", KEYS[:4])
    tiers.store.drop_host()
    first = tiers.store.stage("a", KEYS[:4])
    assert files.has_begun.wait(SETTLE_S)
    tiers.store.release(first)  # nobody wants it: it is told to stop
    tiers.io.start(asyncio.sleep(0)).result()  # and has heard of it
    second = tiers.store.stage("a", KEYS[:4])
    files.may_go_on.set()
    assert tiers.check(second, KEYS[:4]) == 4
    tiers.store.release(second)
    tiers.end_reads()


class NotedReads(HeldReads):
    """Notes where each read begins."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("is_guessed", [False, True])
def test_what_a_request_waits_for_is_read_before_what_may_be_asked_for(
    make: Callable[..., Tiers], monkeypatch: pytest.MonkeyPatch, is_guessed: bool
) -> None:
    """A request comes while much is read for others that may come. is_guessed: that was begun for it, too, last of all."""
    monkeypatch.setattr(log_reader, "MAX_READ_BYTES", SHAPE.layer_bytes)  # a read is one part of a block
    files = NotedReads()
    tiers = make(host_blocks=40, files=files)
    tiers.put_on_disk("guessed", KEYS[:8])
    tiers.put_on_disk("asked", KEYS[8:12])  # lies behind them
    tiers.store.drop_host()
    guesses = [tiers.store.stage("guessed", KEYS[:8], gives_way=True)]
    if is_guessed:
        guesses.append(tiers.store.stage("asked", KEYS[8:12], gives_way=True))
    assert files.has_begun.wait(SETTLE_S) and not tiers.store.is_reading_for_requests
    asked = tiers.store.stage("asked", KEYS[8:12])
    assert tiers.store.is_reading_for_requests and tiers.store.progress(asked).disk_bytes_ahead == 0
    files.may_go_on.set()
    assert tiers.check(guesses[0], KEYS[:8]) == 8 and tiers.check(asked, KEYS[8:12]) == 4
    first_asked = max(files.offsets) - 4 * SHAPE.num_layers * SHAPE.layer_bytes
    last_of_asked = max(at for at, offset in enumerate(files.offsets) if offset > first_asked)
    num_before = sum(offset < first_asked for offset in files.offsets[:last_of_asked])
    assert (
        num_before <= 2 * log_reader.READS_IN_FLIGHT < sum(offset < first_asked for offset in files.offsets)
    )
    for stage in (asked, *guesses):
        tiers.store.release(stage)
    tiers.end_reads()
    assert not tiers.store.is_reading_for_requests


def test_what_is_half_read_is_lent_as_the_disk_has_it(make: Callable[..., Tiers]) -> None:
    files = HeldReads()
    tiers = make(files=files)
    tiers.put_on_disk("a", KEYS[:4])
    tiers.put_on_disk("b", KEYS[4:12])  # so that other KV lies in memory
    tiers.store.drop_host()
    stage = tiers.store.stage("a", KEYS[:4])
    assert files.has_begun.wait(SETTLE_S)
    loan = tiers.store.lend(KEYS[:4])

    async def read() -> bytes:
        return b"".join([bytes(view) async for chunk in loan.chunks(0) for view in chunk.views])

    reading = tiers.io.start(read())
    for _ in range(20):  # by then what lies in memory has been sent
        tiers.io.start(asyncio.sleep(0)).result()
    files.may_go_on.set()
    layers = range(SHAPE.num_layers)
    assert reading.result() == b"".join(tiers.content(key, layer) for layer in layers for key in KEYS[:4])
    loan.release()
    tiers.store.release(stage)
    tiers.end_reads()


@pytest.mark.parametrize("how", ["leave", "leave_all"])
def test_the_kv_of_requests_outlives_that_of_other_sessions(make: Callable[..., Tiers], how: str) -> None:
    tiers = make(host_blocks=8, disk_bytes=0)
    tiers.store.enter("runs")  # before it holds anything, and twice
    tiers.store.enter("runs")
    tiers.save("runs", KEYS[:4])
    for _ in range(5):
        tiers.restore("runs", KEYS[:4])
        tiers.save("chat", KEYS[4:8])
        tiers.restore("chat", KEYS[4:8])
    tiers.store.leave("runs")
    tiers.save("new", KEYS[8:10])
    assert tiers.restore("runs", KEYS[:4]) == (4, 0)
    assert tiers.restore("chat", KEYS[4:8])[0] < 4
    tiers.store.leave("runs") if how == "leave" else tiers.store.leave_all()
    tiers.store.enter("new")
    tiers.store.enter("newer")
    tiers.save("newer", KEYS[10:14])
    tiers.save("new", KEYS[14:16])
    assert tiers.restore("runs", KEYS[:4])[0] < 4


def test_a_kept_session_outlives_others_of_its_tenant_until_it_ends(
    make: Callable[..., Tiers],
) -> None:
    tiers = make(host_blocks=8, disk_bytes=0)
    tiers.store.keep("kept", 60.0)  # before it holds anything
    tiers.save("kept", KEYS[:3])
    for number in range(4):
        tiers.save("kept more", KEYS[8 * number + 8 : 8 * number + 12])
    assert tiers.restore("kept", KEYS[:3]) == (3, 0)
    tiers.store.end("kept")
    tiers.save("new", KEYS[48:52])
    assert tiers.restore("kept", KEYS[:3])[0] < 3


def test_kept_sessions_have_half_of_host_memory_and_take_none_of_another_tenants_share(
    make: Callable[..., Tiers],
) -> None:
    tiers = make(host_blocks=8, disk_bytes=0)
    for number in range(2):
        tiers.store.keep(f"kept-{number}", 60.0, tenant="greedy")
        tiers.save(f"kept-{number}", KEYS[4 * number : 4 * number + 4], tenant="greedy")
    tiers.save("s", KEYS[16:20], tenant="modest")
    assert tiers.restore("s", KEYS[16:20], tenant="modest") == (4, 0)
    assert tiers.restore("kept-1", KEYS[4:8], tenant="greedy") == (4, 0), "the one kept last"
    assert tiers.restore("kept-0", KEYS[:4], tenant="greedy")[0] == 0


def test_what_others_share_stays_with_the_session_that_is_kept_for_it(make: Callable[..., Tiers]) -> None:
    tiers = make(host_blocks=8, disk_bytes=0)
    tiers.save("shared", KEYS[:3])
    tiers.store.keep("shared", 60.0, is_shared=True)
    assert tiers.restore("other", KEYS[:3]) == (3, 0)
    tiers.store.end("other")
    for number in range(4):
        tiers.save("more", KEYS[8 * number + 8 : 8 * number + 12])
    assert tiers.restore("another", KEYS[:3]) == (3, 0)


def test_what_a_tenant_has_is_erased_from_memory_and_disk_and_nothing_else(
    make: Callable[..., Tiers], tmp_path: Path
) -> None:
    def leaves(key: BlockKey) -> bool:
        """Whether a layer of this block's content is in memory or in a file."""
        disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        everywhere = bytes(tiers.store.pool.memory) + disk
        return any(tiers.content(key, layer) in everywhere for layer in range(SHAPE.num_layers))

    tiers = Tiers(tmp_path, host_blocks=12)
    tiers.save("s", KEYS[:3], tenant="gone")
    tiers.save("s", KEYS[3:6], tenant="stays")
    assert tiers.store.flush()
    stage = tiers.store.stage("s", KEYS[:1], tenant="gone")  # in use meanwhile
    late = tiers.store.begin_save("s", KEYS[6:7], tenant="gone")
    tiers.save("s", KEYS[7:8], tenant="gone")  # waits for the disk
    assert leaves(KEYS[0]) and leaves(KEYS[7])
    assert tiers.store.erase("gone") >= 3
    tiers.store.commit(late)
    tiers.store.release(stage)
    assert tiers.store.flush()
    assert not any(leaves(key) for key in KEYS[:3] + KEYS[6:8])
    assert tiers.store.num_held(KEYS[:1]) == 0
    assert tiers.restore("s", KEYS[3:6], tenant="stays") == (3, 0)
    tiers.store.check_invariants()
    tiers.store.drop_host()
    assert tiers.restore("s", KEYS[3:6], tenant="stays") == (3, 3), "records behind erased ones are found"
    tiers.save("s", KEYS[:1], tenant="gone")
    assert tiers.store.flush() and leaves(KEYS[0]), "whoever comes back is stored as anybody"
    assert tiers.store.erase("gone") == 1 and tiers.store.erase("gone") == 0
    tiers.close()
    tiers = make(host_blocks=12)
    assert tiers.restore("s", KEYS[3:6], tenant="stays") == (3, 3)
    assert tiers.restore("s", KEYS[:1], tenant="gone")[0] == 0


def test_the_kv_of_a_request_that_waits_outlives_that_of_one_that_runs(make: Callable[..., Tiers]) -> None:
    tiers = make(host_blocks=8, disk_bytes=0)
    for name, first in (("runs", 0), ("waits", 4)):
        tiers.store.enter(name)
        tiers.store.runs(name, is_running=True)
        tiers.save(name, KEYS[first : first + 4])
    tiers.store.runs("waits", is_running=False)  # it was preempted
    tiers.save("new", KEYS[8:12])
    assert tiers.restore("waits", KEYS[4:8]) == (4, 0)
    assert tiers.restore("runs", KEYS[:4])[0] < 4


def test_a_weight_of_three_holds_three_times_as_much(make: Callable[..., Tiers]) -> None:
    tiers = make(host_blocks=12, disk_bytes=0)
    tiers.store.enter("big", tenant="ada", weight=3.0)
    for number in range(20):
        tiers.save("big", KEYS[number : number + 1], tenant="ada")
        tiers.save("small", KEYS[30 + number : 31 + number], tenant="bob")
    tiers.store.leave("big", tenant="ada")
    assert tiers.restore("small", KEYS[30:50], tenant="bob")[0] <= 3
    assert tiers.store.stats().host.num_blocks == 12


class GivenUpPeer:
    """A peer that says what it lacks at the moment at which nobody waits for it any more."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    async def read(self, wanted: BlockRead) -> None:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            wanted.on_layer(0)
            for index in range(len(wanted.keys)):
                wanted.on_bad(index)


def test_how_a_stage_stands_is_told_by_the_speeds_of_all_that_it_waits_for(tiers: Tiers) -> None:
    """Half of it read off the disk at the speed of a disk, half by a peer that says nothing."""
    tiers.put_on_disk("a", KEYS[:2])
    tiers.store.drop_host()
    tiers.store.use_peers(lambda address: GivenUpPeer())
    tiers.store.assume_disk_rate(1e3)
    stage = tiers.store.stage("a", KEYS[:4], peer="there")
    while tiers.store.wait_for_layer(stage, 2, SHAPE.num_layers - 1, SETTLE_S) < 2:
        pass
    progress = tiers.store.progress(stage)
    assert (progress.num_blocks, progress.num_ready_blocks, progress.num_ready_layers) == (4, 2, 0)
    assert (progress.disk_bytes_left, progress.disk_bytes_done) == (2 * SHAPE.block_bytes, 0)
    assert progress.disk_bytes_per_s == tiers.store.peer_bytes_per_s("there")
    assert progress.is_from_peer and stage.origins == ["disk"] * 2 + ["peer"] * 2
    tiers.store.release(stage)
    tiers.end_reads()


class StoreMachine(RuleBasedStateMachine):
    """Random saves, restores, losses and restarts. `Tiers.check` compares every byte; what was never saved must not come."""

    numbers = st.integers(0, 40)
    lengths = st.integers(1, 9)
    groups = st.sampled_from(["a", "b", "c", "d"])
    tenants = st.sampled_from(["", "ada", "bob"])

    @initialize(eviction=st.sampled_from([ByValue(), Lru()]))
    def open(self, eviction: EvictionPolicy) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.eviction = eviction
        self.saved: set[BlockKey] = set()
        self.held: list[tuple[Stage, list[BlockKey]]] = []
        self.tiers = self._open()

    def _open(self) -> Tiers:
        # Room for about 20 blocks on disk and 8 in memory, so that both overflow.
        disk_bytes = 20 * (SHAPE.block_bytes + 200)
        return Tiers(Path(self.folder.name), disk_bytes=disk_bytes, eviction=self.eviction)

    @rule(group=groups, start=numbers, length=lengths, tenant=tenants)
    def save(self, group: str, start: int, length: int, tenant: str) -> None:
        keys = KEYS[start : start + length]
        self.tiers.save(group, keys, tenant=tenant)
        self.saved.update(keys)

    @rule(group=groups, start=numbers, length=lengths, tenant=tenants)
    def abandon(self, group: str, start: int, length: int, tenant: str) -> None:
        self.tiers.save(group, KEYS[start : start + length], tenant=tenant, spoil=True)

    @rule(group=groups, start=numbers, length=lengths, tenant=tenants)
    def restore(self, group: str, start: int, length: int, tenant: str) -> None:
        keys = KEYS[start : start + length]
        num_blocks, _ = self.tiers.restore(group, keys, tenant=tenant)
        assert self.saved.issuperset(keys[:num_blocks])

    @rule(group=groups, start=numbers, length=lengths, tenant=tenants)
    def hold(self, group: str, start: int, length: int, tenant: str) -> None:
        keys = KEYS[start : start + length]
        self.held.append((self.tiers.store.stage(group, keys, tenant=tenant), keys))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        stage, keys = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if data.draw(st.booleans()):  # else while it is still being read
            num_blocks = self.tiers.check(stage, keys)
            assert self.saved.issuperset(keys[:num_blocks])
        self.tiers.store.release(stage)

    @rule()
    def flush(self) -> None:
        assert self.tiers.store.flush()

    @rule()
    def lose_host_memory(self) -> None:
        self.tiers.store.drop_host()

    @rule(group=groups, tenant=tenants)
    def end_session(self, group: str, tenant: str) -> None:
        self.tiers.store.end(group, tenant=tenant)

    @rule(group=groups, tenant=tenants, keep_s=st.sampled_from([0.0, 1e-6, 60.0]), is_shared=st.booleans())
    def keep_session(self, group: str, tenant: str, keep_s: float, is_shared: bool) -> None:
        self.tiers.store.keep(group, keep_s, tenant=tenant, is_shared=is_shared)

    @rule(tenant=tenants)
    def erase(self, tenant: str) -> None:
        self.tiers.store.erase(tenant)

    @precondition(lambda self: not self.held)
    @rule()
    def restart(self) -> None:
        self.tiers.close()
        self.tiers = self._open()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.store.check_invariants()
            stats = self.tiers.store.stats()
            assert stats.host.bytes <= stats.host.capacity_bytes
            assert stats.disk.bytes <= stats.disk.capacity_bytes

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            for stage, keys in self.held:
                self.tiers.check(stage, keys)
                self.tiers.store.release(stage)
            self.tiers.close()
            self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
