"""Adapters laid out in a slot's memory on a CPU."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from engine_bridge.driver.adapters import slots  # noqa: E402  (after the skips)
from engine_bridge.driver.adapters.slots import (  # noqa: E402
    LARGE_PAGE_BYTES,
    PackedSlots,
    StepLayout,
    large_memory,
)
from engine_bridge.driver.adapters.weights import AdapterWeights, ModuleWeights  # noqa: E402

from .test_lora_segments import OUTS, SLOTS, adapter, add, expected, fake_layer, wrapper_for  # noqa: E402

NAMES = ("first", "second")


@pytest.fixture
def packed():
    layers = {name: fake_layer(OUTS) for name in NAMES}
    for layer in layers.values():
        layer.tp_size = 1
    wrapper = wrapper_for(layers["first"])
    wrapper.watch(layers["second"])
    manager = SimpleNamespace(modules=layers, lora_slots=3)
    return SimpleNamespace(slots=PackedSlots(manager, wrapper), wrapper=wrapper, layers=layers)


def adapter_weights(ranks):
    """For both layers, and by layer as `expected` takes them."""
    by_layer = {name: adapter(ranks, OUTS) for name in NAMES}
    modules = {name: ModuleWeights(tuple(a), tuple(b), is_list=True) for name, (a, b) in by_layer.items()}
    return AdapterWeights(modules, 0, None), by_layer


def test_each_layer_computes_with_what_was_filled_last(packed):
    torch.manual_seed(0)
    filled = {}
    for slot, ranks in [(0, (16, 16, 16)), (1, (4, 0, 8)), (2, (8, 8, 8)), (0, (2, 5, 2)), (2, (16, 8, 16))]:
        weights, filled[slot] = adapter_weights(ranks)
        packed.slots.fill(slot, weights)
        if slot != 1:  # whose layers are laid out by the step that needs them
            packed.slots.finish(slot)
            assert packed.slots.is_filled(slot)
    assert not packed.slots.is_filled(1)
    x, y = torch.randn(6, 24).bfloat16(), torch.randn(6, sum(OUTS)).bfloat16()
    for name, layer in packed.layers.items():
        want = expected(y, x, SLOTS, {slot: by_layer[name] for slot, by_layer in filled.items()})
        got = add(packed.wrapper, layer, y.clone(), x)
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    assert packed.slots.is_filled(1)


def test_what_steps_lay_out_themselves_is_counted_and_what_the_loader_does_is_not(packed):
    weights, _ = adapter_weights((4, 4, 4))
    packed.slots.fill(0, weights)
    packed.slots.finish(0)
    packed.slots.fill(1, weights)
    x, y = torch.randn(6, 24).bfloat16(), torch.randn(6, sum(OUTS)).bfloat16()
    for layer in packed.layers.values():
        add(packed.wrapper, layer, y.clone(), x)
    done = packed.slots.take_step_layouts()
    assert done.slots == {1}
    assert done.num_bytes == packed.slots._memories[1].numel() * 4 and done.all_s > done.pack_s > 0
    assert packed.slots.take_step_layouts() == StepLayout()
    assert packed.slots.laid_out_bytes(100) == 200, "of bfloat16, in float32"


def test_a_slots_memory_is_used_again_unless_much_of_it_would_lie_idle(packed):
    def filled_with(ranks):
        packed.slots.fill(0, adapter_weights(ranks)[0])
        packed.slots.finish(0)
        return {packs[0].storage.untyped_storage().data_ptr() for packs in packed.slots._packs.values()}

    (large,) = filled_with((16, 16, 16))
    assert filled_with((16, 12, 12)) == {large}
    filled_with((2, 2, 2))
    assert packed.slots._memories[0].numel() < 16 * 3 * (24 + sum(OUTS))
    packed.slots.empty(0)
    assert packed.slots._memories[0].numel() == 0


@pytest.mark.parametrize("least_bytes", [0, 1 << 62])
def test_memory_is_as_large_as_asked_for_and_may_be_written(monkeypatch, least_bytes):
    monkeypatch.setattr(slots, "LEAST_LARGE_BYTES", least_bytes)
    memory = large_memory(700_001)
    assert memory.numel() == 700_001 and memory.dtype == torch.float32
    assert least_bytes or memory.data_ptr() % LARGE_PAGE_BYTES == 0
    assert memory.fill_(2.0).sum() == 1_400_002
