"""Which rows are computed together, and that the laid-out weights say what the adapters say."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from hypothesis import given  # noqa: E402  (after the skips)
from hypothesis import strategies as st  # noqa: E402

from engine_bridge.driver.lora import few_rows, lora_weights  # noqa: E402
from engine_bridge.driver.lora.few_rows import terms_at_a_time  # noqa: E402
from engine_bridge.driver.lora.lora import SegmentPunicaWrapper  # noqa: E402
from engine_bridge.driver.lora.lora_rows import LONG_RUN_ROWS, NO_ADAPTER, RowBlock, plan_rows  # noqa: E402
from engine_bridge.driver.lora.lora_weights import FEW_ROWS, pack_slot  # noqa: E402
from engine_bridge.driver.vllm_api import LoRAMapping, PunicaWrapperCPU  # noqa: E402
from engine_bridge.protocol.errors import SeamMoved  # noqa: E402

from .equal_bits import needs_equal_bits  # noqa: E402

RUNS = st.lists(
    st.tuples(st.integers(NO_ADAPTER, 4), st.sampled_from([1, 1, 2, 3, LONG_RUN_ROWS, LONG_RUN_ROWS + 7])),
    max_size=12,
)


def rows_by_slot(block: RowBlock) -> dict[int, list[int]]:
    """The batch rows that each slot computes in this block, in order."""
    order = block.order.tolist() if block.order is not None else list(range(block.stop - block.start))
    out, at = {}, 0
    for slot, size in zip(block.slots, block.sizes, strict=True):
        out.setdefault(slot, []).extend(block.start + row for row in order[at : at + size])
        at += size
    return out


@given(RUNS)
def test_each_row_is_computed_by_its_own_adapter_and_by_no_other(runs):
    slots = [slot for slot, size in runs for _ in range(size)]
    seen = {}
    for block in plan_rows(slots):
        for slot, rows in rows_by_slot(block).items():
            for row in rows:
                assert slots[row] == slot
                seen[row] = slot
    assert {row: slot for row, slot in seen.items() if slot != NO_ADAPTER} == {
        row: slot for row, slot in enumerate(slots) if slot != NO_ADAPTER
    }


@given(RUNS)
def test_blocks_are_disjoint_and_each_adapter_has_one_group_in_a_block(runs):
    blocks = plan_rows([slot for slot, size in runs for _ in range(size)])
    assert all(a.stop <= b.start for a, b in pairwise(blocks))
    for block in blocks:
        used = [slot for slot in block.slots if slot != NO_ADAPTER]
        assert len(set(used)) == len(used) and sum(block.sizes) == block.stop - block.start


@given(RUNS)
def test_reading_and_writing_back_changes_nothing(runs):
    slots = [slot for slot, size in runs for _ in range(size)]
    rows = torch.randn(len(slots), 3).bfloat16()
    before = rows.clone()
    for block in plan_rows(slots):
        block.write(rows, block.read(rows))
    assert torch.equal(rows, before)


def test_scattered_decode_rows_of_one_adapter_become_one_group():
    (block,) = plan_rows([0, 1, NO_ADAPTER, 0, 1, 0])
    assert dict(zip(block.slots, block.sizes, strict=True)) == {0: 3, 1: 2, NO_ADAPTER: 1}


def test_a_prefill_stays_in_place_between_decodes():
    blocks = plan_rows([0, 1, 0, *[2] * LONG_RUN_ROWS, *[1] * 4])
    assert [(b.start, b.stop, b.order is None) for b in blocks] == [
        (0, 3, False),
        (3, 3 + LONG_RUN_ROWS, True),
        (3 + LONG_RUN_ROWS, 3 + LONG_RUN_ROWS + 4, True),
    ]


@pytest.mark.parametrize("slots", [[], [NO_ADAPTER], [NO_ADAPTER] * 100])
def test_base_rows_alone_need_no_work(slots):
    assert plan_rows(slots) == ()


# --- arithmetic ---------------------------------------------------------------------------------------------------------------


def fake_layer(
    outs: tuple[int, ...], num_in: int = 24, slots: int = 3, max_rank: int = 16
) -> SimpleNamespace:
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
    wrapper.update_metadata(
        SimpleNamespace(index_mapping=ids, prompt_mapping=ids, is_prefill=True), [1, 2, 3], 4, 100
    )
    return wrapper


def add(wrapper, layer, y, x):
    wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, OUTS)
    return y


@pytest.mark.parametrize("block_diagonal_bytes", [0, 1 << 20])
def test_every_row_gets_its_own_adapter_at_its_true_rank(monkeypatch, block_diagonal_bytes):
    monkeypatch.setattr(lora_weights, "BLOCK_DIAGONAL_BYTES", block_diagonal_bytes)
    torch.manual_seed(0)
    layer = fake_layer(OUTS)
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


def test_a_reloaded_or_reset_slot_forgets_its_old_weights():
    layer = fake_layer(OUTS)
    wrapper = wrapper_for(layer)
    x, zero = torch.randn(6, 24).bfloat16(), torch.zeros(6, sum(OUTS)).bfloat16()
    big, small = adapter((16, 16, 16), OUTS), adapter((2, 2, 2), OUTS)
    layer.set_lora(2, *big)
    layer.set_lora(2, *small)
    torch.testing.assert_close(
        add(wrapper, layer, zero.clone(), x).float(),
        expected(zero, x, SLOTS, {2: small}),
        rtol=1e-2,
        atol=1e-2,
    )
    layer.reset_lora(2)
    assert torch.equal(add(wrapper, layer, zero.clone(), x), zero)


def test_memory_of_a_slot_is_used_again():
    layer = fake_layer(OUTS)
    wrapper = wrapper_for(layer)
    layer.set_lora(0, *adapter((16, 16, 16), OUTS))
    peak = wrapper.cached_bytes
    for _ in range(5):
        layer.set_lora(0, *adapter((2, 2, 2), OUTS))
        layer.set_lora(0, *adapter((16, 16, 16), OUTS))
    assert wrapper.cached_bytes == peak


@needs_equal_bits
@pytest.mark.parametrize("num_in", [256, 768])  # above it MKL splits the sum by row count: see the module
@pytest.mark.parametrize("rank", [8, 16, 128])
def test_a_rows_bits_do_not_depend_on_its_companions(num_in, rank):
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
    return pack_slot(
        [torch.randn(rank, num_in) for rank in ranks],
        [torch.randn(out, rank) for out, rank in zip(outs, ranks, strict=True)],
        ranks,
        make_few=few_rows.few_rows,
    )


@needs_equal_bits
def test_few_rows_are_computed_apart_in_most_layers():
    assert sum(weight_of(layer).few is not None for layer in LAYERS) > len(LAYERS) / 2


def few_and_many(layer):
    """The delta of 40 rows as it is computed for few of them, and for many."""
    num_in, outs, _ = layer
    weight = weight_of(layer)
    if weight.few is None:
        pytest.skip(
            "this processor's MKL adds these products in no order that few_rows knows: it computes few rows, too"
        )
    x, y = torch.randn(40, num_in), torch.randn(40, sum(outs))
    few = y.clone()
    for first in range(0, 40, FEW_ROWS):
        weight.few.add(few.numpy(), x.numpy(), first, min(first + FEW_ROWS, 40), 0.5)
    weight.add_to(y, x, 0.5)
    return few, y


@needs_equal_bits
@pytest.mark.parametrize("layer", LAYERS)
def test_few_rows_have_the_bits_of_many(layer):
    assert torch.equal(*few_and_many(layer))


@pytest.mark.parametrize("layer", LAYERS)
def test_few_rows_have_the_deltas_of_many(layer, monkeypatch):
    """Also where this machine's MKL adds up in an order that is not found."""
    monkeypatch.setattr(few_rows, "terms_at_a_time", lambda num_terms, num_columns, **_: num_terms)
    torch.testing.assert_close(*few_and_many(layer), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("first", "stop", "num_in", "num_out"),
    [(0, 7, 768, 768), (-1, 2, 768, 768), (5, 9, 768, 768), (0, 2, 767, 768), (0, 2, 768, 767)],
)
def test_few_rows_never_touch_what_is_not_theirs(first, stop, num_in, num_out, monkeypatch):
    """Six rows; what lies around them in memory must not change."""
    monkeypatch.setattr(few_rows, "terms_at_a_time", lambda num_terms, num_columns, **_: num_terms)
    few = weight_of(LAYERS[0]).few
    around = torch.zeros(18, num_out)
    y, x = around[6:12], torch.randn(6, num_in)
    with pytest.raises(IndexError):
        few.add(y.numpy(), x.numpy(), first, stop, 1.0)
    assert not around.any()


@pytest.mark.parametrize(
    "change", [{"memory": np.zeros(100, np.float32)}, {"num_columns": 17000}, {"at": (0, -8)}]
)
def test_few_rows_never_read_beyond_an_adapters_memory(change, monkeypatch):
    monkeypatch.setattr(few_rows, "terms_at_a_time", lambda num_terms, num_columns, **_: num_terms)
    few = weight_of(LAYERS[0]).few
    if "at" in change:
        column, start = change["at"]
        parts = few.parts.copy()
        parts[0, column] = start
        change = {"parts": parts}
    with pytest.raises(IndexError):
        few._replace(**change).add(np.zeros((2, 768), np.float32), np.zeros((2, 768), np.float32), 0, 2, 1.0)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_plan_of_other_rows_is_refused(num_rows):
    """A layer's rows and their plan are of one call: with another one's, deltas would go to rows that are not there."""
    layer = fake_layer(OUTS)
    wrapper = wrapper_for(layer)
    layer.set_lora(0, *adapter((4, 4, 4), OUTS))
    with pytest.raises(IndexError):
        add(wrapper, layer, torch.zeros(num_rows, sum(OUTS)).bfloat16(), torch.zeros(num_rows, 24).bfloat16())


def test_vllm_may_look_into_what_numba_brings():
    """It asks every value of every module for what it holds when it builds an engine, and fails where that is no dictionary."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("numba", "llvmlite")):
            for value in list(vars(module).values()):
                assert not hasattr(value, "__dict__") or vars(value).get("kernel") is None


def test_where_no_order_of_sums_has_the_same_bits_few_rows_are_left_to_mkl(monkeypatch):
    terms_at_a_time.cache_clear()
    monkeypatch.setattr(few_rows, "_candidates", lambda num_terms: [1])
    layer = fake_layer(OUTS)
    wrapper = wrapper_for(layer)
    weights = {slot: adapter((16, 2, 8), OUTS) for slot in range(3)}
    for slot, (a, b) in weights.items():
        layer.set_lora(slot, a, b)
    terms_at_a_time.cache_clear()
    assert all(pack.few is None for pack in wrapper.packs_of(layer))
    x, y = torch.randn(6, 24).bfloat16(), torch.randn(6, sum(OUTS)).bfloat16()
    want = expected(y, x, SLOTS, weights)
    torch.testing.assert_close(add(wrapper, layer, y, x).float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("outs", [(256,), (256, 128, 128), (384, 384)])
@pytest.mark.parametrize("rank", [8, 16, 32, 64, 128])
def test_sums_are_nearer_to_the_truth_than_vllms_own(outs, rank):
    """In bf16, over 40 rows of one adapter and 8 of another: the mean and the largest distance from fp64. vLLM rounds the delta, and then the sum."""
    generator = torch.Generator().manual_seed(rank + len(outs))

    def numbers(*shape, deviation):
        return (torch.randn(*shape, generator=generator) * deviation).bfloat16()

    num_in, slots = 256, [0] * 40 + [1] * 8
    layer = fake_layer(outs, num_in=num_in, max_rank=128)
    ours = wrapper_for(layer, slots)
    stock = PunicaWrapperCPU(64, 8, "cpu")
    ids = tuple(slot + 1 for slot in slots)
    stock.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [1, 2, 3], 4, 100)
    weights = {
        slot: (
            [numbers(rank, num_in, deviation=num_in**-0.5) for _ in outs],
            [numbers(out, rank, deviation=0.3 * rank**-0.5) for out in outs],
        )
        for slot in (0, 1)
    }
    for slot, (a, b) in weights.items():
        layer.set_lora(slot, a, b)
    x, y = numbers(48, num_in, deviation=1.0), numbers(48, sum(outs), deviation=1.0)
    truth = y.double()
    for row, slot in enumerate(slots):
        truth[row] += torch.cat(
            [b.double() @ (a.double() @ x[row].double()) for a, b in zip(*weights[slot], strict=True)]
        )

    def distances(wrapper):
        added = y.clone()
        wrapper.add_lora_linear(added, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, outs)
        return (added.double() - truth).abs()

    own, theirs = distances(ours), distances(stock)
    assert own.mean() < theirs.mean() and own.max() <= theirs.max()


def test_a_layer_that_never_announced_itself_is_refused():
    wrapper = wrapper_for(fake_layer(OUTS))
    stranger = fake_layer(OUTS)
    with pytest.raises(SeamMoved):
        add(wrapper, stranger, torch.zeros(6, sum(OUTS)).bfloat16(), torch.zeros(6, 24).bfloat16())


def test_stacks_that_only_the_wrapper_stands_for_are_never_written():
    """They are gigabytes at the largest rank, once written; what the rows get is the same."""
    torch.manual_seed(0)
    layer, written = fake_layer(OUTS), fake_layer(OUTS)
    layer.tp_size = 1  # as vLLM's own layers say
    stacks = layer.lora_a_stacked + layer.lora_b_stacked  # those that its own set_lora writes into
    x, zero = torch.randn(6, 24).bfloat16(), torch.zeros(6, sum(OUTS)).bfloat16()
    weights = [adapter(ranks, OUTS) for ranks in ((4, 8, 2), (0, 5, 0), (16, 16, 16))]
    answers = []
    for each in (layer, written):
        wrapper = wrapper_for(each)
        for slot, (a, b) in enumerate(weights):
            each.set_lora(slot, a, b)
        answers.append(add(wrapper, each, zero.clone(), x))
    assert torch.equal(*answers) and answers[0].any()
    assert not any(stack.any() for stack in stacks + layer.lora_a_stacked + layer.lora_b_stacked)
