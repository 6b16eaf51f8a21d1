import threading
from types import SimpleNamespace

import pytest
import torch

from engine_bridge.core.adapters.staging import AHEAD_FOR_S
from engine_bridge.driver.adapters import layouts
from engine_bridge.driver.adapters.layouts import LAYER_BYTES, LayoutsAhead
from engine_bridge.driver.adapters.slots import PackedSlots, StepLayout
from engine_bridge.driver.adapters.weights import AdapterWeights, Memories, ModuleWeights

from .test_lora_segments import OUTS, SLOTS, adapter, add, expected, fake_layer, wrapper_for

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


def test_each_layer_computes_with_what_was_filled_last_and_what_steps_lay_out_themselves_is_counted(packed):
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
    done = packed.slots.take_step_layouts()
    assert done.slots == {1}
    assert done.num_bytes == packed.slots._layouts[1].num_bytes + 2 * LAYER_BYTES
    assert done.all_s > done.pack_s > 0
    assert packed.slots.take_step_layouts() == StepLayout()
    assert packed.slots.laid_out_bytes(100) == 200 + 2 * LAYER_BYTES, "of bfloat16, in float32"


def deltas(packed, x):
    """Of slot 0, in each layer."""
    y = torch.zeros(6, sum(OUTS)).bfloat16()
    return [add(packed.wrapper, layer, y.clone(), x) for layer in packed.layers.values()]


def test_what_was_prepared_is_what_a_slot_that_is_filled_without_it_computes(packed):
    weights, _ = adapter_weights((4, 8, 2))
    x = torch.randn(6, 24).bfloat16()
    packed.slots.fill(0, weights)
    want = deltas(packed, x)
    for num_taken in range(3):  # of its layers, when the slot gets it
        layout = packed.slots.prepare(weights)
        for name in NAMES[:num_taken]:
            layout.layers[name].take()
        packed.slots.empty(0)
        assert not any(packs[0] for packs in packed.slots._packs.values())
        packed.slots.fill(0, weights, layout=layout)
        assert packed.slots.is_filled(0) == (num_taken == 2)
        left_bytes = sum(layout.layers[name].size_bytes + LAYER_BYTES for name in NAMES[num_taken:])
        assert packed.slots.left_bytes(0) == left_bytes
        assert all(map(torch.equal, deltas(packed, x), want))
        assert packed.slots.is_filled(0) and packed.slots.left_bytes(0) == 0
        assert packed.slots.take_step_layouts().slots == ({0} if num_taken < 2 else set())


def test_what_was_dropped_is_laid_out_no_more_and_puts_nothing_into_the_slot_of_another(packed):
    first, _ = adapter_weights((4, 4, 4))
    second, _ = adapter_weights((8, 8, 8))
    x = torch.randn(6, 24).bfloat16()
    packed.slots.fill(0, second)
    want = deltas(packed, x)
    packed.slots.fill(0, first)
    late = packed.slots._layouts[0]
    packed.slots.fill(0, second)
    packed.slots.finish(0)
    late.finish()  # the loader's thread comes to it now
    assert not late.is_waiting and all(layer.take() is None for layer in late.layers.values())
    assert all(map(torch.equal, deltas(packed, x), want))


def test_memory_is_for_others_only_when_nobody_lays_out_in_it_any_more(packed, monkeypatch):
    weights, _ = adapter_weights((4, 4, 4))
    is_begun, may_end, stock, packed_layers = threading.Event(), threading.Event(), layouts.pack_slot, []

    def slow(*args):
        packed_layers.append(args)
        is_begun.set()
        assert may_end.wait(30)
        return stock(*args)

    monkeypatch.setattr(layouts, "pack_slot", slow)
    packed.slots.fill(0, weights)
    layout, memories = packed.slots._layouts[0], packed.slots._memories
    loader = threading.Thread(target=layout.finish)
    loader.start()
    assert is_begun.wait(30)
    engine = threading.Thread(target=lambda: packed.slots.empty(0))
    engine.start()
    engine.join(0.1)
    assert engine.is_alive() and not memories.idle_bytes
    may_end.set()
    for thread in (engine, loader):
        thread.join(30)
    assert memories.idle_bytes == layout.num_bytes
    assert len(packed_layers) == 1, "the second layer is not begun"
    assert not any(packs[0] for packs in packed.slots._packs.values())


def test_memory_that_a_layout_has_left_is_used_again_unless_much_of_it_would_lie_idle(packed):
    def filled_with(ranks):
        packed.slots.fill(0, adapter_weights(ranks)[0])
        packed.slots.finish(0)
        return {packs[0].storage.untyped_storage().data_ptr() for packs in packed.slots._packs.values()}

    (large,) = filled_with((16, 16, 16))
    assert filled_with((16, 12, 12)) == {large}
    assert large not in filled_with((2, 2, 2))
    assert filled_with((16, 16, 16)) == {large}
    memories = Memories(torch.empty, max_idle_bytes=4 * 100)
    given = [torch.empty(num_floats) for num_floats in (60, 30, 40)]
    for memory in given:
        memories.give_back(memory)
    assert memories.idle_bytes == 4 * 70, "the oldest has gone"
    assert memories.take(25) is given[1] and memories.take(25) is given[2]
    assert memories.take(25).numel() == 25 and memories.idle_bytes == 0


def test_layouts_ahead_are_bounded_and_go_when_their_request_does_not_come(packed):
    weights, _ = adapter_weights((4, 4, 4))
    ahead = LayoutsAhead(1, packed.slots.prepare, packed.slots.cost)

    def begin(adapter_id, now=0.0):
        return ahead.begin(adapter_id, 1, lambda asked: weights, now)

    layout = begin(1)
    assert layout is not None, "one at least, however large"
    assert begin(1) is None and begin(2) is None
    ahead.expire(AHEAD_FOR_S)
    assert ahead.take(1) is layout and ahead.take(1) is None
    given_up = begin(2, now=5.0)
    assert given_up.is_waiting
    ahead.expire(5.0 + AHEAD_FOR_S + 1)
    assert not given_up.is_waiting and ahead.take(2) is None
    assert ahead.begin(3, 1, lambda asked: None, 0.0) is None, "its weights have gone"
    assert begin(4) is not None
    size_bytes = ahead.take(4).num_bytes
    roomy = LayoutsAhead(3 * size_bytes, packed.slots.prepare, lambda num_bytes: size_bytes)
    begun = [roomy.begin(adapter_id, 1, lambda asked: weights, 0.0) for adapter_id in range(4)]
    assert [each is not None for each in begun] == [True, True, True, False]
    needs_slot = LayoutsAhead(1, lambda given: None, packed.slots.cost)
    assert needs_slot.begin(1, 1, lambda asked: weights, 0.0) is None
