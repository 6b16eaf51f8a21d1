"""The disk tier: KV blocks by key, in append-only segment files of one folder.

What an owner may rely on:

* A block that is read is the block that was written: every part is verified after it was read. A missing, damaged or unreadable block is a
  miss and a count; no fault of the disk raises once the store is open.
* The segment files never take more than `capacity_bytes` together, also while blocks are carried forward, and leave others some room on the
  disk: where it is smaller than that, or fills up, the store shrinks, and it grows again when there is room.
* A process that is killed loses no block that `append` reported as written. Nothing is synced, so a power cut may cost the newest records; the
  checksums find out. KV can be computed again, so a sync for each record would buy little.
* One process holds a folder. A new one starts a new segment and never appends to an old one.

When room is short, the oldest segment is removed. Its blocks that were read since they were written get a second chance: they are carried forward
into the newest segment, most recently read first. Source: CLOCK and FIFO-reinsertion (Corbató 1969; Yang et al., "FIFO can
be better than LRU", HotOS 2023); departs in that a segment passes on no more than half its bytes, so that each eviction makes room.

Where several tenants share the disk, the tenants that hold most for their weight make the room (`policy/fairness.py`), as nearly as whole segments
allow: the oldest segment is removed of which at least half is theirs, and the blocks of all others are carried forward. A record names its tenant by
a tag.

Threads: everything async belongs to one event loop. Files are touched in a bounded pool of threads, writes through aiofiles. `in` may be used on any
thread at any time: it only reads a dict, which under the GIL needs no lock. Its answer may be out of date when it is used, and a read then reports
the block as bad.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtiers.closing import going_on
from kvtiers.errors import KvTiersError
from kvtiers.io.block_read import BlockRead, ignore
from kvtiers.io.disk_room import DiskRoom
from kvtiers.io.files import Claim, Files, FileSystemRoom, is_full, is_same_file, prepare
from kvtiers.io.log_contents import NEVER, BlockLocation, DiskStats, LogIndex
from kvtiers.io.log_evictor import Evictor, reordered
from kvtiers.io.log_reader import MAX_BYTES_IN_FLIGHT, READS_IN_FLIGHT, LogReader, ReadResult
from kvtiers.io.log_writer import WRITE_BUFFER_BYTES, LogWriter
from kvtiers.io.overwrite import overwrite
from kvtiers.io.read_plan import RecordPlace
from kvtiers.io.records import SEGMENT_HEADER_BYTES, Part, Record
from kvtiers.io.scan import SegmentScan, live_blocks, scan_segment, segment_paths
from kvtiers.io.segment import Segment
from kvtiers.io.workers import FileWorkers, to_the_end
from kvtiers.keys import BlockKey, BlockShape

logger = logging.getLogger(__name__)

NUM_THREADS: Final = READS_IN_FLIGHT + 2  # The reads, and room for the writer and for opening files.
RETRY_AFTER_S: Final = 5.0  # Chosen: a full disk costs one failed write in this time.
MAX_SHED: Final = 2  # Segments given up for one write on a full disk. Chosen: room for the write, and little lost to a disk that others fill.


class DiskLog:
    """An open store. Make one with `open`, end it with `close`."""

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        shape: BlockShape,
        capacity_bytes: int,
        segment_bytes: int | None,
        describe: bytes | None,
        files: Files,
        on_dropped: Callable[[list[BlockKey]], None],
        now: Callable[[], float],
    ) -> None:
        """Prepare the parts; `open` touches the files."""
        self._directory, self._fingerprint, self._shape = directory, fingerprint, shape
        self._describe, self._files, self._now = describe, files, now
        self._workers = FileWorkers(NUM_THREADS)
        self._contents = LogIndex(shape, on_dropped, now)
        self._room = DiskRoom(directory, capacity_bytes, segment_bytes, now)
        self._reader = LogReader(self._contents, self._workers, files, now)
        self._writer = LogWriter(
            directory, fingerprint, self._contents, self._room, self._workers, files, now
        )
        self._evictor = Evictor(
            directory, self._contents, self._room, self._reader, self._writer, self._workers, files, now
        )
        self.weights = self._contents.weights
        """The weights of owners, by tag, where a weight is not 1. May be set from any thread."""
        self._claim: Claim | None = None
        self._write_lock = asyncio.Lock()
        self._retry_at_s = NEVER
        self._last_warning = ""
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
        on_dropped: Callable[[list[BlockKey]], None] = ignore,
        now: Callable[[], float] = time.monotonic,
    ) -> DiskLog:
        """Claim the folder, made if need be, and index its segments. Segments of another fingerprint, shape or format hold no blocks.

        Args:
            directory: the folder.
            fingerprint: the namespace's.
            shape: the shape of every block.
            capacity_bytes: the most that all segment files may take.
            segment_bytes: size of a segment; None: by the capacity.
            describe: JSON that describes the store, kept in `namespace.json`.
            files: the file system.
            on_dropped: called on the loop with keys that were evicted or lost; a block that a read found bad is reported by that read.
            now: returns seconds, for the order of use, the pause after an error and the busy times; called from any thread.

        Raises:
            StoreBusy: another process holds the folder.
            StoreUnusable: the folder cannot be made or written.
            OSError: it cannot be listed.
        """
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
            await log._fit()
            await log._evictor.make_room(0)
        except BaseException:
            await log.close()
            raise
        return log

    async def _load(self) -> None:
        """Claim the folder and index its segments. If it raises StoreBusy, StoreUnusable or OSError, the folder is not held."""
        try:
            await self._workers.run(self._take_claim)
            found = await self._workers.run(segment_paths, self._directory)
            scans = await asyncio.gather(
                *(
                    self._workers.run(scan_segment, self._files, number, path, self._fingerprint, self._shape)
                    for number, path in found
                )
            )
            index, by_segment = await self._workers.run(_index_of, scans)
        except BaseException:
            self._release_claim()
            raise
        self._contents.segments = {scan.number: _segment_of(scan) for scan in scans}
        self._contents.num_bytes = sum(scan.num_bytes for scan in scans)
        self._writer.next_number = max([self._writer.next_number - 1, *self._contents.segments]) + 1
        self._contents.index, self._contents.held = index, Counter()
        for number, alive in by_segment.items():
            self._contents.segments[number].live = alive
            self._contents.held.update(alive)
        self._contents.used_s = dict.fromkeys(self._contents.held, self._now())
        self._contents.counts.num_torn += sum(scan.is_torn for scan in scans)
        self._contents.counts.num_read_errors += sum(scan.has_failed for scan in scans)

    def _take_claim(self) -> None:
        # Stored by the thread that took it: a result for a cancelled task would be lost, and the folder locked for good.
        self._claim = prepare(self._directory, self._describe)

    def _release_claim(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    # For any thread.

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._contents.index

    @property
    def stats(self) -> DiskStats:
        """The counts, and the sizes of now."""
        return self._contents.stats(self._room.capacity_bytes)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Take blocks out of the index. Their bytes stay until their segment goes, so a store opened again has them again."""
        self._contents.forget(keys)

    # Reading.

    async def read(
        self, wanted: BlockRead, *, max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT, is_use: bool = True
    ) -> ReadResult:
        """Read blocks. An error of a callback is raised here, in an ExceptionGroup if other reads were under way.

        Args:
            wanted: the blocks, and who is told of them; `on_bytes` counts as `stats` does.
            max_bytes_in_flight: bounds the memory of reads under way.
            is_use: whether the read counts as a use, for the order of eviction; a peer's read does not.
        """
        started_s = self._now()
        entries = [self._contents.index.get(key) for key in wanted.keys]
        for entry in entries:
            if entry is not None and is_use:
                entry.last_read_s = self._contents.used_s[entry.record.owner] = started_s
        return await self._reader.read(wanted, entries, max_bytes_in_flight)

    # Writing.

    async def append(self, keys: Sequence[BlockKey], part: Part, owner: int = 0) -> bool:
        """Write the blocks that are not on disk yet as one record. A cancelled append is finished first.

        Args:
            keys: the blocks.
            part: `part(i, layer)` returns the `layer_bytes` bytes of key i; called in a worker thread. Its memory must not change meanwhile.
            owner: `owner_tag` of the blocks' tenant.

        Returns:
            Whether all keys are on disk now. False when the record was refused or the disk failed (see `stats`): then no block of it is kept, and
            no write is tried for RETRY_AFTER_S.
        """
        return await self.append_all([Record(keys, part, owner)])

    async def append_all(self, records: Sequence[Record]) -> bool:
        """Append several records, with one look at the folder. Return whether all are on disk now."""
        return await to_the_end(self._append_all(records))

    async def _append_all(self, records: Sequence[Record]) -> bool:
        async with self._write_lock:
            if self._is_closed:
                return False
            is_all = False
            if self._now() < self._retry_at_s:
                self._contents.counts.num_refused += len(records)
            else:
                try:
                    await self._recover()
                    is_all = await self._append_new(records)
                except (OSError, KvTiersError) as error:
                    self._contents.counts.num_write_errors += 1
                    self._retry_at_s = self._now() + RETRY_AFTER_S
                    self._warn_of(error)
            if not is_all:
                self._contents.counts.num_unwritten += sum(
                    key not in self._contents.index for keys, _, _ in records for key in keys
                )
            return is_all

    def _warn_of(self, error: Exception) -> None:
        """Log an error, once for each kind of error in a row: writes are tried again every few seconds."""
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            logger.warning("KV blocks cannot be written to %s: %s", self._directory, error)

    async def _append_new(self, records: Iterable[Record]) -> bool:
        """Write the blocks that are not on disk yet, and return whether all are there now. Raises OSError."""
        if self._contents.num_bytes > self._room.capacity_bytes:  # the disk has less room than it had
            await self._evictor.make_room(0)
        is_all = True
        for batch in self._batches(records):
            need_bytes = sum(self._contents.record_bytes(keys) for keys, _, _ in batch) + SEGMENT_HEADER_BYTES
            if need_bytes > self._room.capacity_bytes or not await self._evictor.make_room(need_bytes):
                self._contents.counts.num_refused += len(batch)
                is_all = False
                continue
            for (keys, _, _), place in zip(batch, await self._write_or_shed(batch), strict=True):
                self._contents.publish(keys, place)
            self._last_warning = ""
        return is_all

    async def _write_or_shed(self, batch: Sequence[Record]) -> list[RecordPlace]:
        """Write a batch; where the disk is full though it reported room, remove the oldest segments for it. Raises OSError."""
        for _ in range(MAX_SHED):
            try:
                return await self._writer.write(batch)
            except OSError as error:
                if not is_full(error) or not await self._evictor.shed_oldest():
                    raise
                await self._fit()
        return await self._writer.write(batch)

    def _batches(self, records: Iterable[Record]) -> Iterator[list[Record]]:
        """Yield the blocks that are not on disk yet in batches of one write, because each write costs hand-overs between threads."""
        batch: list[Record] = []
        num_bytes, taken = 0, set[BlockKey]()
        for keys, part, owner in records:
            blocks = list(
                {
                    key: i
                    for i, key in enumerate(keys)
                    if key not in self._contents.index and key not in taken
                }.values()
            )
            if not blocks:
                continue
            new = Record([keys[i] for i in blocks], reordered(part, blocks), owner)
            taken.update(new.keys)
            size = self._contents.record_bytes(new.keys)
            if batch and num_bytes + size > min(WRITE_BUFFER_BYTES, self._room.segment_bytes):
                yield batch
                batch, num_bytes = [], 0
            batch.append(new)
            num_bytes += size
        if batch:
            yield batch

    async def _recover(self) -> None:
        """Start over with the present files if the folder or the newest segment was removed or replaced by others."""
        is_newest_there, is_folder_ours, room = await self._workers.run(self._look_around)
        if self._writer.active is not None and not is_newest_there:
            segment, _ = self._writer.active
            await self._writer.seal()
            self._contents.lose(segment.number)
        if self._claim is None or not is_folder_ours:
            await self._writer.seal()
            self._release_claim()
            for segment in self._contents.segments.values():
                self._contents.lose(segment.number)
            await self._load()
            room = await self._workers.run(self._look_for_room)
        self._room.fit(room, self._contents.num_bytes)

    def _look_around(self) -> tuple[bool, bool, FileSystemRoom | None]:
        """Return whether the newest segment is still the open file, whether the folder is still the claimed one, and the disk's room."""
        is_newest_there = self._writer.active is None or is_same_file(
            self._writer.active[0].path, self._writer.active[1].fileno()
        )
        is_folder_ours = self._claim is not None and self._claim.is_valid()
        return is_newest_there, is_folder_ours, self._look_for_room()

    def _look_for_room(self) -> FileSystemRoom | None:
        try:
            return self._files.room(self._directory)
        except OSError:
            return None

    async def _fit(self) -> None:
        self._room.fit(await self._workers.run(self._look_for_room), self._contents.num_bytes)

    # The rest.

    async def erase(self, owner: int) -> int:
        """Forget and overwrite all blocks of an owner, and return how many there were. A cancelled erasure is finished first.

        owner: `owner_tag` of the tenant; what another tenant with the same tag has goes as well. Raises OSError for a segment that cannot be written;
        its blocks are forgotten all the same.
        """
        return await to_the_end(self._erase(owner))

    async def _erase(self, owner: int) -> int:
        num_blocks = 0
        async with self._write_lock:
            for segment in list(self._contents.segments.values()):
                own = [(place, keys) for place, keys in segment.records if place.owner == owner]
                if not own:
                    continue
                if self._writer.active is not None and self._writer.active[0] is segment:
                    await self._writer.seal()
                for place, keys in own:
                    self._contents.forget([key for key in keys if self._contents.is_at(key, place)])
                try:
                    await self._workers.run(overwrite, segment.path, [place.offset for place, _ in own])
                except FileNotFoundError:
                    pass  # the segment was removed from outside, with its blocks
                segment.records = [record for record in segment.records if record[0].owner != owner]
                num_blocks += sum(place.num_blocks for place, _ in own)
        return num_blocks

    async def close(self) -> None:
        """End the reads under way and release the folder. Afterwards the store is empty: reads miss, and appends are refused."""
        self._is_closed = True
        async with self._write_lock:
            with going_on("the newest file of the KV disk"):
                await self._writer.seal()
        self._contents.clear()
        with going_on("reading from the KV disk"):
            await self._reader.close()
        self._release_claim()
        self._workers.pool.shutdown()


def _segment_of(scan: SegmentScan) -> Segment:
    segment = Segment(scan.number, scan.path, scan.num_bytes)
    segment.records = scan.records
    return segment


def _index_of(scans: Iterable[SegmentScan]) -> tuple[dict[BlockKey, BlockLocation], dict[int, Counter[int]]]:
    """Return every block's place, and the number of live blocks in each segment, by owner."""
    index = {key: BlockLocation(record, position) for key, record, position in live_blocks(scans)}
    alive: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for entry in index.values():
        alive[entry.record.segment][entry.record.owner] += 1
    return index, alive
