"""A disk tier in virtual time: it remembers keys; bytes take their time over one link each way, which those who read or write share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.emulated.core.clock import Clock
from bench.emulated.core.links import SharedLink
from bench.emulated.core.virtual_io import VirtualLoop
from kvtiers.io.block_read import BlockRead
from kvtiers.io.log_contents import DiskStats
from kvtiers.io.log_reader import MAX_BYTES_IN_FLIGHT
from kvtiers.io.records import Record
from kvtiers.keys import BlockKey, BlockShape


class EmulatedDisk:
    """The emulated counterpart of `kvtiers.io.disk_log.DiskLog`, which is never full. bytes_per_s: each way."""

    def __init__(self, clock: Clock, loop: VirtualLoop, bytes_per_s: float, shape: BlockShape) -> None:
        self.weights: dict[int, float] = {}
        """Of tenants, as the log keeps them; nobody leaves this disk."""
        self.reader, self.writer = SharedLink(clock, bytes_per_s), SharedLink(clock, bytes_per_s)
        self._loop, self._shape = loop, shape
        self._keys: set[BlockKey] = set()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    @property
    def stats(self) -> DiskStats:
        """The blocks that the disk has, and the bytes that it has moved."""
        num_bytes = len(self._keys) * self._shape.block_bytes
        return DiskStats(
            num_blocks=len(self._keys),
            num_segments=0,
            bytes=num_bytes,
            capacity_bytes=num_bytes,
            bytes_written=self.writer.bytes_moved,
            bytes_read=self.reader.bytes_moved,
        )

    async def append_all(self, records: Sequence[Record]) -> bool:
        """Write records over the link, one after the other."""
        for record in records:
            await self._move(self.writer, len(record.keys) * self._shape.block_bytes)
            self.keep(record.keys)
        return True

    def keep(self, keys: Sequence[BlockKey]) -> None:
        """Have these blocks at once, without moving bytes."""
        self._keys.update(keys)

    async def read(self, wanted: BlockRead) -> None:
        """Read one layer of all blocks after the other, as records lie on the disk, in portions, before each of which the read may give way."""
        assert wanted.turn is not None
        for layer in range(wanted.first_layer, self._shape.num_layers):
            num_left = len(wanted.keys) * self._shape.layer_bytes
            while num_left:
                await wanted.turn.wait()
                num_bytes = min(num_left, MAX_BYTES_IN_FLIGHT)
                wanted.on_bytes(num_bytes)
                await self._move(self.reader, num_bytes)
                num_left -= num_bytes
            wanted.on_layer(layer)

    async def _move(self, link: SharedLink, num_bytes: int) -> None:
        """Move bytes to the end, even if the waiting task has been cancelled by then."""
        moved: asyncio.Future[None] = self._loop.create_future()

        def done(now: float) -> None:
            """Let the waiting task go on."""
            if not moved.done() and not self._loop.is_closed():
                moved.set_result(None)
                self._loop.turn()

        link.transfer(num_bytes, done)
        await moved

    async def close(self) -> None:
        """Do nothing: there is no file."""
