"""Writes finished blocks to disk beside the engine's steps, the blocks of a session together."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable

from kvtiers.blocks import Block, Group
from kvtiers.host_tier import HostTier
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.io_thread import IoThread
from kvtiers.io.records import Record, owner_tag

log = logging.getLogger(__name__)

# Finished blocks wait this long for their neighbours, so that decoding writes records of several blocks. A killed server loses at most
# this much KV per session, and no text. Chosen.
WRITE_DELAY_S = 0.25
RECORD_BYTES = 16 << 20  # chosen: sequential enough for any disk, soon enough on it
# The share of host memory that blocks may take which wait for a slow disk; the rest is for blocks that are read. Chosen.
UNWRITTEN_SHARE = 0.5


class WriteBehind:
    """The queue of blocks to be written. lock: the store's."""

    def __init__(self, host: HostTier, disk: DiskLog, io: IoThread, lock: threading.Lock) -> None:
        self.num_unwritten = 0
        self.num_skipped = 0
        """Blocks that were not queued, because too many waited already."""
        self._host, self._disk, self._io, self._lock = host, disk, io, lock
        self._unwritten: dict[Group, list[tuple[float, Block]]] = {}
        self._limit = int(host.pool.num_slots * UNWRITTEN_SHARE) // host.shape.num_layers
        self._wakes = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task = io.start(self._write_on())

    def close(self) -> None:
        """Stop writing; blocks that still wait are not written."""
        self._task.cancel()

    def wake(self) -> None:
        """Have the writer look for added blocks. May be called from any thread."""
        self._io.loop.call_soon_threadsafe(self._wakes.set)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def add(self, block: Block, now: float) -> None:
        """Queue a block, unless too many wait."""
        if self.num_unwritten >= self._limit:
            self.num_skipped += 1
            return
        block.is_unwritten = True
        self.num_unwritten += 1
        self._unwritten.setdefault(block.group, []).append((now, block))

    def add_all(self, blocks: list[Block], now: float) -> None:
        """Queue blocks, and wake the writer."""
        for block in blocks:
            self.add(block, now)
        if blocks:
            self.wake()

    def lag_s(self, now: float) -> float:
        """Return the longest wait of a queued block, in seconds."""
        return now - min((queue[0][0] for queue in self._unwritten.values() if queue), default=now)

    def drop(self, tenant: str) -> None:
        """Take a tenant's blocks out of the queue; blocks being written right now are no longer in it."""
        for group, queue in list(self._unwritten.items()):
            # A block may have come to another session since.
            left = [entry for entry in queue if entry[1].group.tenant != tenant]
            for _, block in queue:
                if block.group.tenant == tenant:
                    block.is_unwritten = False
                    self.num_unwritten -= 1
            self._unwritten[group] = left
            if not left:
                del self._unwritten[group]

    # -- on the I/O thread -------------------------------------------------------------------------------------------

    async def _write_on(self) -> None:
        while True:
            await self._wakes.wait()
            await asyncio.sleep(WRITE_DELAY_S)
            self._wakes.clear()
            await self.write_all()

    async def write_all(self) -> None:
        """Write all queued blocks to disk."""
        async with self._writing:
            while records := self._next_unwritten():
                await self._write(records)

    async def erase(self, tenant: str) -> int:
        """Erase a tenant's blocks on disk, once the present write has ended, and return their number. Raises OSError."""
        async with self._writing:
            return await self._disk.erase(owner_tag(tenant))

    def _next_unwritten(self) -> list[list[Block]]:
        """Return the blocks of the next records, each of one session, so that reading it is sequential.

        The sessions that waited longest are first, RECORD_BYTES in all. The blocks stay pinned until they are written.
        """
        num_left = max(RECORD_BYTES // self._host.shape.block_bytes, 1)
        records = []
        with self._lock:
            while self._unwritten and num_left:
                group = next(iter(self._unwritten))
                queue = self._unwritten.pop(group)
                if len(queue) > num_left:
                    self._unwritten[group] = queue[num_left:]
                blocks = [block for _, block in queue[:num_left]]
                num_left -= len(blocks)
                for block in blocks:
                    block.pins += 1
                records.append(blocks)
        return records

    async def _write(self, records: list[list[Block]]) -> None:
        try:
            await self._disk.append_all(
                [
                    Record(
                        [block.key for block in blocks],
                        self._parts_of(blocks),
                        owner_tag(blocks[0].group.tenant),
                    )
                    for blocks in records
                ]
            )
        except Exception:
            log.exception("writing %d KV blocks failed", sum(map(len, records)))
        finally:
            with self._lock:
                for block in itertools.chain.from_iterable(records):
                    block.is_unwritten = False
                    self.num_unwritten -= 1
                    self._host.unpin(block)

    def _parts_of(self, blocks: list[Block]) -> Callable[[int, int], memoryview]:
        return lambda index, layer: self._host.pool.slot(blocks[index].slots[layer])
