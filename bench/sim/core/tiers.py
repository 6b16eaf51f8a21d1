"""KV of sessions outside the device: the host memory and disk that the devices of one machine share, and the network between machines.

Bookkeeping by session: how many leading blocks were saved, how many bytes of them lie in host memory (first layers first), and who waits for the
rest. Who leaves host memory is asked of a `kvtiers.policy.eviction.EvictionPolicy`, which is told what `kvtiers.store.KvStore` tells it. Departs
from the store in trimming all blocks of a session at once, in reading one session at a time from disk, and in a disk that is never full.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from bench.sim.core.clock import Clock
from bench.sim.core.links import SharedLink
from kvtiers.policy.eviction import EvictionPolicy, GroupFacts
from kvtiers.policy.returns import Returns

# Of host memory, as in kvtiers.store.
EVICTION_BATCH = 1 / 64
UNWRITTEN_SHARE = 0.5

Done = Callable[[float], None]


class Device(Protocol):
    """Where a session's KV may be cached."""

    def drop(self, kv: SessionKv) -> None:
        """What is cached of it is of no use any more, or somebody holds it now."""


@dataclass(slots=True, eq=False)
class SessionKv:
    """Where a session's KV is, in blocks from its beginning.

    saved_blocks: in the tiers of `host`; host_bytes: of them, in its memory. unwritten_bytes: not on disk yet, so they stay in memory. device_blocks:
    cached on `device`, used by nobody. num_pins: requests and advisories that need it in host memory. stage: on its way there.
    num_forgotten: times that its tiers gave it up, so that writes of what was there before can be told apart.
    """

    session_id: str
    saved_blocks: int = 0
    host: HostTiers | None = None
    host_bytes: int = 0
    unwritten_bytes: int = 0
    device: Device | None = None
    device_blocks: int = 0
    num_pins: int = 0
    last_used_s: float = 0.0
    expected_s: float | None = None
    stage: Stage | None = None
    num_forgotten: int = 0


@dataclass(slots=True, eq=False)
class Stage:
    """A session's KV on its way into the memory of `to`, where room for `num_bytes` is taken. waiting: called when it is there, or will not come."""

    to: HostTiers
    kv: SessionKv
    num_bytes: int
    waiting: list[Done] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Read:
    """Of a disk. One that nobody wants any more when its turn comes is not begun."""

    stage: Stage
    num_bytes: int
    done: Done


@dataclass(frozen=True, slots=True)
class Coming:
    """What is missing in a host's memory: its bytes, those that come before them, and how fast all come."""

    left_bytes: int
    ahead_bytes: int
    bytes_per_s: float


class HostTiers:
    """One machine's tiers.

    Args:
        disk_bytes_per_s: each way; 0 for no disk: what leaves memory is lost.
        network_bytes_per_s: each way, for all its devices together.
    """

    def __init__(
        self,
        clock: Clock,
        eviction: EvictionPolicy,
        *,
        memory_bytes: int,
        block_bytes: int,
        num_layers: int,
        disk_bytes_per_s: float,
        network_bytes_per_s: float,
    ) -> None:
        self.memory_bytes, self.block_bytes, self.num_layers = memory_bytes, block_bytes, num_layers
        self.has_disk = disk_bytes_per_s > 0
        self.used_bytes = 0
        """Of sessions that lie here, and taken by stages under way."""
        self.unwritten_bytes = 0
        self.sessions: dict[str, SessionKv] = {}
        self.returns = Returns()
        self.counts: Counter[str] = Counter()
        self._clock, self._eviction = clock, eviction
        # A host without a disk never uses these two.
        self._reader = SharedLink(clock, disk_bytes_per_s or 1.0)
        self._writer = SharedLink(clock, disk_bytes_per_s or 1.0)
        self._inbound = SharedLink(clock, network_bytes_per_s)
        self._outbound = SharedLink(clock, network_bytes_per_s)
        self._reads: deque[_Read] = deque()
        self._reading: _Read | None = None

    def total_bytes(self, kv: SessionKv) -> int:
        return kv.saved_blocks * self.block_bytes

    def is_whole(self, kv: SessionKv) -> bool:
        """All that was saved is in this memory."""
        return kv.host is self and kv.host_bytes == self.total_bytes(kv)

    def ready_layers(self, kv: SessionKv) -> int:
        """Layers that all saved blocks have in this memory."""
        if kv.host is not self or not kv.saved_blocks:
            return 0
        return self.num_layers * kv.host_bytes // self.total_bytes(kv)

    def coming(self, kv: SessionKv) -> Coming:
        """What a restore here would wait for, or waits for."""
        if kv.host is not self:
            link = self._inbound
            return Coming(self.total_bytes(kv), 0, link.bytes_per_s / max(link.num_transfers, 1))
        ahead = 0
        for read in ([self._reading] if self._reading is not None else []) + list(self._reads):
            if read.stage is kv.stage:
                break
            ahead += read.num_bytes
        return Coming(self.total_bytes(kv) - kv.host_bytes, ahead, self._reader.bytes_per_s)

    # -- saving --------------------------------------------------------------------------------------------------------

    def place(self, kv: SessionKv, num_blocks: int) -> None:
        """It has been here for long: on disk, and in memory if there is room without asking anybody to leave."""
        num_bytes = num_blocks * self.block_bytes
        fits = self.used_bytes + num_bytes <= self.memory_bytes
        if not fits and not self.has_disk:
            return
        kv.host, kv.saved_blocks = self, num_blocks
        self.sessions[kv.session_id] = kv
        if fits:
            self._grow(kv, num_bytes)

    def save(self, kv: SessionKv, num_blocks: int, now: float) -> None:
        """Its first `num_blocks` are on the device: keep those that are new, as far as memory and disk keep up.

        They were copied behind the forward pass, so they are here at once. What another host has of it is given up.
        """
        if kv.stage is not None:
            return
        if kv.host is not None and kv.host is not self:
            kv.host.forget(kv)
        kv.last_used_s = now
        new_bytes = (num_blocks - kv.saved_blocks) * self.block_bytes
        if new_bytes <= 0:
            return
        has_backlog = self.unwritten_bytes + new_bytes > self.memory_bytes * UNWRITTEN_SHARE
        kv.num_pins += 1
        fits = not (self.has_disk and has_backlog) and self._make_room(new_bytes, now)
        kv.num_pins -= 1
        if not fits:
            self.counts["dropped_saves"] += 1
            return
        kv.host, kv.saved_blocks = self, num_blocks
        self.sessions[kv.session_id] = kv
        self._grow(kv, new_bytes)
        self._write(kv, new_bytes)

    def _write(self, kv: SessionKv, num_bytes: int) -> None:
        if not self.has_disk:
            return
        kv.unwritten_bytes += num_bytes
        self.unwritten_bytes += num_bytes
        num_forgotten = kv.num_forgotten

        def written(now: float) -> None:
            self.unwritten_bytes -= num_bytes
            if kv.num_forgotten == num_forgotten:
                kv.unwritten_bytes -= num_bytes

        self._writer.transfer(num_bytes, written)

    def _grow(self, kv: SessionKv, num_bytes: int) -> None:
        kv.host_bytes += num_bytes
        self.used_bytes += num_bytes

    def forget(self, kv: SessionKv) -> None:
        """Give up all that is here of it."""
        self.used_bytes -= kv.host_bytes
        kv.host_bytes = kv.saved_blocks = kv.unwritten_bytes = 0
        kv.host = None
        kv.num_forgotten += 1
        del self.sessions[kv.session_id]

    def _make_room(self, num_bytes: int, now: float) -> bool:
        """Have so many free, if those who may leave suffice."""
        if self.used_bytes + num_bytes > self.memory_bytes:
            goal = max(num_bytes, int(self.memory_bytes * EVICTION_BATCH))
            self._evict(self.memory_bytes - goal, now)
        return self.used_bytes + num_bytes <= self.memory_bytes

    def _evict(self, limit_bytes: int, now: float) -> None:
        facts = [
            GroupFacts(
                group=kv.session_id,
                num_bytes=kv.host_bytes,
                last_used_s=kv.last_used_s,
                num_uses=self.returns.num_requests(kv.session_id),
                expected_s=kv.expected_s,
                usual_pause_s=self.returns.usual_pause_s,
            )
            for kv in self.sessions.values()
            if kv.host_bytes > kv.unwritten_bytes and not kv.num_pins and kv.stage is None
        ]
        for victim in self._eviction.order(facts, self.num_layers, now):
            if self.used_bytes <= limit_bytes:
                return
            kv = self.sessions.get(victim.group)
            if kv is not None:
                self._trim(kv, victim.keep_layers)

    def _trim(self, kv: SessionKv, keep_layers: int) -> None:
        if not self.has_disk:
            self.counts["forgotten"] += 1
            self.forget(kv)
            return
        keep_bytes = max(self.total_bytes(kv) * keep_layers // self.num_layers, kv.unwritten_bytes)
        if keep_bytes < kv.host_bytes:
            self.counts["trimmed"] += 1
            self.used_bytes -= kv.host_bytes - keep_bytes
            kv.host_bytes = keep_bytes

    # -- restoring -----------------------------------------------------------------------------------------------------

    def stage(self, kv: SessionKv, done: Done, now: float) -> None:
        """Bring all that any machine saved of it into this memory. `done` is called when it is there or will not come; the caller has pinned it."""
        if kv.stage is not None:
            kv.stage.waiting.append(lambda now: self.stage(kv, done, now))
            return
        home = kv.host
        if home is None or self.is_whole(kv):
            done(now)
            return
        num_bytes = self.total_bytes(kv) - (kv.host_bytes if home is self else 0)
        if not self._make_room(num_bytes, now):
            self.counts["refused_stages"] += 1
            done(now)
            return
        self.used_bytes += num_bytes
        kv.stage = Stage(self, kv, num_bytes, [done])
        if home is self:
            self._read(_Read(kv.stage, num_bytes, lambda now: self._staged(kv, now)), now)
        else:
            self._fetch(kv, kv.stage, home, now)

    def _fetch(self, kv: SessionKv, stage: Stage, home: HostTiers, now: float) -> None:
        """From another machine: what it has only on disk is read there first."""

        def arrived(now: float) -> None:
            self.counts["peer_bytes"] += stage.num_bytes
            num_blocks = kv.saved_blocks
            home.forget(kv)
            kv.host, kv.saved_blocks = self, num_blocks
            self.sessions[kv.session_id] = kv
            self._write(kv, stage.num_bytes)
            self._staged(kv, now)

        def send(now: float) -> None:
            both = Both(arrived)
            home._outbound.transfer(stage.num_bytes, both)
            self._inbound.transfer(stage.num_bytes, both)

        missing = home.total_bytes(kv) - kv.host_bytes
        if missing:
            home._read(_Read(stage, missing, send), now)
        else:
            send(now)

    def _staged(self, kv: SessionKv, now: float) -> None:
        stage = kv.stage
        assert stage is not None and stage.to is self, "something came that nobody waited for"
        kv.stage = None
        kv.host_bytes += stage.num_bytes
        self._call(stage, now)

    def _give_up(self, stage: Stage, now: float) -> None:
        stage.to.used_bytes -= stage.num_bytes
        stage.kv.stage = None
        self.counts["given_up_reads"] += 1
        self._call(stage, now)

    @staticmethod
    def _call(stage: Stage, now: float) -> None:
        for done in stage.waiting:
            done(now)

    def _read(self, read: _Read, now: float) -> None:
        self._reads.append(read)
        if self._reading is None:
            self._next_read(now)

    def _next_read(self, now: float) -> None:
        self._reading = None
        while self._reads and self._reading is None:
            read = self._reads.popleft()
            if read.stage.kv.num_pins:
                self._reading = read
                self._reader.transfer(read.num_bytes, partial(self._has_read, read))
            else:
                self._give_up(read.stage, now)

    def _has_read(self, read: _Read, now: float) -> None:
        self.counts["disk_bytes"] += read.num_bytes
        self._next_read(now)
        read.done(now)

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raises AssertionError if bytes are lost, doubled, or beyond the memory."""
        staged = {id(kv.stage): kv.stage for kv in self.sessions.values() if kv.stage is not None}
        own = sum(kv.host_bytes for kv in self.sessions.values())
        own += sum(stage.num_bytes for stage in staged.values() if stage.to is self)
        assert own <= self.used_bytes <= self.memory_bytes, "host memory"
        for kv in self.sessions.values():
            assert kv.host is self, "a session lies in two places"
            assert kv.unwritten_bytes <= kv.host_bytes <= self.total_bytes(kv), "a session's bytes"


@dataclass(slots=True)
class Both:
    """Calls on at the second call."""

    then: Done
    has_one: bool = False

    def __call__(self, now: float) -> None:
        if self.has_one:
            self.then(now)
        self.has_one = True
