"""Adapters laid out for our wrapper's GEMMs, in memory that goes from one adapter to the next."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from engine_bridge.core.adapters.staging import AHEAD_FOR_S
from engine_bridge.driver.adapters.weights import AdapterWeights
from engine_bridge.driver.lora.lora_weights import MakeFew, Pending, SlotWeights, pack_slot, packed_size

# Our wrapper computes in fp32.
PACKED_BYTES = 4
# Beyond its bytes a layer takes as long as so many of them: 0.08 ms (measured; adapters of 1 to 3 MB, 48 layers: 3 to 5 ms).
LAYER_BYTES = 160_000
# Linux' large pages, and the least memory that is asked for on them: the last page is full only in part.
LARGE_PAGE_BYTES, LEAST_LARGE_BYTES = 1 << 21, 1 << 23

Slices = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[int]]
"""A, B and rank of a layer's slices, as `pack_slot` takes them."""


class Memories:
    """Memory that layouts have left, for the next ones. From any thread. max_idle_bytes: beyond these the oldest goes, but not the last one."""

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[torch.Tensor] = []
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Of all that nobody uses now."""
        return sum(PACKED_BYTES * memory.numel() for memory in self._idle)

    def take(self, num_floats: int) -> torch.Tensor:
        """At least as long, unless there has to be new memory: then as long. What lies in it is of no use."""
        with self._lock:
            fitting = [each for each in self._idle if num_floats <= each.numel() <= 2 * num_floats]
            if fitting:
                best = min(fitting, key=lambda memory: memory.numel())
                self._idle = [each for each in self._idle if each is not best]
                return best
        return large_memory(num_floats)

    def give_back(self, memory: torch.Tensor) -> None:
        """Nobody reads or writes it any more."""
        with self._lock:
            self._idle.append(memory)
            while len(self._idle) > 1 and self.idle_bytes > self._max_idle_bytes:
                self._idle.pop(0)


class Layout:
    """One adapter in its layers, each laid out by whoever needs it first: the loader's thread, or a step that has come to it.

    Args:
        slices: by the name of the layer.
    """

    def __init__(self, slices: Mapping[str, Slices], memories: Memories, make_few: MakeFew | None) -> None:
        sizes = {name: packed_size(*each) for name, each in slices.items()}
        total = sum(sizes.values())
        self._memories, self._memory = memories, memories.take(total)
        self._lock = threading.Lock()
        parts = self._memory[:total].split(list(sizes.values()))
        self.layers = {
            name: Pending(
                _packing(slices[name], part, make_few), self._lock, size_bytes=PACKED_BYTES * part.numel()
            )
            for name, part in zip(sizes, parts, strict=True)
        }
        self.num_bytes = PACKED_BYTES * self._memory.numel()

    @property
    def left_bytes(self) -> int:
        """Of the layers that are not laid out yet, with what each takes beyond its bytes."""
        return sum(layer.size_bytes + LAYER_BYTES for layer in self.layers.values() if layer.is_waiting)

    @property
    def is_waiting(self) -> bool:
        """Is anything left to do?"""
        return any(layer.is_waiting for layer in self.layers.values())

    def finish(self) -> None:
        """Lay out what is left. From any thread."""
        for layer in self.layers.values():
            layer.take()

    def drop(self) -> None:
        """Nobody computes with it any more. What is left is not laid out, and its memory is the next one's."""
        for layer in self.layers.values():
            layer.drop()  # so that nobody begins another one
        with self._lock:
            for layer in self.layers.values():
                layer.drop()  # and the one that was under way
        self._memories.give_back(self._memory)


def _packing(
    slices: Slices, memory: torch.Tensor, make_few: MakeFew | None
) -> Callable[[], SlotWeights | None]:
    return lambda: pack_slot(*slices, memory, make_few)


class LayoutsAhead:
    """Layouts of adapters whose requests are on their way here. From any thread. One at least, however large, beyond that `max_bytes`.

    prepare: begins one, see `Slots.prepare`. cost: bytes of the layout of an adapter of so many bytes.
    """

    def __init__(
        self,
        max_bytes: int,
        prepare: Callable[[AdapterWeights], Layout | None],
        cost: Callable[[int], int],
    ) -> None:
        self._max_bytes, self._prepare, self._cost = max_bytes, prepare, cost
        self._layouts: dict[int, tuple[Layout, float]] = {}
        self._lock = threading.Lock()

    def begin(
        self, adapter_id: int, num_bytes: int, weights_of: Callable[[int], AdapterWeights | None], now: float
    ) -> Layout | None:
        """A layout to be finished. None if there is one, there need not be any, or there are too many.

        num_bytes: of the adapter. weights_of: None if they have gone. Asked under the lock, so that whoever takes them away later finds the layout.
        """
        with self._lock:
            total = sum(layout.num_bytes for layout, _ in self._layouts.values())
            is_full = self._layouts and total + self._cost(num_bytes) > self._max_bytes
            if adapter_id in self._layouts or is_full:
                return None
            weights = weights_of(adapter_id)
            layout = self._prepare(weights) if weights is not None else None
            if layout is not None:
                self._layouts[adapter_id] = layout, now
            return layout

    def take(self, adapter_id: int) -> Layout | None:
        """For its slot; or because its weights go. None: there is none."""
        with self._lock:
            return self._layouts.pop(adapter_id, (None, 0.0))[0]

    def expire(self, now: float) -> None:
        """Give up those that no slot has taken over: their requests did not come, or wait for longer."""
        for adapter_id in [
            each for each, (_, at_s) in list(self._layouts.items()) if now - at_s > AHEAD_FOR_S
        ]:
            layout = self.take(adapter_id)
            if layout is not None:
                layout.drop()


def large_memory(num_floats: int) -> torch.Tensor:
    """For fp32, not written yet; on pages of 2 MB, if there is much of it and this system has them: 90 MB are then read in 4.8 in place of 6.0 ms."""
    num_bytes = PACKED_BYTES * num_floats
    if num_bytes < LEAST_LARGE_BYTES:
        return torch.empty(num_floats)
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    start = -whole.data_ptr() % LARGE_PAGE_BYTES // PACKED_BYTES
    return whole[start : start + num_floats]
