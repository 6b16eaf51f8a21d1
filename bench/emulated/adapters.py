"""Adapters of an emulated node: the core that serves decides (`engine_bridge/core/residency.py`), copies take their bytes over a link.

All adapters are in host memory, as the papers have them. A request is gated as live until its adapter could be computed with; what becomes of a step
that begins before its adapters' copies are whole, `ColdStart` says. Not here: copies in KV blocks that nobody needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from bench.emulated.assist import ColdStart
from bench.sim.core.links import SharedLink
from engine_bridge.core.adapter_moves import Fill, Load, Move
from engine_bridge.core.adapter_worth import Worth
from engine_bridge.core.residency import AdapterPlaces, Rules


class EmulatedAdapters:
    """In the place of `engine_bridge.driver.adapters.residency.Residency`.

    Args:
        num_bytes: of each adapter; ids count from 1, as vLLM's do.
        num_slots: adapters that steps may compute with; each slot is as large as the largest, as on a GPU.
        policy: which one leaves its slot first; None for no cache: it goes with its last request.
        running: ids of adapters that requests run with.
        on_filled: called when a slot can be computed with.
        cold_start: of requests whose adapter is on its way.
    """

    def __init__(
        self,
        link: SharedLink,
        num_bytes: Sequence[int],
        num_slots: int,
        policy: str | None,
        running: Callable[[], set[int]],
        on_filled: Callable[[], None],
        clock: Callable[[], float],
        cold_start: ColdStart = "step waits",
    ) -> None:
        # Twice as much lies idle as there is, so that all are loaded before anybody asks for them.
        rules = Rules(
            host_bytes=2 * sum(num_bytes),
            num_slots=num_slots,
            step_room=num_slots,
            cpu_assist=cold_start == "host helps",
            fills_from_copies=cold_start != "request waits",
        )
        self.core = AdapterPlaces(rules, Worth(policy or "lru", copy_bytes_per_s=link.bytes_per_s))
        self._link, self._num_bytes, self._keeps = link, num_bytes, policy is not None
        self._running, self._on_filled, self._clock = running, on_filled, clock
        for adapter_id, size in enumerate(num_bytes, 1):
            self.core.add(adapter_id, size, room=1, is_pinned=True, now=clock())
        while self.core.has_work(clock()):
            self.advance()

    # -- requests ------------------------------------------------------------------------------------------------------

    def requested(self, request_id: str, adapter_id: int) -> str:
        """A request enters the engine. Where its adapter is: `slot` or `host`."""
        place = self.core.table[adapter_id].place
        self.core.requested(request_id, adapter_id, self._clock())
        return place

    def released(self, request_id: str, adapter_id: int) -> None:
        """It has ended."""
        self._do(self.core.released(request_id, adapter_id, self._clock()))
        if not self._keeps and not self.core.table[adapter_id].requests:
            self._do(self.core.put_back(adapter_id, keeps_host=True))

    # -- as the scheduler asks -----------------------------------------------------------------------------------------

    def is_at_hand(self, adapter_id: int) -> bool:
        return self.core.is_at_hand(adapter_id)

    def may_start(self, adapter_id: int) -> bool:
        room = self.free_room()
        return self.is_at_hand(adapter_id) and (room is None or self.needed_room(adapter_id) <= room)

    def free_room(self) -> int | None:
        return self.core.free_room(self._running())

    def needed_room(self, adapter_id: int) -> int:
        return self.core.needed_room(adapter_id, self._running())

    def room_of(self, adapter_id: int) -> int:
        return self.core.room_of(adapter_id)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Between steps."""
        now = self._clock()
        self._do(self.core.advance(self._running(), now))
        self.core.copies_to_write()

    def enter(self, adapter_ids: Collection[int]) -> None:
        """A step begins with these; it runs once it `may_run`."""
        self._do(self.core.enter(adapter_ids, self._running(), self._clock()))

    def may_run(self, adapter_ids: Iterable[int]) -> bool:
        """Are the copies whole, or is there a host that helps until they are?"""
        return self.is_assisted or all(self.core.table[adapter_id].is_filled for adapter_id in adapter_ids)

    @property
    def is_assisted(self) -> bool:
        return self.core.rules.cpu_assist

    def assisted(self, adapter_ids: Iterable[int]) -> set[int]:
        """Of these, the ones that the host computes now."""
        if not self.is_assisted:
            return set()
        return {adapter_id for adapter_id in adapter_ids if not self.core.table[adapter_id].is_filled}

    def _do(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if isinstance(move, Load):
                size = self._num_bytes[move.adapter_id - 1]
                self._do(self.core.loaded(move.adapter_id, size, "disk", 1e-9, self._clock()))
            elif isinstance(move, Fill):
                self._copy(move.adapter_id, move.slot)

    def _copy(self, adapter_id: int, slot: int) -> None:
        def copied(now: float) -> None:
            self.core.filled(adapter_id, slot)
            self._do(self.core.laid_out(adapter_id))
            self._on_filled()

        self._link.transfer(self._num_bytes[adapter_id - 1], copied)
