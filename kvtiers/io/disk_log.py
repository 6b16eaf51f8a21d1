"""The disk tier: KV blocks by key, in append-only segment files of one folder.

What an owner may rely on:

* A block that is read is the block that was written: every part is verified after it was read. What is missing, damaged or unreadable is a
  miss and a count; no fault of the disk raises once the store is open.
* The segment files never take more than `capacity_bytes` together, also while blocks are carried forward, and leave others some room on the
  disk: where it is smaller than that, or fills up, the store shrinks, and it grows again when there is room.
* A process that is killed loses nothing that `append` said was written. Nothing is synced, so a power cut may cost the newest records; the
  checksums find out. KV can be computed again, so a sync for each record would buy little.
* One process holds a folder. A new one starts a new segment and never appends to an old one.

What does not fit goes, the oldest segment first. Those of its blocks that were read since they were written get a second chance: they are
carried forward into the newest segment, most recently read first. Source: CLOCK and FIFO-reinsertion (Corbató 1969; Yang et al., "FIFO can
be better than LRU", HotOS 2023); departs in that a segment passes on no more than half its bytes, so that each eviction makes room.

Where several tenants share the disk, those that hold most for their weight make the room (`policy/fairness.py`), as nearly as whole segments allow:
the oldest segment goes of which at least half is theirs, and the blocks of all others are carried forward. A record says whose it is.

Threads: everything async belongs to one event loop. Files are touched in a bounded pool of threads, writes through aiofiles. `in` and
`count_prefix` may be called from any thread at any time: they only read a dict, which under the GIL needs no lock; what they say may be out of
date when it is used, and a read then reports the block as bad.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import mmap
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct

from kvtiers.errors import KvTiersError
from kvtiers.io.block_reader import BatchResult, BlockReader, Fault
from kvtiers.io.files import AppendFile, Claim, Files, Room, is_full, is_same_file, prepare
from kvtiers.io.read_plan import BlockPlace, ReadOp, RecordPlace, plan_reads
from kvtiers.io.records import (
    SEGMENT_HEADER_BYTES,
    Part,
    Record,
    RecordHead,
    RecordStream,
    encode_segment_header,
)
from kvtiers.io.scan import SegmentScan, live_blocks, scan_segment, segment_path, segment_paths
from kvtiers.io.segment import Segment
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.fairness import choose_victim, floors

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES: Final = 64 << 20  # Chosen: small against the capacity, so that little goes at once.
SEGMENTS_PER_CAPACITY: Final = 16  # Chosen: the same for small capacities.
READS_IN_FLIGHT: Final = 4  # Chosen: enough to keep an NVMe disk busy with reads of this size.
NUM_THREADS: Final = READS_IN_FLIGHT + 2  # The reads, and room for the writer and for opening files.
MAX_READ_BYTES: Final = 4 << 20
MAX_BYTES_IN_FLIGHT: Final = (
    8 << 20
)  # Measured: reads of 2 MiB are as fast as any on a warm file and on a cold one.
WRITE_BUFFER_BYTES: Final = 8 << 20  # Chosen: few writes, and little memory.
RETRY_AFTER_S: Final = 5.0  # Chosen: a full disk costs one failed write in this time.
NEVER: Final = -math.inf
GIB: Final = 1 << 30
# Left free on the disk for others: conversations are often stored there, and are worth more than KV. Chosen; less on small disks.
SPARE_BYTES: Final = 256 << 20
SPARE_SHARE: Final = 1 / 16
# After a disk was full that had told of room (a quota, say), so long until a segment more is tried. Chosen.
GROW_AFTER_S: Final = 60.0
# What an evicted segment passes on: of blocks that were read; of those whose owners are below their share. Chosen: the rest is the gain.
CARRIED_SHARE: Final = 1 / 2
CARRIED_FOR_OTHERS: Final = 7 / 8
CLAIM_S: Final = (
    86_400.0  # An owner that was not seen for so long has no share to be spared. Chosen: back the next day.
)
MAX_SHED: Final = 2  # Segments given up for one write that met a full disk. Chosen: room for it, and little lost to a disk that others fill.

_T = TypeVar("_T")


class DiskStats(Struct, frozen=True, kw_only=True):
    """Counts are since `open`. bytes: of all segment files now. read_s, write_s: how long threads were busy, so they may outrun the clock.

    capacity_bytes: what they may take now, less than was asked for where the disk has no room for that.

    num_corrupt: blocks whose bytes were wrong. num_torn: segments with something that is no record behind their last one, as a killed process
    leaves them. num_foreign: segments of another namespace or format. num_refused: appends given up because of their size, because all segments
    were being read, or soon after a write error; num_unwritten: their blocks. num_evicted: blocks dropped to make room.
    """

    num_blocks: int
    num_segments: int
    bytes: int
    capacity_bytes: int
    bytes_written: int = 0
    bytes_read: int = 0
    num_corrupt: int = 0
    num_torn: int = 0
    num_foreign: int = 0
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_refused: int = 0
    num_unwritten: int = 0
    num_evicted: int = 0
    num_carried: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


class _Counts(Struct):
    """Those of `DiskStats` that only grow."""

    bytes_written: int = 0
    bytes_read: int = 0
    num_corrupt: int = 0
    num_torn: int = 0
    num_foreign: int = 0
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_refused: int = 0
    num_unwritten: int = 0
    num_evicted: int = 0
    num_carried: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


class ReadResult(Struct, frozen=True):
    """bad: which of the keys were not there, damaged or unreadable; what lies in their places is not KV."""

    bad: tuple[int, ...]
    bytes_read: int
    elapsed_s: float


class _Entry(Struct, gc=False):
    """Where a block is. last_read_s: since it was written or carried forward, else NEVER."""

    record: RecordPlace
    position: int
    last_read_s: float = NEVER


class _Reading:
    """One read under way: which layers are complete, which blocks are bad."""

    def __init__(
        self,
        reader: BlockReader,
        batches: list[list[ReadOp]],
        num_layers: int,
        first_layer: int,
        on_layer: Callable[[int], None],
        on_bad: Callable[[int], None],
    ) -> None:
        self.reader = reader
        self.batches = iter(batches)
        self.num_batches = len(batches)
        self.bytes_read = 0
        self._ops_left = [0] * num_layers
        for op in itertools.chain.from_iterable(batches):
            for layer in op.layers:
                self._ops_left[layer] += 1
        self._next_layer = first_layer
        self._on_layer = on_layer
        self._on_bad = on_bad

    def mark_bad(self, block: int) -> bool:
        """Whether that is news."""
        if block in self.reader.bad:
            return False
        self.reader.bad.add(block)
        self._on_bad(block)
        return True

    def settle(self, ops: Iterable[ReadOp] = ()) -> None:
        """These are done; report the layers that are now complete."""
        for op in ops:
            for layer in op.layers:
                self._ops_left[layer] -= 1
        while self._next_layer < len(self._ops_left) and self._ops_left[self._next_layer] == 0:
            self._on_layer(self._next_layer)
            self._next_layer += 1


def _ignore(_: Any) -> None:
    pass


class DiskLog:
    """An open store. Make one with `open`, end it with `close`."""

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        shape: BlockShape,
        capacity_bytes: int,
        segment_bytes: int,
        describe: bytes | None,
        files: Files,
        on_dropped: Callable[[list[BlockKey]], None],
        now: Callable[[], float],
    ) -> None:
        """Touches no file; `open` does."""
        self._directory = directory
        self._fingerprint = fingerprint
        self._shape = shape
        self._wanted_bytes = capacity_bytes
        self._capacity_bytes = capacity_bytes  # What the disk has room for of it.
        self._full_at: tuple[int, float] | None = (
            None  # What a write that met a full disk has left us, and when.
        )
        self._largest_segment_bytes = self._segment_bytes = segment_bytes
        self._describe = describe
        self._files = files
        self._on_dropped = on_dropped
        self._now = now
        self._segment_header = memoryview(mmap.mmap(-1, SEGMENT_HEADER_BYTES))
        self._segment_header[:] = encode_segment_header(fingerprint)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-disk")
        self._claim: Claim | None = None
        self._index: dict[BlockKey, _Entry] = {}
        self._held: Counter[int] = Counter()  # Blocks of the index by owner.
        self._used_s: dict[int, float] = {}  # When each owner last wrote or read.
        self.weights: dict[int, float] = {}
        """Of owners, by tag, where it is not 1: their share against others'. Whoever knows sets it, from any thread."""
        self._segments: dict[int, Segment] = {}  # Oldest first.
        self._active: tuple[Segment, AppendFile] | None = None
        self._next_number = 0
        self._num_bytes = 0  # Of all segment files.
        self._counts = _Counts()
        self._write_lock = asyncio.Lock()
        self._read_slots = asyncio.Semaphore(READS_IN_FLIGHT)
        self._buffer = memoryview(b"")
        self._retry_at_s = NEVER
        self._last_warning = ""
        self._num_reads = 0
        self._no_reads = asyncio.Event()
        self._no_reads.set()
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        directory: Path,
        fingerprint: str,
        shape: BlockShape,
        capacity_bytes: int,
        *,
        segment_bytes: int | None = None,
        describe: bytes | None = None,
        files: Files | None = None,
        on_dropped: Callable[[list[BlockKey]], None] = _ignore,
        now: Callable[[], float] = time.monotonic,
    ) -> DiskLog:
        """Claim the folder, made if need be, and index what is in it. Segments of another fingerprint, shape or format hold no blocks.

        describe: JSON that says what the store holds, kept in `namespace.json`. on_dropped: called on the loop with keys that
        were evicted or lost; a block that a read found bad is told to that read. now: seconds, for the order of use, the pause after an error
        and the busy times; called from any thread. Raises StoreBusy when another process holds the folder, StoreUnusable when it cannot be made
        or written, OSError when it cannot be listed.
        """
        if segment_bytes is None:
            segment_bytes = min(MAX_SEGMENT_BYTES, capacity_bytes // SEGMENTS_PER_CAPACITY)
        log = cls(
            directory,
            fingerprint,
            shape,
            capacity_bytes,
            segment_bytes,
            describe,
            files or Files(),
            on_dropped,
            now,
        )
        try:
            await log._load()
            log._fit(await log._in_worker(log._look_for_room))
            await log._make_room(0)
        except BaseException:
            await log.close()
            raise
        return log

    async def _load(self) -> None:
        """Claim the folder and take over what is in it; nothing is held if this raises StoreBusy, StoreUnusable or OSError."""
        try:
            await self._in_worker(self._take_claim)
            found = await self._in_worker(segment_paths, self._directory)
            scans = await asyncio.gather(
                *(
                    self._in_worker(scan_segment, self._files, number, path, self._fingerprint, self._shape)
                    for number, path in found
                )
            )
            index, by_segment = await self._in_worker(_index_of, scans)
        except BaseException:
            self._release_claim()
            raise
        self._segments = {scan.number: _segment_of(scan) for scan in scans}
        self._num_bytes = sum(scan.num_bytes for scan in scans)
        self._next_number = max([self._next_number - 1, *self._segments]) + 1
        self._index, self._held = index, Counter()
        for number, alive in by_segment.items():
            self._segments[number].live = alive
            self._held.update(alive)
        self._used_s = dict.fromkeys(self._held, self._now())
        self._counts.num_torn += sum(scan.is_torn for scan in scans)
        self._counts.num_foreign += sum(scan.is_foreign for scan in scans)
        self._counts.num_read_errors += sum(scan.has_failed for scan in scans)

    def _take_claim(self) -> None:
        # Stored by the thread that took it: a result handed to a cancelled task would be lost, and the folder locked for good.
        self._claim = prepare(self._directory, self._describe)

    def _release_claim(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    # What any thread may ask.

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._index

    def count_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first keys are on disk without a gap."""
        index = self._index
        for i, key in enumerate(keys):
            if key not in index:
                return i
        return len(keys)

    @property
    def stats(self) -> DiskStats:
        counts = {name: getattr(self._counts, name) for name in _Counts.__struct_fields__}
        return DiskStats(
            num_blocks=len(self._index),
            num_segments=len(self._segments),
            bytes=self._num_bytes,
            capacity_bytes=self._capacity_bytes,
            **counts,
        )

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Take blocks out of the index. Their bytes stay until their segment goes, so a store opened again has them again."""
        for key in keys:
            self._take_out(key)

    # Reading.

    async def read(
        self,
        keys: Sequence[BlockKey],
        part: Part,
        *,
        first_layer: int = 0,
        on_layer: Callable[[int], None] = _ignore,
        on_bad: Callable[[int], None] = _ignore,
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
    ) -> ReadResult:
        """Fill `part(i, layer)`, a writable view of `layer_bytes` bytes, for every key i and every layer from `first_layer` on, in that order.

        `part` is called in worker threads. All its memory belongs to the read until this returns or raises, also that of bad blocks; a cancelled
        read waits for the threads that still write into it. on_layer(l): layer l of all blocks that are not bad is there and verified; called
        once for each layer, in order. on_bad(i): block i will not come; the store has forgotten it. Both are called on the loop. What they
        or `part` raise ends the read and comes out, in an ExceptionGroup if other reads were under way.
        """
        started_s = self._now()
        entries = [self._index.get(key) for key in keys]
        for entry in entries:
            if entry is not None:
                entry.last_read_s = self._used_s[entry.record.owner] = started_s
        return await self._read(keys, entries, part, first_layer, on_layer, on_bad, max_bytes_in_flight)

    async def _read(
        self,
        keys: Sequence[BlockKey],
        entries: Sequence[_Entry | None],
        part: Part,
        first_layer: int = 0,
        on_layer: Callable[[int], None] = _ignore,
        on_bad: Callable[[int], None] = _ignore,
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
    ) -> ReadResult:
        started_s = self._now()
        places = [None if entry is None else BlockPlace(entry.record, entry.position) for entry in entries]
        records = {place.record for place in places if place is not None}
        max_read_bytes = max(1, min(max_bytes_in_flight // READS_IN_FLIGHT, MAX_READ_BYTES))
        batches = plan_reads(places, self._shape, max_read_bytes, first_layer)
        with self._pinned({record.segment for record in records}) as segments:
            reader = BlockReader(self._files, self._shape, segments, records, keys, part, self._now)
            reading = _Reading(reader, batches, self._shape.num_layers, first_layer, on_layer, on_bad)
            for block, place in enumerate(places):
                if place is None:
                    reading.mark_bad(block)
            reading.settle()
            await self._run(reading, keys, entries)
        return ReadResult(tuple(sorted(reader.bad)), reading.bytes_read, self._now() - started_s)

    async def _run(
        self, reading: _Reading, keys: Sequence[BlockKey], entries: Sequence[_Entry | None]
    ) -> None:
        async def lane() -> None:
            for ops in reading.batches:
                async with self._read_slots:
                    result = await self._in_worker(reading.reader.read_batch, ops)
                self._take(reading, result, keys, entries)
                reading.settle(ops)

        if reading.num_batches < 2:
            await lane()
            return
        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(reading.num_batches, READS_IN_FLIGHT)):
                lanes.create_task(lane())

    def _take(
        self,
        reading: _Reading,
        result: BatchResult,
        keys: Sequence[BlockKey],
        entries: Sequence[_Entry | None],
    ) -> None:
        """Count what a batch brought, and forget the blocks that it found bad."""
        reading.bytes_read += result.num_bytes
        self._counts.bytes_read += result.num_bytes
        self._counts.read_s += result.busy_s
        for block, fault in result.faults.items():
            if not reading.mark_bad(block):
                continue
            if fault is Fault.CORRUPT:
                self._counts.num_corrupt += 1
            else:
                self._counts.num_read_errors += 1
            entry = entries[block]
            if entry is not None and self._index.get(keys[block]) is entry:
                self._take_out(keys[block])
            if fault is Fault.LOST and entry is not None:
                self._lose(entry.record.segment)

    def _lose(self, number: int) -> None:
        """A segment's file is gone: so are its blocks. What it took of the capacity is written off when its turn to go comes."""
        segment = self._segments.get(number)
        if segment is not None:
            self._drop(self._live(segment))
            segment.records.clear()

    @contextmanager
    def _pinned(self, numbers: Iterable[int]) -> Iterator[dict[int, Segment]]:
        segments = {number: self._segments[number] for number in numbers}
        self._num_reads += 1
        self._no_reads.clear()
        for segment in segments.values():
            segment.pin()
        try:
            yield segments
        finally:
            for segment in segments.values():
                segment.unpin(self._files)
            self._num_reads -= 1
            if self._num_reads == 0:
                self._no_reads.set()

    # Writing.

    async def append(self, keys: Sequence[BlockKey], part: Part, owner: int = 0) -> bool:
        """Write the blocks that are not yet there as one record; `part(i, layer)` gives the bytes of key i, `layer_bytes` of them.

        owner: `owner_tag` of the tenant whose they are.

        Returns whether all keys are on disk now. False when the record was refused or the disk failed (see `stats`); nothing of it is kept then,
        and the disk is left alone for RETRY_AFTER_S. `part` is called in a worker thread; its memory must not change until this returns. Not cut
        short by being cancelled: a cancelled append is finished first.
        """
        return await self.append_all([Record(keys, part, owner)])

    async def append_all(self, records: Sequence[Record]) -> bool:
        """`append` each of these; cheaper than one by one, because the folder is looked at once. Returns whether all are on disk now."""
        return await _to_the_end(self._append_all(records))

    async def _append_all(self, records: Sequence[Record]) -> bool:
        async with self._write_lock:
            if self._is_closed:
                return False
            is_all = False
            if self._now() < self._retry_at_s:
                self._counts.num_refused += len(records)
            else:
                try:
                    await self._recover()
                    is_all = await self._append_new(records)
                except (OSError, KvTiersError) as error:
                    self._counts.num_write_errors += 1
                    self._retry_at_s = self._now() + RETRY_AFTER_S
                    self._warn_of(error)
            if not is_all:
                self._counts.num_unwritten += sum(
                    key not in self._index for keys, _, _ in records for key in keys
                )
            return is_all

    def _warn_of(self, error: Exception) -> None:
        """Once for each kind of error in a row: it is tried again every few seconds."""
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            logger.warning("KV blocks cannot be written to %s: %s", self._directory, error)

    async def _append_new(self, records: Iterable[Record]) -> bool:
        """Raises OSError."""
        if (
            self._num_bytes > self._capacity_bytes
        ):  # the disk has less room than it had; also where none is left for these
            await self._make_room(0)
        is_all = True
        for batch in self._batches(records):
            need_bytes = sum(self._record_bytes(keys) for keys, _, _ in batch) + SEGMENT_HEADER_BYTES
            if need_bytes > self._capacity_bytes or not await self._make_room(need_bytes):
                self._counts.num_refused += len(batch)
                is_all = False
                continue
            for (keys, _, _), place in zip(batch, await self._write_or_shed(batch), strict=True):
                self._publish(keys, place)
            self._last_warning = ""
        return is_all

    async def _write_or_shed(self, batch: Sequence[Record]) -> list[RecordPlace]:
        """Write; where the disk is full whatever it told of its room, give up our own oldest segments for that. Raises OSError."""
        for _ in range(MAX_SHED):
            try:
                return await self._write(batch)
            except OSError as error:
                if not is_full(error) or not await self._shed():
                    raise
        return await self._write(batch)

    async def _shed(self) -> bool:
        """Drop the oldest segment, and be content for a while with as much as the disk has held. False when there is none but the newest.

        Raises OSError.
        """
        held_bytes = self._num_bytes
        victim = next((s for s in list(self._segments.values())[:-1] if not s.is_pinned), None)
        if victim is None:
            return False
        left = self._live(victim)
        self._counts.num_evicted += len(left)
        self._drop(left)
        await self._remove(victim)
        self._full_at = held_bytes, self._now()
        self._fit(await self._in_worker(self._look_for_room))
        return True

    def _batches(self, records: Iterable[Record]) -> Iterator[list[Record]]:
        """What of the records is new, as many together as one write takes: each write costs hand-overs between threads."""
        batch: list[Record] = []
        num_bytes, taken = 0, set[BlockKey]()
        for keys, part, owner in records:
            blocks = list(
                {key: i for i, key in enumerate(keys) if key not in self._index and key not in taken}.values()
            )
            if not blocks:
                continue
            new = Record([keys[i] for i in blocks], _reordered(part, blocks), owner)
            taken.update(new.keys)
            size = self._record_bytes(new.keys)
            if batch and num_bytes + size > min(WRITE_BUFFER_BYTES, self._segment_bytes):
                yield batch
                batch, num_bytes = [], 0
            batch.append(new)
            num_bytes += size
        if batch:
            yield batch

    def _record_bytes(self, keys: Sequence[BlockKey]) -> int:
        return RecordHead(len(keys), self._shape).record_bytes

    async def _recover(self) -> None:
        """If the folder or the newest segment was removed or replaced under us, start over with what is there now."""
        is_newest_there, is_folder_ours, room = await self._in_worker(self._look_around)
        if self._active is not None and not is_newest_there:
            segment, _ = self._active
            await self._seal()
            self._lose(segment.number)
        if self._claim is None or not is_folder_ours:
            await self._seal()
            self._release_claim()
            for segment in self._segments.values():
                self._lose(segment.number)
            await self._load()
            room = await self._in_worker(self._look_for_room)
        self._fit(room)

    def _look_around(self) -> tuple[bool, bool, Room | None]:
        """Whether the newest segment is still the file that we write to, and the folder the one that we claimed; the disk's room."""
        is_newest_there = self._active is None or is_same_file(self._active[0].path, self._active[1].fileno())
        is_folder_ours = self._claim is not None and self._claim.is_valid()
        return is_newest_there, is_folder_ours, self._look_for_room()

    def _look_for_room(self) -> Room | None:
        try:
            return self._files.room(self._directory)
        except OSError:
            return None

    def _fit(self, room: Room | None) -> None:
        """Take no more of the disk than it has room for beside what others need of it."""
        capacity = self._wanted_bytes
        if room is not None:
            spare = min(SPARE_BYTES, int(room.total_bytes * SPARE_SHARE))
            capacity = min(capacity, self._num_bytes + room.free_bytes - spare)
        if self._full_at is not None:
            had_bytes, since_s = self._full_at
            grown = int((self._now() - since_s) / GROW_AFTER_S) * self._largest_segment_bytes
            capacity = min(capacity, had_bytes + grown)
            if had_bytes + grown >= self._wanted_bytes:
                self._full_at = None
        capacity = max(capacity, 0)
        was_short, is_short = self._capacity_bytes < self._wanted_bytes, capacity < self._wanted_bytes
        self._capacity_bytes = capacity
        self._segment_bytes = self._largest_segment_bytes
        if is_short:
            self._segment_bytes = min(self._segment_bytes, max(capacity // SEGMENTS_PER_CAPACITY, 1))
        if is_short and not was_short:
            logger.warning(
                "the disk of %s has room for %.2f GiB of KV, not for the %.2f GiB that it may take (--kv-disk-gib); it takes what there is",
                self._directory,
                capacity / GIB,
                self._wanted_bytes / GIB,
            )
        elif was_short and not is_short:
            logger.info("the disk of %s has room for all the KV again that it may take", self._directory)

    async def _write(self, records: Sequence[Record]) -> list[RecordPlace]:
        """Append records to the newest segment, or to a new one if they do not fit: all or none. The caller has made room. Raises OSError."""
        started_s = self._now()
        if not self._buffer:
            self._buffer = memoryview(
                mmap.mmap(-1, WRITE_BUFFER_BYTES)
            )  # begins at a page, as O_DIRECT wants
        stream, used = await self._in_worker(_begin, records, self._shape, self._buffer)
        if self._active is not None and self._active[0].num_bytes + stream.num_bytes > self._segment_bytes:
            await self._seal()
        segment, file = self._active or await self._start_segment()
        try:
            await self._write_all(file, self._buffer[:used])
            while stream.num_bytes_left:
                used = await self._in_worker(stream.fill, self._buffer)
                await self._write_all(file, self._buffer[:used])
        except OSError:
            await self._mend(segment, file)
            raise
        places = []
        for keys, _, owner in records:
            places.append(RecordPlace(segment.number, segment.num_bytes, len(keys), owner))
            segment.records.append((places[-1], list(keys)))
            segment.num_bytes += self._record_bytes(keys)
        self._num_bytes += stream.num_bytes
        self._counts.bytes_written += stream.num_bytes
        self._counts.write_s += self._now() - started_s
        return places

    async def _write_all(self, file: AppendFile, data: memoryview) -> None:
        while data:
            num_bytes = await self._files.write(file, data)
            if num_bytes == 0:
                raise OSError("the disk took no bytes")
            data = data[num_bytes:]

    async def _start_segment(self) -> tuple[Segment, AppendFile]:
        """Raises OSError."""
        while True:
            path = segment_path(self._directory, self._next_number)
            try:
                file = await self._files.create(path, self._pool)
                break
            except FileExistsError:  # something that is no segment of ours has the name
                self._next_number += 1
        segment = Segment(self._next_number, path, 0)
        self._next_number += 1
        self._segments[segment.number] = segment
        self._active = segment, file
        try:
            await self._write_all(file, self._segment_header)
        except OSError:
            await self._mend(segment, file)
            await self._seal()
            raise
        segment.num_bytes = SEGMENT_HEADER_BYTES
        self._num_bytes += SEGMENT_HEADER_BYTES
        return segment, file

    async def _mend(self, segment: Segment, file: AppendFile) -> None:
        """Cut a torn record off; a segment where that fails takes no more records, and what it really takes is counted."""
        try:
            await self._files.truncate(file, segment.num_bytes)
        except OSError:
            try:
                size = await self._in_worker(self._files.size, file.fileno())
            except OSError:
                size = segment.num_bytes
            self._num_bytes += size - segment.num_bytes
            segment.num_bytes = size
            await self._seal()

    async def _seal(self) -> None:
        """The newest segment takes no more records."""
        if self._active is not None:
            _, file = self._active
            self._active = None
            try:
                await file.close()
            except OSError:
                self._counts.num_write_errors += 1

    def _publish(self, keys: Sequence[BlockKey], record: RecordPlace) -> None:
        self._used_s[record.owner] = self._now()
        for position, key in enumerate(keys):
            self._put(key, _Entry(record, position))

    def _put(self, key: BlockKey, entry: _Entry) -> None:
        """All changes of the index are these two, so that what each owner holds is known."""
        old = self._index.get(key)
        self._index[key] = entry
        self._count(entry.record, 1)
        if old is not None:
            self._count(old.record, -1)

    def _take_out(self, key: BlockKey) -> None:
        entry = self._index.pop(key, None)
        if entry is not None:
            self._count(entry.record, -1)

    def _count(self, record: RecordPlace, num_blocks: int) -> None:
        for counter in (self._held, self._live_in(record.segment)):
            counter[record.owner] += num_blocks
            if not counter[record.owner]:
                del counter[record.owner]

    def _live_in(self, number: int) -> Counter[int]:
        segment = self._segments.get(number)
        return segment.live if segment is not None else Counter()

    # Making room.

    async def _make_room(self, need_bytes: int) -> bool:
        """Evict until `need_bytes` fit, with room to carry blocks forward next time; False when all that could go is being read.

        Raises OSError when a file cannot be removed.
        """
        share = CARRIED_SHARE if len(self._held) < 2 else CARRIED_FOR_OTHERS
        room_to_carry = int(self._segment_bytes * share) + SEGMENT_HEADER_BYTES
        target = max(self._capacity_bytes - room_to_carry - need_bytes, 0)
        while self._num_bytes > target:
            givers = self._givers()
            victim = self._choose(givers)
            if victim is None:
                return self._num_bytes + need_bytes <= self._capacity_bytes
            await self._evict(victim, givers)
        return True

    def _givers(self) -> Collection[int]:
        """The owners whose blocks make room now: all, where there is one; else who is above its share, and who has long not been seen."""
        if len(self._held) < 2:
            return self._held.keys()
        since_s = self._now() - CLAIM_S
        absent = {owner for owner in self._held if self._used_s.get(owner, NEVER) < since_s}
        return (
            absent
            | floors(self._held, self.weights, max(self._segment_bytes // self._single_bytes, 1)).keys()
        )

    def _choose(self, givers: Collection[int]) -> Segment | None:
        segments = [segment for segment in self._segments.values() if not segment.is_pinned]
        if len(self._held) < 2 or not segments:
            return segments[0] if segments else None
        place = choose_victim([(s.num_bytes // self._single_bytes, s.live) for s in segments], givers)
        return segments[place] if place is not None else None

    @property
    def _single_bytes(self) -> int:
        """What a block takes at most: those of one record share its header."""
        return RecordHead(1, self._shape).record_bytes

    async def _evict(self, victim: Segment, givers: Collection[int]) -> None:
        """Remove a segment, after its blocks that were read, or are not the givers', have been carried forward.

        Raises OSError; the segment is then still counted.
        """
        if self._active is not None and self._active[0] is victim:
            await self._seal()
        live = self._live(victim)
        chosen = self._second_chance(victim, live, givers)
        dropped = [key for key in live if key not in chosen]
        self._counts.num_evicted += len(dropped)
        self._drop(dropped)
        for record, keys in victim.records:
            kept = [key for key in keys if key in chosen and self._is_at(key, record)]
            if kept:
                await self._carry(kept)
        left = self._live(victim)
        self._counts.num_evicted += len(left)
        self._drop(left)
        await self._remove(victim)

    async def _remove(self, victim: Segment) -> None:
        """Remove a segment's file, once nobody reads it any more. Raises OSError; the segment is then still counted."""
        await victim.wait_unpinned()  # Reads of the blocks just carried may have begun meanwhile.
        try:
            await self._in_worker(self._files.unlink, victim.path)
        except FileNotFoundError:
            pass
        # Another segment object may stand there if the folder was loaded again.
        if self._segments.get(victim.number) is victim:
            del self._segments[victim.number]
            self._num_bytes -= victim.num_bytes

    def _second_chance(
        self, victim: Segment, live: Sequence[BlockKey], givers: Collection[int]
    ) -> set[BlockKey]:
        """Which blocks to carry forward: first those of owners that need not give, then those read since they were written, the last read first.

        Up to half a segment's bytes; more only for the former, and never so many that nothing is gained.
        """
        size = min(victim.num_bytes, self._segment_bytes)
        by_read = sorted(live, key=lambda key: self._index[key].last_read_s, reverse=True)
        others = [key for key in by_read if self._index[key].record.owner not in givers]
        gain = 2 * (SEGMENT_HEADER_BYTES + self._single_bytes)  # a new segment may have to be begun for them
        most = max(size // 2, min(int(size * CARRIED_FOR_OTHERS), size - gain)) // self._single_bytes
        chosen = set(others[:most])
        left = max(int(size * CARRIED_SHARE) // self._single_bytes - len(chosen), 0)
        read = [key for key in by_read if self._index[key].last_read_s > NEVER and key not in chosen]
        return chosen | set(read[:left])

    async def _carry(self, keys: list[BlockKey]) -> None:
        """Copy blocks of one record into the newest segment. Those that cannot be read or written stay where they are."""
        entries = [self._index[key] for key in keys]
        shape = self._shape
        data = memoryview(bytearray(len(keys) * shape.block_bytes))

        def part(block: int, layer: int) -> memoryview:
            start = block * shape.block_bytes + layer * shape.layer_bytes
            return data[start : start + shape.layer_bytes]

        bad = set((await self._read(keys, entries, part)).bad)
        good = [i for i in range(len(keys)) if i not in bad]
        need_bytes = RecordHead(len(good), shape).record_bytes + SEGMENT_HEADER_BYTES
        if not good or self._num_bytes + need_bytes > self._capacity_bytes:
            return
        good_keys = [keys[i] for i in good]
        try:
            (record,) = await self._write(
                [Record(good_keys, _reordered(part, good), entries[0].record.owner)]
            )
        except OSError as error:
            self._counts.num_write_errors += 1
            logger.warning("KV blocks cannot be carried forward in %s: %s", self._directory, error)
            return
        for position, i in enumerate(good):
            # Unless somebody forgot it meanwhile.
            if self._index.get(keys[i]) is entries[i]:
                self._put(keys[i], _Entry(record, position))
                self._counts.num_carried += 1

    def _live(self, segment: Segment) -> list[BlockKey]:
        """The blocks for which this segment is the place to read."""
        return [key for record, keys in segment.records for key in keys if self._is_at(key, record)]

    def _is_at(self, key: BlockKey, record: RecordPlace) -> bool:
        entry = self._index.get(key)
        return entry is not None and entry.record == record

    def _drop(self, keys: list[BlockKey]) -> None:
        """Forget blocks and tell the owner."""
        self.forget(keys)
        if keys:
            self._on_dropped(keys)

    # The rest.

    async def close(self) -> None:
        """End the reads under way, let go of the folder. After this the store is empty: nothing is in it, reads miss, appends are refused."""
        self._is_closed = True
        async with self._write_lock:
            await self._seal()
        self._index, self._held = {}, Counter()
        await self._no_reads.wait()
        self._release_claim()
        self._pool.shutdown()

    async def _in_worker(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run it in the pool. A cancelled caller still waits for the thread: it may be writing into memory that the caller owns."""
        job = self._pool.submit(function, *args)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if not job.cancel():
                await _outlast(asyncio.wrap_future(job))
            raise


async def _to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`; if we are cancelled, finish it first and then be cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _outlast(task)
        raise


async def _outlast(future: Awaitable[Any]) -> None:
    """Wait until it is done, whatever comes of it and however often we are cancelled."""
    waiting = asyncio.ensure_future(future)
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            pass
    if not waiting.cancelled():
        waiting.exception()  # Looked at, so that asyncio does not complain that nobody did.


def _begin(records: Sequence[Record], shape: BlockShape, buffer: memoryview) -> tuple[RecordStream, int]:
    """The records and how many of their first bytes are in `buffer` now: one hand-over for both."""
    stream = RecordStream(records, shape)
    return stream, stream.fill(buffer)


def _reordered(part: Part, blocks: Sequence[int]) -> Part:
    return lambda position, layer: part(blocks[position], layer)


def _segment_of(scan: SegmentScan) -> Segment:
    segment = Segment(scan.number, scan.path, scan.num_bytes)
    segment.records = scan.records
    return segment


def _index_of(scans: Iterable[SegmentScan]) -> tuple[dict[BlockKey, _Entry], dict[int, Counter[int]]]:
    """Every block's place; and how many blocks are alive in each segment, by owner."""
    index = {key: _Entry(record, position) for key, record, position in live_blocks(scans)}
    alive: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for entry in index.values():
        alive[entry.record.segment][entry.record.owner] += 1
    return index, alive
