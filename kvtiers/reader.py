"""Reads staged blocks from disk or from peers into host memory, layer by layer, on the I/O thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtiers.blocks import Block, Origin, ReadJob, Stage, StageProgress, count_while
from kvtiers.host_tier import HostTier
from kvtiers.io.block_read import BlockRead
from kvtiers.io.io_thread import IoThread
from kvtiers.io.turns import ReadTurns, Turn
from kvtiers.policy.rates import Rate
from kvtiers.policy.restore import (
    PEER_HALF_LIFE_S,
    PRIOR_DISK_BYTES_PER_S,
    PRIOR_PEER_BYTES_PER_S,
    READ_BYTES,
)

log = logging.getLogger(__name__)

# Number of peers whose speeds are remembered. Chosen: many more than talk to one node at a time.
MAX_PEERS = 64
# A shorter read from a peer says nothing of its speed unless much has come. Chosen: many round trips on one continent.
MIN_SAMPLE_S = 0.1


class BlockSource(Protocol):
    """A source of blocks. A block that does not come is a bad block."""

    async def read(self, wanted: BlockRead, /) -> object:
        """Read blocks, layer by layer."""


FindPeer = Callable[[str], BlockSource | None]
"""Returns the peer at an address; None where it is not to be asked now."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of a store that all its readers share.

    Attributes:
        arrived: the store's lock, on which threads wait for layers.
        on_progress: called when layers have come, without the lock.
        on_fetched: called, under the lock, with blocks that a peer gave and this store's disk lacks.
    """

    host: HostTier
    io: IoThread
    arrived: threading.Condition
    on_progress: Callable[[], None]
    on_fetched: Callable[[list[Block]], None]
    clock: Callable[[], float]


class Reader:
    """The reads from one source, and their speed.

    Args:
        source: the source; None where no block will have to be read.
        origin: the kind of the source.
        around: the parts that all readers share.
    """

    def __init__(self, source: BlockSource | None, origin: Origin, around: Surroundings) -> None:
        self.source, self.origin = source, origin
        self.jobs: set[ReadJob] = set()
        self.turns = ReadTurns()
        self.bytes_done = 0
        self.num_hits = 0
        """Blocks that were read for stages."""
        self.rate = (
            Rate(PRIOR_DISK_BYTES_PER_S)
            if origin == "disk"
            else Rate(PRIOR_PEER_BYTES_PER_S, half_life_s=PEER_HALF_LIFE_S)
        )
        self._around, self._host = around, around.host
        self._arrived, self._on_progress = around.arrived, around.on_progress
        self._busy_since: tuple[float, int] = (0.0, 0)

    def start(self, job: ReadJob) -> None:
        """Begin a read. Call it without the lock."""
        self._around.io.start(self._read(job))

    # -- under the lock ----------------------------------------------------------------------------------------------

    def bytes_left(self, *, is_asked: bool) -> int:
        """Return the bytes still to come of all reads under way. is_asked: count only reads with a waiting request."""
        num_left = sum(job.num_left for job in self.jobs if job.num_asked or not is_asked)
        return num_left * self._host.shape.layer_bytes

    def join(self, job: ReadJob, stage: Stage) -> None:
        """Have a stage wait for a read. A read that gave way goes first from now on, if the stage's request has come."""
        job.num_users += 1
        if not stage.gives_way:
            job.num_asked += 1
            if job.num_asked == 1:
                self._around.io.loop.call_soon_threadsafe(self.turns.settle)

    def plan(self, stage: Stage, blocks: list[Block]) -> list[ReadJob]:
        """Give slots to the blocks of a stage that are to be read, and return one job for each number of layers that blocks have already."""
        num_layers = self._host.shape.num_layers
        by_layers: dict[int, list[Block]] = {}
        for block in blocks:
            by_layers.setdefault(len(block.slots), []).append(block)
        jobs = []
        for first_layer, unread in by_layers.items():
            self._host.deal(unread, first_layer)
            job = ReadJob(self, stage, unread, first_layer, num_layers)
            for block in unread:
                block.job = job
                block.pins += 1
            jobs.append(job)
        stage.num_readings += len(jobs)
        if jobs and not self.jobs:
            self._busy_since = (self._around.clock(), self.bytes_done)
        self.jobs.update(jobs)
        return jobs

    def check_invariants(self) -> None:
        """Raise AssertionError if a job's count is not the count of its blocks."""
        num_layers = self._host.shape.num_layers
        for job in self.jobs:
            assert job.num_left == sum(num_layers - block.ready for block in job.blocks if not block.is_bad)

    # -- on the I/O thread -------------------------------------------------------------------------------------------

    async def _read(self, job: ReadJob) -> None:
        source = self.source
        assert source is not None
        blocks = job.blocks

        def part(index: int, layer: int) -> memoryview:
            """Return the slot of one part."""
            return self._host.pool.slot(blocks[index].slots[layer])

        def on_layer(layer: int) -> None:
            """Note that a layer of all good blocks has come."""
            with self._arrived:
                self._note_layer(job, layer)
            self._on_progress()

        def on_bad(index: int) -> None:
            """Spoil a block that will not come."""
            block = blocks[index]
            with self._arrived:
                if block.is_bad:  # no stage waited for it any more
                    return
                job.num_left -= self._host.shape.num_layers - block.ready
                self._host.spoil(block)
                if self.origin == "peer" and block.ready == 0:
                    # Most are blocks that the peer never had: their memory is needed for computing them.
                    self._host.empty(block)
                self._arrived.notify_all()
            self._on_progress()

        def on_bytes(num_bytes: int) -> None:
            """Count bytes for the stage that began the read."""
            job.begun_by.bytes_read[self.origin] += num_bytes

        job.task = asyncio.current_task()
        try:
            if job.num_users:
                with Turn(self.turns, lambda: not job.num_asked) as turn:
                    keys, first = [block.key for block in blocks], job.first_layer
                    await source.read(BlockRead(keys, part, first, None, on_layer, on_bad, on_bytes, turn))
            else:
                job.is_stopped = True
        except Exception:
            log.exception("reading %d KV blocks failed", len(blocks))
        finally:
            self._end_read(job)

    def _is_wanted_again(self, job: ReadJob) -> bool:
        """Return whether a stage joined a stopped read before its end, so that the missing layers are read after all. Call it under the lock."""
        if not (job.is_stopped and job.num_users and job.num_left):
            return False
        job.is_stopped = False
        job.first_layer = min(block.ready for block in job.blocks if not block.is_bad)
        return True

    def _note_layer(self, job: ReadJob, layer: int) -> None:
        good = [block for block in job.blocks if not block.is_bad]
        for block in good:
            block.ready = layer + 1
        job.num_left -= len(good)
        self.bytes_done += len(good) * self._host.shape.layer_bytes
        if self.origin == "peer" and layer + 1 == self._host.shape.num_layers:
            self._around.on_fetched(good)
        self._arrived.notify_all()

    def _end_read(self, job: ReadJob) -> None:
        with self._arrived:
            if self._is_wanted_again(job):
                self.start(job)
                return
            for block in job.blocks:
                block.job = None
                if not block.is_bad and block.ready < self._host.shape.num_layers:
                    # The read stopped early: keep the layers that came if no stage holds the others and the disk has them.
                    if block.pins > 1 or block.ready == 0 or self.origin == "peer":
                        self._host.spoil(block)
                    else:
                        self._host.trim(block, block.ready)
                self._host.unpin(block)
            self.jobs.discard(job)
            job.begun_by.num_readings -= 1
            if not self.jobs:
                self._note_rate()
            self._arrived.notify_all()
        self._on_progress()

    def _note_rate(self) -> None:
        """Note the speed of the reads since the source was last idle, now that it is idle again."""
        now = self._around.clock()
        since, bytes_then = self._busy_since
        num_bytes, seconds = self.bytes_done - bytes_then, now - since
        if self.origin == "peer":
            # A few blocks measure latency and not throughput; but little in a long time is the throughput.
            if num_bytes < READ_BYTES and seconds < MIN_SAMPLE_S:
                return
            num_bytes = max(num_bytes, 1)
        self.rate.note(num_bytes, seconds, now)


class Readers:
    """The disk's reader, and one for each peer that was asked. Call all methods but `start` and `stop_unwanted` under the lock."""

    def __init__(self, disk: BlockSource | None, around: Surroundings) -> None:
        self.disk = Reader(disk, "disk", around)
        self.find_peer: FindPeer = lambda address: None
        self._around, self._host = around, around.host
        self._peers: dict[str, Reader] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no block is being read or waits to be read."""
        return not any(reader.jobs for reader in self._all())

    @property
    def is_stopping(self) -> bool:
        """Whether a read that no stage wants is still under way."""
        return any(job.num_users == 0 for reader in self._all() for job in reader.jobs)

    @property
    def is_asked(self) -> bool:
        """Whether a request waits for a read that is under way."""
        return any(job.num_asked for reader in self._all() for job in reader.jobs)

    def _all(self) -> list[Reader]:
        return [self.disk, *self._peers.values()]

    def peer(self, address: str) -> Reader | None:
        """Return the reader of the peer at this address; None where it is not to be asked."""
        source = self.find_peer(address) if address else None
        if source is None:
            return None
        reader = self._peers.pop(address, None) or Reader(source, "peer", self._around)
        reader.source = source
        self._peers[address] = reader  # asked last, so forgotten last
        if len(self._peers) > MAX_PEERS:
            idle = next((each for each, known in self._peers.items() if not known.jobs), None)
            if idle is not None and idle != address:
                del self._peers[idle]
        return reader

    def plan(self, stage: Stage, peer: Reader | None) -> list[ReadJob]:
        """Return jobs for the blocks that no reader is reading yet, and note where the stage found each of its blocks."""
        num_layers = self._host.shape.num_layers
        from_disk: list[Block] = []
        from_peer: list[Block] = []
        for block in stage.blocks:
            if len(block.slots) < num_layers:
                is_here = peer is None or self._host.is_held(block.key)
                (from_disk if is_here else from_peer).append(block)
        jobs = self.disk.plan(stage, from_disk) + (peer.plan(stage, from_peer) if peer is not None else [])
        self._note_origins(stage)
        return jobs

    def _note_origins(self, stage: Stage) -> None:
        num_layers = self._host.shape.num_layers
        for block in stage.blocks:
            reader = block.job.supply if block.job is not None else self.disk
            assert isinstance(reader, Reader)
            origin = reader.origin if block.ready < num_layers else "host"
            stage.origins.append(origin)
            if origin == "host":
                self._host.stats.num_hits += 1
            else:
                reader.num_hits += 1
        stage.jobs = {block.job for block in stage.blocks if block.job is not None}
        for job in stage.jobs:
            assert isinstance(job.supply, Reader)
            job.supply.join(job, stage)
        stage.bytes_before = {
            reader: reader.bytes_done for reader in (self.disk, *(j.supply for j in stage.jobs))
        }

    def start(self, jobs: list[ReadJob]) -> None:
        """Begin these reads."""
        for job in jobs:
            assert isinstance(job.supply, Reader)
            job.supply.start(job)

    def give_up_unwanted(self, jobs: set[ReadJob]) -> None:
        """Spoil blocks that only a peer has and no stage waits for, so that they can be computed and saved before the read has ended."""
        num_layers = self._host.shape.num_layers
        for job in jobs:
            if job.num_users == 0 and job in job.supply.jobs and job.supply is not self.disk:
                job.num_left = 0
                for block in job.blocks:
                    if not block.is_bad and block.ready < num_layers:
                        self._host.spoil(block)

    def stop_unwanted(self, jobs: set[ReadJob]) -> None:
        """Stop the reads that no stage waits for any more."""
        for job in jobs:
            if job.num_users == 0 and job in job.supply.jobs:
                self._around.io.loop.call_soon_threadsafe(job.stop_if_unwanted)

    def progress(self, stage: Stage) -> StageProgress:
        """Return how far a stage has come."""
        shape, now = self._host.shape, self._around.clock()
        num_blocks = count_while(not block.is_bad for block in stage.blocks)
        ready = [block.ready for block in stage.blocks[:num_blocks]]
        left: dict[Reader, int] = {}
        for block in stage.blocks[:num_blocks]:
            if block.ready < shape.num_layers:
                reader = block.job.supply if block.job is not None else self.disk
                assert isinstance(reader, Reader)
                left[reader] = left.get(reader, 0) + (shape.num_layers - block.ready) * shape.layer_bytes
        readers = list(left) or [self.disk]
        # Reads that no request waits for are not ahead of reads with a waiting request.
        ahead = {
            each: max(each.bytes_left(is_asked=not stage.gives_way) - left.get(each, 0), 0)
            for each in readers
        }
        # Two sources that read at once are taken to read one after the other: the cautious guess.
        rates = {each: each.rate.at(now) for each in readers}
        seconds = sum((left.get(each, 0) + ahead[each]) / rates[each] for each in readers)
        bytes_left, bytes_ahead = sum(left.values()), sum(ahead.values())
        done = (each.bytes_done - stage.bytes_before.get(each, each.bytes_done) for each in readers)
        return StageProgress(
            num_blocks=num_blocks,
            num_ready_blocks=count_while(r == shape.num_layers for r in ready),
            num_ready_layers=min(ready, default=shape.num_layers),
            waited_s=now - stage.started_s,
            disk_bytes_done=sum(done),
            disk_bytes_left=bytes_left,
            disk_bytes_ahead=bytes_ahead,
            disk_bytes_per_s=(bytes_left + bytes_ahead) / seconds if seconds else rates[readers[0]],
            is_from_peer=any(each.origin == "peer" for each in readers),
        )

    def num_queued(self) -> int:
        """Return the number of blocks that the disk reads or will read."""
        return sum(len(job.blocks) for job in self.disk.jobs)

    def check_invariants(self) -> None:
        """Raise AssertionError if a reader's counts are wrong."""
        for reader in self._all():
            reader.check_invariants()
