"""The order and the portions in which blocks are read from disk. Pure.

First layers first over all records, because an engine starts on layer 0 while the rest is under way; within a layer in the order of the
disk. A record's layers are taken in bands, so that one read moves about `max_read_bytes`: much more delays the layers before it, much less
pays for the call. Measured: 1, 2 and 4 MiB give the same throughput within noise; the first layer comes the sooner the smaller they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from kvtiers.keys import BlockShape

IOV_MAX = 1024  # Linux: how many buffers one preadv takes.


class RecordPlace(Struct, frozen=True, order=True, gc=False):
    """The place of a record: its segment's number, its offset there in bytes, its number of blocks, and its owner's tag."""

    segment: int
    offset: int
    num_blocks: int
    owner: int = 0


class BlockPlace(Struct, frozen=True, gc=False):
    """The place of a block in a record."""

    record: RecordPlace
    position: int


class ReadOp(Struct, frozen=True, gc=False):
    """Read `num_layers` layers, from `first_layer`, of neighbouring blocks of one record.

    The blocks lie at `first_position`, + 1, ... in the record; `blocks` has the caller's numbers of them, in that order. The bytes of one layer are
    one range of the file; the bytes of all layers are one range if the op takes all blocks of the record (`is_whole_width`).
    """

    record: RecordPlace
    first_position: int
    blocks: tuple[int, ...]
    first_layer: int
    num_layers: int

    @property
    def is_whole_width(self) -> bool:
        """Whether it takes all blocks of the record."""
        return len(self.blocks) == self.record.num_blocks

    @property
    def layers(self) -> range:
        """The layers that it reads."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def num_bytes(self, shape: BlockShape) -> int:
        """Return the bytes that it reads."""
        return len(self.blocks) * self.num_layers * shape.layer_bytes


def plan_reads(
    places: Sequence[BlockPlace | None],
    shape: BlockShape,
    max_read_bytes: int,
    first_layer: int = 0,
    end_layer: int | None = None,
) -> list[list[ReadOp]]:
    """Return batches, each for one worker, in the order to start them, that read every part of the layers and blocks exactly once.

    A batch has one op, or several small ones that are not worth a hand-over to a thread each.

    Args:
        places: the place of each of the caller's blocks; None for a block to leave out.
        shape: the shape of a block.
        max_read_bytes: the most bytes of a batch, unless a single part is larger.
        first_layer: the first layer to read.
        end_layer: the layer behind the last one; None: to the end.
    """
    ops = [
        op
        for run in _runs(places, shape, max_read_bytes)
        for op in _bands(*run, shape, max_read_bytes, range(first_layer, end_layer or shape.num_layers))
    ]
    ops.sort(key=lambda op: (op.first_layer, op.record, op.first_position))
    return list(_batches(ops, shape, max_read_bytes))


def _runs(
    places: Sequence[BlockPlace | None], shape: BlockShape, max_read_bytes: int
) -> Iterator[tuple[RecordPlace, int, tuple[int, ...]]]:
    """Yield (record, first position, the caller's blocks) of neighbouring blocks, in equal portions whose single layer fits one read."""
    wanted: dict[RecordPlace, list[tuple[int, int]]] = {}
    for block, place in enumerate(places):
        if place is not None:
            wanted.setdefault(place.record, []).append((place.position, block))
    longest = max(1, min(max_read_bytes // shape.layer_bytes, IOV_MAX))
    for record, found in wanted.items():
        for run in _neighbours(sorted(found)):
            num_portions = -(-len(run) // longest)
            step = -(-len(run) // num_portions)
            for start in range(0, len(run), step):
                portion = run[start : start + step]
                yield record, portion[0][0], tuple(block for _, block in portion)


def _neighbours(found: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut where the position does not grow by exactly one; a block that is wanted twice is read twice."""
    run: list[tuple[int, int]] = []
    for position, block in found:
        if run and position != run[-1][0] + 1:
            yield run
            run = []
        run.append((position, block))
    if run:
        yield run


def _bands(
    record: RecordPlace,
    first_position: int,
    blocks: tuple[int, ...],
    shape: BlockShape,
    max_read_bytes: int,
    layers: range,
) -> Iterator[ReadOp]:
    """Cut the layers into bands; a small record is one band, read whole in the first pass."""
    band = max_read_bytes // (len(blocks) * shape.layer_bytes)
    step = max(1, min(band, IOV_MAX // len(blocks)))
    for first in layers[::step]:
        yield ReadOp(record, first_position, blocks, first, min(step, layers.stop - first))


def _batches(ops: Iterable[ReadOp], shape: BlockShape, max_read_bytes: int) -> Iterator[list[ReadOp]]:
    batch: list[ReadOp] = []
    batch_bytes = 0
    for op in ops:
        num_bytes = op.num_bytes(shape)
        if batch and batch_bytes + num_bytes > max_read_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(op)
        batch_bytes += num_bytes
    if batch:
        yield batch
