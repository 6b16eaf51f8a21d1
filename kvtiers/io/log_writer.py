"""Appends records to the newest segment of a disk log, and starts new ones."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvtiers.io.disk_room import DiskRoom
from kvtiers.io.files import AppendFile, Files
from kvtiers.io.log_contents import LogIndex
from kvtiers.io.read_plan import RecordPlace
from kvtiers.io.records import SEGMENT_HEADER_BYTES, Record, RecordStream, encode_segment_header
from kvtiers.io.scan import segment_path
from kvtiers.io.segment import Segment
from kvtiers.io.workers import FileWorkers
from kvtiers.keys import BlockShape

WRITE_BUFFER_BYTES: Final = 8 << 20  # Chosen: few writes, and little memory.


class LogWriter:
    """Writes records. The caller holds the log's lock."""

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        contents: LogIndex,
        room: DiskRoom,
        workers: FileWorkers,
        files: Files,
        now: Callable[[], float],
    ) -> None:
        self._directory, self._contents, self._room = directory, contents, room
        self._workers, self._files, self._now = workers, files, now
        self._shape = contents.shape
        self._segment_header = memoryview(mmap.mmap(-1, SEGMENT_HEADER_BYTES))
        self._segment_header[:] = encode_segment_header(fingerprint)
        self.active: tuple[Segment, AppendFile] | None = None
        """The newest segment, while it takes records."""
        self.next_number = 0
        self._buffer = memoryview(b"")

    async def write(self, records: Sequence[Record]) -> list[RecordPlace]:
        """Append records, all or none, to the newest segment, or to a new one if they do not fit. The caller has made room. Raises OSError."""
        started_s = self._now()
        if not self._buffer:
            # It begins at a page, as O_DIRECT needs.
            self._buffer = memoryview(mmap.mmap(-1, WRITE_BUFFER_BYTES))
        stream, used = await self._workers.run(_begin, records, self._shape, self._buffer)
        if self.active is not None and self.active[0].num_bytes + stream.num_bytes > self._room.segment_bytes:
            await self.seal()
        segment, file = self.active or await self._start_segment()
        try:
            await self._write_all(file, self._buffer[:used])
            while stream.num_bytes_left:
                used = await self._workers.run(stream.fill, self._buffer)
                await self._write_all(file, self._buffer[:used])
        except OSError:
            await self._mend(segment, file)
            raise
        places = []
        for keys, _, owner in records:
            places.append(RecordPlace(segment.number, segment.num_bytes, len(keys), owner))
            segment.records.append((places[-1], list(keys)))
            segment.num_bytes += self._contents.record_bytes(keys)
        self._contents.num_bytes += stream.num_bytes
        self._contents.counts.bytes_written += stream.num_bytes
        self._contents.counts.write_s += self._now() - started_s
        return places

    async def _write_all(self, file: AppendFile, data: memoryview) -> None:
        while data:
            num_bytes = await self._files.write(file, data)
            if num_bytes == 0:
                raise OSError("the disk took no bytes")
            data = data[num_bytes:]

    async def _start_segment(self) -> tuple[Segment, AppendFile]:
        """Begin a segment. Raises OSError."""
        while True:
            path = segment_path(self._directory, self.next_number)
            try:
                file = await self._files.create(path, self._workers.pool)
                break
            except FileExistsError:  # a file that is no segment of this store has the name
                self.next_number += 1
        segment = Segment(self.next_number, path, 0)
        self.next_number += 1
        self._contents.segments[segment.number] = segment
        self.active = segment, file
        try:
            await self._write_all(file, self._segment_header)
        except OSError:
            await self._mend(segment, file)
            await self.seal()
            raise
        segment.num_bytes = SEGMENT_HEADER_BYTES
        self._contents.num_bytes += SEGMENT_HEADER_BYTES
        return segment, file

    async def _mend(self, segment: Segment, file: AppendFile) -> None:
        """Cut a torn record off. Where that fails, the segment takes no more records, and its real size is counted."""
        try:
            await self._files.truncate(file, segment.num_bytes)
        except OSError:
            try:
                size = await self._workers.run(self._files.size, file.fileno())
            except OSError:
                size = segment.num_bytes
            self._contents.num_bytes += size - segment.num_bytes
            segment.num_bytes = size
            await self.seal()

    async def seal(self) -> None:
        """Close the newest segment for writing."""
        if self.active is not None:
            _, file = self.active
            self.active = None
            try:
                await file.close()
            except OSError:
                self._contents.counts.num_write_errors += 1


def _begin(records: Sequence[Record], shape: BlockShape, buffer: memoryview) -> tuple[RecordStream, int]:
    """Return the records as a stream, and how many of their first bytes are in `buffer` now: one hand-over between threads for both."""
    stream = RecordStream(records, shape)
    return stream, stream.fill(buffer)
