"""Reads and verifies blocks of a disk log, several batches at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from msgspec import Struct

from kvtiers.io.block_read import BlockRead
from kvtiers.io.block_reader import BatchResult, BlockReader, Fault
from kvtiers.io.files import Files
from kvtiers.io.log_contents import BlockLocation, LogIndex
from kvtiers.io.read_plan import BlockPlace, ReadOp, plan_reads
from kvtiers.io.segment import Segment
from kvtiers.io.turns import Turn
from kvtiers.io.workers import FileWorkers
from kvtiers.keys import BlockShape

READS_IN_FLIGHT: Final = 4  # Chosen: enough to keep an NVMe disk busy with reads of this size.
MAX_READ_BYTES: Final = 4 << 20
# Measured: reads of 2 MiB are as fast as any on a warm file and on a cold one.
MAX_BYTES_IN_FLIGHT: Final = 8 << 20


class ReadResult(Struct, frozen=True):
    """The outcome of a read. bad: the keys that were missing, damaged or unreadable; their places hold no KV."""

    bad: tuple[int, ...]
    bytes_read: int
    elapsed_s: float


class _Reading:
    """One read under way: its complete layers and its bad blocks."""

    def __init__(
        self,
        reader: BlockReader,
        batches: list[list[ReadOp]],
        layers: range,
        wanted: BlockRead,
        entries: Sequence[BlockLocation | None],
    ) -> None:
        self.wanted, self.entries = wanted, entries
        self.reader = reader
        self.batches = iter(batches)
        self.num_batches = len(batches)
        self.bytes_read = 0
        self._ops_left = [0] * layers.stop
        for op in itertools.chain.from_iterable(batches):
            for layer in op.layers:
                self._ops_left[layer] += 1
        self._next_layer = layers.start

    def mark_bad(self, block: int) -> bool:
        """Mark a block as bad, and return whether it was not yet."""
        if block in self.reader.bad:
            return False
        self.reader.bad.add(block)
        self.wanted.on_bad(block)
        return True

    def settle(self, ops: Iterable[ReadOp] = ()) -> None:
        """Note that these operations are done, and report the layers that are now complete."""
        for op in ops:
            for layer in op.layers:
                self._ops_left[layer] -= 1
        while self._next_layer < len(self._ops_left) and self._ops_left[self._next_layer] == 0:
            self.wanted.on_layer(self._next_layer)
            self._next_layer += 1


class LogReader:
    """Reads blocks; its reads pin segments until they end."""

    def __init__(
        self, contents: LogIndex, workers: FileWorkers, files: Files, now: Callable[[], float]
    ) -> None:
        self._contents, self._workers, self._files, self._now = contents, workers, files, now
        self._shape: BlockShape = contents.shape
        self._read_slots = asyncio.Semaphore(READS_IN_FLIGHT)
        self._num_reads = 0
        self._no_reads = asyncio.Event()
        self._no_reads.set()

    async def close(self) -> None:
        """Wait for the reads under way."""
        await self._no_reads.wait()

    async def read(
        self,
        wanted: BlockRead,
        entries: Sequence[BlockLocation | None],
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
    ) -> ReadResult:
        """Read blocks as `DiskLog.read` says. entries: their places; None for a block that is not there."""
        started_s = self._now()
        places = [None if entry is None else BlockPlace(entry.record, entry.position) for entry in entries]
        records = {place.record for place in places if place is not None}
        max_read_bytes = max(1, min(max_bytes_in_flight // READS_IN_FLIGHT, MAX_READ_BYTES))
        batches = plan_reads(places, self._shape, max_read_bytes, wanted.first_layer, wanted.end_layer)
        with self.pinned({record.segment for record in records}) as segments:
            reader = BlockReader(
                self._files, self._shape, segments, records, wanted.keys, wanted.part, self._now
            )
            layers = range(wanted.first_layer, wanted.end_layer or self._shape.num_layers)
            reading = _Reading(reader, batches, layers, wanted, entries)
            for block, place in enumerate(places):
                if place is None:
                    reading.mark_bad(block)
            reading.settle()
            await self._run(reading)
        return ReadResult(tuple(sorted(reader.bad)), reading.bytes_read, self._now() - started_s)

    async def _run(self, reading: _Reading) -> None:
        async def lane() -> None:
            """Read batches until none is left."""
            for ops in reading.batches:
                result = BatchResult({})
                try:
                    async with self._slot(reading.wanted.turn):
                        await self._workers.run(reading.reader.read_batch, ops, result)
                finally:  # bytes of a cancelled read count, too
                    self._take(reading, result)
                reading.settle(ops)

        if reading.num_batches < 2:
            await lane()
            return
        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(reading.num_batches, READS_IN_FLIGHT)):
                lanes.create_task(lane())

    @asynccontextmanager
    async def _slot(self, turn: Turn | None) -> AsyncIterator[None]:
        """Have one of the reads in flight within the context, when it is this one's turn."""
        while True:
            if turn is not None:
                await turn.wait()
            await self._read_slots.acquire()
            if turn is None or turn.is_now:
                break
            self._read_slots.release()  # a request has come to wait for another read meanwhile
        try:
            yield
        finally:
            self._read_slots.release()

    def _take(self, reading: _Reading, result: BatchResult) -> None:
        """Count the bytes of a batch, and forget the blocks that it found bad."""
        reading.bytes_read += result.num_bytes
        reading.wanted.on_bytes(result.num_bytes)
        self._contents.counts.bytes_read += result.num_bytes
        self._contents.counts.read_s += result.busy_s
        for block, fault in result.faults.items():
            if not reading.mark_bad(block):
                continue
            if fault is Fault.CORRUPT:
                self._contents.counts.num_corrupt += 1
            else:
                self._contents.counts.num_read_errors += 1
            entry, key = reading.entries[block], reading.wanted.keys[block]
            if entry is not None and self._contents.index.get(key) is entry:
                self._contents.take_out(key)
            if fault is Fault.LOST and entry is not None:
                self._contents.lose(entry.record.segment)

    @contextmanager
    def pinned(self, numbers: Iterable[int]) -> Iterator[dict[int, Segment]]:
        """Keep these segments' files open and in place within the context."""
        segments = {number: self._contents.segments[number] for number in numbers}
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
