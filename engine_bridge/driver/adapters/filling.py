"""Carries out the core's decisions on the slots of one engine, and tells the core when steps can compute with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine_bridge.core.adapters.adapter_moves import Fill, LeaveSlot, Move
from engine_bridge.core.adapters.residency import AdapterPlaces
from engine_bridge.driver.adapters.device_copies import DeviceCopies
from engine_bridge.driver.adapters.failures import Failures
from engine_bridge.driver.adapters.loading import LoaderThread
from engine_bridge.driver.adapters.slots import ComputeFor, Slots
from engine_bridge.driver.adapters.weights import AdapterWeights


class Filling:
    """The slots of one engine. All methods run on the engine thread.

    Args:
        core: decides which adapter gets which slot.
        manager: vLLM's LoRAModelManager, whose slot table this object writes.
        computes: returns the function that computes an adapter's deltas until the adapter is in its slot.
    """

    def __init__(
        self,
        core: AdapterPlaces,
        *,
        manager: Any,
        slots: Slots,
        loader: LoaderThread,
        computes: Callable[[int], ComputeFor | None],
        host: Mapping[int, AdapterWeights],
        copies: DeviceCopies,
        failures: Failures,
        do: Callable[[Iterable[Move]], None],
    ) -> None:
        self._core, self._manager, self._slots, self._loader = core, manager, slots, loader
        self._computes, self._host, self._copies = computes, host, copies
        self._failures, self._do = failures, do
        # Slots that steps cannot compute with yet, and the ids of their adapters.
        self._unfilled: dict[int, int] = {}
        self.num_laid_out_ahead = 0
        self.layout_s = 0.0
        """Seconds that the loader's thread spent on slots."""
        slots.on_failed = lambda slot, error: failures.note(manager.lora_index_to_id[slot], error)

    def fill(self, move: Fill) -> None:
        """Make steps compute with an adapter in a slot. Even if this raises, no step computes with the slot's previous adapter."""
        self._manager.lora_index_to_id[move.slot] = move.adapter_id
        try:
            self._begin(move)
        except Exception:
            self._do(self._core.laid_out(move.adapter_id))
            raise
        if self.is_filled(move.adapter_id):
            self._do(self._core.laid_out(move.adapter_id))
            return
        self._loader.lay_out(
            lambda: self._slots.finish(move.slot),
            lambda elapsed_s, problem: self._laid_out(move, elapsed_s, problem),
        )

    def _begin(self, move: Fill) -> None:
        self._slots.empty(move.slot)
        is_in_host = move.source == "host"
        weights = self._host[move.adapter_id] if is_in_host else self._copies.read(move.adapter_id)
        layout = self._loader.take_layout(move.adapter_id)
        if layout is not None:
            self.num_laid_out_ahead += 1
        self._slots.fill(move.slot, weights, self._computes(move.adapter_id), layout)
        self._unfilled[move.slot] = move.adapter_id

    def _laid_out(self, move: Fill, elapsed_s: float, problem: Exception | None) -> None:
        self.layout_s += elapsed_s
        self.is_filled(move.adapter_id)
        if problem is not None and self._unfilled.get(move.slot) == move.adapter_id:
            self._failures.note(move.adapter_id, problem)
        self._do(self._core.laid_out(move.adapter_id))

    def is_filled(self, adapter_id: int) -> bool:
        """Return whether a step can compute with the adapter's slot. Tells the core so the first time."""
        version = self._core.table[adapter_id]
        slot = version.slot
        if slot is not None and self._unfilled.get(slot) == adapter_id and self._slots.is_filled(slot):
            del self._unfilled[slot]
            self._core.filled(adapter_id, slot)
        return version.is_filled

    def wait(self, adapter_id: int) -> None:
        """Make the step that begins wait until this adapter's slot is filled, without waiting here."""
        slot = self._core.table[adapter_id].slot
        assert slot is not None
        self._slots.wait(slot)

    def leave(self, move: LeaveSlot) -> None:
        """Take an adapter out of its slot."""
        self._manager.lora_index_to_id[move.slot] = None
        self._unfilled.pop(move.slot, None)
        if move.is_emptied:
            self._slots.empty(move.slot)
