"""What a disk log holds: where every block is, whose it is, and what was counted. No files are touched here."""

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
    """Since `open`. read_s, write_s: how long threads were busy, so they may outrun the clock.

    num_corrupt: blocks whose bytes were wrong. num_torn: segments with something that is no record behind their last one, as a killed process
    leaves them. num_foreign: segments of another namespace or format. num_refused: appends given up because of their size, because all segments
    were being read, or soon after a write error; num_unwritten: their blocks. num_evicted: blocks dropped to make room.
    """

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


class DiskStats(Counts, kw_only=True):
    """A copy of the counts, and how it stands now. bytes: of all segment files.

    capacity_bytes: what they may take, less than was asked for where the disk has no room for that.
    """

    num_blocks: int
    num_segments: int
    bytes: int
    capacity_bytes: int


class BlockLocation(Struct, gc=False):
    """Where a block is. last_read_s: since it was written or carried forward, else NEVER."""

    record: RecordPlace
    position: int
    last_read_s: float = NEVER


class LogIndex:
    """All changes of the index are `put` and `take_out`, so that what each owner holds is known. on_dropped: called with keys that are lost."""

    def __init__(
        self, shape: BlockShape, on_dropped: Callable[[list[BlockKey]], None], now: Callable[[], float]
    ) -> None:
        self.shape = shape
        self.index: dict[BlockKey, BlockLocation] = {}
        self.held: Counter[int] = Counter()
        """Blocks of the index by owner."""
        self.used_s: dict[int, float] = {}
        """When each owner last wrote or read."""
        self.weights: dict[int, float] = {}
        self.segments: dict[int, Segment] = {}
        """Oldest first."""
        self.num_bytes = 0
        """Of all segment files."""
        self.counts = Counts()
        self._on_dropped = on_dropped
        self._now = now

    def clear(self) -> None:
        self.index, self.held = {}, Counter()

    def stats(self, capacity_bytes: int) -> DiskStats:
        return DiskStats(
            num_blocks=len(self.index),
            num_segments=len(self.segments),
            bytes=self.num_bytes,
            capacity_bytes=capacity_bytes,
            **asdict(self.counts),
        )

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Take blocks out of the index. Their bytes stay until their segment goes, so a store opened again has them again."""
        for key in keys:
            self.take_out(key)

    def lose(self, number: int) -> None:
        """A segment's file is gone: so are its blocks. What it took of the capacity is written off when its turn to go comes."""
        segment = self.segments.get(number)
        if segment is not None:
            self.drop(self.live(segment))
            segment.records.clear()

    def publish(self, keys: Sequence[BlockKey], record: RecordPlace) -> None:
        """Makes blocks that were written found: the record's blocks are these keys, in this order."""
        self.used_s[record.owner] = self._now()
        for position, key in enumerate(keys):
            self.put(key, BlockLocation(record, position))

    def put(self, key: BlockKey, entry: BlockLocation) -> None:
        old = self.index.get(key)
        self.index[key] = entry
        self._count(entry.record, 1)
        if old is not None:
            self._count(old.record, -1)

    def take_out(self, key: BlockKey) -> None:
        """Lets a block be found no more. An unknown key is no error."""
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
        """The blocks for which this segment is the place to read."""
        return [key for record, keys in segment.records for key in keys if self.is_at(key, record)]

    def is_at(self, key: BlockKey, record: RecordPlace) -> bool:
        """Whether the block is found in this very record."""
        entry = self.index.get(key)
        return entry is not None and entry.record == record

    def drop(self, keys: list[BlockKey]) -> None:
        """Forget blocks and tell the owner."""
        self.forget(keys)
        if keys:
            self._on_dropped(keys)

    @property
    def single_bytes(self) -> int:
        """What a block takes at most: those of one record share its header."""
        return RecordHead(1, self.shape).record_bytes

    def record_bytes(self, keys: Sequence[BlockKey]) -> int:
        """Bytes of a record with these blocks."""
        return RecordHead(len(keys), self.shape).record_bytes
