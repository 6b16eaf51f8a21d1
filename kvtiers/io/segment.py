"""One segment file of an open store: its records, its readers and its size."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path

from kvtiers.io.files import Files
from kvtiers.io.read_plan import RecordPlace
from kvtiers.keys import BlockKey


class Segment:
    """A segment file. While it is pinned it is not evicted, and its file stays open, so that reads end well even if it is unlinked.

    `pin`, `unpin` and the numbers belong to the event loop; `fd` may be called from any thread.
    """

    def __init__(self, number: int, path: Path, num_bytes: int) -> None:
        self.number = number
        self.path = path
        self.num_bytes = num_bytes
        self.records: list[tuple[RecordPlace, list[BlockKey]]] = []
        self.live: Counter[int] = Counter()
        """Number of blocks that are read from here, by their owner's tag. The log counts them."""
        self._num_pins = 0
        self._unpinned = asyncio.Event()
        self._unpinned.set()
        self._fd: int | None = None
        self._fd_lock = threading.Lock()

    @property
    def is_pinned(self) -> bool:
        """Whether the file is being read."""
        return self._num_pins > 0

    def pin(self) -> None:
        """Keep the file for one more read."""
        self._num_pins += 1
        self._unpinned.clear()

    def unpin(self, files: Files) -> None:
        """End a read; the last read closes the file, so that a store of thousands of segments needs few descriptors."""
        self._num_pins -= 1
        if self._num_pins == 0:
            self._unpinned.set()
            if self._fd is not None:
                files.close(self._fd)
                self._fd = None

    async def wait_unpinned(self) -> None:
        """Wait until no read uses the file."""
        await self._unpinned.wait()

    def fd(self, files: Files) -> int:
        """Return the file, opened by its first read. Call it only while pinned. Raises OSError."""
        with self._fd_lock:
            if self._fd is None:
                self._fd = files.open_read(self.path)
            return self._fd
