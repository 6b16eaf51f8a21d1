"""Copies of whole KV blocks between the engine's cache and the host tier's slots, one layer at a time.

On a CPU both are ordinary memory, and a copy is done when the call returns. On CUDA copies run on streams of their own, behind the kernels launched
so far. Kernels wait for what their own step loads, and for no other copy: the blocks of any other are to be held until `end_step` tells that it is
made (`driver/kv/held_blocks.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine_bridge.driver.memory.pinning import PINNING, piece_bytes
from engine_bridge.policy.costs.costs import Copied
from engine_bridge.protocol.errors import SeamMoved

log = logging.getLogger(__name__)

Rows = NDArray[np.int64]

# An engine of at most FEW_THREADS threads copies on one thread past the caches (`row_copies`): measured with two threads, that is faster than torch
# using both. With more threads torch should win (chosen, not measured), so one thread copies only where stretches of neighbouring rows have fewer
# than FEW_ROWS rows on average: a call of torch costs more than a short copy.
FEW_THREADS, FEW_ROWS = 3, 4


class BlockCopier(Protocol):
    """A copier between the host tier's memory and the device's blocks, on the engine thread, in a step or between two.

    Attributes:
        overlaps: whether copies run beside the step's computation; False: they take the engine thread's time.
        out, back: the copies to host memory and to the device so far.
    """

    @property
    def overlaps(self) -> bool:
        """See the class."""

    out: Copied
    back: Copied

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy a layer's device blocks into slots of host memory, by the next `end_step` at the latest."""

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots of host memory into a layer's device blocks, by the next `flush` or `end_step` at the latest."""

    def flush(self) -> None:
        """Begin the copies so far, so that later kernels find their blocks on the device."""

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Begin the other copies, which no kernel waits for: until they are made their blocks must be left alone.

        `then` is called, on any thread, once all copies since the last call are made; `failed` where they cannot be made.
        """

    def ask(self) -> None:
        """Have copies that were made tell so, if they do not by themselves."""

    def rest(self) -> None:
        """Return once no copy is under way."""


class CpuCopier:
    """The copier of an engine on a CPU: on few threads row by row past the caches, on many by torch.

    Torch is called once for each stretch of neighbouring rows. It gathers into
    stretches or scatters from them, whichever side has fewer.

    Args:
        kv_caches: one tensor per layer, shape (num_blocks, ...), a block's bytes contiguous.
        region: the host pool's memory, shape (num_slots, slot_bytes).
    """

    overlaps = False

    def __init__(self, kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8]) -> None:
        # Importing this loads numba, which a device that copies by itself does not need.
        from engine_bridge.driver.memory.row_copies import LINE_BYTES, copy_rows

        self._layers = [_words(kv_rows(tensor)) for tensor in kv_caches]
        self._region = _words(torch.from_numpy(region))
        self._row_bytes = region.shape[1]
        self._copy_rows = copy_rows
        starts = [memory.data_ptr() for memory in (self._region, *self._layers)]
        self._has_lines = not any(number % LINE_BYTES for number in (self._row_bytes, *starts))
        self.out, self.back = Copied(), Copied()

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy a layer's device blocks, as the forward pass has just left them, into slots before the call returns."""
        self._copy(self._region, slots, self._layers[layer], blocks, self.out)

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots into a layer's device blocks before the call returns."""
        self._copy(self._layers[layer], blocks, self._region, slots, self.back)

    def flush(self) -> None:
        """Do nothing: no copy outlives its call."""

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Call `then` at once: no copy outlives its call."""
        then()

    def ask(self) -> None:
        """Do nothing: each copy has told."""

    def rest(self) -> None:
        """Do nothing: no copy outlives its call."""

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


class CudaCopier:
    """The copier of a CUDA device, from and to pinned memory: one call for all copies of a direction.

    There are three streams: for copies to host memory, for copies to the device that the next kernels wait for, and for copies to the device that
    no kernel waits for. Copies are gathered until `flush` or `end_step`. They are counted once they are done, on the waiter's threads.
    """

    overlaps = True

    def __init__(
        self, kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8], waiter: Callable[..., Any]
    ) -> None:
        self._layers = [kv_rows(tensor) for tensor in kv_caches]
        PINNING.pin(region)
        self._region = region
        self._row_bytes = region.shape[1]
        lowest, _ = torch.cuda.Stream.priority_range()  # kernels of a step go first
        self._out, self._in, self._beside = (torch.cuda.Stream(priority=lowest) for _ in range(3))
        self._submit = waiter
        self._to_host: list[_Gathered] = []
        self._to_device: list[_Gathered] = []
        # Of the copies since the last `end_step`.
        self._streams: list[Any] = []
        self._timed: list[_Timed] = []
        self._counting = threading.Lock()
        self.out, self.back = Copied(), Copied()

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Gather the copy of a layer's device blocks into slots."""
        self._to_host.append((layer, blocks, slots))

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Gather the copy of slots into a layer's device blocks."""
        self._to_device.append((layer, blocks, slots))

    def flush(self) -> None:
        """Launch the gathered copies, behind the kernels launched so far; kernels launched later wait for copies to the device."""
        if self._send(self._in):
            torch.cuda.current_stream().wait_stream(self._in)

    def _send(self, back: Any) -> bool:
        """Launch the gathered copies, and return whether any of them go to the device, by the stream `back`.

        Copies to the device are made behind copies to host memory of the same call, because they may read its results.
        """
        compute = torch.cuda.current_stream()
        out, self._to_host = self._to_host, []
        if out:
            self._out.wait_stream(compute)  # the blocks' KV must have been written
            self._launch(self._out, out, self.out, is_out=True)
        gathered, self._to_device = self._to_device, []
        if gathered:
            back.wait_stream(compute)  # earlier steps may still read these blocks
            if out:
                back.wait_stream(self._out)
            self._launch(back, gathered, self.back, is_out=False)
        return bool(gathered)

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Launch the gathered copies, behind the kernels launched so far. Neither the host nor any kernel waits for them.

        `then` is called on another thread once all copies since the last call are done; `failed` (or `then`, without a `failed`) if the device has
        failed while it copied: the memory is free, and its new contents are not to be trusted.
        """
        self._send(self._beside)
        streams, self._streams = self._streams, []
        timed, self._timed = self._timed, []
        dones = [torch.cuda.Event() for _ in streams]
        for done, stream in zip(dones, streams, strict=True):
            done.record(stream)

        def wait() -> None:
            """Block until the copies are done, count them, and call `then` or `failed`."""
            try:
                for done in dones:
                    done.synchronize()
                self._count(timed)
            except Exception:
                log.exception("the device has failed while it copied KV")
                (failed or then)()
            else:
                then()

        self._submit(wait)

    def ask(self) -> None:
        """Do nothing: the waiter's threads tell."""

    def rest(self) -> None:
        """Return once the side streams have finished their copies, or the device has failed."""
        try:
            for stream in (self._out, self._in, self._beside):
                stream.synchronize()
        except Exception as error:
            # CUDA's errors last: every call after an error fails, and no kernel runs any more.
            log.warning("the device has failed: %s", error)

    def _count(self, timed: list[_Timed]) -> None:
        with self._counting:
            for copied, num_bytes, num_copies, began, ended in timed:
                copied.add(num_bytes, began.elapsed_time(ended) / 1e3, num_copies)

    def _launch(self, stream: Any, gathered: list[_Gathered], copied: Copied, *, is_out: bool) -> None:
        from engine_bridge.driver.vllm_api import swap_blocks_batch

        num_rows = [len(blocks) for _, blocks, _ in gathered]
        starts = np.repeat([self._layers[layer].data_ptr() for layer, _, _ in gathered], num_rows)
        blocks, slots = (
            np.concatenate([np.asarray(each[side], dtype=np.int64) for each in gathered]) for side in (1, 2)
        )
        device = starts.astype(np.int64) + blocks * self._row_bytes
        host = self._region.ctypes.data + slots * self._row_bytes
        pieces = slots * self._row_bytes // piece_bytes(self._row_bytes)
        pointers = joined(*((device, host) if is_out else (host, device)), pieces, self._row_bytes)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record()
            swap_blocks_batch(*(torch.from_numpy(each) for each in pointers))
            ended.record()
        if stream not in self._streams:
            self._streams.append(stream)
        self._timed.append((copied, sum(num_rows) * self._row_bytes, len(gathered), began, ended))


_Gathered = tuple[int, Sequence[int], Sequence[int]]
"""A layer, its device blocks, and the host slot of each."""
_Timed = tuple[Copied, int, int, Any, Any]
"""The direction's counter, the number of bytes and of copies of a layer, and the events before and after them."""


def joined(source: Rows, into: Rows, pieces: Rows, row_bytes: int) -> tuple[Rows, Rows, Rows]:
    """Return where to copy from and to, and how many bytes: rows that follow one another on both sides are one copy.

    On a GPU each copy costs a microsecond or two beside its bytes, as long as 100 kB take.

    Args:
        source: the addresses of the rows to read, in the order in which they may follow one another.
        into: the addresses to write them to.
        pieces: the piece of pinned memory that each is in or goes to; no copy may lie in two.
        row_bytes: bytes of a row.
    """
    begins = np.ones(len(source), dtype=bool)
    begins[1:] = (np.diff(source) != row_bytes) | (np.diff(into) != row_bytes) | (np.diff(pieces) != 0)
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(source)))
    return source[first], into[first], lengths * row_bytes


def make_copier(
    kv_caches: Sequence[torch.Tensor], region: NDArray[np.uint8], waiter: Callable[..., Any]
) -> BlockCopier:
    """Return the copier for the device that the cache is on.

    kv_caches: one tensor per layer. region: the host pool's memory, shape (num_slots, slot_bytes). waiter: runs a function on a thread that may
    block.
    """
    if kv_caches[0].device.type == "cuda":
        return CudaCopier(kv_caches, region, waiter)
    return CpuCopier(kv_caches, region)


def layer_bytes(kv_cache: torch.Tensor) -> int:
    """Return the bytes of one block in one layer. Raises SeamMoved for a layout whose blocks are not contiguous."""
    return kv_rows(kv_cache).shape[1]


def kv_rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a layer's cache as bytes, shape (num_blocks, layer_bytes), without a copy. The dimensions within a block may lie in any order.

    Raises:
        SeamMoved: where a block is not one stretch of memory, or where other memory lies between a layer's blocks: a row's address is computed from
            its number and its size.
    """
    layout = f"(shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()})"
    try:
        rows = kv_cache.permute(0, *memory_order(kv_cache)).view(kv_cache.shape[0], -1).view(torch.uint8)
    except RuntimeError as error:
        raise SeamMoved(f"a KV block is not one stretch of memory {layout}") from error
    if not rows.is_contiguous():
        raise SeamMoved(f"a layer's KV blocks do not lie one behind the other {layout}")
    return rows


def in_blocks(kv_cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a layer's cache with the pool's `num_blocks` blocks as its first dimension, without a copy.

    A kernel may take blocks of fewer tokens than the pool's. vLLM hands out the cache in the kernel's: several that follow one another are one of the
    pool's. A cache whose first dimension is no multiple of `num_blocks` is returned as it is.
    """
    num_rows = kv_cache.shape[0]
    if num_rows == num_blocks or num_rows % num_blocks:
        return kv_cache
    return kv_cache.unflatten(0, (num_blocks, -1))


def whole_pages(kv_cache: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """Return a recurrent layer's states with what fills each block's memory up to `page_bytes`, shape (num_blocks, page_bytes).

    Other tensors are returned as they are: attention fills its blocks.
    """
    if kv_cache.element_size() != 1 or kv_cache.stride(0) != page_bytes:
        return kv_cache
    return kv_cache.as_strided((kv_cache.shape[0], page_bytes), (page_bytes, 1))


def distinct(kv_caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor for each stretch of memory: layers of several groups, or that share their KV, lie at one address."""
    return list({tensor.data_ptr(): tensor for tensor in reversed(list(kv_caches))}.values())[::-1]


def own_memory(kv_caches: Sequence[Any]) -> bool:
    """Return whether these are tensors of KV blocks, no two of which share memory."""
    if not all(isinstance(each, torch.Tensor) for each in kv_caches):
        return False
    try:
        ranges = sorted((rows.data_ptr(), rows.data_ptr() + rows.numel()) for rows in map(kv_rows, kv_caches))
    except SeamMoved:
        return False
    return all(end <= start for (_, end), (start, _) in pairwise(ranges))


def memory_order(kv_cache: torch.Tensor) -> list[int]:
    """Return a block's dimensions in the order in which they lie in memory, the outermost first.

    Some GPU backends have heads before tokens, others tokens before heads.
    """
    return sorted(range(1, kv_cache.dim()), key=lambda dim: (-kv_cache.stride(dim), dim))


def _words(rows: torch.Tensor) -> torch.Tensor:
    """View rows of bytes as rows of 8-byte words where they allow it: torch gathers those faster (measured: 27 against 16 GB/s)."""
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.data_ptr() % 8 == 0 else rows


def _stretches(near: Sequence[int], far: Sequence[int]) -> list[tuple[int, Rows]]:
    """Return each stretch of neighbouring rows of `near`: its first row, and the rows on the far side that belong to the stretch, in order."""
    first, second = np.asarray(near, dtype=np.int64), np.asarray(far, dtype=np.int64)
    order = np.argsort(first)
    first, second = first[order], second[order]
    edges = [0, *(np.flatnonzero(np.diff(first) != 1) + 1).tolist(), len(first)]
    return [(int(first[start]), second[start:end]) for start, end in pairwise(edges)]
