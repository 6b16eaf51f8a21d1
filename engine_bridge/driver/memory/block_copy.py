"""Copies of whole KV blocks between the engine's cache and the host tier's slots, one layer at a time.

On a CPU both are ordinary memory and a copy is done when the call returns. On CUDA copies run on a stream of their own, ordered against the
compute stream by events, so neither the launch of kernels nor the host waits for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine_bridge.policy.costs.costs import Copied
from engine_bridge.protocol.errors import SeamMoved

log = logging.getLogger(__name__)

Rows = NDArray[np.int64]

# An engine of so few threads has one of them copy past the caches (`row_copies`): measured on two, it is faster than both by torch. With more, where
# torch should win (chosen, not measured), it does so only where stretches of neighbouring rows have fewer than FEW_ROWS on average: a call of torch
# costs more than a short copy.
FEW_THREADS, FEW_ROWS = 3, 4


class BlockCopier(Protocol):
    """One per engine. Called on the engine thread, inside a step."""

    overlaps: bool
    """Whether copies run beside the step's computation, or take the engine thread's time."""
    out: Copied
    """To host memory."""
    back: Copied
    """To the device."""

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy device blocks of a layer, as the forward pass has just left them, into slots."""
        ...

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots into device blocks before the layer's attention reads them."""
        ...

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Call `then` once all copies so far are done: at once, or later on another thread. Where the device has failed at them, `failed` is called
        in its place, or `then` where there is none: the memory is free, and what was copied into it is not to be trusted."""
        ...

    def rest(self) -> None:
        """Return once nothing is copied any more, also where the device has failed: one that takes no more work does none."""
        ...


class CpuCopier:
    """Row by row past the caches; or, on many threads, by one call of torch for each stretch of neighbouring rows, gathering into or scattering from
    them, whichever side has fewer.

    Args:
        kv_caches: one tensor per layer, shape (num_blocks, ...), a block's bytes contiguous.
        region: the host pool's, shape (num_slots, slot_bytes).
    """

    overlaps = False

    def __init__(self, kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8]) -> None:
        # Numba, which a device that copies by itself does not need.
        from engine_bridge.driver.memory.row_copies import LINE_BYTES, copy_rows

        self._layers = [_words(kv_rows(tensor)) for tensor in kv_caches]
        self._region = _words(torch.from_numpy(region))
        self._row_bytes = region.shape[1]
        self._copy_rows = copy_rows
        starts = [memory.data_ptr() for memory in (self._region, *self._layers)]
        self._has_lines = not any(number % LINE_BYTES for number in (self._row_bytes, *starts))
        self.out, self.back = Copied(), Copied()

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._copy(self._region, slots, self._layers[layer], blocks, self.out)

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._copy(self._layers[layer], blocks, self._region, slots, self.back)

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        then()

    def rest(self) -> None: ...

    def _copy(
        self,
        into: torch.Tensor,
        to_rows: Sequence[int],
        source: torch.Tensor,
        rows: Sequence[int],
        copied: Copied,
    ) -> None:
        started_s = time.perf_counter()
        if self._has_lines and torch.get_num_threads() <= FEW_THREADS:
            self._copy_lines(into, to_rows, source, rows)
        else:
            self._copy_stretches(into, to_rows, source, rows)
        copied.add(len(rows) * self._row_bytes, time.perf_counter() - started_s)

    def _copy_lines(
        self, into: torch.Tensor, to_rows: Sequence[int], source: torch.Tensor, rows: Sequence[int]
    ) -> None:
        to, of = np.array(to_rows, dtype=np.uint64), np.array(rows, dtype=np.uint64)
        self._copy_rows(into.data_ptr(), len(into), to, source.data_ptr(), len(source), of, self._row_bytes)

    def _copy_stretches(
        self, into: torch.Tensor, to_rows: Sequence[int], source: torch.Tensor, rows: Sequence[int]
    ) -> None:
        gathers = _stretches(to_rows, rows)
        scatters = _stretches(rows, to_rows) if len(gathers) > 1 else gathers
        if self._has_lines and len(rows) < FEW_ROWS * min(len(gathers), len(scatters)):
            self._copy_lines(into, to_rows, source, rows)
        elif len(gathers) <= len(scatters):
            for start, wanted in gathers:
                torch.index_select(source, 0, torch.from_numpy(wanted), out=into[start : start + len(wanted)])
        else:
            for start, wanted in scatters:
                into.index_copy_(0, torch.from_numpy(wanted), source[start : start + len(wanted)])


# Which way, bytes, and the events before and after.
_Timed = tuple[Copied, int, Any, Any]


class CudaCopier:
    """Copies on a side stream from and to pinned memory, by vLLM's block-swapping kernel.

    What it has copied is counted once it is done, on the waiter's threads.
    """

    overlaps = True

    def __init__(
        self, kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8], waiter: Callable[..., Any]
    ) -> None:
        self._layers = [kv_rows(tensor) for tensor in kv_caches]
        self._region = torch.from_numpy(region)
        _pin(self._region)
        self._stream = torch.cuda.Stream()
        self._submit = waiter
        self._has_loaded = False
        self._timed: list[_Timed] = []  # of this step's copies
        self._counting = threading.Lock()
        self.out, self.back = Copied(), Copied()

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())  # the layer's KV must have been written
        self._swap(self._layers[layer], self._region, blocks, slots, self.out)

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if not self._has_loaded:
            # Steps before may still read these blocks. This one's kernels do so behind the copy only: waiting for those of the layers before
            # would have each copy run after its step's computation, and not beside it.
            self._stream.wait_stream(torch.cuda.current_stream())
            self._has_loaded = True
        self._swap(self._region, self._layers[layer], slots, blocks, self.back)
        torch.cuda.current_stream().wait_stream(self._stream)

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """The next step may overwrite blocks that are still being copied: its kernels wait for the copies, the host does not."""
        done = torch.cuda.Event()
        done.record(self._stream)
        torch.cuda.current_stream().wait_event(done)
        timed, self._timed, self._has_loaded = self._timed, [], False

        def wait() -> None:
            try:
                done.synchronize()
                self._count(timed)
            except Exception:
                log.exception("the device has failed while it copied KV")
                (failed or then)()
            else:
                then()

        self._submit(wait)

    def rest(self) -> None:
        try:
            self._stream.synchronize()
        except Exception as error:
            # CUDA's errors last: every call after one fails, and nothing runs any more.
            log.warning("the device has failed: %s", error)

    def _count(self, timed: list[_Timed]) -> None:
        with self._counting:
            for copied, num_bytes, began, ended in timed:
                copied.add(num_bytes, began.elapsed_time(ended) / 1e3)

    def _swap(
        self,
        source: torch.Tensor,
        into: torch.Tensor,
        rows: Sequence[int],
        to_rows: Sequence[int],
        copied: Copied,
    ) -> None:
        from engine_bridge.driver.vllm_api import swap_blocks

        mapping = torch.tensor(list(zip(rows, to_rows, strict=True)), dtype=torch.int64)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            began.record()
            swap_blocks(source, into, into.shape[1], mapping)
            ended.record()
        self._timed.append((copied, len(rows) * into.shape[1], began, ended))


def make_copier(
    kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8], waiter: Callable[..., Any]
) -> BlockCopier:
    """The copier for where the cache lives. `waiter` runs a function on a thread that may block."""
    if kv_caches[0].device.type == "cuda":
        return CudaCopier(kv_caches, region, waiter)
    return CpuCopier(kv_caches, region)


def layer_bytes(kv_cache: torch.Tensor) -> int:
    """Bytes of one block in one layer. Raises SeamMoved for a layout whose blocks are not contiguous."""
    return kv_rows(kv_cache).shape[1]


def kv_rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache as bytes, shape (num_blocks, layer_bytes), without a copy. The dimensions within a block may lie in any order.

    Raises SeamMoved where a block is not one stretch of memory, or where other memory lies between a layer's blocks: whoever copies a row reckons
    its address from its number and its size.
    """
    layout = f"(shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()})"
    try:
        rows = kv_cache.permute(0, *memory_order(kv_cache)).view(kv_cache.shape[0], -1).view(torch.uint8)
    except RuntimeError as error:
        raise SeamMoved(f"a KV block is not one stretch of memory {layout}") from error
    if not rows.is_contiguous():
        raise SeamMoved(f"a layer's KV blocks do not lie one behind the other {layout}")
    return rows


def own_memory(kv_caches: Sequence[Any]) -> bool:
    """Whether each of these layers is one tensor of KV blocks in memory that no other layer has. Layers of several KV groups share theirs."""
    if not all(isinstance(each, torch.Tensor) for each in kv_caches):
        return False
    try:
        ranges = sorted((rows.data_ptr(), rows.data_ptr() + rows.numel()) for rows in map(kv_rows, kv_caches))
    except SeamMoved:
        return False
    return all(end <= start for (_, end), (start, _) in pairwise(ranges))


def memory_order(kv_cache: torch.Tensor) -> list[int]:
    """The dimensions within a block, as they lie in memory, the outermost first. GPU backends have heads before tokens, or the other way round."""
    return sorted(range(1, kv_cache.dim()), key=lambda dim: (-kv_cache.stride(dim), dim))


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes as rows of 8-byte words where they allow it: torch gathers those faster (measured: 27 against 16 GB/s)."""
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.data_ptr() % 8 == 0 else rows


def _stretches(near: Sequence[int], far: Sequence[int]) -> list[tuple[int, Rows]]:
    """(first row, the rows that belong to it and its successors on the other side) for each stretch of neighbouring rows of `near`."""
    first, second = np.asarray(near, dtype=np.int64), np.asarray(far, dtype=np.int64)
    order = np.argsort(first)
    first, second = first[order], second[order]
    edges = [0, *(np.flatnonzero(np.diff(first) != 1) + 1).tolist(), len(first)]
    return [(int(first[start]), second[start:end]) for start, end in pairwise(edges)]


def _pin(region: torch.Tensor) -> None:
    """Page-lock the region, so that copies need no bounce buffer; without it they are slower, not wrong."""
    result = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.numel(), 0)
    if int(result) != 0:
        log.warning(
            "the host tier's memory could not be pinned (CUDA error %s); copies will be slower", result
        )
