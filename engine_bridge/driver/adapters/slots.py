"""Adapters in slots: what the layers of a step compute with.

On a CPU a slot holds no copy in vLLM's stacks: our wrapper computes with weights laid out for its GEMMs (`SlotWeights`). The thread that needs a
layer first lays it out: the loader's thread ahead of time, or the forward pass that has come to it. So a request may start as soon as its adapter is
in host memory (CPU-assist, CaraServe §4.1: here host and device are the same), and uses the layers that the loader has laid out by then. On CUDA a
slot is vLLM's stacks, filled by copies beside the steps; until then rows are computed by the host path (`host_path.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from engine_bridge.driver.adapters.layouts import LAYER_BYTES, PACKED_BYTES, Layout, large_memory
from engine_bridge.driver.adapters.weights import AdapterWeights, Memories, ModuleWeights
from engine_bridge.driver.lora.lora import SegmentPunicaWrapper, whole_slices
from engine_bridge.driver.lora.lora_weights import Compute, Pending, SlotWeights, pack_slot

# Slots on a CPU beyond the adapters that one step may use: the next adapters are laid out there while all others run. Chosen.
SPARE_SLOTS = 2
ComputeFor = Callable[[str], Compute]


@dataclass(slots=True)
class StepLayout:
    """The layouts that steps have made themselves.

    Attributes:
        num_bytes: their bytes, as `Layout.left_bytes` counts them.
        pack_s: seconds of laying out.
        all_s: the same, with waits for the loader's thread, which does some meanwhile.
    """

    slots: set[int] = field(default_factory=set)
    num_bytes: int = 0
    pack_s: float = 0.0
    all_s: float = 0.0


class Slots:
    """The places for adapters in use: here vLLM's own stacks, filled at once. Called on the engine thread, except for `finish`."""

    fills_beside_steps = False
    """Whether slots fill while steps run. Then no step may compute with an unfilled slot: its rows are cold, or the step waits."""

    def __init__(self, manager: Any) -> None:
        self._layers = dict(manager.modules)
        self.on_failed: Callable[[int, Exception], None] | None = None
        """Called with the slot whose weights a step could not lay out, and the error; None: the step fails."""

    @property
    def max_cost(self) -> int:
        """The cost of the largest possible adapter."""
        return 1

    def cost(self, num_bytes: int) -> int:
        """Return how much of `Rules.step_room` an adapter of `num_bytes` bytes takes."""
        return 1  # each slot is as large as the largest adapter

    def laid_out_bytes(self, num_bytes: int) -> int:
        """Return the bytes that laying out an adapter of `num_bytes` bytes counts as."""
        return num_bytes

    def left_bytes(self, slot: int) -> int:
        """Return the bytes that the rest of a slot's laying out counts as."""
        return 0

    def prepare(self, weights: AdapterWeights) -> Layout | None:
        """Begin to lay an adapter out for a slot that it has not got yet. None: that needs its slot. From any thread."""
        return None

    def take_step_layouts(self) -> StepLayout:
        """Return the layouts that steps have made themselves since the last call."""
        return StepLayout()

    def empty(self, slot: int) -> None:
        """Empty a slot that is used no more: its memory, if it has any, becomes free."""

    def fill(
        self,
        slot: int,
        weights: AdapterWeights,
        compute_for: ComputeFor | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Make the layers compute rows of this slot with these weights from the next step on.

        compute_for: returns, by the name of a layer, what computes its delta until it is in the slot. layout: of these weights, from `prepare`.
        """
        for name, layer in self._layers.items():
            module = weights.modules.get(name)
            if module is None:
                layer.reset_lora(slot)
            else:
                layer.set_lora(slot, *module.as_arguments())

    def finish(self, slot: int) -> None:
        """Do the remaining work of `fill`. May run on the loader's thread."""

    def is_filled(self, slot: int) -> bool:
        """Return whether `fill` has no work left."""
        return True

    def wait(self, slot: int) -> None:
        """Make the step that begins wait for this slot, without waiting here."""


class StreamedSlots(Slots):
    """vLLM's stacks on CUDA, filled from pinned or device memory on a separate stream, beside the steps. Not run on a GPU yet: tests/gpu."""

    fills_beside_steps = True

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self._stream = torch.cuda.Stream()
        self._copied: dict[int, Any] = {}

    def fill(
        self,
        slot: int,
        weights: AdapterWeights,
        compute_for: ComputeFor | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Launch the copies of an adapter into a slot's stacks, behind the steps that read the slot's previous weights."""
        # Steps before this one read the slot's previous weights.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            super().fill(slot, weights, compute_for)
            self._copied[slot] = torch.cuda.Event()
            self._copied[slot].record(self._stream)
        if weights.buffer is not None and weights.buffer.is_cuda:
            # These weights were read from KV blocks and are released by now: their memory must not be reused before it is copied.
            weights.buffer.record_stream(self._stream)

    def finish(self, slot: int) -> None:
        """Wait until the slot's copies are done."""
        self._copied[slot].synchronize()

    def is_filled(self, slot: int) -> bool:
        """Return whether the slot's copies are done."""
        return slot not in self._copied or bool(self._copied[slot].query())

    def wait(self, slot: int) -> None:
        """Make the compute stream wait for the slot's copies."""
        torch.cuda.current_stream().wait_event(self._copied[slot])


class PackedSlots(Slots):
    """Our wrapper's layouts, in memory that passes from one adapter to the next. The thread that needs a layer first lays it out."""

    def __init__(self, manager: Any, wrapper: SegmentPunicaWrapper) -> None:
        super().__init__(manager)
        self._make_few = wrapper.make_few
        self._packs: dict[str, list[SlotWeights | Pending | None]] = {}
        for name, layer in plain_layers(manager).items():
            self._packs[name] = wrapper.packs_of(layer.lora_b_stacked[0])
        stack = next((s for layer in self._layers.values() for s in _stacks(layer) if s.dim() == 4), None)
        self._weight_bytes = stack.element_size() if stack is not None else PACKED_BYTES
        self._memories = Memories(large_memory, SPARE_SLOTS * self.max_cost)
        self._layouts: list[Layout | None] = [None] * manager.lora_slots
        self._step_layout = StepLayout()
        self._in_stacks: set[tuple[int, str]] = set()  # slots and layers whose stacks hold weights

    @property
    def max_cost(self) -> int:
        """The cost of an adapter of the largest rank on all layers."""
        stacks = [stack for layer in self._layers.values() for stack in _stacks(layer)]
        return sum(PACKED_BYTES * stack[0].numel() for stack in stacks if stack.dim() == 4)

    def cost(self, num_bytes: int) -> int:
        """Return the bytes of the layout of an adapter of `num_bytes` bytes."""
        return num_bytes * PACKED_BYTES // self._weight_bytes

    def laid_out_bytes(self, num_bytes: int) -> int:
        """Return the layout's bytes, with LAYER_BYTES for each layer."""
        return self.cost(num_bytes) + LAYER_BYTES * len(self._packs)

    def left_bytes(self, slot: int) -> int:
        """Return the bytes of the slot's layers that are not laid out yet, with LAYER_BYTES for each."""
        layout = self._layouts[slot]
        return layout.left_bytes if layout is not None else 0

    def prepare(self, weights: AdapterWeights) -> Layout:
        """Begin an adapter's layout, with no layer laid out yet. From any thread."""
        slices = {
            name: found
            for name, module in weights.modules.items()
            if name in self._packs
            and (found := whole_slices(self._layers[name], module.a, module.b)) is not None
        }
        return Layout(slices, self._memories, self._make_few)

    def take_step_layouts(self) -> StepLayout:
        """Return the layouts that steps have made since the last call."""
        found, self._step_layout = self._step_layout, StepLayout()
        return found

    def empty(self, slot: int) -> None:
        """Drop the slot's layout, which no step computes with any more; the loader may be at work on it."""
        layout, self._layouts[slot] = self._layouts[slot], None
        if layout is not None:
            layout.drop()
        for packs in self._packs.values():
            packs[slot] = None

    def fill(
        self,
        slot: int,
        weights: AdapterWeights,
        compute_for: ComputeFor | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Put an adapter's layout, or a new one, into a slot; layers are laid out by `finish` or by the first step that needs them."""
        self.empty(slot)
        self._layouts[slot] = layout = layout or self.prepare(weights)
        for name in self._layers:
            self._set_stacks(slot, name, None if name in layout.layers else weights.modules.get(name))
        for name, pending in layout.layers.items():
            compute = compute_for(name) if compute_for is not None else None
            failed = partial(self.on_failed, slot) if self.on_failed is not None else None
            took = partial(self._took, slot, pending.size_bytes)
            pending.put(self._packs[name], slot, compute, took, failed)

    def finish(self, slot: int) -> None:
        """Lay out the slot's remaining layers. May run on the loader's thread."""
        layout = self._layouts[slot]
        if layout is not None:
            layout.finish()

    def is_filled(self, slot: int) -> bool:
        """Return whether all of the slot's layers are laid out."""
        layout = self._layouts[slot]
        return layout is None or not layout.is_waiting

    def _took(self, slot: int, size_bytes: int, pack_s: float, all_s: float) -> None:
        done = self._step_layout
        if pack_s:
            done.slots.add(slot)
            done.num_bytes += size_bytes + LAYER_BYTES
        done.pack_s += pack_s
        done.all_s += all_s

    def _set_stacks(self, slot: int, name: str, module: ModuleWeights | None) -> None:
        """Fill vLLM's stacks for layers that read them (embeddings), and for weights that vLLM must split first.

        A module of None empties the stacks.
        """
        if module is not None:
            self._in_stacks.add((slot, name))
            self._layers[name].set_lora(slot, *module.as_arguments())
        elif (slot, name) in self._in_stacks:
            self._in_stacks.discard((slot, name))
            self._layers[name].reset_lora(slot)


def lay_out(layer: Any, module: ModuleWeights) -> SlotWeights | None:
    """Lay out one layer's weights for our wrapper's GEMMs. None if the adapter leaves the layer alone."""
    slices = whole_slices(layer, module.a, module.b)
    assert slices is not None, "weights that vLLM splits are computed in slots alone"
    return pack_slot(*slices)


def plain_layers(manager: Any) -> dict[str, Any]:
    """Return the layers whose A and B only our wrapper reads."""
    return {name: layer for name, layer in manager.modules.items() if _is_plain(layer)}


def make_slots(manager: Any) -> Slots:
    """Return the slots that fit the wrapper with which the engine computes."""
    wrappers = list(manager.punica_wrapper_mapping.values())
    if len(wrappers) == 1 and isinstance(wrappers[0], SegmentPunicaWrapper):
        return PackedSlots(manager, wrappers[0])
    return StreamedSlots(manager) if torch.device(manager.device).type == "cuda" else Slots(manager)


def _is_plain(layer: Any) -> bool:
    """Return whether only our wrapper reads this layer's A and B."""
    return all(stack.dim() == 4 for stack in _stacks(layer))


def _stacks(layer: Any) -> Iterator[torch.Tensor]:
    for name in ("lora_a_stacked", "lora_b_stacked"):
        stacked = vars(layer).get(name)
        if not isinstance(stacked, tuple):
            yield torch.empty(0)  # not one stack per slice: the layer is not plain
        else:
            yield from stacked
