"""The disk tier against a model, in any order of use, damage and restart."""

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtiers.io.block_read import BlockRead
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.files import AppendFile, Files
from kvtiers.io.records import ALIGNMENT_BYTES
from kvtiers.io.scan import live_blocks, scan_segment, segment_paths
from kvtiers.keys import BlockKey, BlockShape

SHAPE = BlockShape(num_layers=2, layer_bytes=2000)  # one block is a record of one page
CAPACITY_BYTES = 28 * ALIGNMENT_BYTES
SEGMENT_BYTES = 7 * ALIGNMENT_BYTES
KEYS = [BlockKey(hashlib.sha256(bytes([i])).digest()) for i in range(24)]
keys_of_records = st.lists(st.sampled_from(range(24)), min_size=1, max_size=6)


class KillsAndShortReads(Files):
    """Calls `killed` once the next `num_bytes` have been written: what lies in the folder then is what `kill -9` leaves.

    No read gives more than 700 bytes.
    """

    def __init__(self, killed: Callable[[], None]) -> None:
        self.killed, self.num_bytes = killed, 0

    async def write(self, file: AppendFile, data: memoryview) -> int:
        if not self.num_bytes:
            return await super().write(file, data)
        written = await super().write(file, data[: self.num_bytes])
        self.num_bytes -= written
        if not self.num_bytes:
            self.killed()
        return written

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        return super().pread(fd, min(num_bytes, 700), offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, [buffers[0][:700]], offset)


class DiskLogMachine(RuleBasedStateMachine):
    """`written`: every content that a key was ever given. A block may be missing; what is there must be one of these, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.version = 0
        self.written: dict[int, set[bytes]] = {i: set() for i in range(24)}
        self.last: dict[int, bytes] = {}
        self.is_damaged = False
        self.left_behind: tuple[Path, list[BlockKey]] | None = None
        self.files = KillsAndShortReads(self.leave_behind)
        self.open()

    def open(self) -> None:
        opening = DiskLog.open(
            self.directory,
            "machine",
            SHAPE,
            CAPACITY_BYTES,
            segment_bytes=SEGMENT_BYTES,
            files=self.files,
            on_dropped=self.drop,
        )
        self.log = self.runner.run(opening)

    def drop(self, keys: list[BlockKey]) -> None:
        for key in keys:
            assert key not in self.log
            self.last.pop(KEYS.index(key), None)

    def teardown(self) -> None:
        self.runner.run(self.log.close())
        self.runner.close()
        shutil.rmtree(self.directory)

    def content(self, block: int) -> bytes:
        """New for each version, so that old bytes under a key are seen to be old."""
        return hashlib.shake_128(bytes([block]) + self.version.to_bytes(4, "big")).digest(SHAPE.block_bytes)

    @rule(blocks=keys_of_records, owner=st.integers(0, 3))
    def append(self, blocks: list[int], owner: int = 0) -> None:
        self.version += 1
        datas = [self.content(block) for block in blocks]
        is_new = [KEYS[block] not in self.log for block in blocks]
        for block, data, new in zip(blocks, datas, is_new, strict=True):
            if new:
                self.written[block].add(data)
                self.last[block] = data

        def part(i: int, layer: int) -> memoryview:
            start = layer * SHAPE.layer_bytes
            return memoryview(datas[i])[start : start + SHAPE.layer_bytes]

        appended = self.runner.run(self.log.append([KEYS[block] for block in blocks], part, owner))
        assert appended
        assert all(KEYS[block] in self.log for block, new in zip(blocks, is_new, strict=True) if new)

    @rule(blocks=st.lists(st.sampled_from(range(24)), max_size=10), max_bytes=st.sampled_from([1, 400, 4000]))
    def read(self, blocks: list[int], max_bytes: int) -> None:
        buffers = [bytearray(SHAPE.block_bytes) for _ in blocks]
        there = [KEYS[block] in self.log for block in blocks]

        def part(i: int, layer: int) -> memoryview:
            start = layer * SHAPE.layer_bytes
            return memoryview(buffers[i])[start : start + SHAPE.layer_bytes]

        keys = [KEYS[block] for block in blocks]
        result = self.runner.run(self.log.read(BlockRead(keys, part), max_bytes_in_flight=max_bytes))
        for i, block in enumerate(blocks):
            if i in result.bad:
                assert not there[i] or self.is_damaged
                assert KEYS[block] not in self.log
            else:
                assert there[i]
                assert bytes(buffers[i]) in self.written[block]
                assert self.is_damaged or bytes(buffers[i]) == self.last.get(block, bytes(buffers[i]))

    @rule(blocks=keys_of_records)
    def forget_and_write_anew(self, blocks: list[int]) -> None:
        self.log.forget(KEYS[block] for block in blocks)
        self.append(blocks)

    @rule(blocks=keys_of_records)
    def forget(self, blocks: list[int]) -> None:
        self.log.forget(KEYS[block] for block in blocks)

    def leave_behind(self) -> None:
        copy = Path(tempfile.mkdtemp())
        shutil.copytree(self.directory, copy, dirs_exist_ok=True)
        self.left_behind = copy, [key for key in KEYS if key in self.log]

    @rule(blocks=keys_of_records, num_bytes=st.integers(1, 4 * ALIGNMENT_BYTES))
    def is_killed_while_it_writes(self, blocks: list[int], num_bytes: int) -> None:
        self.files.num_bytes = num_bytes
        self.append(blocks)
        self.files.num_bytes = 0
        if self.left_behind is None:
            return
        (copy, acknowledged), self.left_behind = self.left_behind, None
        self.runner.run(self.log.close())
        shutil.rmtree(self.directory)
        self.directory = copy
        self.open()
        assert self.is_damaged or all(key in self.log for key in acknowledged)
        for block in blocks:  # its last version may not be whole, and then the one before counts
            self.last.pop(block, None)

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.log.close())
        self.open()
        scans = [scan_segment(Files(), *found, "machine", SHAPE) for found in segment_paths(self.directory)]
        assert {key for key in KEYS if key in self.log} == {key for key, _, _ in live_blocks(scans)}

    @rule(which=st.integers(0, 20), where=st.integers(0, 900), bit=st.integers(0, 7))
    def corrupt(self, which: int, where: int, bit: int) -> None:
        found = segment_paths(self.directory)
        if found:
            path = found[which % len(found)][1]
            data = path.read_bytes()
            if data:
                where %= len(data)
                # In place: a store has the file open.
                with path.open("r+b") as file:
                    file.seek(where)
                    file.write(bytes([data[where] ^ (1 << bit)]))
                self.is_damaged = True

    @rule(which=st.integers(0, 20), length=st.integers(0, 900))
    def cut_off(self, which: int, length: int) -> None:
        found = segment_paths(self.directory)
        if found:
            path = found[which % len(found)][1]
            os.truncate(path, min(length, path.stat().st_size))
            self.is_damaged = True

    @invariant()
    def the_files_fit_the_capacity(self) -> None:
        on_disk = sum(path.stat().st_size for _, path in segment_paths(self.directory))
        stats = self.log.stats
        assert on_disk <= CAPACITY_BYTES
        assert stats.bytes <= CAPACITY_BYTES
        assert self.is_damaged or on_disk == stats.bytes

    @invariant()
    def what_each_owner_holds_is_known(self) -> None:
        log = self.log
        held = Counter(entry.record.owner for entry in log._contents.index.values())
        assert held == log._contents.held
        assert sum((segment.live for segment in log._contents.segments.values()), Counter()) == held

    @invariant()
    def nothing_is_there_that_was_never_written(self) -> None:
        for block, key in enumerate(KEYS):
            assert key not in self.log or self.written[block]


TestDiskLogMachine = DiskLogMachine.TestCase
TestDiskLogMachine.settings = settings(
    max_examples=60, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
