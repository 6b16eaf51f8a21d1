"""Blocks that are lent to another node: read layer by layer from host memory and disk, without a trace in either.

A loan moves no block and counts as no use of one: a peer's request neither keeps a block here nor evicts one. Blocks on disk are read into two
buffers that belong to the loan.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtiers.blocks import Block
from kvtiers.io.block_read import BlockRead
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.host_pool import HostPool, runs_of
from kvtiers.keys import BlockKey

# Size of one chunk for a peer. Chosen: 0.1 ms of summing, and long beside the cost of a call.
CHUNK_BYTES = 1 << 20
# Size of one read from disk; a loan has two such buffers. Chosen: the size of the disk's reads in flight.
BAND_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """One layer of a loan's blocks from `first` on; each view holds one or several of them, back to back. Read it before asking for the next."""

    layer: int
    first: int
    num_blocks: int
    views: list[memoryview]


@dataclass(frozen=True, slots=True)
class _Band:
    """Some layers of some blocks, which are read together."""

    layers: range
    blocks: range


class Loan:
    """Leading blocks of a list of keys, until `release`.

    Args:
        keys: the keys of blocks that this store has.
        blocks: the blocks in host memory, pinned; None for a block on disk.
        pool: the host memory.
        disk: reads the other blocks.
        num_layers: layers of a block.
        release: unpins the blocks; called once.

    Attributes:
        num_blocks: falls where the disk cannot give a block after all.
    """

    def __init__(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[Block | None],
        pool: HostPool,
        disk: DiskLog | None,
        num_layers: int,
        release: Callable[[], None],
    ) -> None:
        self.num_blocks = len(blocks)
        self._keys, self._blocks = keys, blocks
        self._pool, self._disk, self._num_layers = pool, disk, num_layers
        self._release: Callable[[], None] | None = release
        self._unread = [index for index, block in enumerate(blocks) if block is None]

    def release(self) -> None:
        """Unpin the blocks; no chunk may be read any more. May be called from any thread."""
        release, self._release = self._release, None
        if release is not None:
            release()

    async def chunks(self, first_layer: int) -> AsyncIterator[Chunk]:
        """Yield all layers from `first_layer` on, each in the order of the blocks. Call it on the disk's loop, and close it."""
        bands = list(self._bands(first_layer))
        buffers = [bytearray(self._buffer_bytes(bands)) for _ in range(min(len(bands), 2))]
        reading: asyncio.Task[None] | None = None
        try:
            for number, band in enumerate(bands):
                await (reading or asyncio.create_task(self._read(band, buffers[number % 2])))
                # The next band is read while this one is sent.
                reading = (
                    asyncio.create_task(self._read(bands[number + 1], buffers[(number + 1) % 2]))
                    if number + 1 < len(bands)
                    else None
                )
                for chunk in self._chunks_of(band, buffers[number % 2]):
                    yield chunk
        finally:
            if reading is not None:
                reading.cancel()
                # The disk's threads write into its buffer until then.
                await asyncio.gather(reading, return_exceptions=True)

    def _bands(self, first_layer: int) -> Iterator[_Band]:
        size = self._pool.slot_bytes
        layer_bytes = len(self._unread) * size
        blocks = range(len(self._blocks))
        if layer_bytes <= BAND_BYTES:
            step = self._num_layers if not layer_bytes else max(BAND_BYTES // layer_bytes, 1)
            for layer in range(first_layer, self._num_layers, step):
                yield _Band(range(layer, min(layer + step, self._num_layers)), blocks)
            return
        step = max(BAND_BYTES // size, 1)
        for layer in range(first_layer, self._num_layers):
            for first in blocks[::step]:
                yield _Band(range(layer, layer + 1), blocks[first : first + step])

    def _buffer_bytes(self, bands: list[_Band]) -> int:
        size = self._pool.slot_bytes
        return max((len(self._in(band)) * len(band.layers) for band in bands), default=0) * size

    def _in(self, band: _Band) -> list[int]:
        """Return the blocks of a band that must be read."""
        return [index for index in self._unread if index in band.blocks]

    async def _read(self, band: _Band, buffer: bytearray) -> None:
        unread = self._in(band)
        wanted = [index for index in unread if index < self.num_blocks]
        if not wanted:
            return
        assert self._disk is not None
        view, size, num_places = memoryview(buffer), self._pool.slot_bytes, len(unread)

        def part(at: int, layer: int) -> memoryview:
            """Return the place of one part in the buffer."""
            start = ((layer - band.layers.start) * num_places + at) * size
            return view[start : start + size]

        def on_bad(at: int) -> None:
            """End the loan before a bad block: a conversation's later blocks are of no use without it."""
            self.num_blocks = min(self.num_blocks, wanted[at])

        keys = [self._keys[index] for index in wanted]
        layers = band.layers
        await self._disk.read(BlockRead(keys, part, layers.start, layers.stop, on_bad=on_bad), is_use=False)

    def _chunks_of(self, band: _Band, buffer: bytearray) -> Iterator[Chunk]:
        size = self._pool.slot_bytes
        most = max(CHUNK_BYTES // size, 1)
        place = {index: at for at, index in enumerate(self._in(band))}
        view = memoryview(buffer)
        for layer in band.layers:
            start = (layer - band.layers.start) * len(place)
            for first in band.blocks[::most]:
                end = min(first + most, band.blocks.stop, self.num_blocks)
                if first < end:
                    views = self._views(range(first, end), layer, place, view[start * size :])
                    yield Chunk(layer, first, end - first, views)

    def _views(
        self, blocks: range, layer: int, place: dict[int, int], buffer: memoryview
    ) -> list[memoryview]:
        """Return one layer of the blocks in as few views as possible: neighbours share a view."""
        size = self._pool.slot_bytes
        views: list[memoryview] = []
        for is_read, run in _alike(self._blocks, blocks):
            numbers = (
                [place[index] for index in run] if is_read else [self._slot(index, layer) for index in run]
            )
            memory = buffer if is_read else self._pool.memory
            views += [memory[at * size : (at + length) * size] for at, length in runs_of(numbers)]
        return views

    def _slot(self, index: int, layer: int) -> int:
        block = self._blocks[index]
        assert block is not None
        return block.slots[layer]


def _alike(blocks: Sequence[Block | None], indices: range) -> Iterator[tuple[bool, range]]:
    """Yield stretches of blocks that are all read from disk, or all in memory."""
    start = indices.start
    for index in indices:
        if (blocks[index] is None) is not (blocks[start] is None):
            yield blocks[start] is None, range(start, index)
            start = index
    if start < indices.stop:
        yield blocks[start] is None, range(start, indices.stop)
