from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.driver.lora import few_rows, lora_weights
from engine_bridge.driver.lora.lora import SegmentPunicaWrapper
from engine_bridge.driver.lora.lora_rows import LONG_RUN_ROWS, NO_ADAPTER, plan_rows
from engine_bridge.driver.lora.lora_weights import FEW_ROWS, pack_slot
from engine_bridge.protocol.errors import SeamMoved

from .equal_bits import needs_equal_bits

LENGTHS = st.sampled_from([1, 1, 2, 3, LONG_RUN_ROWS, LONG_RUN_ROWS + 7])
RUNS = st.lists(st.tuples(st.integers(NO_ADAPTER, 4), LENGTHS), max_size=12)


@given(RUNS)
def test_each_row_is_computed_by_its_own_adapter_and_by_no_other(runs):
    """Blocks are disjoint, an adapter has one group in each, and what is read and written back changes nothing."""
    slots = [slot for slot, size in runs for _ in range(size)]
    blocks, seen = plan_rows(slots), {}
    assert all(a.stop <= b.start for a, b in pairwise(blocks))
    numbers = torch.arange(len(slots)).view(-1, 1).float()
    for block in blocks:
        used = [slot for slot in block.slots if slot != NO_ADAPTER]
        assert len(set(used)) == len(used) and sum(block.sizes) == block.stop - block.start
        read = block.read(numbers)
        groups = read.view(-1).int().split(block.sizes)
        seen |= {int(row): slot for slot, rows in zip(block.slots, groups, strict=True) for row in rows}
        block.write(numbers, read)
    assert numbers.view(-1).tolist() == list(range(len(slots)))
    of_adapters = {row: slot for row, slot in enumerate(slots) if slot != NO_ADAPTER}
    assert {row: slot for row, slot in seen.items() if slot != NO_ADAPTER} == of_adapters
    assert all(slots[row] == slot for row, slot in seen.items())


def test_short_runs_are_gathered_by_adapter_and_a_prefill_stays_in_place_between_them():
    (block,) = plan_rows([0, 1, NO_ADAPTER, 0, 1, 0])
    assert dict(zip(block.slots, block.sizes, strict=True)) == {0: 3, 1: 2, NO_ADAPTER: 1}
    end = 3 + LONG_RUN_ROWS
    blocks = plan_rows([0, 1, 0, *[2] * LONG_RUN_ROWS, *[1] * 4])
    found = [(b.start, b.stop, b.order is None) for b in blocks]
    assert found == [(0, 3, False), (3, end, True), (end, end + 4, True)]
    assert all(plan_rows(slots) == () for slots in ([], [NO_ADAPTER], [NO_ADAPTER] * 100))


def fake_layer(outs, num_in=24, slots=3, max_rank=16):
    """Stands for vLLM's merged linear layer: the stacks and the two functions that fill them."""
    a = tuple(torch.zeros(slots, 1, max_rank, num_in, dtype=torch.bfloat16) for _ in outs)
    b = tuple(torch.zeros(slots, 1, out, max_rank, dtype=torch.bfloat16) for out in outs)
    layer = SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b)

    def reset_lora(index):
        for stack in a + b:
            stack[index] = 0

    def set_lora(index, lora_a, lora_b):
        layer.reset_lora(index)
        for i in range(len(outs)):
            if lora_a[i] is not None:
                a[i][index, 0, : lora_a[i].shape[0]] = lora_a[i]
                b[i][index, 0, :, : lora_b[i].shape[1]] = lora_b[i]

    layer.set_lora, layer.reset_lora = set_lora, reset_lora
    return layer


def adapter(ranks, outs, num_in=24):
    """Random weights, None for a slice of rank 0."""
    a = [torch.randn(r, num_in).bfloat16() if r else None for r in ranks]
    return a, [torch.randn(out, r).bfloat16() if r else None for r, out in zip(ranks, outs, strict=True)]


def expected(y, x, slots, weights):
    out = y.float()
    for row, slot in enumerate(slots):
        left = 0
        for a, b in zip(*weights.get(slot, ([], [])), strict=True):
            if a is not None:
                out[row, left : left + b.shape[0]] += b.float() @ (a.float() @ x[row].float())
            left += b.shape[0] if b is not None else OUTS[len(OUTS) - 1]
    return out


OUTS = (16, 8, 8)
SLOTS = [2, NO_ADAPTER, 0, 2, 1, NO_ADAPTER]


def wrapper_for(layer, slots=SLOTS):
    wrapper = SegmentPunicaWrapper(64, 8, "cpu")
    wrapper.watch(layer)
    ids = [slot + 1 for slot in slots]
    mapping = SimpleNamespace(index_mapping=ids, prompt_mapping=ids, is_prefill=True)
    wrapper.update_metadata(mapping, [1, 2, 3], 4, 100)
    return wrapper


def add(wrapper, layer, y, x):
    wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, OUTS)
    return y


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("block_diagonal_bytes", [0, 1 << 20])
def test_every_row_gets_its_own_adapter_at_its_true_rank(monkeypatch, block_diagonal_bytes, is_whole):
    """Stacks that only the wrapper stands for are never written: they are gigabytes at the largest rank, once written."""
    monkeypatch.setattr(lora_weights, "BLOCK_DIAGONAL_BYTES", block_diagonal_bytes)
    torch.manual_seed(0)
    layer = fake_layer(OUTS)
    if is_whole:
        layer.tp_size = 1  # as vLLM's own layers say
    own_stacks = layer.lora_a_stacked + layer.lora_b_stacked
    wrapper = wrapper_for(layer)
    weights = {0: adapter((4, 4, 4), OUTS), 1: adapter((16, 2, 8), OUTS), 2: adapter((8, 0, 8), OUTS)}
    for slot, (a, b) in weights.items():
        layer.set_lora(slot, a, b)
    x, y = torch.randn(6, 24).bfloat16(), torch.randn(6, sum(OUTS)).bfloat16()
    want = expected(y, x, SLOTS, weights)
    base = y.clone()
    got = add(wrapper, layer, y, x)
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    assert torch.equal(got[[1, 5]], base[[1, 5]])
    stacks = own_stacks + layer.lora_a_stacked + layer.lora_b_stacked
    assert any(stack.any() for stack in stacks) is not is_whole


@needs_equal_bits
@pytest.mark.parametrize(("num_in", "rank"), [(256, 8), (256, 128), (768, 16), (768, 128)])
def test_a_rows_bits_do_not_depend_on_its_companions(num_in, rank):
    """Above 768 columns MKL splits the sum by row count: see the module."""
    torch.manual_seed(1)
    weight = pack_slot([torch.randn(rank, num_in)], [torch.randn(512, rank)], [rank])
    x, y = torch.randn(33, num_in), torch.randn(33, 512)

    def rows(num_rows):
        out = y[:num_rows].clone()
        weight.add_to(out, x[:num_rows], 1.0)
        return out

    many = rows(33)
    assert all(torch.equal(rows(n), many[:n]) for n in range(1, 33))


LAYERS = [  # columns in, columns out and rank by slice
    (768, (768,), (4,)),
    (768, (768,), (64,)),
    (768, (768, 768, 768), (8, 8, 8)),  # one block-diagonal matrix
    (768, (768, 256, 256), (16, 0, 8)),
    (768, (768, 768, 768), (128, 64, 128)),
    (3072, (768,), (256,)),
]


def weight_of(layer):
    num_in, outs, ranks = layer
    torch.manual_seed(2)
    a = [torch.randn(rank, num_in) for rank in ranks]
    b = [torch.randn(out, rank) for out, rank in zip(outs, ranks, strict=True)]
    return pack_slot(a, b, ranks, make_few=few_rows.few_rows)


def few_and_many(layer):
    """The delta of 40 rows as it is computed for few of them, and for many; None where MKL computes few rows, too."""
    num_in, outs, _ = layer
    weight = weight_of(layer)
    if weight.few is None:
        return None
    x, y = torch.randn(40, num_in), torch.randn(40, sum(outs))
    few = y.clone()
    for first in range(0, 40, FEW_ROWS):
        weight.few.add(few.numpy(), x.numpy(), first, min(first + FEW_ROWS, 40), 0.5)
    weight.add_to(y, x, 0.5)
    return few, y


@needs_equal_bits
def test_few_rows_are_computed_apart_in_most_layers_with_the_bits_of_many():
    found = list(filter(None, map(few_and_many, LAYERS)))
    assert len(found) > len(LAYERS) / 2 and all(torch.equal(few, many) for few, many in found)


@pytest.mark.parametrize("layer", LAYERS)
def test_few_rows_have_the_deltas_of_many(layer, monkeypatch):
    """Also where this machine's MKL adds up in an order that is not found."""
    monkeypatch.setattr(few_rows, "terms_at_a_time", lambda num_terms, num_columns, **_: num_terms)
    torch.testing.assert_close(*few_and_many(layer), rtol=1e-4, atol=1e-2)


@pytest.fixture
def few(monkeypatch):
    """Loops for few rows of the first layer, whatever the order of MKL's sums."""
    monkeypatch.setattr(few_rows, "terms_at_a_time", lambda num_terms, num_columns, **_: num_terms)
    return weight_of(LAYERS[0]).few


def test_few_rows_never_touch_what_is_not_theirs(few):
    """Six rows; what lies around them in memory must not change. Nor is anything read beyond an adapter's memory."""
    around = torch.zeros(18, 768)
    wrong_rows = ((0, 7, 768, 768), (-1, 2, 768, 768), (5, 9, 768, 768))
    for first, stop, num_in, num_out in (*wrong_rows, (0, 2, 767, 768), (0, 2, 768, 767)):
        with pytest.raises(IndexError):
            y = around.view(-1)[: 18 * num_out].view(18, num_out)[6:12]
            few.add(y.numpy(), torch.randn(6, num_in).numpy(), first, stop, 1.0)
    parts = few.parts.copy()
    parts[0, 0] = -8
    for change in ({"memory": np.zeros(100, np.float32)}, {"num_columns": 17000}, {"parts": parts}):
        with pytest.raises(IndexError):
            few._replace(**change).add(around[6:12].numpy(), np.ones((6, 768), np.float32), 0, 2, 1.0)
    assert not around.any()


def test_a_plan_of_other_rows_and_a_layer_that_never_announced_itself_are_refused():
    """A layer's rows and their plan are of one call: with another one's, deltas would go to rows that are not there."""
    layer = fake_layer(OUTS)
    wrapper = wrapper_for(layer)
    layer.set_lora(0, *adapter((4, 4, 4), OUTS))
    for stranger, num_rows, error in ((layer, 1, IndexError), (fake_layer(OUTS), 6, SeamMoved)):
        y, x = torch.zeros(num_rows, sum(OUTS)).bfloat16(), torch.zeros(num_rows, 24).bfloat16()
        with pytest.raises(error):
            add(wrapper, stranger, y, x)
