"""The disk tier on real files: what it promises, and what each fault of a disk costs."""

import asyncio
import errno
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvtiers.errors import StoreBusy, StoreUnusable
from kvtiers.io.block_read import BlockRead
from kvtiers.io.disk_log import RETRY_AFTER_S, DiskLog
from kvtiers.io.disk_room import GROW_AFTER_S
from kvtiers.io.files import AppendFile, Files, FileSystemRoom
from kvtiers.io.inspect import erase, inspect, prune
from kvtiers.io.log_reader import ReadResult
from kvtiers.io.records import SEGMENT_HEADER_BYTES, Record, RecordHead, owner_tag
from kvtiers.keys import BlockKey, BlockShape

SHAPE = BlockShape(num_layers=3, layer_bytes=1300)  # one block is a record of one page
ROOMY = 1 << 20


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


async def append_each(log: DiskLog, names: Iterable[object]) -> None:
    """A record each."""
    for name in names:
        assert await append(log, name)


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

    async def run(self, log: DiskLog) -> ReadResult:
        result = await log.read(
            BlockRead(self.keys, self.part, on_layer=self.on_layer, on_bad=self.bad.append)
        )
        assert self.layers == list(range(SHAPE.num_layers))
        assert sorted(self.bad) == list(result.bad)
        for block, block_key in enumerate(self.keys):
            if block not in result.bad:
                whole = b"".join(content(block_key, layer) for layer in range(SHAPE.num_layers))
                assert self.buffer[block * SHAPE.block_bytes :][: SHAPE.block_bytes] == whole
        return result


async def bad_of(log: DiskLog, *names: object) -> list[object]:
    """Read and check; returns the names of the blocks that did not come."""
    result = await Reader(*names).run(log)
    return [names[i] for i in result.bad]


class Opener:
    """Opens stores in one folder, and closes them at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()
        self.dropped: list[BlockKey] = []
        self._opened: list[DiskLog] = []

    async def __call__(self, *, capacity_bytes: int = ROOMY, **options: Any) -> DiskLog:
        facts = {"describe": b'{"model":"tiny"}', "on_dropped": self.dropped.extend, "now": self.clock}
        log = await DiskLog.open(self.directory, "tiny", SHAPE, capacity_bytes, **(facts | options))
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


async def test_a_record_of_more_keys_than_one_header_read_is_found_again(opened: Opener) -> None:
    log = await opened()
    assert await append(log, *range(200))
    await log.close()
    assert await bad_of(await opened(), *range(200)) == []


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_outward_link(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.write_bytes(b"somebody else's")
    path.symlink_to(outside)


STRANGERS = [os.mkfifo, Path.mkdir, make_dangling_link, make_outward_link]


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
    await append_each(log, range(20))
    assert await bad_of(log, 19) == []
    assert stat.S_IFMT(in_the_way.lstat().st_mode) == kind
    assert not before.exists()
    assert inspect(opened.directory)[0].num_blocks == log.stats.num_blocks


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["lock", "namespace.json", "namespace.partial"])
@pytest.mark.parametrize("make", STRANGERS)
async def test_nothing_but_files_is_opened(opened: Opener, make: Callable[[Path], None], name: str) -> None:
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


SINGLE = RecordHead(1, SHAPE).record_bytes
# Four segments of four single blocks, and what a new store keeps free to carry half a segment.
SEGMENT = SEGMENT_HEADER_BYTES + 4 * SINGLE
CAPACITY = 4 * SEGMENT + SEGMENT // 2 + 2 * SEGMENT_HEADER_BYTES


async def test_one_record_too_large_costs_the_others_nothing(opened: Opener) -> None:
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
    assert not await log.append_all([record("a"), record(*range(100)), record("b")])
    assert log.stats.num_refused == 1
    assert await bad_of(log, "a", "b") == []


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
    await append_each(log, range(4))
    reading = asyncio.create_task(bad_of(log, 0))
    await asyncio.to_thread(files.has_begun.wait)
    for i in range(4, 12):
        await append(log, i)
    assert key(0) in log
    files.may_end.set()
    assert await reading == []


async def test_a_block_forgotten_while_it_is_carried_forward_stays_forgotten(opened: Opener) -> None:
    files = SlowFiles()
    files.may_end.set()
    log = await opened(capacity_bytes=CAPACITY, segment_bytes=SEGMENT, files=files)
    await append_each(log, range(16))
    assert await bad_of(log, 0) == []
    files.may_end.clear()
    files.has_begun.clear()
    appending = asyncio.create_task(append(log, 16))  # carries block 0 forward, which it waits to read
    await asyncio.to_thread(files.has_begun.wait)
    log.forget([key(0)])
    files.may_end.set()
    assert await appending
    assert key(0) not in log


async def test_a_segment_put_in_anothers_place_gives_nothing(opened: Opener) -> None:
    log = await opened(segment_bytes=1)
    await append_each(log, "ab")
    one, other = opened.segments()
    shutil.copy(one, other)
    assert await bad_of(log, "a", "b") == ["b"]
    assert log.stats.num_corrupt == 1


async def test_a_segment_cut_off_costs_what_was_behind(opened: Opener) -> None:
    log = await opened()
    await append_each(log, ("a", "b", "c"))
    os.truncate(opened.segments()[0], SEGMENT_HEADER_BYTES + SINGLE + RecordHead(1, SHAPE).part_offset(2, 0))
    assert await bad_of(log, "a", "b", "c") == ["b", "c"]
    await log.close()
    log = await opened()
    assert await bad_of(log, "a", "b", "c") == ["b", "c"]
    assert log.stats.num_torn == 1


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


BODY = RecordHead(3, SHAPE)


@pytest.mark.parametrize(
    ("bit", "sector", "bad"),
    [
        pytest.param(BODY.part_offset(0, 1) + 7, None, ["b"], id="a flipped bit in a first layer"),
        pytest.param(BODY.part_offset(2, 1) + 7, None, ["b"], id="a flipped bit in a last layer"),
        pytest.param(40, None, ["a", "b", "c"], id="a flipped bit in the keys"),
        pytest.param(None, BODY.part_offset(1, 2), ["c"], id="a bad sector in a layer"),
    ],
)
async def test_what_is_damaged_costs_its_block_or_its_record_until_it_is_written_anew(
    opened: Opener, bit: int | None, sector: int | None, bad: list[str]
) -> None:
    files = BadSector()
    log = await opened(files=files)
    assert await append(log, "a", "b", "c")
    assert await append(log, "d")
    if bit is not None:
        flip(opened.segments()[0], SEGMENT_HEADER_BYTES + bit)
    files.offset = -1 if sector is None else SEGMENT_HEADER_BYTES + sector
    assert await bad_of(log, "a", "b", "c", "d") == bad
    assert log.stats.num_corrupt == (len(bad) if sector is None else 0)
    assert log.stats.num_read_errors == (sector is not None)
    assert not any(key(name) in log for name in bad)
    files.offset = -1
    assert await append(log, "a", "b", "c")
    assert await bad_of(log, "a", "b", "c", "d") == []


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
async def test_a_full_disk_costs_one_record(opened: Opener, extra_bytes: int, can_truncate: bool) -> None:
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


class SmallDisk(Files):
    """Holds so many bytes of segments and of others' files. A quota does not say how many are left: it is only found to be full."""

    def __init__(self, directory: Path, total_bytes: int, *, is_quota: bool) -> None:
        self.directory, self.total_bytes, self.is_quota = directory, total_bytes, is_quota
        self.others_bytes = 0

    @property
    def free_bytes(self) -> int:
        used_bytes = sum(path.stat().st_size for path in self.directory.glob("segment-*"))
        return max(self.total_bytes - used_bytes - self.others_bytes, 0)

    def room(self, directory: Path) -> FileSystemRoom | None:
        return None if self.is_quota else FileSystemRoom(self.total_bytes, self.free_bytes)

    async def write(self, file: AppendFile, data: memoryview) -> int:
        num_bytes = min(self.free_bytes, len(data))
        if not num_bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return await super().write(file, data[:num_bytes])


async def test_a_quota_that_is_met_costs_the_oldest_and_writing_goes_on(opened: Opener) -> None:
    files = SmallDisk(opened.directory, 64 * SINGLE, is_quota=True)
    log = await opened(files=files, segment_bytes=8 * SINGLE)
    for number in range(300):
        assert await append(log, number)
        assert log.stats.bytes <= log.stats.capacity_bytes
    assert log.stats.num_write_errors == 0
    assert await bad_of(log, *range(280, 300)) == []
    assert log.stats.capacity_bytes <= 64 * SINGLE
    files.total_bytes = ROOMY
    for number in range(300, 600):
        opened.clock.now_s += GROW_AFTER_S
        assert await append(log, number)
    assert log.stats.capacity_bytes == ROOMY
    assert await bad_of(log, *range(450, 600)) == []


async def test_a_small_disk_is_never_filled_and_what_others_take_of_it_is_given_back(opened: Opener) -> None:
    files = SmallDisk(opened.directory, 2 << 20, is_quota=False)
    log = await opened(capacity_bytes=1 << 30, files=files)
    for start in range(0, 1500, 5):
        assert await append(log, *range(start, start + 5))
        assert files.free_bytes >= files.total_bytes // 32
    assert await bad_of(log, *range(1450, 1500)) == []
    assert files.total_bytes // 2 < log.stats.bytes <= log.stats.capacity_bytes < files.total_bytes
    assert log.stats.num_write_errors == 0
    for start in range(2000, 2200, 5):
        files.others_bytes += 50_000
        await append(log, *range(start, start + 5))
    assert not await append(log, *range(3000, 3005))
    assert log.stats.bytes < files.total_bytes // 8
    files.others_bytes = 0
    assert await append(log, "again")
    assert await bad_of(log, "again") == []


@pytest.mark.parametrize("is_in_the_way", [False, True])
async def test_a_vanished_folder_costs_its_blocks_and_is_made_again(
    opened: Opener, is_in_the_way: bool
) -> None:
    """Where it cannot be made again that is a write error, until it can."""
    log = await opened()
    assert await append(log, "a", "b")
    shutil.rmtree(opened.directory)
    if is_in_the_way:
        opened.directory.write_text("in the way")
        assert not await append(log, "a")
    assert await bad_of(log, "a") == ["a"]
    assert opened.dropped == [key(name) for name in ("ab" if is_in_the_way else "b")]
    if is_in_the_way:
        opened.directory.unlink()
        opened.clock.now_s += RETRY_AFTER_S
    assert await append(log, "a")
    assert await bad_of(log, "a", "b") == ["b"]
    await log.close()
    assert await bad_of(await opened(), "a") == []


async def test_a_live_store_can_be_looked_at_but_not_pruned_or_opened(opened: Opener, tmp_path: Path) -> None:
    log = await opened(segment_bytes=SEGMENT)
    await append_each(log, range(6))
    (info,) = inspect(tmp_path)
    assert (info.directory, info.num_segments, info.num_blocks) == (opened.directory, 2, 6)
    assert info.bytes == log.stats.bytes and info.oldest_s is not None
    assert info.description == b'{"model":"tiny"}'
    with pytest.raises(StoreBusy):
        prune(tmp_path, max_bytes=0, now=0.0)
    assert len(opened.segments()) == 2
    with pytest.raises(StoreBusy, match="in use by another process"):
        await opened()
    await log.close()
    await opened()


async def test_an_owner_is_erased_from_the_disk_and_all_others_stay(opened: Opener, tmp_path: Path) -> None:
    log = await opened(segment_bytes=SEGMENT)
    for number in range(6):
        assert await append_of(log, BOB, "bob", number) and await append_of(log, ADA, "ada", f"ada {number}")
    with pytest.raises(StoreBusy):
        erase(tmp_path, "ada")
    await log.close()
    whole = b"".join(path.read_bytes() for path in opened.segments())
    assert content(key("ada 3"), 1) in whole and key("ada 3") in whole
    assert erase(tmp_path, "ada") == 7
    left = b"".join(path.read_bytes() for path in opened.segments())
    for layer in range(SHAPE.num_layers):
        assert content(key("ada"), layer) not in left and content(key("ada 3"), layer) not in left
    assert key("ada 3") not in left and len(left) == len(whole)
    log = await opened()
    assert await bad_of(log, "bob", *range(6)) == []
    assert key("ada") not in log and key("ada 3") not in log
    await log.close()
    assert erase(tmp_path, "ada") == 0
    with pytest.raises(ValueError, match="everybody"):
        erase(tmp_path, "")
