from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.driver import vllm_api
from engine_bridge.driver.adapters.slots import StreamedSlots
from engine_bridge.driver.adapters.weights import AdapterWeights
from engine_bridge.driver.memory import block_copy
from engine_bridge.driver.memory.block_copy import CpuCopier, kv_rows, layer_bytes, own_memory
from engine_bridge.driver.memory.pinning import Pinning
from engine_bridge.driver.memory.row_copies import copy_rows
from engine_bridge.policy.costs.costs import Copied
from engine_bridge.protocol.errors import SeamMoved

NUM_BLOCKS, NUM_SLOTS = 40, 60
SHAPE = (NUM_BLOCKS, 2, 4, 8)


def pairs(size: int) -> st.SearchStrategy[list[int]]:
    """Different rows: scattered, counting up, or counting down, as an allocator leaves them."""
    return st.one_of(
        st.permutations(range(size)).map(lambda order: order[:10]),
        st.integers(0, size - 10).map(lambda start: list(range(start, start + 10))),
        st.integers(0, size - 10).map(lambda start: list(range(start + 9, start - 1, -1))),
    )


def aligned(num_bytes: int) -> np.ndarray:
    """Zeros at a multiple of 64, as the host pool's are."""
    memory = np.zeros(num_bytes + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


@given(st.sampled_from([0, 1 << 10]), st.booleans(), pairs(NUM_BLOCKS), pairs(NUM_SLOTS), st.integers(1, 10))
def test_there_and_back(
    few_threads: int, is_aligned: bool, blocks: list[int], slots: list[int], length: int
) -> None:
    blocks, slots = blocks[:length], slots[:length]
    layer = torch.arange(NUM_BLOCKS * 64, dtype=torch.bfloat16).view(SHAPE)
    before = layer.clone()
    num_bytes = NUM_SLOTS * layer_bytes(layer)
    region = (aligned(num_bytes) if is_aligned else aligned(num_bytes + 8)[8:]).reshape(NUM_SLOTS, -1)
    copier = CpuCopier([layer], region)
    rows = before.view(NUM_BLOCKS, -1).view(torch.uint8).numpy()
    expected = np.zeros_like(region)
    expected[slots] = rows[blocks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_copy, "FEW_THREADS", few_threads)
        copier.to_host(0, blocks, slots)
        assert np.array_equal(region, expected)
        layer[blocks] = 0
        copier.to_device(0, blocks, slots)
    assert torch.equal(layer, before)
    assert copier.out.num_bytes == copier.back.num_bytes == len(blocks) * layer_bytes(layer)


def test_rows_that_are_not_there_are_never_copied() -> None:
    layer = torch.ones(SHAPE, dtype=torch.bfloat16)
    region = aligned(NUM_SLOTS * layer_bytes(layer)).reshape(NUM_SLOTS, -1)
    copier = CpuCopier([layer], region)
    for blocks, slots in (([NUM_BLOCKS], [0]), ([0], [NUM_SLOTS]), ([-1], [0]), ([0, 1], [0]), ([0], [0, 1])):
        with pytest.raises((IndexError, OverflowError)):
            copier.to_host(0, blocks, slots)
    start, row = region.ctypes.data, np.zeros(1, dtype=np.uint64)
    with pytest.raises(ValueError, match="whole lines"):
        copy_rows(start, NUM_SLOTS, row, layer.data_ptr(), NUM_BLOCKS, row, 96)
    assert not region.any()


@given(order=st.permutations([1, 2, 3]), sizes=st.tuples(*[st.integers(1, 5)] * 3))
def test_the_dimensions_within_a_block_may_lie_in_any_order(order: list[int], sizes: tuple[int, ...]) -> None:
    """FlashAttention on a GPU has the tokens within the heads, where the shape has them the other way round."""
    memory = torch.arange(3 * math.prod(sizes), dtype=torch.int16)
    layer = memory.view(3, *sizes).permute(0, *order)
    rows = block_copy.kv_rows(layer)
    assert rows.data_ptr() == layer.data_ptr()
    assert layer_bytes(layer) == 2 * math.prod(sizes)
    assert torch.equal(rows.view(torch.int16), memory.view(3, -1))


def test_a_layout_whose_rows_have_no_address_of_their_own_is_refused() -> None:
    whole = torch.zeros(NUM_BLOCKS, 3, 2, 4, 8)  # all layers of a block lie together
    scattered = torch.zeros(2, NUM_BLOCKS, 4, 8).transpose(0, 1)
    for layout in (*whole.unbind(1), scattered):
        with pytest.raises(SeamMoved):
            kv_rows(layout)
    with pytest.raises(SeamMoved):
        CpuCopier([whole[:, 1]], np.zeros((NUM_SLOTS, 256), dtype=np.uint8))
    assert kv_rows(whole[:, :, 0][:, 0].clone()).is_contiguous()


def test_layers_that_share_memory_are_told_by_where_they_lie() -> None:
    memory = torch.zeros(4 * NUM_BLOCKS, 8)
    first, second = memory[:NUM_BLOCKS], memory[NUM_BLOCKS : 2 * NUM_BLOCKS]
    assert own_memory([first, second]) and own_memory([second, first])
    assert not own_memory([first, second, first])
    assert not own_memory([first, first.view(NUM_BLOCKS, 2, 4)])  # of another group, and another shape
    assert not own_memory([first, memory[NUM_BLOCKS - 1 : 2 * NUM_BLOCKS]])
    assert not own_memory([memory.view(NUM_BLOCKS, 4, 8)[:, layer] for layer in range(4)])
    assert not own_memory([first, [second]])  # a layer with states in place of blocks


LOWEST = 0


class Cuda:
    """In place of torch.cuda where there is none: writes down who waits for whom, and says that each copy took a quarter of a second."""

    def __init__(self) -> None:
        self.sides = iter([Stream(name, self) for name in ("out", "in", "beside")])
        self.compute = Stream("compute", self)
        self.copied: list[list[list[int]]] = []
        self.done: list[str] = []
        self.waited_for: list[str] = []  # the streams by whose events the host is told
        self.now_ms = 0.0
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return {
            "Stream": self,
            "current_stream": lambda: self.compute,
            "stream": lambda stream: nullcontext(),
            "Event": lambda enable_timing=False: Event(self),
        }[name]

    def __call__(self, priority: int = 0) -> Stream:
        assert priority == LOWEST, "kernels of a step go first"
        return next(self.sides)

    def priority_range(self) -> tuple[int, int]:
        return LOWEST, -5

    def cudaHostRegister(self, ptr: int, size: int, flags: int = 0) -> int:
        return 0

    cudaHostUnregister = cudaGetLastError = lambda self, *args: 0

    def swap_blocks_batch(self, *args: Any) -> None:
        self.copied.append([each.tolist() for each in args])
        self.done.append("copy")
        self.now_ms += 250.0


class Stream(NamedTuple):
    name: str
    cuda: Cuda

    def wait_stream(self, other: Stream) -> None:
        self.cuda.done.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        if self.cuda.error is not None:
            raise self.cuda.error


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.synchronize = cuda.compute.synchronize

    def record(self, stream: Any = None) -> None:
        self.at_ms = self._cuda.now_ms
        if stream is not None:
            self._cuda.waited_for.append(stream.name)

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(block_copy, "PINNING", Pinning(lambda: cuda))
    monkeypatch.setitem(vars(vllm_api), "swap_blocks_batch", cuda.swap_blocks_batch)
    return cuda


def copier_of(num_layers: int, waiter: Any = lambda run: run()) -> tuple[block_copy.CudaCopier, int]:
    """A copier, and the bytes of a block in a layer."""
    layers = [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(num_layers)]
    num_bytes = layer_bytes(layers[0])
    return block_copy.CudaCopier(layers, np.zeros((NUM_SLOTS, num_bytes), dtype=np.uint8), waiter), num_bytes


def test_on_cuda_a_step_makes_one_copy_each_way_in_order_with_its_kernels(cuda: Cuda) -> None:
    copier, num_bytes = copier_of(2)
    for _ in range(2):
        for layer in range(2):
            copier.to_device(layer, [1, 2], [3, 4])
        assert cuda.done == []
        copier.flush()
        assert cuda.done == ["in waits for compute", "copy", "compute waits for in"]
        for layer in range(2):
            copier.to_host(layer, [4, 2], [5, 6])
        copier.end_step(lambda: None)
        assert cuda.done[3:] == ["out waits for compute", "copy"], "no kernel waits for what is saved"
        assert sorted(cuda.waited_for) == ["in", "out"]
        cuda.done.clear()
        cuda.waited_for.clear()
    (_, _, loaded), (_, _, saved) = cuda.copied[:2]
    assert loaded == [2 * num_bytes] * 2, "neighbours on both sides are one copy"
    assert saved == [num_bytes] * 4


def test_on_cuda_blocks_that_come_back_in_the_same_call_wait_for_their_way_out(cuda: Cuda) -> None:
    copier, _ = copier_of(1)
    copier.to_host(0, [1], [3])
    copier.to_device(0, [1], [3])
    copier.flush()
    assert cuda.done[2:] == ["in waits for compute", "in waits for out", "copy", "compute waits for in"]
    (out, host, _), (back, device, _) = cuda.copied
    assert (out, host) == (device, back)


def test_on_cuda_no_kernel_waits_for_a_copy_to_the_device_that_no_step_reads(cuda: Cuda) -> None:
    copier, _ = copier_of(1)
    told: list[str] = []
    copier.to_host(0, [1], [3])
    copier.end_step(lambda: told.append("saved"))
    cuda.done.clear()
    cuda.waited_for.clear()
    copier.to_device(0, [5], [4])
    copier.end_step(lambda: told.append("promoted"))
    assert cuda.done == ["beside waits for compute", "copy"], "kernels launched before may read these blocks"
    assert cuda.waited_for == ["beside"], "it does not wait for what others save and load"
    assert told == ["saved", "promoted"]


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30),
    row_bytes=st.integers(1, 3),
    piece_rows=st.integers(1, 9),
)
def test_joined_copies_move_the_same_bytes_and_lie_in_one_piece(
    rows: list[tuple[int, int]], row_bytes: int, piece_rows: int
) -> None:
    source, into = (np.array(each, dtype=np.int64) * row_bytes for each in zip(*rows, strict=True))
    piece_bytes = piece_rows * row_bytes
    copies = list(zip(*block_copy.joined(source, into, into // piece_bytes, row_bytes), strict=True))

    def moved(moves: Any) -> list[tuple[int, int]]:
        return [(of + at, to + at) for of, to, size in moves for at in range(size)]

    assert moved(copies) == moved((of, to, row_bytes) for of, to in zip(source, into, strict=True))
    assert all(to // piece_bytes == (to + size - 1) // piece_bytes for _, to, size in copies)
    ends = [(of + size, to + size) for of, to, size in copies]
    pairs = zip(ends, copies[1:], strict=False)
    assert not any(end == (of, to) and to % piece_bytes for end, (of, to, _) in pairs)


def test_on_cuda_what_was_copied_is_counted_with_its_time_once_it_is_done(cuda: Cuda) -> None:
    waiting: list[Any] = []
    copier, num_bytes = copier_of(1, waiting.append)
    copier.to_host(0, [1, 2], [3, 4])
    copier.end_step(lambda: waiting.append("told"))
    assert copier.out == copier.back == Copied()
    waiting[0]()
    assert copier.out == Copied(2 * num_bytes, 1, 0.25) and copier.back == Copied()
    assert waiting[1] == "told"


def test_on_cuda_memory_is_given_back_by_copies_at_which_the_device_fails(cuda: Cuda) -> None:
    heard: list[str] = []
    copier, _ = copier_of(1)
    cuda.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    for failed in (None, lambda: heard.append("failed")):
        copier.to_host(0, [1, 2], [3, 4])
        copier.end_step(lambda: heard.append("then"), failed)
    copier.rest()
    assert heard == ["then", "failed"] and copier.out == Copied()


@pytest.mark.parametrize("is_cuda", [True, False])
def test_memory_that_a_slot_is_filled_from_is_kept_for_the_copying(cuda: Cuda, is_cuda: bool) -> None:
    """Of adapters; tests/gpu has real slots."""
    used_by: list[Any] = []
    memory: Any = SimpleNamespace(is_cuda=is_cuda, record_stream=used_by.append)
    StreamedSlots(SimpleNamespace(modules={})).fill(1, AdapterWeights({}, 0, memory))
    assert [each.name for each in used_by] == (["out"] if is_cuda else []), "torch refuses it for host memory"
    assert cuda.done == ["out waits for compute"], "steps before this one read the slot's previous weights"
