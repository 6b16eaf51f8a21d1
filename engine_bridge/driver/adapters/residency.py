"""Carries out on vLLM's LoRA manager, its slots, KV blocks and host memory what `engine_bridge.core.adapters.residency` decides.

Reading, checking and laying out happen on a loader's thread; the engine's thread decides, between steps. All methods run on the engine thread unless
they say otherwise.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import ModelContract
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.core.adapters.adapter_moves import (
    DropCopy,
    DropHost,
    Fill,
    Forget,
    LeaveSlot,
    LoadToHost,
    Move,
    Refuse,
    WriteCopy,
)
from engine_bridge.core.adapters.residency import AdapterPlaces
from engine_bridge.core.adapters.step_layouts import StepLayouts
from engine_bridge.driver.adapters.device_copies import DeviceCopies
from engine_bridge.driver.adapters.failures import Failures
from engine_bridge.driver.adapters.filling import Filling
from engine_bridge.driver.adapters.host_path import ColdAdapter, HostPath, NoHostPath
from engine_bridge.driver.adapters.host_workers import AssistWorkers
from engine_bridge.driver.adapters.loading import Loaded, LoaderThread
from engine_bridge.driver.adapters.slots import Slots
from engine_bridge.driver.adapters.weights import AdapterWeights
from engine_bridge.protocol.figures import AdapterStats
from engine_bridge.protocol.node import AdapterPlace, Advisory, AdvisoryReport
from kvtiers.closing import going_on

log = logging.getLogger(__name__)


class Residency:
    """The adapters of one engine.

    Args:
        core: decides which adapters are loaded, filled and dropped.
        contract: the shapes, types and names that an adapter must have to run here.
        manager: vLLM's LoRAModelManager, whose slot table this object writes.
        slots: the places that steps compute with.
        running_ids: returns the adapters of the requests that the scheduler runs now.
        on_failed: called with the ids of requests whose adapter cannot be had, and why; they must leave the engine.
        workers: compute with adapters that are not in their slot yet.
        host_path: computes rows of adapters whose slots are not filled, where slots fill beside the steps.
        step_layouts: which adapters a step may lay out itself, where slots do not fill beside it.
        on_spoiled: see `Failures`.
    """

    def __init__(
        self,
        core: AdapterPlaces,
        *,
        contract: ModelContract,
        manager: Any,
        slots: Slots,
        loader: LoaderThread,
        running_ids: Callable[[], set[int]],
        has_running: Callable[[], bool],
        is_busy: Callable[[], bool],
        on_failed: Callable[[list[str], Exception], None],
        copies: DeviceCopies,
        workers: AssistWorkers,
        host_path: HostPath | NoHostPath,
        step_layouts: StepLayouts,
        on_spoiled: Callable[[int], None] = lambda adapter_id: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.contract = contract
        self.loader = loader
        self.copies = copies
        self._slots = slots
        self._running_ids = running_ids
        self._has_running, self._is_busy = has_running, is_busy
        self._on_failed = on_failed
        self._workers = workers
        self._host_path = host_path
        self._step_layouts = step_layouts
        self._clock = clock
        self._records: dict[int, AdapterRecord] = {}
        self._host: dict[int, AdapterWeights] = {}
        self._failures = Failures(self._name_of, on_spoiled)
        self._filling = Filling(
            core,
            manager=manager,
            slots=slots,
            loader=loader,
            computes=workers.computes,
            host=self._host,
            copies=copies,
            failures=self._failures,
            do=self._do,
        )
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._doers: dict[type, Callable[[Any], None]] = {
            LoadToHost: self._load,
            Fill: self._filling.fill,
            LeaveSlot: self._filling.leave,
            DropHost: self._drop_host,
            WriteCopy: self._write_copy,
            DropCopy: lambda move: copies.drop(move.adapter_id),
            Refuse: self._refuse,
            Forget: self._forget,
        }

    # -- adapters ---------------------------------------------------------------------------------------------------

    def add(self, record: AdapterRecord) -> None:
        """Register a version, or update a known one (pinned or not). A new version is loaded where memory lies idle."""
        self._records[record.version_id] = record
        room = self._slots.cost(record.num_bytes)
        self.core.add(
            record.version_id, record.num_bytes, room=room, is_pinned=record.is_pinned, now=self._clock()
        )

    def remove(self, adapter_id: int) -> None:
        """Take a version away: no new request will name it, and it leaves when its last request has ended."""
        self._do(self.core.remove(adapter_id))

    def announce(self, advisory: Advisory, adapter_id: int) -> None:
        """Bring an adapter that an advisory names as near to the device as it may come."""
        self.core.announce(advisory.advisory_id, adapter_id, advisory.probability)

    def accounted(self, adapter_id: int, report: AdvisoryReport) -> AdvisoryReport:
        """Return the report on an advisory's KV, completed with the fate of the adapter that it names."""
        is_late = adapter_id in self._records and not self.is_at_hand(adapter_id)
        return self.core.announced.accounted(report.advisory_id, is_late, report, self._clock())

    def expect(self, adapter_id: int) -> None:
        """Note that a request for an adapter is about to enter. From any thread.

        The adapter is read and laid out while the step under way runs, or is not: this is only a hint.
        """
        record = self._records.get(adapter_id)
        place = self.core.place_of(adapter_id)
        if record is not None and place == "disk":
            self.loader.expect(record, self._clock())
        elif record is not None and place == "host":
            self.loader.expect_slot(record, self._without_slot, self._clock())

    def _without_slot(self, adapter_id: int) -> AdapterWeights | None:
        """Return the weights of an adapter that is in host memory and no nearer. From any thread, as a hint."""
        return self._host.get(adapter_id) if self.core.place_of(adapter_id) == "host" else None

    def put_back(self, adapter_ids: Iterable[int], *, keeps_host: bool) -> None:
        """Make adapters leave their slots and the KV blocks, and host memory unless `keeps_host`, so that a measurement begins with them there.

        Afterwards nothing reads KV blocks any more: an engine that sleeps gives their memory up, and a GPU that is read there takes no more work.
        """
        for adapter_id in adapter_ids:
            self._do(self.core.put_back(adapter_id, keeps_host=keeps_host))
        self.loader.rest()

    # -- requests ----------------------------------------------------------------------------------------------------

    def requested(self, request_id: str, adapter_id: int) -> None:
        """Note that a request enters the engine. Raises AdapterRejected where its version was removed while it was queued."""
        if adapter_id not in self._records:
            raise AdapterRejected("Its adapter was replaced or removed meanwhile.", code="gone")
        self._filling.is_filled(adapter_id)
        self.core.requested(request_id, adapter_id, self._clock())
        self.copies.touch(adapter_id)

    def released(self, request_id: str, adapter_id: int) -> None:
        """Note that a request has ended, or has never reached the engine."""
        moves = self.core.released(request_id, adapter_id, self._clock())
        self.copies.touch(adapter_id)
        self._do(moves)

    def may_start(self, adapter_id: int) -> bool:
        """Return whether the next step could compute with this adapter beside the running ones."""
        return self.is_at_hand(adapter_id) and not self.is_held_back(adapter_id) and self.has_room(adapter_id)

    def has_room(self, adapter_id: int) -> bool:
        """Return whether the adapter has room beside the running ones; see `AdapterPlaces.has_room`."""
        return self.core.has_room(adapter_id, self._running_ids())

    def is_at_hand(self, adapter_id: int) -> bool:
        """Return whether a step could compute with this adapter as far as its weights are concerned.

        A step that lays an adapter out itself takes longer for all running requests. While any run, the loader's thread lays it out first, unless
        they lose less by it than the request gains.
        """
        if self._filling.is_filled(adapter_id):
            return True
        delays_nobody = self._slots.fills_beside_steps or not self._has_running()
        may_assist = delays_nobody or self._workers.computes(adapter_id) is not None
        return self.core.is_at_hand(adapter_id, may_assist=may_assist) or self._may_lay_out(adapter_id)

    def _may_lay_out(self, adapter_id: int) -> bool:
        """Return whether the next step may lay the adapter out itself, beside the running requests."""
        if not self.core.is_at_hand(adapter_id):
            return False
        version = self.core.table[adapter_id]
        if version.slot is None:
            num_bytes = self._slots.laid_out_bytes(version.num_bytes)
        else:
            num_bytes = self._slots.left_bytes(version.slot)
        return self._step_layouts.allows(adapter_id, num_bytes, self._clock())

    def is_held_back(self, adapter_id: int) -> bool:
        """Return whether the adapter starts no further request, so that another adapter gets its turn."""
        return self.core.turns.holds_back(adapter_id, self._running_ids, self._clock())

    def enter(self, adapter_ids: Collection[int]) -> None:
        """Begin a step with rows of these adapters. Called inside the step."""
        started_s = time.perf_counter()
        moves = self.core.enter(adapter_ids, self._running_ids(), self._clock())
        self._do(moves)
        if self._slots.fills_beside_steps:
            self._split_cold(adapter_ids)
        if moves:
            self._seconds["step"] += time.perf_counter() - started_s

    def _split_cold(self, adapter_ids: Collection[int]) -> None:
        """Choose which rows the host computes: rows of adapters still being copied.

        Where the host need not or cannot compute them, the device waits for the copy.
        """
        cold = {}
        for adapter_id in adapter_ids:
            if self._filling.is_filled(adapter_id):
                continue
            weights = self._host.get(adapter_id)
            may_assist = weights is not None and self._host_path.covers(weights)
            if weights is not None and may_assist and self.core.is_assisted(adapter_id):
                failed = partial(self._failures.note, adapter_id)
                cold[adapter_id] = ColdAdapter(weights, self._workers.computes(adapter_id), failed)
            else:
                self._filling.wait(adapter_id)
        self._host_path.cold = cold

    # -- between steps -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note that another step is about to be scheduled."""
        done = self._slots.take_step_layouts()
        self._step_layouts.rate.note(done.num_bytes, done.pack_s, self._clock())
        self._seconds["step"] += done.all_s
        self._counts["laid_out_in_step"] += len(done.slots)
        self._step_layouts.begin()
        self._failures.is_in_step = True

    def end_step(self) -> dict[int, AdapterRejected]:
        """Note that the step is over.

        Returns:
            Errors by the adapters that the step could not compute with: its output for their requests is not theirs. See `settle`.
        """
        self._failures.is_in_step = False
        return self._failures.take()

    def settle(self, errors: dict[int, AdapterRejected]) -> None:
        """Release adapters that could not be made ready, and tell their requests. A later request tries again."""
        for adapter_id, error in errors.items():
            version = self.core.table.get(adapter_id)
            waiting = list(version.requests) if version is not None else []
            self._do(self.core.broken(adapter_id))
            if waiting:
                self._on_failed(waiting, error)

    def has_work(self) -> bool:
        """Return whether `advance` would do something now."""
        return self.loader.has_done() or self.core.has_work(self._clock()) or self.copies.blocks.is_writing()

    def wait_s(self) -> float | None:
        """Return the seconds until there is work by itself; None: until something comes."""
        return self.core.wait_s(self._clock())

    def advance(self) -> None:
        """Do the waiting work that takes little time."""
        self.loader.take_done()
        started_s = time.perf_counter()
        now = self._clock()
        self.loader.drop_ahead(now)
        self._do(self.core.advance(self._running_ids(), now))
        # Adapters that were read ahead are here at once. Their slots are laid out during the next step, not during the one after it.
        while self.loader.has_done():
            self.loader.take_done()
            self._do(self.core.advance(self._running_ids(), now))
        self._do(self.core.copies_to_write(now))
        self.copies.write(self._is_busy())
        if self._failures:
            self.settle(self._failures.take())
        self._seconds["between"] += time.perf_counter() - started_s

    def close(self) -> None:
        """Close all parts: the engine closes. Waits for the loader's thread."""
        parts = {
            "the loader of adapters": self.loader.close,
            "adapters in KV blocks": self.copies.blocks.close,
            "the adapters' worker processes": self._workers.close,
            "the host's path of adapters": self._host_path.close,
        }
        for what, close in parts.items():
            with going_on(what):
                close()

    # -- moves -------------------------------------------------------------------------------------------------------

    def _do(self, moves: Iterable[Move]) -> None:
        for move in moves:
            with self._failures.contained(move.adapter_id):
                self._doers[type(move)](move)

    def _load(self, move: LoadToHost) -> None:
        entry = self.copies.blocks.entry(move.adapter_id) if move.source == "cached" else None

        def loaded(result: Loaded) -> None:
            """Hand the result on; errors become this adapter's failure."""
            with self._failures.contained(move.adapter_id):
                self._loaded(move.adapter_id, result)

        self.loader.load(self._records[move.adapter_id], entry, loaded)

    def _loaded(self, adapter_id: int, loaded: Loaded) -> None:
        if loaded.weights is None:
            self._load_failed(adapter_id, loaded.problem)
            return
        if loaded.was_ahead:
            self._counts["read_ahead"] += 1
        self._seconds[f"load:{loaded.source}"] += loaded.elapsed_s
        self._host[adapter_id] = loaded.weights
        num_bytes = loaded.weights.num_bytes
        moves = self.core.loaded(adapter_id, num_bytes, loaded.source, loaded.elapsed_s, self._clock())
        self.copies.touch(adapter_id)
        self._do(moves)

    def _name_of(self, adapter_id: int) -> str:
        record = self._records.get(adapter_id)
        return record.name if record is not None else "that has gone"

    def _load_failed(self, adapter_id: int, problem: Exception | None) -> None:
        error = problem or AdapterRejected("The adapter could not be loaded.", code="unreadable")
        log.error("adapter %s could not be loaded: %s", self._records[adapter_id].name, error)
        waiting = list(self.core.table[adapter_id].requests)
        self._do(self.core.load_failed(adapter_id))
        if waiting:
            self._on_failed(waiting, error)

    def _refuse(self, move: Refuse) -> None:
        error = AdapterRejected(
            "The adapters that are pinned leave no room in host memory for this one. Unpin one, or raise --adapter-host-gib.",
            code="too_large",
        )
        log.error("adapter %s is not loaded: %s", self._records[move.adapter_id].name, error)
        self._on_failed(list(self.core.table[move.adapter_id].requests), error)

    def _drop_host(self, move: DropHost) -> None:
        self.loader.give_up(move.adapter_id, self._host.pop(move.adapter_id))

    def _forget(self, move: Forget) -> None:
        del self._records[move.adapter_id]

    def _write_copy(self, move: WriteCopy) -> None:
        adapter_id, weights = move.adapter_id, self._host[move.adapter_id]
        if self.copies.begin(adapter_id, weights, is_ahead=move.is_ahead):
            return
        drops = [] if move.is_ahead else self.core.copies.room_for(adapter_id, self._clock())
        self._do(drops)
        if drops:  # else the adapter is worth less than those whose place it would take
            self.copies.begin(adapter_id, weights, is_ahead=False)

    # -- figures ------------------------------------------------------------------------------------------------------

    def places(self) -> dict[int, AdapterPlace]:
        """Return where each version is, the nearest place of several. From any thread."""
        return self.core.places()

    def stats(self) -> AdapterStats:
        """Return the figures of all adapters. From any thread."""
        counts = dict(self._counts) | self.copies.counts() | self._workers.counts() | self._host_path.counts()
        seconds = dict(self._seconds)
        counts["laid_out_ahead"] = self._filling.num_laid_out_ahead
        seconds["layout"] = self._filling.layout_s + self.loader.early_layout_s
        return _stats(self.core, self.copies.blocks.num_bytes, counts, seconds)


def _stats(
    core: AdapterPlaces, cached_bytes: int, counts: dict[str, int], seconds: dict[str, float]
) -> AdapterStats:
    return AdapterStats(
        num_adapters=len(core.table),
        num_by_place=dict(Counter[str](core.places().values())),
        host_bytes=core.table.host_bytes,
        host_capacity_bytes=core.rules.host_bytes,
        cached_bytes=cached_bytes,
        num_waiting=core.wanted.num_waited_for,
        counts=dict(core.counts) | counts,
        seconds=seconds,
    )


def lora_ids(requests: Iterable[Any]) -> set[int]:
    """Return the adapter ids of vLLM's scheduler requests."""
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
