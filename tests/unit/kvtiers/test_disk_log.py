"""The disk tier on real files: what it promises, and what each fault of a disk costs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from kvtiers.errors import StoreBusy, StoreUnusable
from kvtiers.io.disk_log import RETRY_AFTER_S, DiskLog
from kvtiers.io.disk_room import GROW_AFTER_S
from kvtiers.io.files import AppendFile, Files, FileSystemRoom
from kvtiers.io.inspect import inspect, prune
from kvtiers.io.log_evictor import CLAIM_S
from kvtiers.io.log_reader import ReadResult
from kvtiers.io.records import SEGMENT_HEADER_BYTES, Record, RecordHead, owner_tag
from kvtiers.keys import BlockKey, BlockShape

SHAPE = BlockShape(num_layers=3, layer_bytes=1300)  # one block is a record of one page
ROOMY = 1 << 20
ROOT = Path(__file__).parents[3]


def key(name: object) -> BlockKey:
    return BlockKey(hashlib.sha256(str(name).encode()).digest())


def content(block_key: BlockKey, layer: int) -> memoryview:
    """What a block holds follows from its key, so that a reader knows what must come back."""
    return memoryview(hashlib.shake_128(block_key + bytes([layer])).digest(SHAPE.layer_bytes))


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6  # Never the same twice, as with a real one.
        return self.now_s


def record(*names: object) -> Record:
    keys = [key(name) for name in names]
    return Record(keys, lambda block, layer: content(keys[block], layer))


async def append(log: DiskLog, *names: object) -> bool:
    return await log.append(*record(*names))


class Reader:
    """One read: its result, and the calls back in their order."""

    def __init__(self, *names: object) -> None:
        self.keys = [key(name) for name in names]
        self.buffer = memoryview(bytearray(len(names) * SHAPE.block_bytes))
        self.layers: list[int] = []
        self.bad: list[int] = []

    def part(self, block: int, layer: int) -> memoryview:
        start = block * SHAPE.block_bytes + layer * SHAPE.layer_bytes
        return self.buffer[start : start + SHAPE.layer_bytes]

    def on_layer(self, layer: int) -> None:
        for block in range(len(self.keys)):
            if block not in self.bad:
                assert self.part(block, layer) == content(self.keys[block], layer)
        self.layers.append(layer)

    async def run(self, log: DiskLog, max_bytes_in_flight: int = 1 << 20) -> ReadResult:
        result = await log.read(
            self.keys,
            self.part,
            on_layer=self.on_layer,
            on_bad=self.bad.append,
            max_bytes_in_flight=max_bytes_in_flight,
        )
        assert self.layers == list(range(SHAPE.num_layers))
        assert sorted(self.bad) == list(result.bad)
        for block, block_key in enumerate(self.keys):
            if block not in result.bad:
                whole = b"".join(content(block_key, layer) for layer in range(SHAPE.num_layers))
                assert self.buffer[block * SHAPE.block_bytes :][: SHAPE.block_bytes] == whole
        return result


async def bad_of(log: DiskLog, *names: object, max_bytes_in_flight: int = 1 << 20) -> list[object]:
    """Read and check; returns the names of the blocks that did not come."""
    result = await Reader(*names).run(log, max_bytes_in_flight)
    return [names[i] for i in result.bad]


class Opener:
    """Opens stores in one folder, and closes them at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()
        self.dropped: list[BlockKey] = []
        self._opened: list[DiskLog] = []

    async def __call__(
        self,
        *,
        files: Files | None = None,
        capacity_bytes: int = ROOMY,
        segment_bytes: int | None = None,
        fingerprint: str = "tiny",
        shape: BlockShape = SHAPE,
    ) -> DiskLog:
        log = await DiskLog.open(
            self.directory,
            fingerprint,
            shape,
            capacity_bytes,
            segment_bytes=segment_bytes,
            describe=b'{"model":"tiny"}',
            files=files,
            on_dropped=self.dropped.extend,
            now=self.clock,
        )
        self._opened.append(log)
        return log

    async def close(self) -> None:
        for log in self._opened:
            await log.close()

    def segments(self) -> list[Path]:
        return sorted(self.directory.glob("segment-*.kv"))


@pytest_asyncio.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opener]:
    opener = Opener(tmp_path / "store")
    yield opener
    await opener.close()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


# What it keeps.


async def test_what_was_written_is_read_back(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a", "b", "c")
    assert await append(log, "d")
    assert await bad_of(log, "d", "b", "a", "c") == []
    assert log.stats.num_blocks == 4


@pytest.mark.parametrize("max_bytes_in_flight", [1, 4 * 64, 4 * 150, 4 * 400])
async def test_reads_of_any_portion_give_the_same(opened: Opener, max_bytes_in_flight: int) -> None:
    log = await opened()
    assert await append(log, *range(7))
    assert await append(log, *range(7, 9))
    assert await bad_of(log, 8, *range(1, 6), "none", max_bytes_in_flight=max_bytes_in_flight) == ["none"]


async def test_a_read_of_nothing_and_one_of_only_missing_blocks_end(opened: Opener) -> None:
    log = await opened()
    assert await bad_of(log) == []
    assert await bad_of(log, "x", "y") == ["x", "y"]


async def test_what_is_on_disk_can_be_asked(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a", "b")
    assert key("a") in log
    assert key("c") not in log
    assert log.count_prefix([key("a"), key("b"), key("c")]) == 2
    assert log.count_prefix([key("c"), key("a")]) == 0
    assert log.count_prefix([]) == 0


async def test_blocks_already_there_are_not_written_again(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a", "b")
    before = log.stats.bytes
    assert await append(log, "b", "a", "a")
    assert log.stats.bytes == before
    assert await append(log, "a", "c", "c")
    assert log.stats.bytes == before + RecordHead(1, SHAPE).record_bytes


async def test_forgotten_blocks_are_gone_until_written_again(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a", "b")
    log.forget([key("a"), key("never")])
    assert await bad_of(log, "a", "b") == ["a"]
    assert await append(log, "a")
    assert await bad_of(log, "a", "b") == []


async def test_a_store_opened_again_has_everything_and_starts_a_new_segment(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a", "b")
    await log.close()
    log = await opened()
    assert await bad_of(log, "a", "b") == []
    assert await append(log, "c")
    assert len(opened.segments()) == 2
    await log.close()
    assert await bad_of(await opened(), "a", "b", "c") == []


async def test_a_record_of_more_keys_than_one_header_read_is_found_again(opened: Opener) -> None:
    log = await opened()
    assert await append(log, *range(200))
    await log.close()
    assert await bad_of(await opened(), *range(200)) == []


async def test_files_are_for_their_owner_only_and_say_what_they_hold(opened: Opener) -> None:
    opened.directory = opened.directory / "kv" / "model"
    await append(await opened(), "a")
    for folder in (opened.directory, opened.directory.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in opened.directory.iterdir()}
    assert modes == {"lock": 0o600, "namespace.json": 0o600, "segment-0000000000.kv": 0o600}
    assert (opened.directory / "namespace.json").read_bytes() == b'{"model":"tiny"}'


async def test_segments_of_another_namespace_or_shape_are_left_alone(opened: Opener) -> None:
    log = await opened(fingerprint="other")
    assert await append(log, "a")
    await log.close()
    log = await opened()
    assert key("a") not in log
    assert log.stats.num_foreign == 1
    assert await append(log, "b")
    await log.close()
    log = await opened(shape=BlockShape(2, 64))
    assert log.stats.num_blocks == 0
    await log.close()
    log = await opened(fingerprint="other")
    assert await bad_of(log, "a") == []


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    # A socket's address may have 108 bytes only: bind it by its name.
    with socket.socket(socket.AF_UNIX) as end, contextlib.chdir(path.parent):
        end.bind(path.name)


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_outward_link(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.write_bytes(b"somebody else's")
    path.symlink_to(outside)


STRANGERS = [make_pipe, make_folder, make_socket, make_dangling_link, make_outward_link]


@pytest.mark.timeout(20)  # opening a pipe would wait for ever
@pytest.mark.parametrize("make", STRANGERS)
async def test_what_is_no_file_is_left_alone_where_a_segment_would_be(
    opened: Opener, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    log = await opened()
    assert await append(log, "a")
    await log.close()
    before, in_the_way = (opened.directory / f"segment-000000000{number}.kv" for number in (0, 1))
    make(in_the_way)
    kind = stat.S_IFMT(in_the_way.lstat().st_mode)
    log = await opened(capacity_bytes=8 * SINGLE, segment_bytes=2 * SINGLE)
    assert caplog.text.count(in_the_way.name) == 1
    for number in range(20):
        assert await append(log, number)
    assert await bad_of(log, 19) == []
    assert stat.S_IFMT(in_the_way.lstat().st_mode) == kind
    assert not before.exists()
    assert inspect(opened.directory)[0].num_blocks == log.stats.num_blocks


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["lock", "namespace.json", "namespace.partial"])
@pytest.mark.parametrize("make", STRANGERS)
async def test_what_is_no_file_is_never_waited_for_in_the_stores_folder(
    opened: Opener, make: Callable[[Path], None], name: str
) -> None:
    opened.directory.mkdir(parents=True)
    make(opened.directory / name)
    try:
        log = await opened()
    except StoreUnusable:
        return
    assert await append(log, "a")
    assert inspect(opened.directory.parent)[0].description == b'{"model":"tiny"}'
    outside = opened.directory.with_name("outside")
    assert not outside.exists() or outside.read_bytes() == b"somebody else's"


async def test_a_hole_of_a_terabyte_takes_nothing_of_the_capacity(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a")
    await log.close()
    (path,) = opened.segments()
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with path.with_name("segment-0000000007.kv").open("wb") as file:
        file.truncate(1 << 40)
    log = await opened()
    assert log.stats.bytes < ROOMY
    assert await append(log, "b")
    assert await bad_of(log, "a", "b") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_a_segment_that_may_not_be_read_costs_its_blocks_only(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a")
    await log.close()
    opened.segments()[0].chmod(0)
    log = await opened()
    assert await append(log, "b")
    assert await bad_of(log, "a", "b") == ["a"]


async def test_a_closed_store_is_empty_and_refuses(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a")
    await log.close()
    await log.close()
    assert key("a") not in log
    assert await bad_of(log, "a") == ["a"]
    assert not await append(log, "b")


async def test_a_part_of_a_wrong_size_is_the_owners_mistake(opened: Opener) -> None:
    log = await opened()
    with pytest.raises(ValueError, match="a layer has 1300"):
        await log.append([key("a")], lambda block, layer: memoryview(b"short"))
    assert await append(log, "a")
    with pytest.raises(ValueError, match="a layer has 1300"):
        await log.read([key("a")], lambda block, layer: memoryview(bytearray(5)))


# How it makes room.

SINGLE = RecordHead(1, SHAPE).record_bytes
# Four segments of four single blocks, and what a new store keeps free to carry half a segment.
SEGMENT = SEGMENT_HEADER_BYTES + 4 * SINGLE
CAPACITY = 4 * SEGMENT + SEGMENT // 2 + 2 * SEGMENT_HEADER_BYTES


async def test_the_oldest_unread_blocks_go_first(opened: Opener) -> None:
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    for i in range(17):
        assert await append(log, i)
        assert log.stats.bytes == sum(path.stat().st_size for path in opened.segments()) <= CAPACITY
    assert opened.dropped == [key(i) for i in range(4)]
    assert log.stats.num_evicted == 4
    assert await bad_of(log, *range(17)) == [0, 1, 2, 3]


async def test_blocks_that_were_read_get_a_second_chance_but_no_third(opened: Opener) -> None:
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    for i in range(16):
        assert await append(log, i)
    assert await bad_of(log, 1) == []
    for i in range(16, 20):
        assert await append(log, i)
    assert key(1) in log
    assert log.stats.num_carried == 1
    for i in range(20, 40):
        assert await append(log, i)
    assert key(1) not in log


async def test_a_segment_passes_on_half_its_bytes_the_last_read_first(opened: Opener) -> None:
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    for i in range(16):
        assert await append(log, i)
    for i in (2, 0, 3, 1):
        assert await bad_of(log, i) == []
    assert await append(log, 16)
    assert [i for i in range(4) if key(i) in log] == [1, 3]
    assert await bad_of(log, 1, 3, 16) == []


async def test_a_record_larger_than_a_segment_gets_its_own(opened: Opener) -> None:
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    assert await append(log, "small")
    assert await append(log, *range(8))
    assert await append(log, "next")
    assert len(opened.segments()) == 3
    assert await bad_of(log, "small", *range(8), "next") == []


async def test_many_records_in_one_go_are_found_again(opened: Opener) -> None:
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    assert await append(log, "old")
    records = [record("a", "b"), record("old"), record("c", "a"), record(*range(8)), record("d")]
    assert await log.append_all(records)
    names = ["old", "a", "b", "c", *range(8), "d"]
    assert await bad_of(log, *names) == []
    await log.close()
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    assert log.stats.num_blocks == len(names)
    assert await bad_of(log, *names) == []


async def test_one_record_too_large_costs_the_others_nothing(opened: Opener) -> None:
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    assert not await log.append_all([record("a"), record(*range(100)), record("b")])
    assert log.stats.num_refused == 1
    assert await bad_of(log, "a", "b") == []


async def test_a_record_larger_than_the_capacity_is_refused(opened: Opener) -> None:
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    assert await append(log, "a")
    assert not await append(log, *range(100))
    assert log.stats.num_refused == 1
    assert await bad_of(log, "a") == []


async def test_a_smaller_capacity_is_kept_from_the_start(opened: Opener) -> None:
    log = await opened()
    for i in range(20):
        assert await append(log, i)
    await log.close()
    log = await opened(capacity_bytes=SEGMENT)
    assert log.stats.bytes <= SEGMENT
    assert sorted(opened.dropped) == sorted(key(i) for i in range(20))


class SlowFiles(Files):
    """Reads of bodies wait until they are let through."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return super().preadv(fd, buffers, offset)


async def test_nothing_is_evicted_while_it_is_read(opened: Opener) -> None:
    files = SlowFiles()
    log = await opened(capacity_bytes=2 * SEGMENT, segment_bytes=SEGMENT, files=files)
    for i in range(4):
        assert await append(log, i)
    reading = asyncio.create_task(bad_of(log, 0))
    await asyncio.to_thread(files.has_begun.wait)
    for i in range(4, 12):
        await append(log, i)
    assert key(0) in log
    files.may_end.set()
    assert await reading == []


async def fill_up_and_carry(opened: Opener, files: SlowFiles) -> tuple[DiskLog, asyncio.Task[bool]]:
    """A store that is about to carry block 0 forward: its read for that has begun and waits."""
    files.may_end.set()
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT, files=files)
    for i in range(16):
        assert await append(log, i)
    assert await bad_of(log, 0) == []
    files.may_end.clear()
    files.has_begun.clear()
    appending = asyncio.create_task(append(log, 16))
    await asyncio.to_thread(files.has_begun.wait)
    return log, appending


async def test_a_block_is_there_while_it_is_carried_forward(opened: Opener) -> None:
    files = SlowFiles()
    log, appending = await fill_up_and_carry(opened, files)
    oldest = opened.segments()[0]
    reading = asyncio.create_task(bad_of(log, 0, max_bytes_in_flight=1))
    assert key(0) in log
    assert log.stats.bytes <= CAPACITY
    files.may_end.set()
    assert await reading == []
    assert await appending
    assert oldest not in opened.segments()
    assert await bad_of(log, 0, 16) == []


async def test_a_block_forgotten_while_it_is_carried_forward_stays_forgotten(opened: Opener) -> None:
    files = SlowFiles()
    log, appending = await fill_up_and_carry(opened, files)
    log.forget([key(0)])
    files.may_end.set()
    assert await appending
    assert key(0) not in log


async def test_a_segment_unlinked_under_a_read_is_read_to_the_end(opened: Opener) -> None:
    files = SlowFiles()
    log = await opened(files=files)
    assert await append(log, *range(4))
    reading = asyncio.create_task(bad_of(log, *range(4), max_bytes_in_flight=1))
    await asyncio.to_thread(files.has_begun.wait)
    opened.segments()[0].unlink()
    files.may_end.set()
    assert await reading == []


async def test_a_cancelled_read_leaves_its_buffers_alone_afterwards(opened: Opener) -> None:
    files = SlowFiles()
    log = await opened(files=files)
    assert await append(log, "a")
    reader = Reader("a")
    reading = asyncio.create_task(reader.run(log))
    await asyncio.to_thread(files.has_begun.wait)
    reading.cancel()
    done, _ = await asyncio.wait([reading], timeout=0)
    assert not done
    files.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert log.stats.bytes_read == SHAPE.block_bytes, "it was read, whoever wants it"
    assert await bad_of(log, "a") == []


async def test_closing_waits_for_the_reads_under_way(opened: Opener) -> None:
    files = SlowFiles()
    log = await opened(files=files)
    assert await append(log, "a", "b", "c")
    reading = asyncio.create_task(bad_of(log, "a", "b", "c", max_bytes_in_flight=1))
    await asyncio.to_thread(files.has_begun.wait)
    closing = asyncio.create_task(log.close())
    await asyncio.wait([closing], timeout=0)
    files.may_end.set()
    await closing
    assert await reading == []


# What faults cost.


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_flipped_bit_costs_its_block(opened: Opener, layer: int) -> None:
    log = await opened()
    assert await append(log, "a", "b", "c")
    flip(opened.segments()[0], SEGMENT_HEADER_BYTES + RecordHead(3, SHAPE).part_offset(layer, 1) + 7)
    assert await bad_of(log, "a", "b", "c") == ["b"]
    assert log.stats.num_corrupt == 1
    assert key("b") not in log
    assert await append(log, "a", "b", "c")
    assert await bad_of(log, "a", "b", "c") == []


async def test_a_flipped_bit_in_the_keys_costs_the_record(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a", "b")
    assert await append(log, "c")
    flip(opened.segments()[0], SEGMENT_HEADER_BYTES + 40)
    assert await bad_of(log, "a", "b", "c") == ["a", "b"]


async def test_a_segment_put_in_anothers_place_gives_nothing(opened: Opener) -> None:
    log = await opened(segment_bytes=1)
    assert await append(log, "a")
    assert await append(log, "b")
    one, other = opened.segments()
    shutil.copy(one, other)
    assert await bad_of(log, "a", "b") == ["b"]
    assert log.stats.num_corrupt == 1


async def test_a_corrupt_header_ends_its_segment_when_opened(opened: Opener) -> None:
    log = await opened()
    for name in ("a", "b", "c"):
        assert await append(log, name)
    await log.close()
    flip(opened.segments()[0], SEGMENT_HEADER_BYTES + SINGLE)
    log = await opened()
    assert log.stats.num_torn == 1
    assert await bad_of(log, "a", "b", "c") == ["b", "c"]


async def test_a_segment_cut_off_costs_what_was_behind(opened: Opener) -> None:
    log = await opened()
    for name in ("a", "b", "c"):
        assert await append(log, name)
    os.truncate(opened.segments()[0], SEGMENT_HEADER_BYTES + SINGLE + RecordHead(1, SHAPE).part_offset(2, 0))
    assert await bad_of(log, "a", "b", "c") == ["b", "c"]
    await log.close()
    log = await opened()
    assert await bad_of(log, "a", "b", "c") == ["b", "c"]
    assert log.stats.num_torn == 1


class ShortFiles(Files):
    """No read gives more than 50 bytes."""

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        return super().pread(fd, min(num_bytes, 50), offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, [buffers[0][:50]], offset)


async def test_short_reads_are_read_on(opened: Opener) -> None:
    log = await opened(files=ShortFiles())
    assert await append(log, "a", "b", "c")
    await log.close()
    assert await bad_of(await opened(files=ShortFiles()), "a", "b", "c") == []


class BadSector(Files):
    """Reads that touch one byte of a file fail."""

    def __init__(self) -> None:
        self.offset = -1

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        self._touch(offset, num_bytes)
        return super().pread(fd, num_bytes, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._touch(offset, sum(map(len, buffers)))
        return super().preadv(fd, buffers, offset)

    def _touch(self, offset: int, num_bytes: int) -> None:
        if offset <= self.offset < offset + num_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_bad_sector_in_the_body_costs_its_block(opened: Opener) -> None:
    files = BadSector()
    log = await opened(files=files)
    assert await append(log, "a", "b", "c")
    files.offset = SEGMENT_HEADER_BYTES + RecordHead(3, SHAPE).part_offset(1, 2)
    assert await bad_of(log, "a", "b", "c") == ["c"]
    assert log.stats.num_read_errors == 1


async def test_a_bad_sector_in_the_header_costs_the_record(opened: Opener) -> None:
    files = BadSector()
    log = await opened(files=files)
    assert await append(log, "a", "b")
    assert await append(log, "c")
    files.offset = SEGMENT_HEADER_BYTES
    assert await bad_of(log, "a", "b", "c") == ["a", "b"]
    await log.close()
    log = await opened(files=files)
    assert log.stats.num_blocks == 0
    assert log.stats.num_read_errors == 1


class FullDisk(Files):
    """Takes so many bytes and no more, unless it has been given room again."""

    def __init__(self, room_bytes: int, *, can_truncate: bool = True) -> None:
        self.room_bytes = room_bytes
        self.num_attempts = 0
        self._can_truncate = can_truncate

    async def write(self, file: AppendFile, data: memoryview) -> int:
        self.num_attempts += 1
        if self.room_bytes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = await super().write(file, data[: self.room_bytes])
        self.room_bytes -= written
        return written

    async def truncate(self, file: AppendFile, num_bytes: int) -> None:
        if not self._can_truncate:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        await super().truncate(file, num_bytes)


@pytest.mark.parametrize("can_truncate", [True, False])
@pytest.mark.parametrize("extra_bytes", [0, 10, SINGLE - 1])
async def test_a_full_disk_costs_the_record_and_then_nothing_for_a_while(
    opened: Opener, extra_bytes: int, can_truncate: bool
) -> None:
    files = FullDisk(SEGMENT_HEADER_BYTES + SINGLE + extra_bytes, can_truncate=can_truncate)
    log = await opened(files=files)
    assert await append(log, "a")
    assert not await append(log, "b")
    assert log.stats.num_write_errors == 1
    num_attempts = files.num_attempts
    files.room_bytes = ROOMY
    assert not await append(log, "b")
    assert files.num_attempts == num_attempts
    opened.clock.now_s += RETRY_AFTER_S
    assert await append(log, "b")
    assert log.stats.bytes == sum(path.stat().st_size for path in opened.segments())
    assert await bad_of(log, "a", "b") == []
    await log.close()
    assert await bad_of(await opened(), "a", "b") == []


async def test_a_disk_too_full_for_a_segment_is_tried_again_later(opened: Opener) -> None:
    files = FullDisk(10)
    log = await opened(files=files)
    assert not await append(log, "a")
    files.room_bytes = ROOMY
    opened.clock.now_s += RETRY_AFTER_S
    assert await append(log, "a")
    assert log.stats.bytes == sum(path.stat().st_size for path in opened.segments())


# Whose blocks make room.

ADA, BOB = owner_tag("ada"), owner_tag("bob")


async def append_of(log: DiskLog, owner: int, *names: object) -> bool:
    keys, part, _ = record(*names)
    return await log.append(keys, part, owner)


async def test_a_flood_of_one_owner_pushes_out_its_own_blocks_and_no_others(opened: Opener) -> None:
    log = await opened(capacity_bytes=64 * SINGLE, segment_bytes=8 * SINGLE)
    for number in range(12):
        assert await append_of(log, BOB, "bob", number)
        assert await append_of(log, ADA, f"ada {number}")
    bobs = ["bob", *range(12)]
    for number in range(500):
        assert await append_of(log, ADA, f"flood {number}")
        assert log.stats.bytes <= log.stats.capacity_bytes
    assert [name for name in bobs if key(name) not in log] == []
    assert await bad_of(log, *bobs, *(f"flood {number}" for number in range(490, 500))) == []


async def test_who_wrote_what_is_known_after_a_restart(opened: Opener) -> None:
    log = await opened(capacity_bytes=64 * SINGLE, segment_bytes=8 * SINGLE)
    for number in range(12):
        assert await append_of(log, BOB, number)
    await log.close()
    log = await opened(capacity_bytes=64 * SINGLE, segment_bytes=8 * SINGLE)
    for number in range(300):
        assert await append_of(log, ADA, f"flood {number}")
    assert await bad_of(log, *range(12)) == []


async def test_an_owner_alone_has_the_whole_disk_and_gives_way_to_who_comes(opened: Opener) -> None:
    log = await opened(capacity_bytes=64 * SINGLE, segment_bytes=8 * SINGLE)
    for number in range(200):
        assert await append_of(log, ADA, f"ada {number}")
    num_alone = log.stats.num_blocks
    assert num_alone >= 44
    for number in range(20):
        assert await append_of(log, BOB, number)
    assert await bad_of(log, *range(20)) == []
    assert log.stats.num_blocks >= num_alone - 16


async def test_an_owner_of_weight_holds_more(opened: Opener) -> None:
    log = await opened(capacity_bytes=64 * SINGLE, segment_bytes=8 * SINGLE)
    log.weights[ADA] = 3.0
    for number in range(300):
        assert await append_of(log, ADA, f"ada {number}")
        assert await append_of(log, BOB, f"bob {number}")
    num_ada = sum(key(f"ada {number}") in log for number in range(300))
    num_bob = sum(key(f"bob {number}") in log for number in range(300))
    assert num_ada > 1.5 * num_bob > 0


async def test_an_owner_that_was_not_seen_for_a_day_is_not_spared(opened: Opener) -> None:
    log = await opened(capacity_bytes=64 * SINGLE, segment_bytes=8 * SINGLE)
    for number in range(12):
        assert await append_of(log, BOB, number)
    opened.clock.now_s += CLAIM_S + 1
    for number in range(300):
        assert await append_of(log, ADA, f"flood {number}")
    assert await bad_of(log, *range(12)) == list(range(12))


class SmallDisk(Files):
    """Holds so many bytes of segments; what others write there is `others_bytes`. `tells` whether it says how much room there is, or
    is only found to be full, as with a quota."""

    def __init__(self, directory: Path, total_bytes: int, *, tells: bool) -> None:
        self.directory = directory
        self.total_bytes = total_bytes
        self.others_bytes = 0
        self.tells = tells

    def free_bytes(self) -> int:
        used_bytes = sum(path.stat().st_size for path in self.directory.glob("segment-*"))
        return self.total_bytes - self.others_bytes - used_bytes

    def room(self, directory: Path) -> FileSystemRoom | None:
        return FileSystemRoom(self.total_bytes, max(self.free_bytes(), 0)) if self.tells else None

    async def write(self, file: AppendFile, data: memoryview) -> int:
        num_bytes = min(max(self.free_bytes(), 0), len(data))
        if not num_bytes:
            number = errno.ENOSPC if self.tells else errno.EDQUOT
            raise OSError(number, os.strerror(number))
        return await super().write(file, data[:num_bytes])


async def test_a_disk_smaller_than_the_capacity_keeps_the_latest_and_leaves_others_room(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    files = SmallDisk(opened.directory, 64 * SINGLE, tells=True)
    log = await opened(files=files)
    for number in range(200):
        assert await append(log, number)
        assert files.free_bytes() >= 4 * SINGLE  # a sixteenth
        assert log.stats.bytes <= log.stats.capacity_bytes <= 60 * SINGLE
    assert await bad_of(log, *range(180, 200)) == []
    assert log.stats.num_write_errors == log.stats.num_unwritten == 0
    assert caplog.text.count("it takes what there is") == 1


async def test_a_disk_that_others_fill_is_left_to_them_and_taken_back_when_they_leave(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    files = SmallDisk(opened.directory, 2 * ROOMY, tells=True)
    log = await opened(files=files)
    for number in range(200):
        assert await append(log, number)
    assert log.stats.capacity_bytes == ROOMY
    spare = files.total_bytes // 16
    for number in range(200, 300):
        left = files.total_bytes - spare - 20 * SINGLE - files.others_bytes
        files.others_bytes += min(
            left, files.free_bytes()
        )  # as much as there is, as often as KV has made room
        assert await append(log, number)
    assert log.stats.bytes <= log.stats.capacity_bytes == 20 * SINGLE
    files.others_bytes += files.free_bytes()
    for _ in range(20):
        opened.clock.now_s += RETRY_AFTER_S
        await append(log, "lost", "too")
        files.others_bytes += files.free_bytes()
    num_unwritten = log.stats.num_unwritten
    assert not await append(log, "lost", "too")
    assert (log.stats.bytes, log.stats.capacity_bytes) == (0, 0)
    assert log.stats.num_unwritten == num_unwritten + 2
    files.others_bytes = 0
    assert await append(log, "kept")
    assert log.stats.capacity_bytes == ROOMY
    assert await bad_of(log, "kept", "lost") == ["lost"]
    assert caplog.text.count("it takes what there is") == 1


async def test_a_quota_that_is_met_costs_the_oldest_and_writing_goes_on(opened: Opener) -> None:
    files = SmallDisk(opened.directory, 64 * SINGLE, tells=False)
    log = await opened(files=files, segment_bytes=8 * SINGLE)
    for number in range(300):
        assert await append(log, number)
        assert log.stats.bytes <= log.stats.capacity_bytes
    assert log.stats.num_write_errors == 0
    assert await bad_of(log, *range(280, 300)) == []
    capacity_bytes = log.stats.capacity_bytes
    assert capacity_bytes <= 64 * SINGLE
    files.total_bytes = ROOMY
    for number in range(300, 600):
        opened.clock.now_s += GROW_AFTER_S
        assert await append(log, number)
    assert log.stats.capacity_bytes == ROOMY
    assert await bad_of(log, *range(450, 600)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
async def test_a_real_small_file_system_is_never_filled(tmp_path: Path) -> None:
    """And what lies on it beside the KV can always be written: conversations, as a rule."""
    place, size_bytes = tmp_path / "small", 8 << 20
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(place)]
    if (await asyncio.to_thread(subprocess.run, mounting, capture_output=True)).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    opener = Opener(place / "kv")
    try:
        log = await opener(capacity_bytes=1 << 30)
        for start in range(0, 6000, 20):
            assert await append(log, *range(start, start + 20))
            if start % 400 == 0:
                (place / "conversations").write_bytes(bytes(start * 50))  # up to 300 kB
        assert await bad_of(log, *range(5900, 6000)) == []
        assert (4 << 20) < log.stats.bytes <= log.stats.capacity_bytes < size_bytes
        assert log.stats.num_write_errors == 0
        room = os.statvfs(place)
        assert room.f_bavail * room.f_frsize >= size_bytes // 16
        with (place / "conversations").open("wb") as others:
            for start in range(7000, 7400, 20):  # they take nearly all, a little at a time
                others.write(bytes(400_000))
                others.flush()
                await append(log, *range(start, start + 20))
        assert not await append(log, *range(9000, 9020))
        assert log.stats.bytes < 1 << 20
        (place / "conversations").unlink()
        assert await append(log, "again")
        assert await bad_of(log, "again") == []
        await log.close()
        again = await opener(capacity_bytes=1 << 30)
        assert await bad_of(again, "again") == []
    finally:
        await opener.close()
        await asyncio.to_thread(subprocess.run, ["umount", str(place)], check=True)


async def test_a_store_opens_on_a_full_disk(tmp_path: Path) -> None:
    files = SmallDisk(tmp_path / "store", 0, tells=True)
    opener = Opener(tmp_path / "store")
    log = await opener(files=files)
    assert not await append(log, "a")
    files.total_bytes = ROOMY
    assert await append(log, "a")
    await opener.close()


async def test_a_vanished_folder_costs_its_blocks_and_is_made_again(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a", "b")
    shutil.rmtree(opened.directory)
    assert await bad_of(log, "a") == ["a"]
    assert opened.dropped == [key("b")]
    assert await append(log, "a")
    assert await bad_of(log, "a", "b") == ["b"]
    await log.close()
    assert await bad_of(await opened(), "a") == []


async def test_a_folder_that_cannot_be_made_again_is_a_write_error_until_it_can(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a")
    shutil.rmtree(opened.directory)
    opened.directory.write_text("in the way")
    assert not await append(log, "a")
    assert await bad_of(log, "a") == ["a"]
    opened.directory.unlink()
    opened.clock.now_s += RETRY_AFTER_S
    assert await append(log, "a")
    assert await bad_of(log, "a") == []


async def test_a_folder_that_was_moved_away_and_back_is_taken_over_again(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a")
    away = opened.directory.with_name("away")
    opened.directory.rename(away)
    assert await bad_of(log, "a") == ["a"]
    opened.directory.mkdir()
    assert await append(log, "b")
    shutil.rmtree(opened.directory)
    away.rename(opened.directory)
    assert await append(log, "c")
    assert await bad_of(log, "a", "c") == []


async def test_a_removed_newest_segment_takes_no_more_records(opened: Opener) -> None:
    log = await opened()
    assert await append(log, "a")
    opened.segments()[0].unlink()
    assert await append(log, "b")
    assert await bad_of(log, "a", "b") == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_folder_that_may_not_be_written_is_a_write_error(opened: Opener) -> None:
    log = await opened(segment_bytes=1)
    assert await append(log, "a")
    opened.directory.chmod(0o500)
    try:
        assert not await append(log, "b")
        assert await bad_of(log, "a") == []
    finally:
        opened.directory.chmod(0o700)
    opened.clock.now_s += RETRY_AFTER_S
    assert await append(log, "b")


async def test_a_store_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="cannot be used"):
        await DiskLog.open(tmp_path / "file" / "store", "tiny", SHAPE, ROOMY)


# Who may hold it.


async def test_a_folder_has_one_holder(opened: Opener) -> None:
    log = await opened()
    with pytest.raises(StoreBusy, match="in use by another process"):
        await opened()
    await log.close()
    await opened()


async def test_a_second_process_is_refused(opened: Opener) -> None:
    await opened()
    code = (
        "import asyncio, sys; from pathlib import Path; from kvtiers.io.disk_log import DiskLog;"
        "from kvtiers.keys import BlockShape;"
        "asyncio.run(DiskLog.open(Path(sys.argv[1]), 'tiny', BlockShape(3, 64), 1 << 20))"
    )
    command = [sys.executable, "-c", code, str(opened.directory)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=ROOT)
    assert "StoreBusy" in done.stderr


# Looking at it, and making it smaller, from outside.


async def test_a_live_store_can_be_looked_at_but_not_pruned(opened: Opener, tmp_path: Path) -> None:
    log = await opened(segment_bytes=SEGMENT)
    for i in range(6):
        assert await append(log, i)
    (info,) = inspect(tmp_path)
    assert (info.directory, info.num_segments, info.num_blocks) == (opened.directory, 2, 6)
    assert info.bytes == log.stats.bytes
    assert info.description == b'{"model":"tiny"}'
    assert info.oldest_s is not None
    with pytest.raises(StoreBusy):
        prune(tmp_path, max_bytes=0, now=0.0)
    assert len(opened.segments()) == 2


@pytest.mark.parametrize(
    "limits", [{"max_bytes": SEGMENT}, {"older_than_s": 50.0}], ids=["by-size", "by-age"]
)
async def test_pruning_deletes_the_oldest_segments(
    opened: Opener, tmp_path: Path, limits: dict[str, float]
) -> None:
    log = await opened(segment_bytes=SEGMENT)
    for i in range(6):
        assert await append(log, i)
    await log.close()
    for written_s, path in zip((100, 200), opened.segments(), strict=True):
        os.utime(path, (written_s, written_s))
    prune_it: Callable[..., object] = prune
    prune_it(tmp_path, **limits, now=201.0)
    (info,) = inspect(opened.directory)
    assert (info.num_segments, info.num_blocks, info.oldest_s) == (1, 2, 200.0)
    assert await bad_of(await opened(), *range(6)) == [0, 1, 2, 3]


def test_a_folder_without_stores_is_empty(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert inspect(tmp_path) == []
    assert prune(tmp_path, max_bytes=0, now=0.0).num_segments == 0
