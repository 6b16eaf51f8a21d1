"""Reads staged blocks from disk into host memory, layer by layer, on the I/O thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from kvtiers.blocks import Block, ReadJob, Stage
from kvtiers.host_tier import HostTier
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.io_thread import IoThread
from kvtiers.policy.rates import Rate
from kvtiers.policy.restore import PRIOR_DISK_BYTES_PER_S

log = logging.getLogger(__name__)


class Reader:
    """What is being read, and how fast that goes.

    Args:
        disk: None: nothing will have to be read.
        arrived: the store's lock, and who waits there for layers.
        on_progress: called when layers have come, without the lock.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskLog | None,
        io: IoThread,
        arrived: threading.Condition,
        on_progress: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.jobs: set[ReadJob] = set()
        self.bytes_done = 0
        self.num_hits = 0
        """Blocks that stages had read."""
        self.rate = Rate(PRIOR_DISK_BYTES_PER_S)
        self._host, self._disk, self._io = host, disk, io
        self._arrived, self._on_progress, self._clock = arrived, on_progress, clock
        self._busy_since: tuple[float, int] = (0.0, 0)

    def start(self, jobs: list[ReadJob]) -> None:
        """Without the lock."""
        for job in jobs:
            self._io.start(self._read(job))

    def stop_unwanted(self, jobs: set[ReadJob]) -> None:
        """What nobody waits for any more is not read further. Without the lock."""
        for job in jobs:
            if job.num_users == 0 and job in self.jobs:
                self._io.loop.call_soon_threadsafe(job.stop_if_unwanted)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def bytes_left(self) -> int:
        """Of all that is being read."""
        return sum(job.num_left for job in self.jobs) * self._host.shape.layer_bytes

    def plan(self, stage: Stage) -> list[ReadJob]:
        """One job per number of layers that blocks have already; blocks under way are left to their jobs."""
        num_layers = self._host.shape.num_layers
        unread: dict[int, list[Block]] = {}
        for block in stage.blocks:
            stage.is_from_disk.append(block.ready < num_layers)
            if len(block.slots) < num_layers:
                unread.setdefault(len(block.slots), []).append(block)
        jobs = []
        for first_layer, blocks in unread.items():
            self._host.deal(blocks, first_layer)
            job = ReadJob(blocks, first_layer, num_layers)
            for block in blocks:
                block.job = job
                block.pins += 1
            jobs.append(job)
        if jobs and not self.jobs:
            self._busy_since = (self._clock(), self.bytes_done)
        self.jobs.update(jobs)
        stage.jobs = {block.job for block in stage.blocks if block.job is not None}
        for job in stage.jobs:
            job.num_users += 1
        num_read = sum(stage.is_from_disk)
        self.num_hits += num_read
        self._host.stats.num_hits += len(stage.blocks) - num_read
        return jobs

    def check_invariants(self) -> None:
        """Raises AssertionError if a job's count is not that of its blocks."""
        num_layers = self._host.shape.num_layers
        for job in self.jobs:
            assert job.num_left == sum(num_layers - block.ready for block in job.blocks if not block.is_bad)

    # -- on the I/O thread -------------------------------------------------------------------------------------------

    async def _read(self, job: ReadJob) -> None:
        disk = self._disk
        assert disk is not None
        blocks = job.blocks

        def part(index: int, layer: int) -> memoryview:
            return self._host.pool.slot(blocks[index].slots[layer])

        def on_layer(layer: int) -> None:
            with self._arrived:
                num_good = 0
                for block in blocks:
                    if not block.is_bad:
                        block.ready = layer + 1
                        num_good += 1
                job.num_left -= num_good
                self.bytes_done += num_good * self._host.shape.layer_bytes
                self._arrived.notify_all()
            self._on_progress()

        def on_bad(index: int) -> None:
            with self._arrived:
                if not blocks[index].is_bad:
                    job.num_left -= self._host.shape.num_layers - blocks[index].ready
                self._host.spoil(blocks[index])
                self._arrived.notify_all()
            self._on_progress()

        job.task = asyncio.current_task()
        try:
            if job.num_users:
                keys = [block.key for block in blocks]
                await disk.read(keys, part, first_layer=job.first_layer, on_layer=on_layer, on_bad=on_bad)
        except Exception:
            log.exception("reading %d KV blocks failed", len(blocks))
        finally:
            self._end_read(job)

    def _end_read(self, job: ReadJob) -> None:
        with self._arrived:
            for block in job.blocks:
                block.job = None
                if not block.is_bad and block.ready < self._host.shape.num_layers:
                    # Unread to the end (nobody wanted it any more, or the log is closed): keep what came, if nobody holds the rest.
                    if block.pins > 1 or block.ready == 0:
                        self._host.spoil(block)
                    else:
                        self._host.trim(block, block.ready)
                self._host.unpin(block)
            self.jobs.discard(job)
            if not self.jobs:
                now = self._clock()
                since, bytes_then = self._busy_since
                self.rate.note(self.bytes_done - bytes_then, now - since, now)
            self._arrived.notify_all()
        self._on_progress()
