"""Where each adapter is, and how it gets to where a request needs it without any step waiting for a disk.

An adapter version is on disk (always), in host memory (bounded in bytes), cached in free KV blocks of the device, in a slot (what a step computes
with), or in several of these. A request whose adapter cannot be computed yet is passed over by the scheduler until it can; others go
on. Reading, checking and laying out happen on a loader's thread; the engine's thread decides, between steps.

Source: Chameleon §4.1 (cache, eviction, prefetch), CaraServe §4 (a start that does not wait for the copy).
All methods run on the engine thread unless they say otherwise.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec import Struct

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import ModelContract
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.driver.adapters.blocks import AdapterBlocks, Entry
from engine_bridge.driver.adapters.host_path import ColdAdapter, HostPath
from engine_bridge.driver.adapters.host_workers import HostWorkers
from engine_bridge.driver.adapters.slots import Slots
from engine_bridge.driver.adapters.weights import AdapterWeights, Loader
from engine_bridge.node import AdapterPlace, AdapterStats
from engine_bridge.policy.adapter_cache import (
    POLICIES,
    CachedAdapter,
    EvictionPolicy,
    PrefixFacts,
    UseWindow,
    choose_victims,
    gain_per_byte,
    may_take_prefix,
)
from engine_bridge.policy.arrivals import Arrivals
from kvtiers.policy.rates import Rate

log = logging.getLogger(__name__)

# Loads that the loader's queue holds at once: the layouts of adapters that have come wait behind no more. Chosen.
MAX_LOADS = 2
# Copying adapters into free blocks takes so much of the engine's thread between two steps. Chosen: a tenth of a step of 15 ms.
BUSY_COPY_S, IDLE_COPY_S = 0.0015, 0.010
# Speeds before anything was measured, in bytes per second. Chosen: a slow SSD, and memory.
PRIOR_DISK_BYTES_PER_S, PRIOR_COPY_BYTES_PER_S = 0.5e9, 5e9
# What may be read ahead of its request, as a share of host memory and beside it, and how long it is kept for one that does not come. Chosen.
AHEAD_SHARE, AHEAD_FOR_S = 0.125, 10.0
# Adapters whose histogram says that a request is near are looked for this often, and loaded this long ahead at least. Chosen.
LOOK_EVERY_S, MIN_LEAD_S = 1.0, 1.0


class ResidencyConfig(Struct, frozen=True, kw_only=True):
    """host_bytes: of adapters in host memory. cpu_assist: requests start while their adapter is still on its way into a slot.

    step_room: what the adapters of all requests that run may take together, in the units of `Slots.cost`; None: as many as there are slots.
    """

    host_bytes: int
    step_room: int | None = None
    cpu_assist: bool = True
    policy: str = "expected_gain"
    prefetch_by_history: bool = False


@dataclass(slots=True, eq=False)
class _Adapter:
    """One version of an adapter. `requests`: ids of those in the engine, the oldest first, with their arrival."""

    record: AdapterRecord
    last_used_s: float
    is_pinned: bool = False
    is_removed: bool = False
    host: AdapterWeights | None = None
    slot: int | None = None
    is_finishing: bool = False
    is_loading: bool = False
    requests: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> int:
        return self.record.version_id


class Residency:
    """The adapters of one engine.

    Args:
        contract: what an adapter must be to run here.
        manager: vLLM's LoRAModelManager, whose slot table this object writes.
        running_ids: adapters of the requests that the scheduler runs now.
        is_busy: do requests run or wait?
        wake: called from the loader's thread when it is done with something.
        on_failed: called with the ids of requests whose adapter cannot be had, and why; they must leave the engine.
        prefix_facts: of the oldest cached prefix blocks, so many of them.
        workers: compute with adapters that are not in their slot yet.
        host_path: where slots fill beside the steps: computes rows of those that are not filled.
    """

    def __init__(
        self,
        config: ResidencyConfig,
        *,
        contract: ModelContract,
        manager: Any,
        slots: Slots,
        loader: Loader,
        running_ids: Callable[[], set[int]],
        is_busy: Callable[[], bool],
        wake: Callable[[], None],
        on_failed: Callable[[list[str], Exception], None],
        prefix_facts: Callable[[int], PrefixFacts],
        workers: HostWorkers | None = None,
        host_path: HostPath | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self.contract = contract
        self._manager = manager
        self._slots = slots
        self._loader = loader
        self._running_ids = running_ids
        self._is_busy = is_busy
        self._wake = wake
        self._on_failed = on_failed
        self._prefix_facts = prefix_facts
        self._workers = workers
        self._host_path = host_path
        self._clock = clock
        self.blocks: AdapterBlocks | None = None
        self._adapters: dict[int, _Adapter] = {}
        self._wanted: OrderedDict[int, bool] = OrderedDict()  # to be staged; whether only as a guess
        self._to_cache: list[int] = []
        self._done: deque[Callable[[], None]] = deque()
        self._executor = ThreadPoolExecutor(1, "adapter-loader", initializer=_keep_out_of_the_way)
        self._num_loads = 0
        self._reserved_bytes = 0
        self._ahead: dict[int, tuple[float, Future[tuple[AdapterWeights, float]]]] = {}
        self._ahead_lock = threading.Lock()
        self._is_stuck = False
        self._uses = UseWindow()
        self._arrivals = Arrivals() if config.prefetch_by_history else None
        self._look_at_s: float | None = None
        self._policies: dict[str, EvictionPolicy] = {
            tier: POLICIES[config.policy]() for tier in ("host", "device")
        }
        self._disk_rate = Rate(PRIOR_DISK_BYTES_PER_S)
        self._copy_rate = Rate(PRIOR_COPY_BYTES_PER_S)
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)

    # -- what there is -----------------------------------------------------------------------------------------------

    def add(self, record: AdapterRecord) -> None:
        """Know a version from now on. One that was known is updated (pinned or not). A new one is loaded where memory lies idle."""
        known = self._adapters.get(record.version_id)
        is_new = known is None
        if known is None:
            known = self._adapters[record.version_id] = _Adapter(record, last_used_s=self._clock())
        known.record, known.is_pinned = record, record.is_pinned
        if record.is_pinned or (is_new and self._has_idle_memory(record.num_bytes)):
            self.prefetch(record.version_id)

    def remove(self, adapter_id: int) -> None:
        """No new request will name this version; it goes when its last request has ended."""
        adapter = self._adapters.get(adapter_id)
        if adapter is not None:
            adapter.is_removed = True
            self._forget_if_unused(adapter)

    def prefetch(self, adapter_id: int) -> None:
        """Bring an adapter to host memory for a request that may come. It displaces none that a waiting request needs."""
        adapter = self._adapters.get(adapter_id)
        if adapter is not None and adapter.host is None and not adapter.is_loading:
            self._wanted.setdefault(adapter_id, True)
            self._is_stuck = False

    def expect(self, adapter_id: int) -> None:
        """A request for it is about to enter. From any thread: it is read while the step that is under way runs, or is not (it is only a hint)."""
        adapter = self._adapters.get(adapter_id)
        if adapter is None or adapter.host is not None or adapter.slot is not None or adapter.is_loading:
            return
        if self._is_cached(adapter_id):
            return
        with self._ahead_lock:
            num_bytes = adapter.record.num_bytes + sum(
                known.record.num_bytes for i in self._ahead if (known := self._adapters.get(i)) is not None
            )
            if adapter_id in self._ahead or (
                self._ahead and num_bytes > AHEAD_SHARE * self._config.host_bytes
            ):
                return
            read = self._executor.submit(self._read, adapter.record)
            self._ahead[adapter_id] = self._clock(), read

    # -- requests ----------------------------------------------------------------------------------------------------

    def requested(self, request_id: str, adapter_id: int) -> None:
        """A request enters the engine."""
        adapter = self._adapters[adapter_id]
        now = self._clock()
        self._counts[f"found:{self._place(adapter)}"] += 1
        self._uses.used(adapter_id, now)
        if self._arrivals is not None:
            self._arrivals.arrived(adapter_id, now)
        adapter.requests[request_id] = adapter.last_used_s = now
        self._touch(adapter)
        if adapter.slot is None or not self._slots.is_filled(adapter.slot):
            self._wanted[adapter_id] = False
            self._is_stuck = False

    def released(self, request_id: str, adapter_id: int) -> None:
        """It has ended, or never was in the engine."""
        adapter = self._adapters.get(adapter_id)
        if adapter is not None and adapter.requests.pop(request_id, None) is not None:
            adapter.last_used_s = self._clock()
            self._touch(adapter)
            self._is_stuck = False
            self._forget_if_unused(adapter)

    def may_start(self, adapter_id: int) -> bool:
        """Whether the next step could compute with this adapter beside those that run."""
        if not self.is_at_hand(adapter_id):
            return False
        room = self.free_room()
        return room is None or self.needed_room(adapter_id) <= room

    def free_room(self) -> int | None:
        """What adapters of further requests may take of the steps to come; None: no bound. One that is too large for all of it runs alone."""
        limit = self._config.step_room
        running = self._running_ids()
        if limit is None or not running:
            return None
        return limit - sum(self.room_of(adapter_id) for adapter_id in running)

    def needed_room(self, adapter_id: int) -> int:
        """For one more request of this adapter."""
        return 0 if adapter_id in self._running_ids() else self.room_of(adapter_id)

    def room_of(self, adapter_id: int) -> int:
        return self._slots.cost(self._adapters[adapter_id].record.num_bytes)

    def is_at_hand(self, adapter_id: int) -> bool:
        """Whether a step could compute with this adapter as far as its weights are concerned."""
        adapter = self._adapters[adapter_id]
        if adapter.slot is not None and self._slots.is_filled(adapter.slot):
            return True
        has_source = adapter.host is not None or (self._copies_on_device and self._is_cached(adapter_id))
        return has_source and (self._config.cpu_assist or self._copies_on_device)

    def enter(self, adapter_ids: Collection[int]) -> None:
        """A step begins, with rows of these adapters. Called inside it."""
        started_s = time.perf_counter()
        is_cold = False
        for adapter_id in adapter_ids:
            adapter = self._adapters[adapter_id]
            if adapter.slot is None:
                is_cold = True
                self._take_slot(adapter, keep=adapter_ids)
        if self._slots.fills_beside_steps:
            self._split_cold(adapter_ids)
        if is_cold:
            self._seconds["step"] += time.perf_counter() - started_s

    def _split_cold(self, adapter_ids: Collection[int]) -> None:
        """Rows of adapters that are still being copied are computed on the host; where they cannot be, the device waits for the copy."""
        cold = {}
        for adapter_id in adapter_ids:
            adapter = self._adapters[adapter_id]
            assert adapter.slot is not None
            if self._slots.is_filled(adapter.slot):
                continue
            if adapter.host is None or self._host_path is None or not self._config.cpu_assist:
                self._slots.wait(adapter.slot)
                continue
            workers = self._workers
            compute_for = partial(workers.compute_for, adapter_id) if workers is not None else None
            cold[adapter_id] = ColdAdapter(adapter.host, compute_for)
        if self._host_path is not None:
            self._host_path.cold = cold

    # -- between steps -----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Would `advance` do something now?"""
        is_wanted = bool(self._wanted) and not self._is_stuck and self._num_loads < MAX_LOADS
        return bool(self._done or self._to_cache) or is_wanted or self._is_copying() or self.wait_s() == 0

    def wait_s(self) -> float | None:
        """How long until there is something to do by itself; None: until something comes."""
        return None if self._look_at_s is None else max(self._look_at_s - self._clock(), 0.0)

    def advance(self) -> None:
        """Do what there is to do and can be done in little time."""
        self._take_done()
        started_s = time.perf_counter()
        self._look_ahead()
        if self._ahead:
            self._drop_ahead()
        self._stage()
        self._take_done()  # what had been read ahead
        self._fill_cache()
        self._seconds["between"] += time.perf_counter() - started_s

    def _take_done(self) -> None:
        while self._done:
            self._done.popleft()()

    def close(self) -> None:
        """The engine goes. Waits for the loader's thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self.blocks is not None:
            self.blocks.close()
        if self._workers is not None:
            self._workers.close()
        if self._host_path is not None:
            self._host_path.close()

    # -- staging -----------------------------------------------------------------------------------------------------

    def _stage(self) -> None:
        """Bring every wanted adapter one step further, those of waiting requests first, in order of arrival."""
        self._is_stuck = True
        for adapter_id, is_guess in sorted(self._wanted.items(), key=lambda item: item[1]):
            adapter = self._adapters.get(adapter_id)
            if adapter is None or self._is_done(adapter, is_guess):
                del self._wanted[adapter_id]
            elif adapter.host is None and not self._has_device_source(adapter):
                self._start_load(adapter, is_guess)
            elif adapter.slot is None and not is_guess:
                self._offer_slot(adapter)

    def _is_done(self, adapter: _Adapter, is_guess: bool) -> bool:
        if is_guess or not adapter.requests:
            return adapter.host is not None or not (is_guess or adapter.requests)
        return adapter.slot is not None

    def _start_load(self, adapter: _Adapter, is_guess: bool) -> None:
        if adapter.is_loading or self._num_loads >= MAX_LOADS:
            return
        num_bytes = adapter.record.num_bytes
        if not self._make_host_room(num_bytes, None if is_guess else adapter):
            if is_guess:
                del self._wanted[adapter.id]
            return
        entry = None
        if self._is_cached(adapter.id):
            assert self.blocks is not None
            entry = self.blocks.entry(adapter.id)
        adapter.is_loading = True
        self._num_loads += 1
        self._reserved_bytes += num_bytes
        with self._ahead_lock:
            _, ahead = self._ahead.pop(adapter.id, (0.0, None))
        if ahead is None:
            self._executor.submit(self._load, adapter, entry)
        elif ahead.done():
            self._done.append(lambda: self._take_ahead(adapter, ahead))
        else:
            ahead.add_done_callback(lambda read: self._came_ahead(adapter, read))

    def _read(self, record: AdapterRecord) -> tuple[AdapterWeights, float]:
        """On the loader's thread. Returns how long it took, too."""
        started_s = time.perf_counter()
        weights = self._loader.load(record)
        return weights, time.perf_counter() - started_s

    def _came_ahead(self, adapter: _Adapter, read: Future[tuple[AdapterWeights, float]]) -> None:
        """On the loader's thread."""
        self._done.append(lambda: self._take_ahead(adapter, read))
        self._wake()

    def _take_ahead(self, adapter: _Adapter, read: Future[tuple[AdapterWeights, float]]) -> None:
        problem = CancelledError() if read.cancelled() else read.exception()
        if problem is not None:
            self._loaded(adapter, None, problem if isinstance(problem, Exception) else None, "disk", 0.0)
            return
        weights, elapsed_s = read.result()
        self._counts["read_ahead"] += 1
        if self._workers is not None:
            self._executor.submit(self._workers.put, adapter.id, weights)
        self._loaded(adapter, weights, None, "disk", elapsed_s)

    def _drop_ahead(self) -> None:
        """What was read for requests that did not come."""
        now = self._clock()
        with self._ahead_lock:
            old = [i for i, (at_s, _) in self._ahead.items() if now - at_s > AHEAD_FOR_S]
            dropped = [self._ahead.pop(adapter_id)[1] for adapter_id in old]
        for read in dropped:
            if not read.cancel() and read.done() and read.exception() is None:
                weights, _ = read.result()
                if weights.buffer is not None:
                    self._executor.submit(self._loader.buffers.give_back, weights.buffer)

    def _load(self, adapter: _Adapter, entry: Entry | None) -> None:
        """On the loader's thread."""
        started_s = time.perf_counter()
        weights, problem, source = None, None, "disk"
        try:
            if entry is not None:
                weights = entry.read(self._loader.buffers.take(entry.size_bytes))
                source = "cached"
            if weights is None:
                weights = self._loader.load(adapter.record)
                source = "disk"
            if self._workers is not None:
                self._workers.put(adapter.id, weights)
        except Exception as error:
            problem = error
        elapsed_s = time.perf_counter() - started_s
        self._done.append(lambda: self._loaded(adapter, weights, problem, source, elapsed_s))
        self._wake()

    def _loaded(
        self,
        adapter: _Adapter,
        weights: AdapterWeights | None,
        problem: Exception | None,
        source: str,
        elapsed_s: float,
    ) -> None:
        adapter.is_loading = False
        self._num_loads -= 1
        self._reserved_bytes -= adapter.record.num_bytes
        self._is_stuck = False
        if weights is None:
            self._wanted.pop(adapter.id, None)
            self._fail(adapter, problem)
            self._forget_if_unused(adapter)
            return
        adapter.host = weights
        self._counts[f"loads:{source}"] += 1
        self._counts[f"load_bytes:{source}"] += weights.num_bytes
        self._seconds[f"load:{source}"] += elapsed_s
        rate = self._disk_rate if source == "disk" else self._copy_rate
        rate.note(weights.num_bytes, elapsed_s, self._clock())
        self._touch(adapter)
        self._forget_if_unused(adapter)

    def _fail(self, adapter: _Adapter, problem: Exception | None) -> None:
        self._counts["failed"] += 1
        error = problem or AdapterRejected("The adapter could not be loaded.", code="unreadable")
        log.error("adapter %s could not be loaded: %s", adapter.record.name, error)
        waiting = list(adapter.requests)
        if waiting:
            self._on_failed(waiting, error)

    def _offer_slot(self, adapter: _Adapter) -> None:
        """Begin to lay an adapter out before its first step, if a slot is free that nobody with an older request waits for."""
        slot = self._free_slot(keep=self._running_ids(), since_s=min(adapter.requests.values()))
        if slot is not None:
            self._fill(adapter, slot)

    def _take_slot(self, adapter: _Adapter, keep: Collection[int]) -> None:
        running = self._running_ids()
        slot = self._free_slot(keep={*keep, *running}, since_s=None)
        if (
            slot is None
        ):  # more adapters run, over several steps, than there are slots: those come back from host memory
            gone = {i for i in running if self._adapters[i].host is None}
            slot = self._free_slot(keep={*keep, *gone}, since_s=None)
        if slot is None:
            raise RuntimeError("a step uses more adapters than there are slots")
        self._fill(adapter, slot)

    def _free_slot(self, keep: Collection[int], since_s: float | None) -> int | None:
        """An empty slot, or the one whose adapter is worth the least. since_s: spare adapters with older requests than this."""
        owners = self._manager.lora_index_to_id
        if None in owners:
            return int(owners.index(None))
        candidates = [self._adapters[owner] for owner in owners if owner not in keep]
        if since_s is not None:
            candidates = [a for a in candidates if not a.requests or min(a.requests.values()) > since_s]
        if not candidates:
            return None
        now = self._clock()
        policy = self._policies["device"]
        victim = self._adapters[
            policy.order([self._facts(a, "slot", now) for a in candidates], now)[0].adapter_id
        ]
        assert victim.slot is not None
        slot = victim.slot
        self._leave_slot(victim)
        return slot

    def _leave_slot(self, adapter: _Adapter) -> None:
        assert adapter.slot is not None
        self._manager.lora_index_to_id[adapter.slot] = None
        adapter.slot = None
        self._counts["evicted:slot"] += 1
        if adapter.requests:
            self._wanted[adapter.id], self._is_stuck = False, False
        if adapter.host is not None and not adapter.is_removed:
            self._to_cache.append(adapter.id)

    def _fill(self, adapter: _Adapter, slot: int) -> None:
        weights = adapter.host
        if weights is None:
            weights = self._read_cached(adapter)
        self._manager.lora_index_to_id[slot] = adapter.id
        adapter.slot = slot
        self._shrink_slots(adapter)
        workers = self._workers
        self._slots.fill(slot, weights, partial(workers.compute_for, adapter.id) if workers else None)
        self._counts["slot_fills"] += 1
        self._counts["slot_bytes"] += weights.num_bytes
        if not self._slots.is_filled(slot):
            adapter.is_finishing = True
            self._executor.submit(self._finish, adapter, slot)

    def _shrink_slots(self, entering: _Adapter) -> None:
        """Have unused adapters leave their slots until all that lie there take no more than a step may, and give the memory back."""
        limit = self._config.step_room
        if limit is None:
            return
        owners = [i for i in self._manager.lora_index_to_id if i is not None]
        over = sum(self.room_of(i) for i in owners) - limit
        running = self._running_ids()
        unused = [a for i in owners if i not in running and (a := self._adapters[i]) is not entering]
        now = self._clock()
        for facts in self._policies["device"].order([self._facts(a, "slot", now) for a in unused], now):
            if over <= 0:
                return
            victim = self._adapters[facts.adapter_id]
            if victim.slot is None or victim.is_finishing:
                continue
            over -= self.room_of(victim.id)
            slot = victim.slot
            self._leave_slot(victim)
            self._slots.empty(slot)

    def _finish(self, adapter: _Adapter, slot: int) -> None:
        """On the loader's thread."""
        started_s = time.perf_counter()
        try:
            self._slots.finish(slot)
        except Exception:
            log.exception("adapter %s could not be laid out ahead; its step will", adapter.record.name)
        elapsed_s = time.perf_counter() - started_s
        self._done.append(lambda: self._finished(adapter, slot, elapsed_s))
        self._wake()

    def _finished(self, adapter: _Adapter, slot: int, elapsed_s: float) -> None:
        adapter.is_finishing = False
        self._is_stuck = False
        self._seconds["layout"] += elapsed_s
        self._slots.is_filled(slot)
        self._forget_if_unused(adapter)

    # -- the cache in free KV blocks ---------------------------------------------------------------------------------

    def _fill_cache(self) -> None:
        """Keep what left its slot in memory that KV does not need."""
        if self.blocks is None:
            self._to_cache = []
            return
        for adapter_id in self._to_cache:
            adapter = self._adapters.get(adapter_id)
            if adapter is not None and adapter.host is not None and adapter.slot is None:
                self._cache(adapter, adapter.host)
        self._to_cache = []
        if self.blocks.is_writing():
            slice_s = BUSY_COPY_S if self._is_busy() else IDLE_COPY_S
            now, started_s = self._clock(), time.perf_counter()
            num_bytes = self.blocks.write(int(slice_s * self._copy_rate.at(now)))
            self._copy_rate.note(num_bytes, time.perf_counter() - started_s, now)
            self._counts["cache_bytes"] += num_bytes

    def _cache(self, adapter: _Adapter, weights: AdapterWeights) -> None:
        assert self.blocks is not None
        if self.blocks.put(adapter.id, weights) or not self.blocks.ids():
            return
        now = self._clock()
        cached = [self._facts(self._adapters[i], "cached", now) for i in self.blocks.ids()]
        cached.append(self._facts(adapter, "cached", now))
        victims = choose_victims(cached, adapter.record.num_bytes, self._policies["device"], now)
        if not victims or adapter.id in victims:
            return  # not worth the place of those that are there
        for victim in victims:
            self.blocks.drop(victim)
            self._policies["device"].evicted(victim)
            self._counts["evicted:cached:adapter"] += 1
        self.blocks.put(adapter.id, weights)

    def lost(self, adapter_id: int) -> None:
        """KV took a cached adapter's blocks."""
        self._policies["device"].evicted(adapter_id)
        self._counts["evicted:cached:kv"] += 1

    def may_displace(self, adapter_id: int, num_blocks: int) -> bool:
        """E3: may a cached adapter take the place of so many of the oldest prefix blocks?"""
        now = self._clock()
        facts = self._facts(self._adapters[adapter_id], "cached", now)
        return may_take_prefix(facts, self._uses.per_s(adapter_id, now), self._prefix_facts(num_blocks))

    def worth_less(self, num_blocks: int) -> int | None:
        """E3: a cached adapter that is worth less, by the byte, than so many of the oldest prefix blocks."""
        if self.blocks is None:
            return None
        now = self._clock()
        prefix = self._prefix_facts(num_blocks)
        if prefix.reuse_per_s <= 0:
            return None
        cached = [self._facts(self._adapters[i], "cached", now) for i in self.blocks.ids()]
        least = min((facts for facts in cached if not facts.is_queued), key=gain_per_byte, default=None)
        if least is None or may_take_prefix(least, self._uses.per_s(least.adapter_id, now), prefix):
            return None
        self._policies["device"].evicted(least.adapter_id)
        self._counts["evicted:cached:value"] += 1
        return least.adapter_id

    def _read_cached(self, adapter: _Adapter) -> AdapterWeights:
        """On a device of its own: a copy within it."""
        assert self.blocks is not None
        entry = self.blocks.entry(adapter.id)
        device = torch.device(self._manager.device)
        weights = entry.read(torch.empty(entry.size_bytes, dtype=torch.uint8, device=device))
        assert weights is not None
        self.blocks.used(adapter.id)
        return weights

    def _is_cached(self, adapter_id: int) -> bool:
        return self.blocks is not None and self.blocks.holds(adapter_id)

    def _is_copying(self) -> bool:
        return self.blocks is not None and self.blocks.is_writing()

    @property
    def _copies_on_device(self) -> bool:
        """A slot is filled from cached blocks without a way through host memory."""
        return torch.device(self._manager.device).type != "cpu"

    def _has_device_source(self, adapter: _Adapter) -> bool:
        return self._copies_on_device and self._is_cached(adapter.id)

    # -- host memory -------------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        adapters = list(self._adapters.values())
        return sum(host.num_bytes for adapter in adapters if (host := adapter.host) is not None)

    def _has_idle_memory(self, num_bytes: int) -> bool:
        """Does it fit beside what is there and what is on its way, with half of the memory left?"""
        on_its_way = [
            self._adapters[i].record.num_bytes for i in self._wanted if self._adapters[i].host is None
        ]
        return 2 * (self.host_bytes + sum(on_its_way) + num_bytes) <= self._config.host_bytes

    def _make_host_room(self, num_bytes: int, needed_by: _Adapter | None) -> bool:
        """needed_by: whose waiting request it is for; None for a guess, which displaces nothing that a request waits for."""
        over = self.host_bytes + self._reserved_bytes + num_bytes - self._config.host_bytes
        if over <= 0:
            return True
        now = self._clock()
        candidates = [a for a in self._adapters.values() if self._may_leave_host(a, needed_by)]
        facts = [self._facts(a, "host", now) for a in candidates]
        victims = choose_victims(facts, over, self._policies["host"], now)
        for victim in victims:
            self._leave_host(self._adapters[victim])
            self._policies["host"].evicted(victim)
            self._counts["evicted:host"] += 1
        return bool(victims)

    def _may_leave_host(self, adapter: _Adapter, needed_by: _Adapter | None) -> bool:
        is_read = adapter.is_finishing or (
            self.blocks is not None and self.blocks.is_writing_from(adapter.id)
        )
        if adapter.host is None or adapter.is_pinned or is_read:
            return False
        if not adapter.requests:
            return True
        if needed_by is None or adapter.id in self._running_ids():
            return False
        return min(adapter.requests.values()) > min(needed_by.requests.values(), default=0.0)

    def _leave_host(self, adapter: _Adapter) -> None:
        weights, adapter.host = adapter.host, None
        if self._workers is not None:
            self._executor.submit(self._workers.drop, adapter.id)
        if adapter.requests:
            self._wanted[adapter.id] = False
        if weights is not None and weights.buffer is not None:
            self._executor.submit(self._loader.buffers.give_back, weights.buffer)

    # -- guesses -----------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Load adapters whose next request is near, by the times between their last ones."""
        if self._arrivals is None or not self._adapters:
            return
        now = self._clock()
        if self._look_at_s is not None and now < self._look_at_s:
            return
        self._look_at_s = now + LOOK_EVERY_S
        for adapter_id, probability in self._arrivals.due(now, MIN_LEAD_S + LOOK_EVERY_S):
            if probability >= 0.5:
                self._counts["prefetched"] += 1
                self.prefetch(adapter_id)

    # -- facts -------------------------------------------------------------------------------------------------------

    def _facts(self, adapter: _Adapter, tier: str, now: float) -> CachedAdapter:
        """What its leaving this tier would cost: the way back from the next best place."""
        num_bytes = adapter.record.num_bytes
        is_near = {
            "slot": adapter.host is not None or self._is_cached(adapter.id),
            "cached": adapter.host is not None,
            "host": self._is_cached(adapter.id),
        }[tier]
        rate = self._copy_rate if is_near else self._disk_rate
        return CachedAdapter(
            adapter_id=adapter.id,
            num_bytes=num_bytes,
            last_used_s=adapter.last_used_s,
            uses=self._uses.uses(adapter.id, now),
            reload_s=num_bytes / rate.at(now),
            is_queued=bool(adapter.requests) or adapter.is_pinned,
        )

    def _touch(self, adapter: _Adapter) -> None:
        now = self._clock()
        for tier, policy in self._policies.items():
            policy.touched(self._facts(adapter, "host" if tier == "host" else "cached", now), now)
        if self._is_cached(adapter.id):
            assert self.blocks is not None
            self.blocks.used(adapter.id)

    def _forget_if_unused(self, adapter: _Adapter) -> None:
        """Of a removed version nothing stays behind its last request."""
        if not adapter.is_removed or adapter.requests or adapter.is_loading or adapter.is_finishing:
            return
        self._adapters.pop(adapter.id, None)
        self._wanted.pop(adapter.id, None)
        if adapter.slot is not None:
            self._manager.lora_index_to_id[adapter.slot] = None
            adapter.slot = None
        if self.blocks is not None:
            self.blocks.drop(adapter.id)
        self._leave_host(adapter)
        for policy in self._policies.values():
            policy.forgotten(adapter.id)
        self._uses.forget(adapter.id)
        if self._arrivals is not None:
            self._arrivals.forget(adapter.id)

    def _place(self, adapter: _Adapter) -> AdapterPlace:
        if adapter.slot is not None:
            return "slot"
        if adapter.host is not None:
            return "host"
        return "cached" if self._is_cached(adapter.id) else "disk"

    def places(self) -> dict[int, AdapterPlace]:
        """Where each version is, the nearest place of several. From any thread."""
        return {adapter.id: self._place(adapter) for adapter in list(self._adapters.values())}

    def stats(self) -> AdapterStats:
        places: Counter[str] = Counter(self.places().values())
        counts = dict(self._counts)
        if self._workers is not None:
            counts["worker_deltas"] = self._workers.num_deltas
        if self._host_path is not None:
            counts["host_path_deltas"] = self._host_path.num_deltas
        return AdapterStats(
            num_adapters=len(self._adapters),
            num_by_place=dict(places),
            host_bytes=self.host_bytes,
            host_capacity_bytes=self._config.host_bytes,
            cached_bytes=self.blocks.num_bytes if self.blocks is not None else 0,
            num_waiting=len([i for i, is_guess in self._wanted.items() if not is_guess]),
            counts=counts,
            seconds=dict(self._seconds),
        )


def _keep_out_of_the_way() -> None:
    """One thread of computation, on any core. A thread inherits from the engine's its core, where it would take turns with it.

    vLLM's CPU worker replaces `torch.set_num_threads` by a function that does nothing; the one beneath it is per thread.
    """
    torch._C.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


def lora_ids(requests: Iterable[Any]) -> set[int]:
    """Of vLLM's scheduler requests."""
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
