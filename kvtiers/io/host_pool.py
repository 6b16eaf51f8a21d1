"""The host tier's memory: one region, cut into slots of one layer of one block.

An engine whose model is split over several devices has a process for each of them (a rank). They share the region, and a slot holds the layer's
part of every rank, side by side.

Slots come in runs where they can: a prefill of 64 blocks gets 64 neighbouring slots for its first layer, then 64 for the next (layer-major),
so that a layer moves in one copy and first layers can move first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


class HostPool:
    """A fixed number of slots. Its owner (`KvStore`) locks it.

    Args:
        slot_bytes: size of one layer of one block.
        capacity_bytes: upper bound of the region; the kernel backs it with memory when it is first written to, or in `populate`.
        is_shared: whether other processes of this user can map the region: see `path`.
    """

    def __init__(self, slot_bytes: int, capacity_bytes: int, *, is_shared: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = capacity_bytes // slot_bytes
        size = max(self.num_slots * slot_bytes, 1)
        self.path = ""
        """Where another process opens a shared region, as long as this process lives; "" for a region that is not shared."""
        if is_shared:
            self._memory = self._share(size)
        else:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE") and len(self._memory) >= HUGE_PAGE_BYTES:
            try:
                self._memory.madvise(mmap.MADV_HUGEPAGE)  # a fault per 2 MiB instead of 4 KiB
            except OSError:
                pass
        self.region: NDArray[np.uint8] = np.frombuffer(
            self._memory, dtype=np.uint8, count=self.num_slots * slot_bytes
        ).reshape(self.num_slots, slot_bytes)
        """All slots, shape (num_slots, slot_bytes). The holder of a slot may read and write its row."""
        self.memory = memoryview(self._memory)
        """The same region as bytes."""
        self._free = _Runs()
        if self.num_slots:
            self._free.add(0, self.num_slots)
        self.num_free = self.num_slots

    def _share(self, size: int) -> mmap.mmap:
        """Return memory without a name, so that nothing is left behind however this process ends."""
        fd = os.memfd_create("overture-kv")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        return mmap.mmap(fd, size)

    def populate(self, is_wanted: Callable[[], bool]) -> None:
        """Have the kernel back the region with memory, first slots first, while `is_wanted()`. Changes no byte; call it on a separate thread.

        Otherwise steps that save wait for it: a page's first write costs 20 times its copy on a virtual machine (measured: 0.5 against 10 GB/s).
        Where the kernel cannot do it in advance, this does nothing.
        """
        madvise = ctypes.CDLL(None).madvise  # `mmap.madvise` would keep the GIL
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        base, end = self.region.ctypes.data, len(self._memory)
        for start in range(0, end, HUGE_PAGE_BYTES):
            size = min(HUGE_PAGE_BYTES, end - start)
            if not is_wanted() or madvise(base + start, size, MADV_POPULATE_WRITE) != 0:
                return

    def allocate(self, num_slots: int) -> list[int] | None:
        """Return slot numbers in few ascending runs; None, without a change, if too few slots are free."""
        if num_slots > self.num_free:
            return None
        self.num_free -= num_slots
        return self._free.take(num_slots)

    def free(self, slots: list[int]) -> None:
        """Give slots back; every one must have been allocated and not freed since."""
        self.num_free += len(slots)
        for start, length in runs_of(sorted(slots)):
            self._free.add(start, length)

    def slot(self, index: int) -> memoryview:
        """Return the writable bytes of one slot."""
        start = index * self.slot_bytes
        return self.memory[start : start + self.slot_bytes]

    def check_invariants(self) -> None:
        """Raise AssertionError if the free slots do not add up."""
        self._free.check_invariants()
        assert sum(self._free.lengths) == self.num_free


class _Runs:
    """Free slots as disjoint runs in ascending order, no two of which touch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.lengths: list[int] = []

    def add(self, start: int, length: int) -> None:
        """Add a run, joined with its neighbours."""
        at = bisect_left(self.starts, start)
        if at < len(self.starts) and start + length == self.starts[at]:
            length += self.lengths.pop(at)
            self.starts.pop(at)
        if at > 0 and self.starts[at - 1] + self.lengths[at - 1] == start:
            self.lengths[at - 1] += length
        else:
            self.starts.insert(at, start)
            self.lengths.insert(at, length)

    def take(self, wanted: int) -> list[int]:
        """Take slots from the first run that has enough, else from the last runs: a search for the largest would hold the lock for too long."""
        slots: list[int] = []
        for at, length in enumerate(self.lengths):
            if length >= wanted:
                self._cut(at, wanted, slots)
                return slots
        while wanted:
            length = min(self.lengths[-1], wanted)
            self._cut(len(self.lengths) - 1, length, slots)
            wanted -= length
        return slots

    def _cut(self, at: int, length: int, slots: list[int]) -> None:
        start = self.starts[at]
        slots.extend(range(start, start + length))
        if length == self.lengths[at]:
            del self.starts[at], self.lengths[at]
        else:
            self.starts[at] += length
            self.lengths[at] -= length

    def check_invariants(self) -> None:
        """Raise AssertionError if runs touch or are empty."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        assert all(end < after for end, after in zip(ends, self.starts[1:], strict=False))
        assert all(length > 0 for length in self.lengths)


def runs_of(numbers: list[int]) -> list[tuple[int, int]]:
    """Return (start, length) of each stretch of consecutive numbers, in the order given."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
