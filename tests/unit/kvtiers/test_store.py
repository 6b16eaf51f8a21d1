"""The two tiers behind the device: what is saved comes back, byte for byte, from wherever it is, or not at all."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtiers.blocks import Stage
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.files import Files
from kvtiers.io.io_thread import IoThread
from kvtiers.io.records import Part
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import ByValue, EvictionPolicy, GroupFacts, Lru, Victim
from kvtiers.store import KvStore

SHAPE = BlockShape(num_layers=6, layer_bytes=64)
SETTLE_S = 10.0


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


def content(key: BlockKey, layer: int) -> bytes:
    return hashlib.shake_128(key + bytes([layer])).digest(SHAPE.layer_bytes)


class Tiers:
    """A store on a folder, with what tests do to it."""

    def __init__(
        self,
        folder: Path,
        *,
        host_blocks: int = 8,
        disk_bytes: int = 1 << 20,
        eviction: EvictionPolicy | None = None,
        files: Files | None = None,
    ) -> None:
        self.io = IoThread("test-io")
        disk = (
            self.io.start(DiskLog.open(folder, "test", SHAPE, disk_bytes, files=files)).result()
            if disk_bytes
            else None
        )
        self.store = KvStore(SHAPE, host_blocks * SHAPE.block_bytes, self.io, disk, eviction or ByValue())

    def save(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "", spoil: bool = False) -> int:
        """Save what is not held yet; returns how many blocks that were."""
        save = self.store.begin_save(group, keys, tenant=tenant)
        for position, slots in zip(save.positions, save.slots, strict=True):
            for layer, slot in enumerate(slots):
                self.store.pool.slot(slot)[:] = (
                    bytes(SHAPE.layer_bytes) if spoil else content(keys[position], layer)
                )
        (self.store.abandon if spoil else self.store.commit)(save)
        return len(save.blocks)

    def restore(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "") -> tuple[int, int]:
        """(blocks that came, those of them that the disk gave); every byte of them is checked."""
        stage = self.store.stage(group, keys, tenant=tenant)
        num_blocks = self.check(stage, keys)
        num_read = stage.origins[:num_blocks].count("disk")
        self.store.release(stage)
        return num_blocks, num_read

    def check(self, stage: Stage, keys: Sequence[BlockKey]) -> int:
        num_layers = SHAPE.num_layers
        num_blocks = len(stage.blocks)
        for layer in range(num_layers):
            num_blocks = min(num_blocks, self.store.wait_for_layer(stage, num_blocks, layer, SETTLE_S))
        for key, slots in zip(keys, stage.slots[:num_blocks], strict=False):
            for layer, slot in enumerate(slots):
                assert bytes(self.store.pool.slot(slot)) == content(key, layer)
        return num_blocks

    def close(self) -> None:
        self.store.close()
        self.io.close()


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path)
    yield tiers
    tiers.close()


KEYS = [key_of(number) for number in range(64)]


def test_a_saved_block_is_in_host_memory_at_once(tiers: Tiers) -> None:
    assert tiers.save("a", KEYS[:3]) == 3
    assert tiers.restore("a", KEYS[:5]) == (3, 0)
    assert tiers.store.stats().host.num_hits == 3
    assert tiers.store.stats().host.num_misses == 2


def test_a_block_is_saved_once(tiers: Tiers) -> None:
    assert tiers.save("a", KEYS[:3]) == 3
    assert tiers.save("b", KEYS[:4]) == 1


def test_a_prefix_ends_at_the_first_block_that_is_nowhere(tiers: Tiers) -> None:
    tiers.save("a", [KEYS[0], KEYS[2]])
    assert tiers.restore("a", KEYS[:3]) == (1, 0)


def test_what_is_held_is_told_without_touching_it(tiers: Tiers) -> None:
    tiers.save("a", [KEYS[0], KEYS[1], KEYS[3]])
    assert tiers.store.num_held(KEYS[:4]) == 2
    assert tiers.store.num_held(KEYS[3:4]) == 1
    assert tiers.store.num_held(KEYS[4:]) == tiers.store.num_held([]) == 0
    assert tiers.store.bytes_to_read(KEYS[:2]) == 0
    assert tiers.store.flush()
    tiers.store.drop_host()
    assert tiers.store.num_held(KEYS[:4]) == 2
    assert tiers.store.bytes_to_read(KEYS[:2]) == 2 * tiers.store.shape.block_bytes
    assert tiers.store.stats().host.num_hits == 0


def test_what_left_host_memory_comes_from_disk(tiers: Tiers) -> None:
    tiers.save("a", KEYS[:4])
    assert tiers.store.flush()
    tiers.store.drop_host()
    assert tiers.store.stats().host.bytes == 0
    assert tiers.restore("a", KEYS[:4]) == (4, 4)
    assert tiers.restore("a", KEYS[:4]) == (4, 0)


def test_an_abandoned_save_leaves_nothing(tiers: Tiers) -> None:
    tiers.save("a", KEYS[:2], spoil=True)
    tiers.store.check_invariants()
    assert tiers.restore("a", KEYS[:2]) == (0, 0)
    assert tiers.store.stats().host.bytes == 0
    assert tiers.save("a", KEYS[:2]) == 2


def test_more_than_host_memory_holds_goes_through_to_disk(tiers: Tiers) -> None:
    for start in range(0, 32, 4):
        assert tiers.save(f"s{start}", KEYS[start : start + 4]) == 4
        tiers.store.flush()
    stats = tiers.store.stats()
    assert stats.host.bytes <= stats.host.capacity_bytes
    assert stats.disk.num_blocks == 32
    for start in range(0, 32, 4):
        assert tiers.restore(f"s{start}", KEYS[start : start + 4])[0] == 4


def test_blocks_in_use_do_not_leave(tiers: Tiers) -> None:
    tiers.save("a", KEYS[:8])
    tiers.store.flush()
    held = tiers.store.stage("a", KEYS[:8])
    assert tiers.save("b", KEYS[8:10]) == 0, "all of host memory is held"
    assert tiers.store.stats().host.num_dropped_saves == 2
    assert tiers.check(held, KEYS[:8]) == 8
    tiers.store.release(held)
    assert tiers.save("b", KEYS[8:10]) == 2


def test_a_stage_is_cut_to_the_memory_that_there_is(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=8)
    for start in range(0, 12, 4):
        tiers.save("a", KEYS[start : start + 4])
        tiers.store.flush()
    assert tiers.restore("a", KEYS[:12])[0] == 8
    tiers.store.check_invariants()
    tiers.close()


def test_a_stage_that_gives_way_leaves_its_memory_to_requests_and_to_saves(tiers: Tiers) -> None:
    for start in range(0, 16, 4):
        tiers.save("a", KEYS[start : start + 4])
        tiers.store.flush()
    guess = tiers.store.stage("a", KEYS[:6], gives_way=True)
    tiers.check(guess, KEYS[:6])
    tiers.store.wait_for_reads(SETTLE_S)
    other = tiers.store.stage("b", KEYS[6:12], gives_way=True)
    assert not guess.is_revoked, "one guess displaces no other"
    tiers.store.release(other)
    tiers.store.wait_for_reads(SETTLE_S)
    assert tiers.restore("a", KEYS[8:16])[0] == 8
    assert guess.is_revoked
    tiers.store.release(guess)
    tiers.store.wait_for_reads(SETTLE_S)
    again = tiers.store.stage("a", KEYS[:8], gives_way=True)
    assert tiers.check(again, KEYS[:8]) == 8
    tiers.store.wait_for_reads(SETTLE_S)
    assert tiers.save("c", KEYS[20:24]) == 4 and again.is_revoked
    tiers.store.release(again)
    tiers.store.check_invariants()


def test_what_a_device_copies_stays_until_it_has_and_is_then_the_first_that_an_expected_session_loses(
    tmp_path: Path,
) -> None:
    tiers = Tiers(tmp_path, host_blocks=8)
    for start in range(0, 16, 4):
        tiers.save("a", KEYS[start : start + 4])
        tiers.store.flush()
    stages = []
    for group, keys in (("a", KEYS[:4]), ("b", KEYS[4:8])):
        stages.append(tiers.store.stage(group, keys, gives_way=True))
        tiers.check(stages[-1], keys)
        tiers.store.expect(group, time.monotonic())
    has_copied = tiers.store.begin_copy(stages[1].blocks[:2])
    for stage in stages:
        tiers.store.release(stage)
    tiers.store.wait_for_reads(SETTLE_S)
    held = tiers.store.stage("c", KEYS[8:16])
    assert len(held.blocks) == 6, "all but those that are being copied"
    tiers.store.release(held)
    tiers.store.wait_for_reads(SETTLE_S)
    has_copied()
    for group, keys in (("a", KEYS[:4]), ("b", KEYS[4:8])):
        again = tiers.store.stage(group, keys, gives_way=True)
        tiers.check(again, keys)
        tiers.store.expect(group, time.monotonic())
        if group == "b":
            tiers.store.begin_copy(again.blocks[:2])()
        tiers.store.release(again)
    tiers.store.wait_for_reads(SETTLE_S)
    assert tiers.save("c", KEYS[20:22]) == 2
    lacks = [tiers.store.bytes_to_read([key]) > 0 for key in KEYS[:8]]
    assert lacks == [False] * 4 + [True] * 2 + [False] * 2
    tiers.store.check_invariants()
    tiers.close()


def test_what_goes_through_in_pieces_makes_room_for_itself(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=8)
    for start in range(0, 16, 4):
        tiers.save("ab"[start >= 12], KEYS[start : start + 4])
        tiers.store.flush()
    tiers.restore("b", KEYS[12:16])
    for start in range(0, 12, 2):
        tiers.store.wait_for_reads(SETTLE_S)
        piece = tiers.store.stage("a", KEYS[start : start + 2])
        assert tiers.check(piece, KEYS[start : start + 2]) == 2
        tiers.store.begin_copy(piece.blocks)()
        tiers.store.release(piece)
    num_lost = tiers.store.bytes_to_read(KEYS[12:16]) / SHAPE.block_bytes
    assert num_lost <= 2, "others make room for the first piece alone"
    tiers.close()


def test_a_guess_that_is_staged_piece_by_piece_does_not_push_out_what_it_has(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=8)
    for start in range(0, 16, 4):
        tiers.save("ab"[start >= 8], KEYS[start : start + 4])
        tiers.store.flush()
    tiers.restore("b", KEYS[8:12])
    tiers.store.wait_for_reads(SETTLE_S)
    for start in (0, 2, 4):
        piece = tiers.store.stage("a", KEYS[start : start + 2], gives_way=True)
        tiers.check(piece, KEYS[start : start + 2])
        tiers.store.expect("a", time.monotonic())
        tiers.store.release(piece)
    tiers.store.wait_for_reads(SETTLE_S)
    assert tiers.store.bytes_to_read(KEYS[:6]) == 0
    tiers.close()


def test_two_stages_share_one_read(tiers: Tiers) -> None:
    tiers.save("a", KEYS[:4])
    tiers.store.flush()
    tiers.store.drop_host()
    first = tiers.store.stage("a", KEYS[:4])
    second = tiers.store.stage("b", KEYS[:4])
    assert tiers.check(second, KEYS[:4]) == 4
    assert tiers.check(first, KEYS[:4]) == 4
    tiers.store.release(first)
    tiers.store.release(second)
    assert tiers.store.stats().disk.bytes_read == 4 * SHAPE.block_bytes
    assert (first.bytes_read, second.bytes_read) == ({"disk": 4 * SHAPE.block_bytes}, {}), "who began it"


class HeldReads(Files):
    """A disk whose reads wait until they are let through."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.has_begun.set()
        assert self.may_go_on.wait(SETTLE_S)
        return super().preadv(fd, buffers, offset)


def test_a_stage_that_joins_a_reading_just_as_it_is_stopped_gets_all_blocks(tmp_path: Path) -> None:
    files = HeldReads()
    tiers = Tiers(tmp_path, files=files)
    tiers.save("a", KEYS[:4])
    tiers.store.flush()
    tiers.store.drop_host()
    first = tiers.store.stage("a", KEYS[:4])
    assert files.has_begun.wait(SETTLE_S)
    tiers.store.release(first)  # nobody wants it: it is told to stop
    tiers.io.start(asyncio.sleep(0)).result()  # and has heard of it
    second = tiers.store.stage("a", KEYS[:4])
    files.may_go_on.set()
    assert tiers.check(second, KEYS[:4]) == 4
    tiers.store.release(second)
    assert tiers.store.wait_for_reads(SETTLE_S)
    tiers.store.check_invariants()
    tiers.close()


def test_what_the_disk_reads_after_nobody_wants_it_counts_for_who_began_it(tmp_path: Path) -> None:
    files = HeldReads()
    tiers = Tiers(tmp_path, files=files)
    tiers.save("a", KEYS[:4])
    tiers.store.flush()
    tiers.store.drop_host()
    stage = tiers.store.stage("a", KEYS[:4], gives_way=True)
    assert files.has_begun.wait(SETTLE_S)
    tiers.store.release(stage)
    tiers.io.start(asyncio.sleep(0)).result()  # it is told to stop in the middle of a read
    assert stage.num_readings == 1 and not stage.bytes_read
    files.may_go_on.set()
    assert tiers.store.wait_for_reads(SETTLE_S)
    assert stage.num_readings == 0
    assert stage.bytes_read["disk"] == tiers.store.stats().disk.bytes_read > 0
    tiers.close()


def test_last_layers_leave_before_any_session_loses_its_first(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=8, eviction=ByValue())
    for number, group in enumerate(("a", "b")):
        tiers.save(group, KEYS[4 * number : 4 * number + 4])
    tiers.store.flush()
    tiers.save("c", KEYS[8:10])
    assert tiers.store.stats().host.num_trimmed > 0
    assert tiers.store.stats().host.num_evicted == 0
    # The rest comes from disk, and only the rest.
    assert tiers.restore("a", KEYS[:4])[0] == 4
    assert 0 < tiers.store.stats().disk.bytes_read < 4 * SHAPE.block_bytes
    tiers.close()


class KeepsTwoLayers(EvictionPolicy):
    def order(self, groups: Sequence[GroupFacts], num_layers: int, now: float) -> Iterator[Victim]:
        return (Victim(facts.group, 2) for facts in groups)


def test_without_a_disk_a_block_goes_whole_and_may_be_saved_again(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=3, disk_bytes=0, eviction=KeepsTwoLayers())
    tiers.save("a", KEYS[:1])
    tiers.save("b", KEYS[1:3])
    tiers.save("c", KEYS[3:4])  # a's block makes room
    host = tiers.store.stats().host
    assert (host.num_evicted, host.num_trimmed) == (1, 0)
    assert tiers.restore("a", KEYS[:1]) == (0, 0)
    assert tiers.restore("b", KEYS[1:3]) == (2, 0)
    assert tiers.save("a", KEYS[:1]) == 1
    tiers.store.check_invariants()
    assert tiers.restore("a", KEYS[:1]) == (1, 0)
    tiers.close()


@pytest.mark.parametrize("how", ["leave", "leave_all"])
def test_the_kv_of_requests_in_the_engine_outlives_that_of_sessions_that_may_come_back(
    tmp_path: Path, how: str
) -> None:
    tiers = Tiers(tmp_path, host_blocks=8, disk_bytes=0)
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
    tiers.store.check_invariants()
    tiers.close()


def test_who_holds_nothing_is_not_kept_in_mind(tiers: Tiers) -> None:
    assert tiers.restore("a", KEYS[:2]) == (0, 0)
    assert tiers.save("b", []) == 0
    tiers.save("c", KEYS[:1])
    tiers.restore("d", KEYS[:1])
    assert tiers.store.stats().host.num_sessions == 1


def test_a_session_that_is_over_goes_first(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=8, disk_bytes=0)
    tiers.save("over", KEYS[:4])
    tiers.save("old", KEYS[4:8])
    tiers.store.end("over")
    tiers.save("new", KEYS[8:12])
    assert tiers.restore("old", KEYS[4:8]) == (4, 0)
    assert tiers.restore("over", KEYS[:4]) == (0, 0)
    tiers.close()


def test_an_expected_session_stays(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=8, disk_bytes=0)
    tiers.save("expected", KEYS[:4])
    tiers.save("recent", KEYS[4:8])
    tiers.store.expect("expected", at_s=float("inf"))
    tiers.save("new", KEYS[8:12])
    assert tiers.restore("expected", KEYS[:4]) == (4, 0)
    tiers.close()


@pytest.mark.parametrize("what", ["end", "expect"])
def test_a_session_of_the_same_name_is_another_tenants_and_not_touched(tmp_path: Path, what: str) -> None:
    tiers = Tiers(tmp_path, host_blocks=8, disk_bytes=0)
    tiers.save("x", KEYS[:4], tenant="ada")
    tiers.save("x", KEYS[4:8], tenant="bob")
    if what == "end":
        tiers.store.end("x", tenant="ada")
        tiers.save("new", KEYS[8:12], tenant="bob")
    else:
        tiers.store.expect("x", at_s=float("inf"), tenant="bob")
        tiers.save("y", KEYS[8:10], tenant="ada")
    assert tiers.restore("x", KEYS[4:8], tenant="bob") == (4, 0)
    assert tiers.restore("x", KEYS[:4], tenant="ada")[0] < 4
    tiers.close()


def test_a_tenant_alone_has_all_and_gives_what_is_above_its_share(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=12, disk_bytes=0)
    for number in range(12):
        tiers.save(f"s{number}", KEYS[number : number + 1], tenant="ada")
    assert tiers.store.stats().host.num_blocks == 12
    tiers.save("x", KEYS[20:26], tenant="bob")
    assert tiers.restore("x", KEYS[20:26], tenant="bob") == (6, 0)
    for number in range(30, 60):  # a flood, long after bob was here last
        tiers.save(f"s{number}", KEYS[number : number + 1], tenant="ada")
    assert tiers.restore("x", KEYS[20:26], tenant="bob") == (6, 0)
    assert tiers.store.stats().host.num_blocks == 12
    tiers.close()


def test_a_weight_of_three_holds_three_times_as_much(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=12, disk_bytes=0)
    tiers.store.enter("big", tenant="ada", weight=3.0)
    for number in range(20):
        tiers.save("big", KEYS[number : number + 1], tenant="ada")
        tiers.save("small", KEYS[30 + number : 31 + number], tenant="bob")
    tiers.store.leave("big", tenant="ada")
    assert tiers.restore("small", KEYS[30:50], tenant="bob")[0] <= 3
    assert tiers.store.stats().host.num_blocks == 12
    tiers.store.check_invariants()
    tiers.close()


def test_what_nobody_will_ask_for_goes_before_anybodys_share(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=8, disk_bytes=0)
    tiers.save("over", KEYS[:2], tenant="bob")
    tiers.save("busy", KEYS[2:8], tenant="ada")
    tiers.store.end("over", tenant="bob")
    tiers.save("busy", KEYS[8:10], tenant="ada")
    assert tiers.restore("busy", KEYS[2:10], tenant="ada") == (8, 0)
    tiers.close()


def test_without_a_disk_the_host_tier_works_alone(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, disk_bytes=0)
    tiers.save("a", KEYS[:4])
    assert tiers.store.flush()
    assert tiers.restore("a", KEYS[:4]) == (4, 0)
    tiers.store.drop_host()
    assert tiers.restore("a", KEYS[:4]) == (0, 0)
    tiers.close()


def test_a_new_process_finds_what_the_last_one_wrote(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.save("a", KEYS[:4])
    tiers.close()
    again = Tiers(tmp_path)
    assert again.restore("a", KEYS[:4]) == (4, 4)
    again.close()


def test_a_disk_that_cannot_keep_up_leaves_half_of_host_memory_to_reading(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, host_blocks=8)
    tiers.save("a", KEYS[:8])
    assert tiers.store.stats().disk.num_unwritten <= 4
    assert tiers.store.stats().disk.num_skipped_writes == 4
    assert tiers.restore("a", KEYS[:8]) == (8, 0)
    tiers.close()


class BrokenReads(Files):
    """A disk whose reads fail once `is_broken`."""

    is_broken = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_broken:
            raise OSError(errno.EIO, "bad sector")
        return super().preadv(fd, buffers, offset)


def test_a_block_that_cannot_be_read_is_a_miss_and_may_be_saved_again(tmp_path: Path) -> None:
    files = BrokenReads()
    tiers = Tiers(tmp_path, files=files)
    tiers.save("a", KEYS[:4])
    tiers.store.flush()
    tiers.store.drop_host()
    files.is_broken = True
    assert tiers.restore("a", KEYS[:4])[0] == 0
    files.is_broken = False
    assert tiers.store.wait_for_reads(SETTLE_S)
    assert tiers.store.stats().disk.num_read_errors > 0
    assert tiers.store.stats().host.bytes == 0
    assert tiers.save("a", KEYS[:4]) == 4
    tiers.close()


def test_a_damaged_block_shortens_the_prefix(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    tiers.save("a", KEYS[:4])
    tiers.store.flush()
    tiers.store.drop_host()
    (segment,) = tmp_path.glob("segment-*.kv")
    data = bytearray(segment.read_bytes())
    position = data.index(content(KEYS[2], 3))
    data[position] ^= 1
    segment.write_bytes(data)
    assert tiers.restore("a", KEYS[:4])[0] == 2
    assert tiers.store.stats().disk.num_corrupt == 1
    tiers.close()


class GivenUpPeer:
    """A peer that says what it lacks at the moment at which nobody waits for it any more."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    async def read(
        self,
        keys: Sequence[BlockKey],
        part: Part,
        *,
        first_layer: int,
        on_layer: Callable[[int], None],
        on_bad: Callable[[int], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            on_layer(0)
            for index in range(len(keys)):
                on_bad(index)


def test_how_a_stage_stands_is_told_by_the_speeds_of_all_that_it_waits_for(tiers: Tiers) -> None:
    """Half of it read off the disk at the speed of a disk, half by a peer that says nothing."""
    tiers.save("a", KEYS[:2])
    assert tiers.store.flush()
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
    assert tiers.store.wait_for_reads(SETTLE_S)
    tiers.store.check_invariants()


def test_what_was_given_up_is_given_back_once_and_may_be_computed_and_saved_at_once(tiers: Tiers) -> None:
    peer = GivenUpPeer()
    tiers.store.use_peers(lambda address: peer)
    stage = tiers.store.stage("a", KEYS[:3], peer="there")
    assert peer.is_asked.wait(SETTLE_S)
    tiers.store.release(stage)
    assert tiers.save("a", KEYS[:3]) == 3
    assert tiers.store.wait_for_reads(SETTLE_S)
    tiers.store.check_invariants()
    assert tiers.restore("a", KEYS[:3]) == (3, 0)
    pool = tiers.store.pool
    assert pool.num_slots - pool.num_free == 3 * SHAPE.num_layers


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
        return Tiers(
            Path(self.folder.name), disk_bytes=20 * (SHAPE.block_bytes + 200), eviction=self.eviction
        )

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
