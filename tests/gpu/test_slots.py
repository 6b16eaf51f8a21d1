"""Slots that are filled on a stream of their own, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

SLOTS, RANK, WIDTH = 4, 64, 4096


class Layer:
    """A LoRA layer's stacks, as vLLM's `set_lora` fills them."""

    def __init__(self) -> None:
        self.a = torch.zeros(SLOTS, RANK, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.b = torch.zeros(SLOTS, WIDTH, RANK, device="cuda", dtype=torch.bfloat16)

    def set_lora(self, slot: int, a: Any, b: Any) -> None:
        self.a[slot].copy_(a, non_blocking=True)
        self.b[slot].copy_(b, non_blocking=True)

    def reset_lora(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()


def test_a_slot_is_filled_beside_the_compute_stream() -> None:
    """What the event says is done is in the stacks, and a step that waits for it reads the new weights."""
    from engine_bridge.driver.adapters.slots import StreamedSlots
    from engine_bridge.driver.adapters.weights import AdapterWeights, ModuleWeights

    layers = {f"layer{number}": Layer() for number in range(24)}
    modules = {
        name: ModuleWeights(
            (torch.randn(RANK, WIDTH).bfloat16().pin_memory(),),
            (torch.randn(WIDTH, RANK).bfloat16().pin_memory(),),
            is_list=False,
        )
        for name in layers
    }
    slots = StreamedSlots(SimpleNamespace(modules=layers))
    slots.fill(2, AdapterWeights(modules, 0, None))
    slots.wait(2)
    sums = [layer.a[2].float().sum() for layer in layers.values()]  # on the compute stream, behind the event
    slots.finish(2)
    assert slots.is_filled(2)
    for (name, layer), total in zip(layers.items(), sums, strict=True):
        assert torch.equal(layer.a[2].cpu(), modules[name].a[0])
        assert torch.equal(layer.b[2].cpu(), modules[name].b[0])
        assert torch.isclose(total.cpu(), modules[name].a[0].float().sum(), rtol=1e-3, atol=1.0)


def test_what_a_slot_is_filled_from_on_the_device_is_nobody_elses_before_it_is_copied() -> None:
    """The weights were read from KV blocks into memory of their own, which the caller lets go of at once; the copy comes late."""
    from engine_bridge.driver.adapters.slots import StreamedSlots
    from engine_bridge.driver.adapters.weights import AdapterWeights, ModuleWeights

    layer = Layer()
    slots = StreamedSlots(SimpleNamespace(modules={"layer": layer}))
    num_bytes = 2 * RANK * WIDTH * 2
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    a, b = buffer.view(torch.bfloat16).view(2, RANK, WIDTH).fill_(1.0)
    modules = {"layer": ModuleWeights((a,), (b.view(WIDTH, RANK),), is_list=False)}
    with torch.cuda.stream(slots._stream):
        torch.cuda._sleep(200_000_000)
    slots.fill(2, AdapterWeights(modules, 0, buffer))
    del buffer, a, b, modules
    others = torch.full((num_bytes,), 255, dtype=torch.uint8, device="cuda")
    slots.finish(2)
    assert (layer.a[2] == 1).all() and (layer.b[2] == 1).all()
    assert (others == 255).all()
