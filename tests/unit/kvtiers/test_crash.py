"""`kill -9` costs the disk tier nothing that it said was written, and never gives wrong bytes.

The file runs itself as the writers' parent, ``python test_crash.py FOLDER``: one process that has everything imported and forks a writer for
each line it is sent, so that a round takes milliseconds. It imports only kvtiers.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvtiers.io.disk_log import DiskLog
from kvtiers.io.files import AppendFile, Files
from kvtiers.io.inspect import inspect
from kvtiers.io.scan import live_blocks, scan_segment, segment_paths
from kvtiers.keys import BlockKey, BlockShape

NUM_KILLS = 200
SHAPE = BlockShape(num_layers=4, layer_bytes=4096)
CAPACITY_BYTES = 4 << 20
ROOT = Path(__file__).parents[3]


def key_of(name: str) -> BlockKey:
    return BlockKey(hashlib.sha256(name.encode()).digest())


def content(key: BlockKey) -> bytes:
    return (key * (SHAPE.block_bytes // len(key)))[::-1]


def layer_of(block: bytes | bytearray, layer: int) -> memoryview:
    return memoryview(block)[layer * SHAPE.layer_bytes :][: SHAPE.layer_bytes]


async def open_store(directory: Path, files: Files | None = None) -> DiskLog:
    return await DiskLog.open(directory, "crash", SHAPE, CAPACITY_BYTES, files=files)


class LastWrites(Files):
    """Writes so many bytes, and the process dies: the kill that hits the middle of a write, made certain."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    async def write(self, file: AppendFile, data: memoryview) -> int:
        written = await super().write(file, data[: self.room_bytes])
        self.room_bytes -= written
        if self.room_bytes == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


async def write_without_end(directory: Path, round_number: str, room_bytes: int) -> None:
    """Append records of many sizes, saying the names of the blocks of each that is written."""
    chance = random.Random(round_number)
    log = await open_store(directory, LastWrites(room_bytes))
    print("pid", os.getpid(), flush=True)
    count = itertools.count()
    while True:
        names = [f"{round_number}-{next(count)}" for _ in range(chance.choice([1, 1, 2, 20]))]
        keys = [key_of(name) for name in names]
        data = [content(key) for key in keys]
        assert await log.append(keys, lambda block, layer, data=data: layer_of(data[block], layer))
        print(*names, flush=True)


def fork_writers(directory: Path) -> None:
    """For each line `ROUND ROOM_BYTES`: run a writer until it is dead, then say so."""
    for line in sys.stdin:
        round_number, room_bytes = line.split()
        pid = os.fork()
        if pid == 0:
            asyncio.run(write_without_end(directory, round_number, int(room_bytes)))
        _, status = os.waitpid(pid, 0)
        print(f"\ndead {os.waitstatus_to_exitcode(status)}", flush=True)


def start_writers(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def run_until_killed(writers: subprocess.Popen[str], round_number: int, chance: random.Random) -> list[str]:
    """Run one writer, that dies within a write or is killed by us at any moment; returns the blocks it acknowledged, oldest first."""
    assert writers.stdin is not None
    assert writers.stdout is not None
    dies_by_itself = chance.random() < 0.5
    room_bytes = chance.randint(1, 1 << 20) if dies_by_itself else 1 << 40
    num_lines = 1 << 40 if dies_by_itself else chance.randint(0, 20)
    writers.stdin.write(f"{round_number} {room_bytes}\n")
    writers.stdin.flush()
    pid = 0
    acknowledged: list[str] = []
    for i, line in enumerate(writers.stdout):
        word, *more = line.split() or [""]
        if word == "dead":
            assert more == [str(-signal.SIGKILL)]
            return acknowledged
        if word == "pid":
            pid = int(more[0])
        elif word:
            # A line is whole or not there: a pipe takes so few bytes at once.
            acknowledged += line.split()
        if i == num_lines:
            # The writer does not wait for us to read. The delay is for chance alone: any moment will do.
            time.sleep(chance.uniform(0, 0.003))
            os.kill(pid, signal.SIGKILL)
    raise AssertionError("the writers' parent is dead")


async def check(directory: Path, acknowledged: list[str]) -> int:
    """All that is reported present is right, and all that was acknowledged is present. Returns how many segments end torn."""
    scans = [scan_segment(Files(), *found, "crash", SHAPE) for found in segment_paths(directory)]
    keys = list({key for key, _, _ in live_blocks(scans)})
    buffers = [bytearray(SHAPE.block_bytes) for _ in keys]
    log = await open_store(directory)
    assert log.count_prefix(keys) == len(keys) == log.stats.num_blocks
    assert log.count_prefix([key_of(name) for name in acknowledged]) == len(acknowledged)

    result = await log.read(keys, lambda block, layer: layer_of(buffers[block], layer))
    await log.close()
    assert result.bad == ()
    assert all(buffer == content(key) for key, buffer in zip(keys, buffers, strict=True))
    return sum(scan.is_torn for scan in scans)


async def test_killed_again_and_again(tmp_path: Path) -> None:
    """One folder survives every kill, each in the middle of the writing that followed the one before, with evictions on the way."""
    chance = random.Random(20)
    num_torn = num_acknowledged = 0
    with start_writers(tmp_path) as writers:
        for round_number in range(NUM_KILLS):
            acknowledged = await asyncio.to_thread(run_until_killed, writers, round_number, chance)
            num_acknowledged += len(acknowledged)
            # The older ones may have been evicted since.
            num_torn += await check(tmp_path, acknowledged[-60:])
        writers.communicate()
    (info,) = inspect(tmp_path)
    assert info.bytes <= CAPACITY_BYTES
    # Else the kills came too early or too late to show anything.
    assert num_acknowledged * SHAPE.block_bytes > 2 * CAPACITY_BYTES
    assert num_torn > NUM_KILLS // 4


if __name__ == "__main__":
    fork_writers(Path(sys.argv[1]))
