"""The decision log's way to a file, by its own thread: the engine thread hands lines over and never waits for a disk."""

from __future__ import annotations

import logging
import os
import threading
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

log = logging.getLogger(__name__)

# The bytes of lines that may wait for the disk. Chosen: some seconds of the busiest traffic.
MAX_PENDING_BYTES = 8 << 20
# How long closing waits for lines that are not written yet. Chosen.
CLOSE_S = 5.0

# Why a recording ended before its engine did: it reached its bound, the disk was too slow, or the file could not be written.
Cut = Literal["size", "slow", "error"]


class LogWriter:
    """Writes one file, from the start of an engine to its end or to the bound; a log with holes would be of no use.

    An earlier file is kept as `FILE.1`. Only its owner may read it: it names requests and tenants.

    Args:
        path: in an existing folder. Raises OSError if the file cannot be made.
        max_bytes: bound of the file's size.
        max_pending_bytes: bound of the lines that wait for the disk.
    """

    def __init__(self, path: Path, max_bytes: int, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self._path, self._max_bytes, self._max_pending_bytes = path, max_bytes, max_pending_bytes
        self._file = FileIO(self._make(path), "wb")
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # Each number is written by one thread only, so neither needs a lock.
        self._num_taken_bytes = 0
        self._num_done_bytes = 0
        self.cut: Cut | None = None
        self._thread = threading.Thread(target=self._write_all, name="decision log", daemon=True)
        self._thread.start()

    def _make(self, path: Path) -> int:
        if path.exists():
            path.replace(path.with_name(f"{path.name}.1"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def num_bytes(self) -> int:
        """The bytes taken so far, written or about to be."""
        return self._num_taken_bytes

    def write(self, line: bytes) -> bool:
        """Take a whole line. False if it was not taken, and none will be any more. From one thread."""
        if self.cut is None and self._num_taken_bytes + len(line) > self._max_bytes:
            self._end("size", f"it has reached its bound of {self._max_bytes >> 20} MiB")
        pending = self._num_taken_bytes - self._num_done_bytes
        if self.cut is None and pending + len(line) > self._max_pending_bytes:
            self._end("slow", "the disk is too slow for it")
        if self.cut is not None:
            return False
        self._num_taken_bytes += len(line)
        self._lines.put(line)
        return True

    def close(self) -> None:
        """Finish writing the lines that were taken, if the disk does that within `CLOSE_S`."""
        self._lines.put(None)
        self._thread.join(CLOSE_S)

    def _end(self, cut: Cut, why: str) -> None:
        self.cut = cut
        log.warning("the decision log %s ends here: %s. What is in it can be replayed.", self._path, why)
        self._lines.put(None)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        with self._file as file:
            while (line := self._lines.get()) is not None:
                if not self._write(file, line):
                    return

    def _write(self, file: FileIO, line: bytes) -> bool:
        """Write this line together with all lines that wait. False if nothing more is to be written."""
        batch = [line]
        following: bytes | None = line
        while not self._lines.empty():
            following = self._lines.get()
            if following is None:
                break
            batch.append(following)
        try:
            _write_whole(file, b"".join(batch))
        except OSError as error:
            self._end("error", f"it cannot be written ({error})")
            return False
        self._num_done_bytes += sum(map(len, batch))
        return following is not None


def _write_whole(file: FileIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file, which may take only a part of them at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
