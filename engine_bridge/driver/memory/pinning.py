"""Page-locks host memory for a GPU: each region once, however many engines copy from it, and until nobody can copy from it any more."""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Region = NDArray[np.uint8]
# The most that is registered by one call. Some drivers refuse more, whatever memory there is. Source: how vLLM's own offloading registers.
MAX_PIECE_BYTES = 64 << 30


class CudaRuntime(Protocol):
    """The calls of CUDA's runtime that pinning needs, as vLLM's `CudaRTLibrary` has them. Each returns 0 or the number of an error."""

    def cudaHostRegister(self, ptr: int, size: int, flags: int = 0) -> int:
        """Page-lock this stretch of memory."""

    def cudaHostUnregister(self, ptr: int) -> int:
        """Undo `cudaHostRegister`, by the stretch's address."""

    def cudaGetLastError(self) -> int:
        """Return the error that is pending on this thread, and clear it."""


class Pinning:
    """The regions of this process that are page-locked.

    Args:
        runtime: returns CUDA's runtime; called when a region is to be pinned. May raise OSError or AssertionError where there is none.
    """

    def __init__(self, runtime: Callable[[], CudaRuntime]) -> None:
        self._runtime = runtime
        self._ends: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def pin(self, region: Region) -> None:
        """Page-lock a region, unless it is locked already; it is unlocked before its memory goes. Without it copies are slower, not wrong.

        region: shape (num_slots, slot_bytes), contiguous. Its memory must live as long as the array that it is a view of.
        """
        owner = _owner_of(region)
        start = region.ctypes.data
        if not region.nbytes or self._ends.get(start) is owner:
            return
        try:
            runtime = self._runtime()
        except (AssertionError, AttributeError, OSError) as error:
            log.warning("the host tier's memory is not pinned, so copies will be slower: %s", error)
            return
        pinned: list[int] = []
        for offset, num_bytes in pieces(region.nbytes, region.shape[1], MAX_PIECE_BYTES):
            error_number = runtime.cudaHostRegister(start + offset, num_bytes)
            if error_number:
                # CUDA keeps the error until it is read, and torch would report it as an error of the next kernel.
                runtime.cudaGetLastError()
                log.warning(
                    "the host tier's memory could not be pinned (CUDA error %s), so copies will be slower",
                    error_number,
                )
                _unpin(runtime, pinned)  # a copy may not lie half in pinned memory
                return
            pinned.append(start + offset)
        self._ends[start] = owner
        # All views of the region hold the owner, whose end is told before it lets go of the memory. At the end of the process nothing need be done.
        weakref.finalize(owner, _unpin, runtime, pinned).atexit = False


def piece_bytes(slot_bytes: int, most_bytes: int = MAX_PIECE_BYTES) -> int:
    """Return the bytes of each stretch but the last: whole slots and whole pages, at most `most_bytes` if that can be."""
    unit = math.lcm(slot_bytes, mmap.PAGESIZE)
    return max(most_bytes // unit, 1) * unit


def pieces(num_bytes: int, slot_bytes: int, most_bytes: int) -> list[tuple[int, int]]:
    """Return the offset and size of each stretch to register: no slot and no page lies in two, and at most `most_bytes` are in one if that can be."""
    size = piece_bytes(slot_bytes, most_bytes)
    return [(offset, min(size, num_bytes - offset)) for offset in range(0, num_bytes, size)]


def _unpin(runtime: CudaRuntime, pinned: list[int]) -> None:
    for start in reversed(pinned):
        error_number = runtime.cudaHostUnregister(start)
        if error_number:
            runtime.cudaGetLastError()
            log.warning("host memory could not be unpinned (CUDA error %s)", error_number)


def _owner_of(region: Region) -> Region:
    """Return the array whose views this region and all of its other views are."""
    while isinstance(region.base, np.ndarray):
        region = region.base
    return region


@cache
def _cuda() -> CudaRuntime:
    from engine_bridge.driver.vllm_api import CudaRTLibrary

    runtime: CudaRuntime = CudaRTLibrary()
    return runtime


PINNING = Pinning(_cuda)
"""The pinning of this process."""
