"""The part of a read that runs in worker threads: reads blocks of open segments into their places and verifies them."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from kvtiers.io.files import Files, fill_up_to, read_up_to
from kvtiers.io.read_plan import ReadOp, RecordPlace
from kvtiers.io.records import Part, RecordHead, checksum, decode_head, decode_keys, decode_sums
from kvtiers.io.segment import Segment
from kvtiers.keys import BlockKey, BlockShape


class Fault(enum.Enum):
    """Why a block cannot be read."""

    CORRUPT = "corrupt"  # Its bytes differ from the written ones, or end too early.
    UNREADABLE = "unreadable"  # The disk gave an error.
    LOST = "lost"  # Its segment has been removed.


class BatchResult(Struct):
    """The outcome of a batch. faults: by the caller's block. busy_s: the time that a thread was busy."""

    faults: dict[int, Fault]
    num_bytes: int = 0
    busy_s: float = 0.0


class _Prelude:
    """A record's keys and checksums, read by the first thread that needs them."""

    def __init__(self, place: RecordPlace, shape: BlockShape) -> None:
        self._place = place
        self.head = RecordHead(place.num_blocks, shape, place.owner)
        self.keys: list[BlockKey] = []
        self.sums: tuple[int, ...] = ()
        self._is_loaded = False
        self._lock = threading.Lock()

    def load(self, files: Files, fd: int) -> bool:
        """Return whether the record's start is whole. Raises OSError, and then reads again at the next call."""
        with self._lock:
            if not self._is_loaded:
                data = read_up_to(files, fd, self.head.prelude_bytes, self._place.offset)
                if len(data) == self.head.prelude_bytes and decode_head(data) == self.head:
                    self.keys = decode_keys(self.head, data) or []
                    self.sums = decode_sums(self.head, data)
                self._is_loaded = True
            return bool(self.keys)


class BlockReader:
    """The state of one `DiskLog.read`. `read_batch` may run in several threads at once, each with different batches."""

    def __init__(
        self,
        files: Files,
        shape: BlockShape,
        segments: Mapping[int, Segment],
        records: Iterable[RecordPlace],
        keys: Sequence[BlockKey],
        part: Part,
        now: Callable[[], float],
    ) -> None:
        """Take the caller's `keys` and `part`, the pinned segments by number, and all records that the batches name."""
        self._files = files
        self._shape = shape
        self._segments = segments
        self._preludes = {record: _Prelude(record, shape) for record in records}
        self._keys = keys
        self._part = part
        self._now = now
        self.bad: set[int] = set()  # The event loop adds to it; its blocks are not read further.

    def read_batch(self, ops: Iterable[ReadOp], result: BatchResult) -> None:
        """Read and verify into an empty result. Errors of the disk are faults in the result, and are never raised."""
        started_s = self._now()
        for op in ops:
            if not self.bad.issuperset(op.blocks):
                self._read_op(op, result)
        result.busy_s = self._now() - started_s

    def _read_op(self, op: ReadOp, result: BatchResult) -> None:
        prelude = self._preludes[op.record]
        try:
            fd = self._segments[op.record.segment].fd(self._files)
            is_whole = prelude.load(self._files, fd)
        except OSError as error:
            fault = Fault.LOST if isinstance(error, FileNotFoundError) else Fault.UNREADABLE
            result.faults.update(dict.fromkeys(op.blocks, fault))
            return
        if not is_whole:
            result.faults.update(dict.fromkeys(op.blocks, Fault.CORRUPT))
            return
        for block, key in zip(op.blocks, prelude.keys[op.first_position :], strict=False):
            if self._keys[block] != key:
                result.faults[block] = Fault.CORRUPT
        if op.is_whole_width:
            self._read_range(op, op.layers, prelude, fd, result)
        else:
            for layer in op.layers:
                self._read_range(op, range(layer, layer + 1), prelude, fd, result)

    def _read_range(self, op: ReadOp, layers: range, prelude: _Prelude, fd: int, result: BatchResult) -> None:
        """Read some of the op's layers that are one range of the file."""
        part = self._part
        views = [part(block, layer) for layer in layers for block in op.blocks]
        if len(views[0]) != self._shape.layer_bytes:
            raise ValueError(f"part() gave {len(views[0])} bytes, a layer has {self._shape.layer_bytes}")
        offset = op.record.offset + prelude.head.part_offset(layers[0], op.first_position)
        try:
            got = fill_up_to(self._files, fd, views, offset)
        except OSError:
            self._read_singly(op, layers, views, offset, prelude, fd, result)
            return
        result.num_bytes += got
        # The checksums also detect a read that was cut short. The checksums of this range are neighbours in the table.
        first_sum = layers[0] * prelude.head.num_blocks + op.first_position
        wanted = prelude.sums[first_sum : first_sum + len(views)]
        found = tuple(map(checksum, views))
        if found != wanted or got < len(views) * self._shape.layer_bytes:
            num_whole = got // self._shape.layer_bytes
            blocks = op.blocks * len(layers)
            for i, block in enumerate(blocks):
                if i >= num_whole or found[i] != wanted[i]:
                    result.faults.setdefault(block, Fault.CORRUPT)

    def _read_singly(
        self,
        op: ReadOp,
        layers: range,
        views: list[memoryview],
        offset: int,
        prelude: _Prelude,
        fd: int,
        result: BatchResult,
    ) -> None:
        """Read one part at a time after an error in a range, so that a bad sector costs one block. A block is given up at its first error."""
        size = self._shape.layer_bytes
        first_sum = layers[0] * prelude.head.num_blocks + op.first_position
        for i, (block, view) in enumerate(zip(op.blocks * len(layers), views, strict=True)):
            if block in result.faults or block in self.bad:
                continue
            try:
                got = fill_up_to(self._files, fd, [view], offset + i * size)
            except OSError:
                result.faults[block] = Fault.UNREADABLE
                continue
            result.num_bytes += got
            if got < size or checksum(view) != prelude.sums[first_sum + i]:
                result.faults[block] = Fault.CORRUPT
