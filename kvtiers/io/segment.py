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
    """While it is pinned it is not evicted, and its file stays open: even if the file is unlinked, the reads under way end well.

    `pin`, `unpin` and the numbers belong to the event loop; `fd` may be called from any thread.
    """

    def __init__(self, number: int, path: Path, num_bytes: int) -> None:
        self.number = number
        self.path = path
        self.num_bytes = num_bytes
        self.records: list[tuple[RecordPlace, list[BlockKey]]] = []
        self.live: Counter[int] = Counter()
        """Blocks for which this is the place to read, by their owner's tag. The log counts."""
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
        self._num_pins += 1
        self._unpinned.clear()

    def unpin(self, files: Files) -> None:
        """The last one closes the file, so that a store of thousands of segments needs few descriptors."""
        self._num_pins -= 1
        if self._num_pins == 0:
            self._unpinned.set()
            if self._fd is not None:
                files.close(self._fd)
                self._fd = None

    async def wait_unpinned(self) -> None:
        """Waits until the file is not being read."""
        await self._unpinned.wait()

    def fd(self, files: Files) -> int:
        """The file, opened by its first reader. Only while pinned. Raises OSError."""
        with self._fd_lock:
            if self._fd is None:
                self._fd = files.open_read(self.path)
            return self._fd
