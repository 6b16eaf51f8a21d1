"""Copies of KV blocks on a CPU, against plain indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from engine_bridge.driver.block_copy import CpuCopier, layer_bytes  # noqa: E402  (after the skip)
from engine_bridge.errors import SeamMoved  # noqa: E402

NUM_BLOCKS, NUM_SLOTS = 40, 60
SHAPE = (NUM_BLOCKS, 2, 4, 8)


def pairs(size: int) -> st.SearchStrategy[list[int]]:
    """Different rows: scattered, counting up, or counting down, as an allocator leaves them."""
    return st.one_of(
        st.permutations(range(size)).map(lambda order: order[:10]),
        st.integers(0, size - 10).map(lambda start: list(range(start, start + 10))),
        st.integers(0, size - 10).map(lambda start: list(range(start + 9, start - 1, -1))),
    )


@given(blocks=pairs(NUM_BLOCKS), slots=pairs(NUM_SLOTS), length=st.integers(1, 10))
def test_there_and_back(blocks: list[int], slots: list[int], length: int) -> None:
    blocks, slots = blocks[:length], slots[:length]
    layer = torch.arange(NUM_BLOCKS * 64, dtype=torch.bfloat16).view(SHAPE)
    before = layer.clone()
    region = np.zeros((NUM_SLOTS, layer_bytes(layer)), dtype=np.uint8)
    copier = CpuCopier([layer], region)
    copier.to_host(0, blocks, slots)
    rows = before.view(NUM_BLOCKS, -1).view(torch.uint8).numpy()
    expected = np.zeros_like(region)
    expected[slots] = rows[blocks]
    assert np.array_equal(region, expected)
    layer[blocks] = 0
    copier.to_device(0, blocks, slots)
    assert torch.equal(layer, before)
    assert copier.num_bytes == 2 * length * layer_bytes(layer)


def test_a_layout_whose_blocks_are_scattered_is_refused() -> None:
    interleaved = torch.zeros(2, NUM_BLOCKS, 4, 8).transpose(0, 1)
    with pytest.raises(SeamMoved, match="stretch of memory"):
        layer_bytes(interleaved)
