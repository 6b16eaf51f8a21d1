"""How much of its disk a log may take: its capacity, as far as the disk has room."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtiers.io.files import FileSystemRoom

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES: Final = 64 << 20  # Chosen: small against the capacity, so that little goes at once.
SEGMENTS_PER_CAPACITY: Final = 16  # Chosen: the same for small capacities.
GIB: Final = 1 << 30
# Left free on the disk for others: conversations are often stored there, and are worth more than KV. Chosen; less on small disks.
SPARE_BYTES: Final = 256 << 20
SPARE_SHARE: Final = 1 / 16
# Seconds until one more segment is tried after a disk was full though it reported room (a quota, say). Chosen.
GROW_AFTER_S: Final = 60.0


class DiskRoom:
    """The bounds of all segments together and of each."""

    def __init__(
        self, directory: Path, wanted_bytes: int, segment_bytes: int | None, now: Callable[[], float]
    ) -> None:
        if segment_bytes is None:
            segment_bytes = min(MAX_SEGMENT_BYTES, wanted_bytes // SEGMENTS_PER_CAPACITY)
        self._directory, self._now = directory, now
        self.wanted_bytes = self.capacity_bytes = wanted_bytes
        self._largest_segment_bytes = self.segment_bytes = segment_bytes
        self._full_at: tuple[int, float] | None = None

    def met_full_disk(self, held_bytes: int) -> None:
        """Note that the disk was full when the log held this much: the log takes no more for a while."""
        self._full_at = held_bytes, self._now()

    def fit(self, room: FileSystemRoom | None, num_bytes: int) -> None:
        """Fit the bounds to the disk's room, less a reserve for others. num_bytes: size of all segments now."""
        capacity = self.wanted_bytes
        if room is not None:
            spare = min(SPARE_BYTES, int(room.total_bytes * SPARE_SHARE))
            capacity = min(capacity, num_bytes + room.free_bytes - spare)
        if self._full_at is not None:
            had_bytes, since_s = self._full_at
            grown = int((self._now() - since_s) / GROW_AFTER_S) * self._largest_segment_bytes
            capacity = min(capacity, had_bytes + grown)
            if had_bytes + grown >= self.wanted_bytes:
                self._full_at = None
        capacity = max(capacity, 0)
        was_short, is_short = self.capacity_bytes < self.wanted_bytes, capacity < self.wanted_bytes
        self.capacity_bytes = capacity
        self.segment_bytes = self._largest_segment_bytes
        if is_short:
            self.segment_bytes = min(self.segment_bytes, max(capacity // SEGMENTS_PER_CAPACITY, 1))
        if is_short and not was_short:
            logger.warning(
                "the disk of %s has room for %.2f GiB of KV, not for the %.2f GiB that it may take (--kv-disk-gib); it takes what there is",
                self._directory,
                capacity / GIB,
                self.wanted_bytes / GIB,
            )
        elif was_short and not is_short:
            logger.info("the disk of %s has room for all the KV again that it may take", self._directory)
