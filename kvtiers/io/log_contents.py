"""The index of a disk log: the place and owner of every block, and counts. It touches no file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict

from kvtiers.io.read_plan import RecordPlace
from kvtiers.io.records import RecordHead
from kvtiers.io.segment import Segment
from kvtiers.keys import BlockKey, BlockShape

NEVER: Final = -math.inf


class Counts(Struct, kw_only=True):
    """Counts since `open`.

    Attributes:
        num_corrupt: blocks whose bytes were wrong.
        num_torn: segments whose last record is incomplete, as a killed process leaves them.
        num_refused: appends given up because of their size, because all segments were being read, or soon after a write error.
        num_unwritten: the blocks of refused appends.
        num_evicted: blocks dropped to make room.
        read_s, write_s: busy time of threads, which may outrun the clock.
    """

    bytes_written: int = 0
    bytes_read: int = 0
    num_corrupt: int = 0
    num_torn: int = 0
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_refused: int = 0
    num_unwritten: int = 0
    num_evicted: int = 0
    num_carried: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


class DiskStats(Counts, kw_only=True):
    """A copy of the counts, and the sizes of now. bytes: size of all segment files.

    capacity_bytes: the most that they may take, less than configured where the disk lacks room.
    """

    num_blocks: int
    num_segments: int
    bytes: int
    capacity_bytes: int


class BlockLocation(Struct, gc=False):
    """The place of a block. last_read_s: its last read since it was written or carried forward; NEVER without one."""

    record: RecordPlace
    position: int
    last_read_s: float = NEVER


class LogIndex:
    """The blocks by key. Only `put` and `take_out` change the index, so that the blocks of each owner are counted.

    on_dropped: called with keys that are lost.
    """

    def __init__(
        self, shape: BlockShape, on_dropped: Callable[[list[BlockKey]], None], now: Callable[[], float]
    ) -> None:
        self.shape = shape
        self.index: dict[BlockKey, BlockLocation] = {}
        self.held: Counter[int] = Counter()
        """Number of blocks by owner."""
        self.used_s: dict[int, float] = {}
        """When each owner last wrote or read."""
        self.weights: dict[int, float] = {}
        self.segments: dict[int, Segment] = {}
        """Oldest first."""
        self.num_bytes = 0
        """Size of all segment files."""
        self.counts = Counts()
        self._on_dropped = on_dropped
        self._now = now

    def clear(self) -> None:
        """Forget all blocks."""
        self.index, self.held = {}, Counter()

    def stats(self, capacity_bytes: int) -> DiskStats:
        """Return the counts and sizes of now."""
        return DiskStats(
            num_blocks=len(self.index),
            num_segments=len(self.segments),
            bytes=self.num_bytes,
            capacity_bytes=capacity_bytes,
            **asdict(self.counts),
        )

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Take blocks out of the index. Their bytes stay until their segment is removed, so a reopened store has them again."""
        for key in keys:
            self.take_out(key)

    def lose(self, number: int) -> None:
        """Note that a segment's file was removed, and drop its blocks. Its bytes count until its turn of eviction comes."""
        segment = self.segments.get(number)
        if segment is not None:
            self.drop(self.live(segment))
            segment.records.clear()

    def publish(self, keys: Sequence[BlockKey], record: RecordPlace) -> None:
        """Add the blocks of a written record, whose keys these are, in order."""
        self.used_s[record.owner] = self._now()
        for position, key in enumerate(keys):
            self.put(key, BlockLocation(record, position))

    def put(self, key: BlockKey, entry: BlockLocation) -> None:
        """Set the place of a block."""
        old = self.index.get(key)
        self.index[key] = entry
        self._count(entry.record, 1)
        if old is not None:
            self._count(old.record, -1)

    def take_out(self, key: BlockKey) -> None:
        """Remove a block. An unknown key is ignored."""
        entry = self.index.pop(key, None)
        if entry is not None:
            self._count(entry.record, -1)

    def _count(self, record: RecordPlace, num_blocks: int) -> None:
        for counter in (self.held, self._live_in(record.segment)):
            counter[record.owner] += num_blocks
            if not counter[record.owner]:
                del counter[record.owner]

    def _live_in(self, number: int) -> Counter[int]:
        segment = self.segments.get(number)
        return segment.live if segment is not None else Counter()

    def live(self, segment: Segment) -> list[BlockKey]:
        """Return the blocks that are read from this segment."""
        return [key for record, keys in segment.records for key in keys if self.is_at(key, record)]

    def is_at(self, key: BlockKey, record: RecordPlace) -> bool:
        """Return whether the block is read from this record."""
        entry = self.index.get(key)
        return entry is not None and entry.record == record

    def drop(self, keys: list[BlockKey]) -> None:
        """Forget blocks and tell the owner."""
        self.forget(keys)
        if keys:
            self._on_dropped(keys)

    @property
    def single_bytes(self) -> int:
        """The most bytes that a block takes; blocks of one record share its header."""
        return RecordHead(1, self.shape).record_bytes

    def record_bytes(self, keys: Sequence[BlockKey]) -> int:
        """Return the size of a record with these blocks."""
        return RecordHead(len(keys), self.shape).record_bytes
