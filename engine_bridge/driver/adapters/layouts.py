"""Adapters laid out for our wrapper's GEMMs, in memory that passes from one adapter to the next."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from engine_bridge.core.adapters.staging import AHEAD_FOR_S
from engine_bridge.driver.adapters.weights import AdapterWeights, Memories
from engine_bridge.driver.lora.lora_weights import MakeFew, Pending, pack_slot, packed_size

# Our wrapper computes in fp32.
PACKED_BYTES = 4
# Laying out a layer takes 0.08 ms beyond the time for its bytes, as long as this many bytes take (measured; adapters of 1 to 3 MB, 48 layers: 3 to 5
# ms).
LAYER_BYTES = 160_000
# The size of Linux' large pages, and the least memory for which they are asked: the last page is full only in part.
LARGE_PAGE_BYTES, LEAST_LARGE_BYTES = 1 << 21, 1 << 23

Slices = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[int]]
"""A, B and rank of a layer's slices, as `pack_slot` takes them."""


class Layout:
    """One adapter in its layers. The thread that needs a layer first lays it out: the loader's thread, or a step that has come to it.

    Args:
        memories: where the layout's memory comes from and returns to.
        make_few: makes the multiplication for few rows; see `pack_slot`.
    """

    def __init__(self, slices: Mapping[str, Slices], memories: Memories, make_few: MakeFew | None) -> None:
        sizes = {name: packed_size(*each) for name, each in slices.items()}
        total = sum(sizes.values())
        self._memories, self._memory = memories, memories.take(total)
        self._lock = threading.Lock()
        parts = self._memory[:total].split(list(sizes.values()))
        self.layers = {
            name: Pending(
                partial(pack_slot, *slices[name], part, make_few),
                self._lock,
                size_bytes=PACKED_BYTES * part.numel(),
            )
            for name, part in zip(sizes, parts, strict=True)
        }
        self.num_bytes = PACKED_BYTES * self._memory.numel()

    @property
    def left_bytes(self) -> int:
        """The bytes of the layers that are not laid out yet, with LAYER_BYTES for each."""
        return sum(layer.size_bytes + LAYER_BYTES for layer in self.layers.values() if layer.is_waiting)

    @property
    def is_waiting(self) -> bool:
        """Whether any layer is not laid out yet."""
        return any(layer.is_waiting for layer in self.layers.values())

    def finish(self) -> None:
        """Lay out the remaining layers. From any thread."""
        for layer in self.layers.values():
            layer.take()

    def drop(self) -> None:
        """Give up a layout that is computed with no more. Remaining layers are not laid out, and the memory goes to the next layout."""
        for layer in self.layers.values():
            layer.drop()  # so that no thread begins another one
        with self._lock:
            for layer in self.layers.values():
                layer.drop()  # and the layer that was under way
        self._memories.give_back(self._memory)


class LayoutsAhead:
    """Layouts of adapters whose requests are on their way here. From any thread.

    Args:
        max_bytes: the most memory of all layouts together; a single layout may be larger.
        prepare: begins a layout, see `Slots.prepare`.
        cost: returns the bytes of an adapter's layout, given the adapter's bytes.
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
        """Return a layout to be finished. None if the adapter has one already, none is needed, or there are too many.

        weights_of: returns an adapter's weights, None if they have left host memory. It is called under the lock, so that a thread which takes the
        weights away later finds the layout.
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
        """Take an adapter's layout out: for its slot, or because its weights leave host memory. None: it has no layout."""
        with self._lock:
            return self._layouts.pop(adapter_id, (None, 0.0))[0]

    def expire(self, now: float) -> None:
        """Give up layouts that no slot has taken over: their requests did not come, or wait for longer."""
        for adapter_id in [
            each for each, (_, at_s) in list(self._layouts.items()) if now - at_s > AHEAD_FOR_S
        ]:
            layout = self.take(adapter_id)
            if layout is not None:
                layout.drop()


def large_memory(num_floats: int) -> torch.Tensor:
    """Return unwritten memory for `num_floats` fp32 values.

    Much memory lies on pages of 2 MB, if this system has them: 90 MB are then read in 4.8 in place of 6.0 ms.
    """
    num_bytes = PACKED_BYTES * num_floats
    if num_bytes < LEAST_LARGE_BYTES:
        return torch.empty(num_floats)
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    start = -whole.data_ptr() % LARGE_PAGE_BYTES // PACKED_BYTES
    return whole[start : start + num_floats]
