"""What is read of a file, and no more."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from kvtiers.io.files import Files

SIZE_BYTES, PIECE_BYTES = 16 << 20, 64 << 10


def num_cached_bytes(path: Path) -> int:
    """Of a file, in the kernel's page cache."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        pages = (ctypes.c_ubyte * (SIZE_BYTES // mmap.PAGESIZE))()
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), SIZE_BYTES, pages) == 0
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_the_kernel_reads_no_further_than_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(SIZE_BYTES))
    files = Files()
    fd = files.open_read(path)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if num_cached_bytes(path):
            pytest.skip("this file system is memory")
        # One after the other, as the kernel's reading ahead waits for.
        for start in range(0, 3 * PIECE_BYTES, PIECE_BYTES):
            assert len(files.pread(fd, PIECE_BYTES, start)) == PIECE_BYTES
        assert num_cached_bytes(path) == 3 * PIECE_BYTES
    finally:
        files.close(fd)
