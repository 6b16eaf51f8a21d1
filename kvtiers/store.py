"""KV blocks by key over host memory and disk: what the connector saves into, stages from and asks.

Write-through: a finished block lands in host memory at once and on disk soon, so the device's copy may be overwritten at any moment. A block
that is wanted while on disk is *staged*: read into host memory by the I/O thread, layer by layer, while the engine goes on stepping.

One lock guards the host tier; it is held for microseconds, never over I/O or a copy. Each method says which thread it is for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvtiers.blocks import Block, Group, GroupId, ReadJob, Save, Stage, StageProgress, count_while
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.host_pool import HostPool
from kvtiers.io.io_thread import IoThread
from kvtiers.io.records import Record, owner_tag
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import EvictionPolicy, GroupFacts
from kvtiers.policy.fairness import floors, is_abandoned
from kvtiers.policy.rates import Rate
from kvtiers.policy.restore import PRIOR_DISK_BYTES_PER_S
from kvtiers.stats import DiskTierStats, HostStats, TierStats

log = logging.getLogger(__name__)

# Finished blocks wait this long for their neighbours, so that decoding writes records of several blocks. A killed server loses at most
# this much KV per session, and no text. Chosen.
WRITE_DELAY_S = 0.25
RECORD_BYTES = 16 << 20  # chosen: sequential enough for any disk, soon enough on it
UNWRITTEN_SHARE = 0.5  # of host memory: what waits for a slow disk may not crowd out what is read from it
EVICTION_BATCH = (
    1 / 64
)  # of the slots leave at a time, so that ranking all sessions is paid for once per batch
FLUSH_TIMEOUT_S = 10.0


class KvStore:
    """The host and disk tiers of one engine. A `group` is what KV is kept together with: a session, by the name that its `tenant` gave it.

    Args:
        shape: of every block.
        host_bytes: of memory for the host tier.
        io: the thread that reads and writes the disk; the store does not close it.
        disk: an open log of `io`'s loop, or None for no disk tier. The store closes it.
        eviction: who leaves host memory.
    """

    def __init__(
        self,
        shape: BlockShape,
        host_bytes: int,
        io: IoThread,
        disk: DiskLog | None,
        eviction: EvictionPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape = shape
        self.pool = HostPool(shape.layer_bytes, host_bytes)
        self.on_progress: Callable[[], None] = lambda: None
        """Called on the I/O thread when staged layers have come, to wake whoever waits for them."""
        self.problem: str | None = None
        self._io = io
        self._disk = disk
        self._eviction = eviction
        self._clock = clock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._blocks: dict[BlockKey, Block] = {}
        self._groups: dict[GroupId, Group] = {}
        self._held: Counter[str] = Counter()  # slots by tenant, those of spoiled blocks left out
        self._weights: dict[str, float] = {}  # of tenants, where it is not 1
        self._live: Counter[GroupId] = Counter()  # requests in the engine, by group; it may hold nothing yet
        self._host = HostStats(capacity_bytes=self.pool.num_slots * shape.layer_bytes)
        self._unwritten: dict[Group, list[tuple[float, Block]]] = {}
        self._num_unwritten = 0
        self._num_skipped_writes = 0
        self._num_disk_hits = 0
        self._jobs: set[ReadJob] = set()
        self._disk_bytes_done = 0
        self._disk_rate = Rate(PRIOR_DISK_BYTES_PER_S)
        self._busy_since: tuple[float, int] = (0.0, 0)
        self._wakes_writer = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writer = io.start(self._write_behind()) if disk is not None else None

    @property
    def num_host_blocks(self) -> int:
        """That host memory can hold."""
        return self.pool.num_slots // self.shape.num_layers

    # -- saving (engine thread) --------------------------------------------------------------------------------------

    def begin_save(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "") -> Save:
        """Slots for those of `keys` that no tier holds yet.

        Where memory is short and nothing may leave, fewer are taken, the first ones first: a lost save is only a later miss.
        """
        num_layers = self.shape.num_layers
        with self._lock:
            positions = [index for index, key in enumerate(keys) if not self._is_held(key)]
            self._make_room(len(positions) * num_layers, tenant)
            num_fitting = min(self.pool.num_free // num_layers, len(positions))
            self._host.num_dropped_saves += len(positions) - num_fitting
            owner = self._touch(tenant, group)
            blocks = [self._new_block(keys[index], owner) for index in positions[:num_fitting]]
            self._deal(blocks, 0)
            return Save(blocks, positions[:num_fitting])

    def commit(self, save: Save) -> None:
        """The slots of a save hold its bytes now: they may be read, and go to disk behind the scenes."""
        with self._lock:
            now = self._clock()
            limit = int(self.pool.num_slots * UNWRITTEN_SHARE) // self.shape.num_layers
            for block in save.blocks:
                block.ready = self.shape.num_layers
                self._host.num_saved += 1
                if self._disk is not None and self._num_unwritten < limit:
                    block.is_unwritten = True
                    self._num_unwritten += 1
                    self._unwritten.setdefault(block.group, []).append((now, block))
                elif self._disk is not None:
                    self._num_skipped_writes += 1
                self._unpin(block)
        if self._disk is not None and save.blocks:
            self._io.loop.call_soon_threadsafe(self._wakes_writer.set)

    def abandon(self, save: Save) -> None:
        """Forget a save whose bytes did not come or are not to be trusted."""
        with self._lock:
            for block in save.blocks:
                self._spoil(block)
                self._unpin(block)

    # -- restoring (engine thread) -----------------------------------------------------------------------------------

    def stage(self, group: str, keys: Sequence[BlockKey], *, tenant: str = "") -> Stage:
        """Hold the leading `keys` that any tier has in host memory, and begin to read what is only on disk.

        Blocks that another stage is reading already are shared with it. The stage is shorter than `keys` where a block is nowhere, or where
        memory for what must be read cannot be had.
        """
        num_layers = self.shape.num_layers
        with self._lock:
            stage = Stage(self._clock(), self._disk_bytes_done)
            owner = self._touch(tenant, group)
            owner.num_uses += 1
            num_wanted = next((i for i, key in enumerate(keys) if not self._is_held(key)), len(keys))
            self._host.num_misses += len(keys) - num_wanted
            num_wanted = min(num_wanted, self.pool.num_slots // num_layers)
            for key in keys[
                :num_wanted
            ]:  # pinned before room is made, or they would make room for one another
                block = self._blocks.get(key) or self._new_block(key, owner, pins=0)
                block.pins += 1
                stage.blocks.append(block)
                self._move(block, owner)
            self._make_room(sum(num_layers - len(block.slots) for block in stage.blocks), tenant)
            self._cut_to_room(stage)
            jobs = self._plan_reads(stage)
        for job in jobs:
            self._io.start(self._read(job))
        return stage

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """How many of these, from the first on, a stage could bring now."""
        with self._lock:
            return next((at for at, key in enumerate(keys) if not self._is_held(key)), len(keys))

    def bytes_to_read(self, keys: Sequence[BlockKey]) -> int:
        """Of these, which are held, what is not in host memory, or about to be: what is being saved need not be read."""
        with self._lock:
            return sum(self._layers_to_read(self._blocks.get(key)) for key in keys) * self.shape.layer_bytes

    def _layers_to_read(self, block: Block | None) -> int:
        num_layers = self.shape.num_layers
        if block is None:
            return num_layers
        is_saved = block.job is None and len(block.slots) == num_layers
        return 0 if is_saved else num_layers - block.ready

    def progress(self, stage: Stage) -> StageProgress:
        """How far a stage has come."""
        num_layers = self.shape.num_layers
        with self._lock:
            now = self._clock()
            num_blocks = count_while(not block.is_bad for block in stage.blocks)
            ready = [block.ready for block in stage.blocks[:num_blocks]]
            left = sum(num_layers - r for r in ready) * self.shape.layer_bytes
            total_left = sum(
                num_layers - block.ready for job in self._jobs for block in job.blocks if not block.is_bad
            )
            return StageProgress(
                num_blocks=num_blocks,
                num_ready_blocks=count_while(r == num_layers for r in ready),
                num_ready_layers=min(ready, default=num_layers),
                waited_s=now - stage.started_s,
                disk_bytes_done=self._disk_bytes_done - stage.disk_bytes_at_start,
                disk_bytes_left=left,
                disk_bytes_ahead=max(total_left * self.shape.layer_bytes - left, 0),
                disk_bytes_per_s=self._disk_rate.at(now),
            )

    def wait_for_layer(self, stage: Stage, num_blocks: int, layer: int, timeout_s: float) -> int:
        """Wait until the first `num_blocks` of a stage have `layer` in host memory. Returns how many leading ones do."""
        blocks = stage.blocks[:num_blocks]

        def is_settled() -> bool:
            return all(block.ready > layer or block.is_bad for block in blocks)

        with self._arrived:
            self._arrived.wait_for(is_settled, timeout_s)
            return count_while(block.ready > layer and not block.is_bad for block in blocks)

    def release(self, stage: Stage) -> None:
        """Let go of a stage. What nobody waits for any more is not read further."""
        with self._lock:
            for block in stage.blocks:
                self._unpin(block)
            for job in stage.jobs:
                job.num_users -= 1
        for job in stage.jobs:
            if job.num_users == 0 and job in self._jobs:
                self._io.loop.call_soon_threadsafe(job.stop_if_unwanted)
        stage.blocks, stage.jobs = [], set()

    def assume_disk_rate(self, bytes_per_s: float) -> None:
        """Until it is seen at work, and again long after a time when it was slower."""
        with self._lock:
            self._disk_rate.prior = bytes_per_s

    def disk_bytes_per_s(self) -> float:
        """What the disk has delivered lately while it was read."""
        with self._lock:
            return self._disk_rate.at(self._clock())

    # -- what is known of sessions (any thread) ----------------------------------------------------------------------

    def expect(self, group: str, at_s: float | None, *, tenant: str = "") -> None:
        """A request of this session is expected at `at_s` on the store's clock; None takes that back."""
        with self._lock:
            if (tenant, group) in self._groups:
                self._groups[tenant, group].expected_s = at_s

    def enter(self, group: str, *, tenant: str = "", weight: float = 1.0) -> None:
        """A request of this session is in the engine from now on, waiting or running. weight: its tenant's share against others'."""
        with self._lock:
            self._live[tenant, group] += 1
            if self._weights.get(tenant, 1.0) != weight:
                self._weights[tenant] = weight
                if self._disk is not None:
                    self._disk.weights[owner_tag(tenant)] = weight

    def leave(self, group: str, *, tenant: str = "") -> None:
        """One that had entered has ended."""
        with self._lock:
            self._live[tenant, group] -= 1
            if self._live[tenant, group] <= 0:
                del self._live[tenant, group]

    def leave_all(self) -> None:
        """The engine is gone, and all of its requests."""
        with self._lock:
            self._live.clear()

    def end(self, group: str, *, tenant: str = "") -> None:
        """Nobody will ask for this tenant's session again: its KV leaves host memory first."""
        with self._lock:
            if (tenant, group) in self._groups:
                self._groups[tenant, group].is_over = True

    # -- as a whole (any thread) -------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Write what waits for the disk now. False if that took too long. Not for the engine or the I/O thread."""
        if self._disk is None:
            return True
        try:
            self._io.start(self._write_all()).result(timeout_s)
        except (TimeoutError, concurrent.futures.CancelledError):
            return False
        return True

    def wait_for_reads(self, timeout_s: float) -> bool:
        """Wait until nothing is being read any more. For benches and tests."""
        with self._arrived:
            return self._arrived.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """Write what waits, then close the disk tier. Nothing may be staged or saved afterwards."""
        self.flush()
        if self._writer is not None:
            self._writer.cancel()
        if self._disk is not None:
            self._io.start(self._disk.close()).result()

    def drop_host(self) -> None:
        """Empty the host tier of all that nobody holds; what is on disk stays there. For benches and tests."""
        with self._lock:
            for block in list(self._blocks.values()):
                if block.pins == 0 and not block.is_unwritten:
                    self._trim(block, 0)

    def stats(self) -> TierStats:
        """A snapshot; takes the lock for microseconds."""
        with self._lock:
            now = self._clock()
            host = HostStats(**{name: getattr(self._host, name) for name in HostStats.__struct_fields__})
            host.bytes = (self.pool.num_slots - self.pool.num_free) * self.shape.layer_bytes
            host.num_blocks = len(self._blocks)
            host.num_sessions = len(self._groups)
            oldest = min((queue[0][0] for queue in self._unwritten.values() if queue), default=now)
            disk = DiskTierStats(
                is_on=self._disk is not None,
                num_hits=self._num_disk_hits,
                num_skipped_writes=self._num_skipped_writes,
                num_unwritten=self._num_unwritten,
                write_lag_s=now - oldest,
                num_reads_queued=sum(len(job.blocks) for job in self._jobs),
                bytes_per_s=self._disk_rate.value or 0.0,
            )
        if self._disk is not None:
            figures = self._disk.stats
            for name in (
                "bytes",
                "capacity_bytes",
                "num_blocks",
                "num_evicted",
                "num_corrupt",
                "num_read_errors",
                "num_write_errors",
                "bytes_written",
                "bytes_read",
            ):
                setattr(disk, name, getattr(figures, name))
            disk.num_skipped_writes += figures.num_unwritten
        return TierStats(host=host, disk=disk, problem=self.problem)

    def check_invariants(self) -> None:
        """For tests: memory adds up and nothing is held twice. Raises AssertionError."""
        with self._lock:
            self.pool.check_invariants()
            slots = [slot for block in self._blocks.values() for slot in block.slots]
            assert len(slots) == len(set(slots))
            assert len(slots) <= self.pool.num_slots - self.pool.num_free
            for group in self._groups.values():
                assert group.num_slots == sum(len(block.slots) for block in group.blocks.values())
                assert self._groups[group.id] is group
                assert all(
                    block.group is group and self._blocks[key] is block for key, block in group.blocks.items()
                )
            assert sum(len(group.blocks) for group in self._groups.values()) == len(self._blocks)
            held = Counter[str]()
            for group in self._groups.values():
                held[group.tenant] += group.num_slots
            assert +held == +self._held
            assert all(0 <= block.ready <= len(block.slots) for block in self._blocks.values())
            assert all(block.pins >= 0 for block in self._blocks.values())
            assert self._num_unwritten == sum(block.is_unwritten for block in self._blocks.values())

    # -- host memory (under the lock) --------------------------------------------------------------------------------

    def _is_held(self, key: BlockKey) -> bool:
        """Whether a stage could bring all layers of this block: complete or on its way in memory, or on disk."""
        block = self._blocks.get(key)
        if block is not None and len(block.slots) == self.shape.num_layers:
            return True
        return self._disk is not None and key in self._disk

    def _touch(self, tenant: str, name: str) -> Group:
        """The session's group; a new one is known from its first block on."""
        group = self._groups.get((tenant, name)) or Group(tenant, name)
        group.last_used_s = self._clock()
        group.is_over = False
        group.expected_s = None
        return group

    def _new_block(self, key: BlockKey, group: Group, pins: int = 1) -> Block:
        leftover = self._blocks.get(key)
        if leftover is not None:  # some of its layers, the others of which no disk has any more
            self._spoil(leftover)
        self._groups[group.id] = group  # also where the leftover was its last
        block = self._blocks[key] = group.blocks[key] = Block(key, group)
        block.pins = pins
        return block

    def _move(self, block: Block, group: Group) -> None:
        """Make a block the latest of a group: it belongs to whoever used it last."""
        del block.group.blocks[block.key]
        self._count(block.group, -len(block.slots))
        if not block.group.blocks:
            self._groups.pop(block.group.id, None)
        self._groups[group.id] = group
        block.group = group
        group.blocks[block.key] = block
        self._count(group, len(block.slots))

    def _deal(self, blocks: list[Block], first_layer: int) -> None:
        """Give blocks slots for their layers from `first_layer` on, layer-major. The room must be there."""
        num_layers = self.shape.num_layers - first_layer
        slots = self.pool.allocate(len(blocks) * num_layers) if blocks else []
        if slots is None:
            raise RuntimeError("slots were dealt that are not free")
        for position, block in enumerate(blocks):
            block.slots = block.slots + slots[position :: len(blocks)]
            self._count(block.group, num_layers)

    def _trim(self, block: Block, keep_layers: int) -> int:
        """Free a block's slots from `keep_layers` on; without any it is gone. Returns how many were freed."""
        freed = block.slots[keep_layers:]
        self.pool.free(freed)
        block.slots = block.slots[:keep_layers]
        block.ready = min(block.ready, keep_layers)
        self._count(block.group, -len(freed))
        if not block.slots:
            self._forget(block)
        return len(freed)

    def _forget(self, block: Block) -> None:
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
            del block.group.blocks[block.key]
            if not block.group.blocks:
                self._groups.pop(block.group.id, None)

    def _spoil(self, block: Block) -> None:
        """A block's bytes are not to be used: it is out of the index at once; its slots are free when nobody holds it."""
        block.is_bad = True
        self._count(block.group, -len(block.slots))
        self._forget(block)
        if block.pins == 0:
            self.pool.free(block.slots)
            block.slots = []

    def _unpin(self, block: Block) -> None:
        block.pins -= 1
        if block.pins == 0 and block.is_bad:
            self.pool.free(block.slots)
            block.slots = []

    def _count(self, group: Group, num_slots: int) -> None:
        """A group, and with it its tenant, holds so many slots more."""
        group.num_slots += num_slots
        self._held[group.tenant] += num_slots
        if not self._held[group.tenant]:
            del self._held[group.tenant]

    def _make_room(self, num_slots: int, tenant: str) -> None:
        """Have `num_slots` free for a tenant, if what may leave suffices: first what nobody will ask for, then from those above their share."""
        if self.pool.num_free >= num_slots:
            return
        goal = min(max(num_slots, int(self.pool.num_slots * EVICTION_BATCH)), self.pool.num_slots)
        now = self._clock()
        groups: dict[str, list[GroupFacts]] = {}
        for group in self._groups.values():
            groups.setdefault(group.tenant, []).append(self._facts(group))
        if len(groups) > 1 or tenant not in groups:
            for name, facts in groups.items():
                self._take(name, [each for each in facts if is_abandoned(each, now)], goal, 0)
        # What is asked for counts as held, so that who is above its share with it makes room for itself.
        need = {name: num_slots if name == tenant else 0 for name in (*groups, tenant)}
        asked = {name: self._held[name] + need[name] for name in need}
        for name, kept in floors(asked, self._weights, goal - self.pool.num_free).items():
            self._take(name, groups.get(name, ()), goal, max(kept - need[name], 0))
        # What others cannot give (it is in use) nobody below its share gives for them; the tenant itself may.
        self._take(tenant, groups.get(tenant, ()), goal, 0)

    def _facts(self, group: Group) -> GroupFacts:
        return GroupFacts(
            group=group.name,
            num_bytes=group.num_slots * self.shape.layer_bytes,
            last_used_s=group.last_used_s,
            num_uses=group.num_uses,
            is_over=group.is_over,
            is_live=group.id in self._live,
            expected_s=group.expected_s,
        )

    def _take(self, tenant: str, facts: Sequence[GroupFacts], goal: int, floor: int) -> None:
        """Evict of these groups of a tenant until `goal` slots are free, or it holds no more than `floor`."""
        for victim in self._eviction.order(facts, self.shape.num_layers, self._clock()):
            group = self._groups.get((tenant, victim.group))
            # Without a disk the other layers would never come back.
            keep_layers = victim.keep_layers if self._disk is not None else 0
            # Most sessions are trimmed to this band already, and there are more blocks than time to look at each.
            if group is None or group.num_slots <= keep_layers * len(group.blocks):
                continue
            for block in reversed(list(group.blocks.values())):
                if self.pool.num_free >= goal or self._held[tenant] <= floor:
                    return
                if block.pins == 0 and not block.is_unwritten and len(block.slots) > keep_layers:
                    self._trim(block, keep_layers)
                    self._host.num_evicted += not block.slots
                    self._host.num_trimmed += bool(block.slots)

    def _cut_to_room(self, stage: Stage) -> None:
        """Shorten a stage to what the free memory can take."""
        num_layers, num_free = self.shape.num_layers, self.pool.num_free
        num_kept = 0
        for block in stage.blocks:
            num_free -= num_layers - len(block.slots)
            if num_free < 0:
                break
            num_kept += 1
        for block in stage.blocks[num_kept:]:
            self._unpin(block)
            if not block.slots:
                self._forget(block)
        del stage.blocks[num_kept:]

    # -- reading (under the lock, then on the I/O thread) ------------------------------------------------------------

    def _plan_reads(self, stage: Stage) -> list[ReadJob]:
        """One job per number of layers that blocks have already; blocks under way are left to their jobs."""
        num_layers = self.shape.num_layers
        unread: dict[int, list[Block]] = {}
        for block in stage.blocks:
            stage.is_from_disk.append(block.ready < num_layers)
            if len(block.slots) < num_layers:
                unread.setdefault(len(block.slots), []).append(block)
        jobs = []
        for first_layer, blocks in unread.items():
            self._deal(blocks, first_layer)
            job = ReadJob(blocks, first_layer)
            for block in blocks:
                block.job = job
                block.pins += 1
            jobs.append(job)
        if jobs and not self._jobs:
            self._busy_since = (self._clock(), self._disk_bytes_done)
        self._jobs.update(jobs)
        stage.jobs = {block.job for block in stage.blocks if block.job is not None}
        for job in stage.jobs:
            job.num_users += 1
        num_read = sum(stage.is_from_disk)
        self._num_disk_hits += num_read
        self._host.num_hits += len(stage.blocks) - num_read
        return jobs

    async def _read(self, job: ReadJob) -> None:
        disk = self._disk
        assert disk is not None
        blocks = job.blocks

        def part(index: int, layer: int) -> memoryview:
            return self.pool.slot(blocks[index].slots[layer])

        def on_layer(layer: int) -> None:
            with self._arrived:
                num_good = 0
                for block in blocks:
                    if not block.is_bad:
                        block.ready = layer + 1
                        num_good += 1
                self._disk_bytes_done += num_good * self.shape.layer_bytes
                self._arrived.notify_all()
            self.on_progress()

        def on_bad(index: int) -> None:
            with self._arrived:
                self._spoil(blocks[index])
                self._arrived.notify_all()
            self.on_progress()

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
                if not block.is_bad and block.ready < self.shape.num_layers:
                    # Unread to the end (nobody wanted it any more, or the log is closed): keep what came, if nobody holds the rest.
                    if block.pins > 1 or block.ready == 0:
                        self._spoil(block)
                    else:
                        self._trim(block, block.ready)
                self._unpin(block)
            self._jobs.discard(job)
            if not self._jobs:
                now = self._clock()
                since, bytes_then = self._busy_since
                self._disk_rate.note(self._disk_bytes_done - bytes_then, now - since, now)
            self._arrived.notify_all()
        self.on_progress()

    # -- writing (I/O thread) ----------------------------------------------------------------------------------------

    async def _write_behind(self) -> None:
        while True:
            await self._wakes_writer.wait()
            await asyncio.sleep(WRITE_DELAY_S)
            self._wakes_writer.clear()
            await self._write_all()

    async def _write_all(self) -> None:
        async with self._writing:
            while records := self._next_unwritten():
                await self._write(records)

    def _next_unwritten(self) -> list[list[Block]]:
        """Blocks that wait, a list for each record: of one session, so that reading it is sequential. The longest-waiting sessions first,
        RECORD_BYTES in all; the blocks stay pinned until written.
        """
        num_left = max(RECORD_BYTES // self.shape.block_bytes, 1)
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
        assert self._disk is not None
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
                    self._num_unwritten -= 1
                    self._unpin(block)

    def _parts_of(self, blocks: list[Block]) -> Callable[[int, int], memoryview]:
        return lambda index, layer: self.pool.slot(blocks[index].slots[layer])
