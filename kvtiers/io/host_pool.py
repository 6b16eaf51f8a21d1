"""The host tier's memory: one region, cut into slots of one layer of one block.

Slots come in runs where they can: a prefill of 64 blocks gets 64 neighbouring slots for its first layer, then 64 for the next (layer-major),
so that a layer moves in one copy and first layers can move first.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


class HostPool:
    """A fixed number of slots. Not locked: its owner (`KvStore`) is.

    Args:
        slot_bytes: one layer of one block.
        capacity_bytes: upper bound of the region; the kernel backs it with memory when it is first written to, or in `populate`.
    """

    def __init__(self, slot_bytes: int, capacity_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = capacity_bytes // slot_bytes
        self._memory = mmap.mmap(-1, max(self.num_slots * slot_bytes, 1), flags=mmap.MAP_PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE") and len(self._memory) >= HUGE_PAGE_BYTES:
            try:
                self._memory.madvise(mmap.MADV_HUGEPAGE)  # a fault per 2 MiB instead of 4 KiB
            except OSError:
                pass
        self.region: NDArray[np.uint8] = np.frombuffer(
            self._memory, dtype=np.uint8, count=self.num_slots * slot_bytes
        ).reshape(self.num_slots, slot_bytes)
        """All slots, shape (num_slots, slot_bytes). Who holds a slot may read and write its row."""
        self.memory = memoryview(self._memory)
        """The same as bytes."""
        self._free = _Runs()
        if self.num_slots:
            self._free.add(0, self.num_slots)
        self.num_free = self.num_slots

    def populate(self, is_wanted: Callable[[], bool]) -> None:
        """Have the kernel back the region with memory, first slots first, while `is_wanted()`. Changes no byte; for a thread of its own.

        Otherwise a step that saves pays for it: a page's first write costs 20 times its copy on a virtual machine (measured: 0.5 against 10 GB/s).
        Where the kernel cannot do it in advance, nothing happens.
        """
        madvise = ctypes.CDLL(None).madvise  # `mmap.madvise` would keep the GIL
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        base, end = self.region.ctypes.data, len(self._memory)
        for start in range(0, end, HUGE_PAGE_BYTES):
            size = min(HUGE_PAGE_BYTES, end - start)
            if not is_wanted() or madvise(base + start, size, MADV_POPULATE_WRITE) != 0:
                return

    def allocate(self, num_slots: int) -> list[int] | None:
        """Slot numbers, in few ascending runs. None if there are not so many; then nothing changes."""
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
        """The bytes of one slot, writable."""
        start = index * self.slot_bytes
        return self.memory[start : start + self.slot_bytes]

    def check_invariants(self) -> None:
        self._free.check_invariants()
        assert sum(self._free.lengths) == self.num_free


class _Runs:
    """Free slots as disjoint runs in ascending order, no two of which touch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.lengths: list[int] = []

    def add(self, start: int, length: int) -> None:
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
        """From the first run that holds all of them, else from the last runs: looking for the largest would take too long under the lock."""
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
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        assert all(end < after for end, after in zip(ends, self.starts[1:], strict=False))
        assert all(length > 0 for length in self.lengths)


def runs_of(numbers: list[int]) -> list[tuple[int, int]]:
    """(start, length) of each stretch of consecutive numbers, in the order given."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
