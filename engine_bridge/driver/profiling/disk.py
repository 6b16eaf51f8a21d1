"""The disk under the data folder, through the disk tier's own files: records written past the page cache, and read back once."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from engine_bridge.driver.profiling.budget import Budget
from engine_bridge.settings.profile import DiskProfile
from kvtiers.io.block_read import BlockRead
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.files import AppendFile, Files
from kvtiers.keys import KEY_BYTES, BlockKey, BlockShape
from kvtiers.write_behind import RECORD_BYTES

MAX_BYTES = 512 << 20  # chosen: more than a disk's own cache hides for long
MIN_BYTES = 32 << 20
FREE_SHARE = 0.25  # The most of the disk's free space that is used. Chosen.
WRITE_SHARE = 0.6  # The share of the time for writing. Chosen: most disks read faster than they write.


class DiskUnmeasured(Exception):
    """There is no room to measure in, or the disk failed. The message says which."""


class _NotingFiles(Files):
    """Files that note whether they are written past the page cache."""

    is_direct = False

    async def create(self, path: Path, pool: Executor) -> AppendFile:
        """Create a file, and note whether it is written past the page cache."""
        file = await super().create(path, pool)
        self.is_direct = bool(fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT)
        return file


def measure_disk(folder: Path, shape: BlockShape, budget: Budget) -> DiskProfile:
    """Measure how fast the disk under an empty folder, which the caller removes, is written and read in blocks of this shape.

    Raises DiskUnmeasured: the disk has too little room, or failed.
    """
    num_bytes = min(MAX_BYTES, int(shutil.disk_usage(folder).free * FREE_SHARE))
    if num_bytes < MIN_BYTES:
        raise DiskUnmeasured(f"the disk of {folder.parent} has too little room to be measured")
    return asyncio.run(_measure(folder, shape, num_bytes, budget))


async def _measure(folder: Path, shape: BlockShape, num_bytes: int, budget: Budget) -> DiskProfile:
    files = _NotingFiles()
    # The log may hold twice the bytes, so that no record is evicted meanwhile.
    log = await DiskLog.open(folder / "log", "profile", shape, 2 * num_bytes + MIN_BYTES, files=files)
    try:
        records, write_s = await _write(log, shape, num_bytes, budget.part(WRITE_SHARE))
        # Where they were not written past the page cache, reads are to come from the disk.
        for path in (folder / "log").iterdir():
            drop_cached(path)
        read_bytes, read_s = await _read(log, shape, records, budget)
        written = log.stats.bytes_written
    finally:
        await log.close()
    return DiskProfile(
        write_bytes_per_s=written / write_s,
        read_bytes_per_s=read_bytes / read_s,
        is_direct=files.is_direct,
        num_bytes=written,
    )


async def _write(
    log: DiskLog, shape: BlockShape, num_bytes: int, budget: Budget
) -> tuple[list[list[BlockKey]], float]:
    """Write records of the usual size with bytes that no disk can compress; returns their keys and the seconds."""
    num_blocks = max(RECORD_BYTES // shape.block_bytes, 1)
    data = memoryview(secrets.token_bytes(shape.block_bytes * num_blocks))

    records: list[list[BlockKey]] = []
    elapsed_s = 0.0
    while not records or (
        log.stats.bytes_written < num_bytes
        and not (budget.is_over() and log.stats.bytes_written >= MIN_BYTES)
    ):
        budget.say("disk: writing")
        keys = [BlockKey(secrets.token_bytes(KEY_BYTES)) for _ in range(num_blocks)]
        started_s = time.perf_counter()
        if not await log.append(keys, _parts(data, shape)):
            raise DiskUnmeasured("the disk could not be written")
        elapsed_s += time.perf_counter() - started_s
        records.append(keys)
    return records, elapsed_s


async def _read(
    log: DiskLog, shape: BlockShape, records: list[list[BlockKey]], budget: Budget
) -> tuple[int, float]:
    """Read each record once, oldest first; returns the bytes and the seconds."""
    into = memoryview(bytearray(shape.block_bytes * len(records[0])))

    num_bytes, elapsed_s = 0, 0.0
    for keys in records:
        if num_bytes >= MIN_BYTES and budget.is_over():
            break
        budget.say("disk: reading")
        result = await log.read(BlockRead(keys, _parts(into, shape)))
        if result.bad:
            raise DiskUnmeasured("the disk did not give back what was written")
        num_bytes += result.bytes_read
        elapsed_s += result.elapsed_s
    return num_bytes, elapsed_s


def _parts(memory: memoryview, shape: BlockShape) -> Callable[[int, int], memoryview]:
    """Return a function that returns the part of a memory for a block and a layer."""

    def part(block: int, layer: int) -> memoryview:
        """Return the memory of a block's layer."""
        start = block * shape.block_bytes + layer * shape.layer_bytes
        return memory[start : start + shape.layer_bytes]

    return part


def drop_cached(path: Path) -> None:
    """Write a file out and make the kernel drop its pages. Best effort: a file system may keep them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
