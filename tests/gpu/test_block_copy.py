"""Copies between a GPU's KV cache and host memory, against plain indexing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

NUM_LAYERS, NUM_BLOCKS, NUM_SLOTS = 3, 64, 400


def test_blocks_go_to_host_and_back_on_a_stream_of_their_own() -> None:
    from engine_bridge.driver.memory.block_copy import CudaCopier

    shape = (NUM_BLOCKS, 2, 32, 128)
    layers = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
    wanted = [layer.clone() for layer in layers]
    region = np.zeros((NUM_SLOTS, layers[0][0].numel() * 2), dtype=np.uint8)
    done = threading.Event()
    copier = CudaCopier(layers, region, lambda run: threading.Thread(target=run).start())
    blocks = [5, 6, 7, 40, 3]
    slots = [[100 * layer + at for at in (10, 11, 12, 0, 99)] for layer in range(NUM_LAYERS)]
    for layer in range(NUM_LAYERS):
        copier.to_host(layer, blocks, slots[layer])
    copier.end_step(done.set)
    assert done.wait(30)
    assert copier.out.num_bytes + copier.back.num_bytes == NUM_LAYERS * len(blocks) * region.shape[1]
    assert copier.out.seconds + copier.back.seconds > 0
    for layer in range(NUM_LAYERS):
        layers[layer][blocks] = 0
        copier.to_device(layer, blocks, slots[layer])
    copier.flush()
    torch.cuda.synchronize()
    for found, expected in zip(layers, wanted, strict=True):
        assert torch.equal(found, expected)


def test_copies_that_no_kernel_waits_for_tell_when_they_are_made() -> None:
    from engine_bridge.driver.memory.block_copy import CudaCopier

    layers = [torch.zeros((NUM_BLOCKS, 2, 32, 128), device="cuda", dtype=torch.bfloat16)]
    region = np.random.default_rng(0).integers(0, 255, (NUM_SLOTS, layers[0][0].numel() * 2), dtype=np.uint8)
    copier = CudaCopier(layers, region, lambda run: threading.Thread(target=run).start())
    saved, filled = threading.Event(), threading.Event()
    copier.to_host(0, [1], [0])
    copier.end_step(saved.set)
    copier.to_device(0, list(range(8, 40)), list(range(100, 132)))
    copier.end_step(filled.set)
    assert saved.wait(30) and filled.wait(30)
    assert not region[0].any()
    found = layers[0][8:40].view(torch.uint8).reshape(32, -1).cpu().numpy()
    assert np.array_equal(found, region[100:132])


def test_a_region_is_pinned_once_and_unpinned_before_its_memory_goes() -> None:
    """As where an engine is built again, and where the store is closed: no error of CUDA's may stay pending, or the next kernel reports it."""
    from engine_bridge.driver.memory.block_copy import CudaCopier
    from kvtiers.io.host_pool import HostPool

    layers = [torch.zeros((NUM_BLOCKS, 2, 32, 128), device="cuda", dtype=torch.bfloat16)]
    slot_bytes = layers[0][0].numel() * 2
    for _ in range(3):  # the kernel gives the next pool the same address, or another
        pool = HostPool(slot_bytes, NUM_SLOTS * slot_bytes)
        for _ in range(2):
            copier = CudaCopier(layers, pool.region, lambda run: run())
            assert torch.from_numpy(pool.region).is_pinned()
            copier.to_host(0, [1, 2], [3, 4])
            copier.end_step(lambda: None)
            assert torch.ones(3, device="cuda").sum().item() == 3
        del copier, pool
