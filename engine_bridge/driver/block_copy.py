"""Copies of whole KV blocks between the engine's cache and the host tier's slots, one layer at a time.

On a CPU both are ordinary memory and a copy is done when the call returns. On CUDA copies run on a stream of their own, ordered against the
compute stream by events, so neither the launch of kernels nor the host waits for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine_bridge.errors import SeamMoved

log = logging.getLogger(__name__)

Rows = NDArray[np.int64]


class BlockCopier(Protocol):
    """One per engine. Called on the engine thread, inside a step."""

    num_bytes: int
    """Copied so far, both ways, and in `seconds` of time that the step waited for it."""
    seconds: float

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy device blocks of a layer, as the forward pass has just left them, into slots."""
        ...

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots into device blocks before the layer's attention reads them."""
        ...

    def end_step(self, then: Callable[[], None]) -> None:
        """Call `then` once all copies so far are done: at once, or later on another thread."""
        ...


class CpuCopier:
    """Plain copies, merged where blocks and slots lie side by side.

    Args:
        kv_caches: one tensor per layer, shape (num_blocks, ...), a block's bytes contiguous.
        region: the host pool's, shape (num_slots, slot_bytes).
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8]) -> None:
        self._layers = [_rows(tensor).numpy() for tensor in kv_caches]
        self._region = region
        self.num_bytes = 0
        self.seconds = 0.0

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._copy(self._region, slots, self._layers[layer], blocks)

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._copy(self._layers[layer], blocks, self._region, slots)

    def end_step(self, then: Callable[[], None]) -> None:
        then()

    def _copy(
        self, into: NDArray[np.uint8], to_rows: Sequence[int], source: NDArray[np.uint8], rows: Sequence[int]
    ) -> None:
        started_s = time.perf_counter()
        for to_run, run in _paired_runs(to_rows, rows):
            into[to_run] = source[run]
        self.seconds += time.perf_counter() - started_s
        self.num_bytes += len(rows) * into.shape[1]


class CudaCopier:
    """Copies on a side stream from and to pinned memory, by vLLM's block-swapping kernel.

    Not run on a GPU yet; tests/gpu holds its test.
    """

    def __init__(
        self, kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8], waiter: Callable[..., Any]
    ) -> None:
        self._layers = [_rows(tensor) for tensor in kv_caches]
        self._region = torch.from_numpy(region)
        _pin(self._region)
        self._stream = torch.cuda.Stream()
        self._submit = waiter
        self.num_bytes = 0
        self.seconds = 0.0

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())  # the layer's KV must have been written
        self._swap(self._layers[layer], self._region, blocks, slots)

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._stream.wait_stream(
            torch.cuda.current_stream()
        )  # earlier readers of these blocks must be through
        self._swap(self._region, self._layers[layer], slots, blocks)
        torch.cuda.current_stream().wait_stream(self._stream)

    def end_step(self, then: Callable[[], None]) -> None:
        """The next step may overwrite blocks that are still being copied: its kernels wait for the copies, the host does not."""
        done = torch.cuda.Event()
        done.record(self._stream)
        torch.cuda.current_stream().wait_event(done)
        self._submit(_after(done, then))

    def _swap(
        self, source: torch.Tensor, into: torch.Tensor, rows: Sequence[int], to_rows: Sequence[int]
    ) -> None:
        from vllm import _custom_ops

        mapping = torch.tensor(list(zip(rows, to_rows, strict=True)), dtype=torch.int64)
        with torch.cuda.stream(self._stream):
            _custom_ops.swap_blocks(source, into, into.shape[1], mapping)
        self.num_bytes += len(rows) * into.shape[1]


def make_copier(
    kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8], waiter: Callable[..., Any]
) -> BlockCopier:
    """The copier for where the cache lives. `waiter` runs a function on a thread that may block."""
    if kv_caches[0].device.type == "cuda":
        return CudaCopier(kv_caches, region, waiter)
    return CpuCopier(kv_caches, region)


def layer_bytes(kv_cache: torch.Tensor) -> int:
    """Bytes of one block in one layer. Raises SeamMoved for a layout whose blocks are not contiguous."""
    return _rows(kv_cache).shape[1]


def _rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache as bytes, shape (num_blocks, layer_bytes), without a copy."""
    try:
        return kv_cache.view(kv_cache.shape[0], -1).view(torch.uint8)
    except RuntimeError as error:
        raise SeamMoved(
            f"a KV block is not one stretch of memory (shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()})"
        ) from error


def _paired_runs(a: Sequence[int], b: Sequence[int]) -> list[tuple[slice, slice]]:
    """Pairs of slices that cover a[i] ↔ b[i]: neighbours on both sides go together, also where one side counts down."""
    if len(a) == 1:
        return [(slice(a[0], a[0] + 1), slice(b[0], b[0] + 1))]
    first, second = np.asarray(a), np.asarray(b)
    order = np.argsort(first)
    first, second = first[order], second[order]
    steps = np.diff(second)
    # A run goes on while the first side counts up by one and the second moves by the same ±1 as before.
    follows = (np.diff(first) == 1) & (np.abs(steps) == 1)
    follows[1:] &= (steps[1:] == steps[:-1]) | ~follows[:-1]
    edges = np.flatnonzero(~follows) + 1
    runs = []
    for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(first)], strict=True):
        low, high = int(first[start]), int(first[end - 1])
        runs.append((slice(low, high + 1), _run(int(second[start]), int(second[end - 1]))))
    return runs


def _run(start: int, last: int) -> slice:
    if last >= start:
        return slice(start, last + 1)
    return slice(start, last - 1 if last else None, -1)


def _pin(region: torch.Tensor) -> None:
    """Page-lock the region, so that copies need no bounce buffer; without it they are slower, not wrong."""
    result = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.numel(), 0)
    if int(result) != 0:
        log.warning(
            "the host tier's memory could not be pinned (CUDA error %s); copies will be slower", result
        )


def _after(event: Any, then: Callable[[], None]) -> Callable[[], None]:
    def wait() -> None:
        event.synchronize()
        then()

    return wait
