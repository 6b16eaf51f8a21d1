"""KV blocks by key over host memory and disk: the connector saves into them, stages from them and asks for them.

Write-through: a finished block lands in host memory at once and on disk soon, so the device's copy may be overwritten at any moment. A block
that is wanted while on disk is *staged*: read into host memory by the I/O thread, layer by layer, while the engine goes on stepping.

One lock guards the host tier; it is held for microseconds, never over I/O or a copy. Each method says which thread it is for.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence

from kvtiers.blocks import Block, Save, Stage, StageProgress, count_while
from kvtiers.host_tier import HostTier
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.io_thread import IoThread
from kvtiers.io.records import owner_tag
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.lending import Loan
from kvtiers.policy.eviction import EvictionPolicy
from kvtiers.reader import FindPeer, Readers, Surroundings
from kvtiers.stats import DiskTierStats, TierStats
from kvtiers.write_behind import WriteBehind

# Seconds for writing the queued blocks at the end: less than a process has to close all. Seconds for closing the log, however slow its disk is.
# Chosen.
FLUSH_TIMEOUT_S, CLOSE_TIMEOUT_S = 6.0, 10.0
# Blocks that are looked up for a loan under one hold of the lock. Chosen: 0.2 ms.
LEND_AT_ONCE = 512
# The figures that the log itself counts.
_DISK_FIGURES = (
    *("bytes", "capacity_bytes", "num_blocks", "num_evicted", "num_corrupt"),
    *("num_read_errors", "num_write_errors", "bytes_written", "bytes_read"),
)


class KvStore:
    """The host and disk tiers of one engine. A `group` is the KV of one session, by the name that its `tenant` gave it.

    Args:
        shape: the shape of every block.
        host_bytes: memory of the host tier.
        io: the thread that reads and writes the disk; the store does not close it.
        disk: an open log of `io`'s loop, or None for no disk tier. The store closes it.
        eviction: chooses which sessions' blocks leave host memory.
        clock: returns the time in seconds.
        is_shared: whether other processes of this user can map the memory of the host tier.
    """

    def __init__(
        self,
        shape: BlockShape,
        host_bytes: int,
        io: IoThread,
        disk: DiskLog | None,
        eviction: EvictionPolicy,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_shared: bool = False,
    ) -> None:
        self.shape = shape
        self.on_progress: Callable[[], None] = lambda: None
        """Called on the I/O thread when staged layers have come, to wake the threads that wait for them."""
        self.problem: str | None = None
        self._io = io
        self._disk = disk
        self._clock = clock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        is_on_disk = disk.__contains__ if disk is not None else None
        self._host = HostTier(shape, host_bytes, eviction, is_on_disk, clock, is_shared=is_shared)
        self.pool = self._host.pool
        self._yielding: list[Stage] = []  # stages that give way, the latest last
        self._readers = Readers(
            disk,
            Surroundings(
                self._host, io, self._arrived, lambda: self.on_progress(), self._keep_fetched, clock
            ),
        )
        self._writer = WriteBehind(self._host, disk, io, self._lock) if disk is not None else None

    @property
    def num_host_blocks(self) -> int:
        """The number of blocks that host memory has room for."""
        return self.pool.num_slots // self.shape.num_layers

    # -- saving (engine thread) --------------------------------------------------------------------------------------

    def begin_save(
        self, group: str, keys: Sequence[BlockKey], *, tenant: str = "", again: bool = False
    ) -> Save:
        """Reserve slots for the blocks that no tier holds yet.

        Where memory is short and no block may leave, only the first ones get slots: a lost save is only a later miss.

        Args:
            group: the session.
            keys: its blocks, in the order of the conversation.
            tenant: the session's tenant.
            again: whether the blocks are not new: saving them is no use of the session, and they come before its blocks already held.
        """
        num_layers = self.shape.num_layers
        with self._lock:
            positions = [index for index, key in enumerate(keys) if not self._host.is_held(key)]
            if again and self._host.is_over((tenant, group)):
                positions = []
            self._make_room(len(positions) * num_layers, tenant)
            num_fitting = min(self.pool.num_free // num_layers, len(positions))
            self._host.stats.num_dropped_saves += len(positions) - num_fitting
            owner = self._host.find(tenant, group) if again else self._host.touch(tenant, group)
            if not again:
                self._host.saved(owner.id, len(positions))
            blocks = [self._host.new_block(keys[index], owner) for index in positions[:num_fitting]]
            self._host.deal(blocks, 0)
            if again:
                self._host.put_first(owner, blocks)
        return Save(blocks, positions[:num_fitting])

    def commit(self, save: Save) -> None:
        """Note that the slots of a save hold its bytes now: the blocks may be read, and are queued for the disk."""
        with self._lock:
            now = self._clock()
            for block in save.blocks:
                block.ready = self.shape.num_layers
                self._host.stats.num_saved += 1
                is_new = self._disk is None or block.key not in self._disk
                if self._writer is not None and is_new and not block.is_bad:
                    self._writer.add(block, now)
                self._host.unpin(block)
        if self._writer is not None and save.blocks:
            self._writer.wake()

    def use_device(self, keeps: Callable[[BlockKey], bool]) -> None:
        """Let blocks leave host memory first that the device keeps for now. keeps: says so of a key, on any thread, and raises nothing."""
        self._host.device_keeps = keeps

    def abandon(self, save: Save) -> None:
        """Forget a save whose bytes did not come or are not to be trusted."""
        with self._lock:
            for block in save.blocks:
                self._host.spoil(block)
                self._host.unpin(block)

    # -- restoring (engine thread) -----------------------------------------------------------------------------------

    def stage(
        self,
        group: str,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        peer: str = "",
        gives_way: bool = False,
    ) -> Stage:
        """Hold the leading blocks that any tier has in host memory, and begin to read the ones that are only on disk.

        Blocks that another stage is reading already are shared with it. The stage is shorter than `keys` where no tier has a block, or where there
        is no memory for the blocks to read.

        Args:
            group: the session.
            keys: its blocks, in the order of the conversation.
            tenant: the session's tenant.
            peer: the address of a node that is asked for the blocks that no tier here has; blocks that it lacks are later marked bad.
            gives_way: whether its request has not come yet: reads of other stages go first, and these and saves may take its memory. It is then
                revoked, and must still be released.
        """
        num_layers = self.shape.num_layers
        with self._lock:
            stage = Stage(self._clock(), gives_way=gives_way)
            owner = self._host.touch(tenant, group, is_guess=gives_way)
            num_wanted = next((i for i, key in enumerate(keys) if not self._host.is_held(key)), len(keys))
            reader = self._readers.peer(peer) if num_wanted < len(keys) else None
            if reader is not None:
                num_wanted = len(keys)
            self._host.stats.num_misses += len(keys) - num_wanted
            num_wanted = min(num_wanted, self.pool.num_slots // num_layers)
            if not gives_way:
                self._host.asked(owner.id, num_wanted)
            # Pinned before room is made, or they would make room for one another.
            for key in keys[:num_wanted]:
                block = self._host.blocks.get(key) or self._host.new_block(key, owner, pins=0)
                block.pins += 1
                stage.blocks.append(block)
                self._host.move(block, owner)
            num_slots = sum(num_layers - len(block.slots) for block in stage.blocks)
            self._host.make_room_for_more(owner, num_slots)
            self._make_room(num_slots, tenant, may_revoke=not gives_way)
            self._host.cut_to_room(stage)
            jobs = self._readers.plan(stage, reader)
            if gives_way:
                self._yielding.append(stage)
        self._readers.start(jobs)
        return stage

    def _make_room(self, num_slots: int, tenant: str, *, may_revoke: bool = True) -> None:
        """Have `num_slots` slots free, if that is possible. Call it under the lock."""
        self._host.make_room(num_slots, tenant)
        while may_revoke and self._yielding and self.pool.num_free < num_slots:
            stage = self._yielding.pop()
            jobs, stage.is_revoked = stage.jobs, True
            self._let_go(stage)
            self._readers.stop_unwanted(jobs)
            self._host.make_room(num_slots, tenant)

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks a stage could bring now."""
        with self._lock:
            return next((at for at, key in enumerate(keys) if not self._host.is_held(key)), len(keys))

    def are_held(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return of each block whether a stage could bring it now."""
        with self._lock:
            return [self._host.is_held(key) for key in keys]

    @property
    def is_stopping_reads(self) -> bool:
        """Whether reads that no stage wants are still under way. Their memory comes back when they end, which `on_progress` tells."""
        with self._lock:
            return self._readers.is_stopping

    @property
    def is_reading_for_requests(self) -> bool:
        """Whether requests wait for reads that are under way."""
        with self._lock:
            return self._readers.is_asked

    def bytes_to_read(self, keys: Sequence[BlockKey]) -> int:
        """Return the bytes of these held blocks that must be read; blocks in host memory or being saved need no read."""
        with self._lock:
            of_all, blocks = self.shape.num_layers, self._host.blocks
            return sum(_layers_to_read(blocks.get(key), of_all) for key in keys) * self.shape.layer_bytes

    def progress(self, stage: Stage) -> StageProgress:
        """Return how far a stage has come."""
        with self._lock:
            return self._readers.progress(stage)

    def wait_for_layer(self, stage: Stage, num_blocks: int, layer: int, timeout_s: float) -> int:
        """Wait until the first `num_blocks` of a stage have `layer` in host memory. Return how many leading blocks have it."""
        blocks = stage.blocks[:num_blocks]

        def is_settled() -> bool:
            """Return whether each block has the layer or is bad."""
            return all(block.ready > layer or block.is_bad for block in blocks)

        with self._arrived:
            self._arrived.wait_for(is_settled, timeout_s)
            return count_while(block.ready > layer and not block.is_bad for block in blocks)

    def release(self, stage: Stage) -> None:
        """Give up a stage. Reads that no other stage waits for are stopped."""
        if stage.is_revoked:
            return
        jobs = stage.jobs
        with self._lock:
            if stage in self._yielding:
                self._yielding.remove(stage)
            self._let_go(stage)
        self._readers.stop_unwanted(jobs)
        stage.blocks = []

    def begin_copy(self, blocks: Sequence[Block]) -> Callable[[], None]:
        """Note that a device is told to copy a stage's blocks.

        Returns:
            A function to be called once, from any thread. Until then the blocks stay in host memory, also beyond the stage's release; afterwards
            they are the first blocks of an expected session to leave.
        """
        with self._lock:
            copied = self._host.begin_copy(blocks)
        return lambda: self._unpin(copied)

    def _unpin(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in blocks:
                self._host.unpin(block)

    def _let_go(self, stage: Stage) -> None:
        """Unpin a stage's blocks and give up its reads. Call it under the lock."""
        for block in stage.blocks:
            self._host.unpin(block)
        for job in stage.jobs:
            job.num_users -= 1
            job.num_asked -= not stage.gives_way
        self._readers.give_up_unwanted(stage.jobs)
        stage.jobs = set()

    def assume_disk_rate(self, bytes_per_s: float) -> None:
        """Assume this speed of the disk until reads are measured, and again long after slow ones."""
        with self._lock:
            self._readers.disk.rate.prior = bytes_per_s

    def disk_bytes_per_s(self) -> float:
        """Return the speed of the disk in recent reads."""
        with self._lock:
            return self._readers.disk.rate.at(self._clock())

    # -- other nodes (any thread) ------------------------------------------------------------------------------------

    def use_peers(self, find: FindPeer) -> None:
        """Set how a peer is found by its address, for stages that name one."""
        with self._lock:
            self._readers.find_peer = find

    def peer_bytes_per_s(self, address: str) -> float | None:
        """Return the speed of a peer in recent reads, or the assumed one; None: it is not to be asked."""
        with self._lock:
            reader = self._readers.peer(address)
            return reader.rate.at(self._clock()) if reader is not None else None

    def lend(self, keys: Sequence[BlockKey]) -> Loan:
        """Lend the leading blocks that host memory or disk has to another node. A loan counts as no use, and evicts no block."""
        blocks: list[Block | None] = []
        for start in range(0, len(keys), LEND_AT_ONCE):
            with self._lock:  # not for long: the engine may be waiting
                blocks += self._host.pin_held(keys[start : start + LEND_AT_ONCE])
            if len(blocks) < start + LEND_AT_ONCE:
                break
        lent = [block for block in blocks if block is not None]
        release = lambda: self._unpin(lent)  # noqa: E731
        return Loan(keys, blocks, self.pool, self._disk, self.shape.num_layers, release)

    def _keep_fetched(self, blocks: list[Block]) -> None:
        """Queue blocks that a peer gave for this node's disk. Called under the lock."""
        if self._writer is not None:
            self._writer.add_all(blocks, self._clock())

    # -- sessions (any thread) -----------------------------------------------------------------------------------------

    def expect(self, group: str, at_s: float | None, *, tenant: str = "") -> None:
        """Expect a session's request at `at_s` on the store's clock; None: no longer."""
        with self._lock:
            if (tenant, group) in self._host.groups:
                self._host.groups[tenant, group].expected_s = at_s

    def keep(self, group: str, keep_s: float, *, tenant: str = "", is_shared: bool = False) -> None:
        """Prefer a session in host memory to others of its tenant for this long; 0: no longer. is_shared: other sessions begin as it does."""
        with self._lock:
            self._host.keep((tenant, group), keep_s, is_shared=is_shared)

    def enter(
        self,
        group: str,
        *,
        tenant: str = "",
        weight: float = 1.0,
        is_asked: bool = True,
        is_session: bool = True,
    ) -> None:
        """Note that a request of this group is in the engine from now on, waiting or running.

        Args:
            group: the request's group.
            tenant: its tenant.
            weight: the tenant's share against others.
            is_asked: whether a client waits for its answer.
            is_session: whether all of the group's requests belong to one session.
        """
        with self._lock:
            self._host.enter((tenant, group), is_asked=is_asked, is_session=is_session)
            if self._host.weights.get(tenant, 1.0) != weight:
                self._host.weights[tenant] = weight
                if self._disk is not None:
                    self._disk.weights[owner_tag(tenant)] = weight

    def runs(self, group: str, *, tenant: str = "", is_running: bool) -> None:
        """Note that a request that had entered, and waited, runs from now on; or that it waits again."""
        with self._lock:
            self._host.running[tenant, group] += 1 if is_running else -1

    def leave(self, group: str, *, tenant: str = "") -> None:
        """Note that a request that had entered has ended."""
        with self._lock:
            self._host.leave((tenant, group))

    def leave_all(self) -> None:
        """Note that the engine has ended with all of its requests."""
        with self._lock:
            self._host.live.clear()
            self._host.running.clear()
            self._host.device_keeps = None

    def end(self, group: str, *, tenant: str = "") -> None:
        """Note that this session has ended for good: its KV leaves host memory first."""
        with self._lock:
            self._host.end((tenant, group))

    def erase(self, tenant: str) -> int:
        """Erase all that a tenant has in host memory and on disk, and return the number of its blocks there.

        What its requests still use goes with its last use, so end them before. Do not call it on the engine's or the I/O thread. Raises OSError.
        """
        with self._lock:
            if self._writer is not None:
                self._writer.drop(tenant)
            self._host.erase(tenant)
        return self._io.start(self._writer.erase(tenant)).result() if self._writer is not None else 0

    # -- as a whole (any thread) -------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Write the queued blocks now. Return False if that took too long. Do not call it on the engine's or the I/O thread."""
        if self._writer is None:
            return True
        try:
            self._io.start(self._writer.write_all()).result(timeout_s)
        except (TimeoutError, concurrent.futures.CancelledError):
            return False
        return True

    def wait_for_reads(self, timeout_s: float) -> bool:
        """Wait until no read is under way, and return whether that is so. For benches and tests."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self._readers.is_idle, timeout_s)

    def close(self) -> None:
        """Write the queued blocks and close the disk tier; afterwards no block may be staged or saved. Raises TimeoutError on a slow disk."""
        if self._writer is not None:
            self.flush()
            self._writer.close()
        if self._disk is not None:
            self._io.start(self._disk.close()).result(CLOSE_TIMEOUT_S)

    def drop_host(self) -> None:
        """Empty the host tier of all blocks that are not pinned; the disk keeps its blocks. For benches and tests."""
        with self._lock:
            self._host.clear()

    def stats(self) -> TierStats:
        """Return the figures of now; takes the lock for microseconds."""
        with self._lock:
            host = self._host.snapshot()
            disk = _disk_stats(self._readers, self._writer, self._clock())
        if self._disk is not None:
            disk.is_on = True
            figures = self._disk.stats
            for name in _DISK_FIGURES:
                setattr(disk, name, getattr(figures, name))
            disk.num_skipped_writes += figures.num_unwritten
        return TierStats(host=host, disk=disk, problem=self.problem)

    def check_invariants(self) -> int:
        """Return how many uses blocks in host memory have, for tests. Raises AssertionError if memory does not add up or a slot is held twice."""
        with self._lock:
            self._host.check_invariants()
            self._readers.check_invariants()
            num_unwritten = self._writer.num_unwritten if self._writer is not None else 0
            assert num_unwritten == sum(block.is_unwritten for block in self._host.blocks.values())
            return sum(block.pins for block in self._host.blocks.values())


def _layers_to_read(block: Block | None, num_layers: int) -> int:
    if block is None:
        return num_layers
    is_saved = block.job is None and len(block.slots) == num_layers
    return 0 if is_saved else num_layers - block.ready


def _disk_stats(readers: Readers, writer: WriteBehind | None, now: float) -> DiskTierStats:
    """Return the figures of the disk that its log does not count. Call it under the lock."""
    return DiskTierStats(
        num_hits=readers.disk.num_hits,
        num_skipped_writes=writer.num_skipped if writer is not None else 0,
        num_unwritten=writer.num_unwritten if writer is not None else 0,
        write_lag_s=writer.lag_s(now) if writer is not None else 0.0,
        num_reads_queued=readers.num_queued(),
        bytes_per_s=readers.disk.rate.value or 0.0,
    )
