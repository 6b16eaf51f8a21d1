"""Which bytes of a region are taken: first fit, neighbours that become free are joined (pure)."""

from __future__ import annotations

from bisect import bisect_left

# A cache line, and the width of an AVX-512 register: MKL may sum in another order where its operands are not aligned to it.
ALIGN_BYTES = 64


def align(num_bytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class FirstFitAllocator:
    """Hands out stretches of `0:capacity_bytes`, each aligned to a cache line.

    First fit, because there are few blocks: one per adapter. Compacting would need the workers to stand still.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._free = [(0, self.capacity_bytes)] if self.capacity_bytes else []  # (offset, size), by offset
        self._taken: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of a free stretch of at least `num_bytes` (one or more), or None: then nothing changes."""
        wanted = max(align(num_bytes), ALIGN_BYTES)
        for i, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[i : i + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                self._taken[offset] = wanted
                return offset
        return None

    def free(self, offset: int) -> None:
        """Take back what `allocate` returned. Raises KeyError for any other offset, so also at the second call."""
        size = self._taken.pop(offset)
        i = bisect_left(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + size:
            size += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == offset:
            i -= 1
            offset, before = self._free.pop(i)
            size += before
        self._free.insert(i, (offset, size))
