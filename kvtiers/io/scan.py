"""Finds the records in a store's folder by their headers: opening a store reads a few KiB of each record, not its body."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from kvtiers.io.files import Files, read_up_to
from kvtiers.io.read_plan import RecordPlace
from kvtiers.io.records import (
    SEGMENT_HEADER_BYTES,
    decode_head,
    decode_keys,
    decode_segment_header,
)
from kvtiers.keys import BlockKey, BlockShape

logger = logging.getLogger(__name__)

SEGMENT_NAME = re.compile(r"segment-(\d{10})\.kv")
# Chosen: one page, which has the keys of records of up to 127 blocks; larger ones take a second read.
HEAD_READ_BYTES = 4096


class SegmentScan(Struct):
    """The whole records of one segment file, in the order of the file; none of one that has another namespace or format.

    Attributes:
        is_torn: whether bytes after the last whole record are no record.
        has_failed: whether the disk gave an error, where `records` then ends.
    """

    number: int
    path: Path
    num_bytes: int
    records: list[tuple[RecordPlace, list[BlockKey]]]
    is_torn: bool = False
    has_failed: bool = False


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of the segment with this number."""
    return directory / f"segment-{number:010d}.kv"


def segment_paths(directory: Path) -> list[tuple[int, Path]]:
    """Return the segment files of a folder as (number, path), oldest first. Raises OSError.

    Only regular files of the folder's owner or of this process's user count. Others of such a name (a pipe, a link, a folder) are neither opened nor
    counted nor removed; the log names them.
    """
    owners = {os.stat(directory).st_uid, os.geteuid()}
    found: list[tuple[int, Path]] = []
    strange: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = SEGMENT_NAME.fullmatch(entry.name)
            if match is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_uid in owners:
                found.append((int(match[1]), Path(entry.path)))
            else:
                strange.append(entry.name)
    if strange:
        logger.warning(
            "%s: left alone, as these are no regular files of the folder's owner: %s",
            directory,
            ", ".join(sorted(strange)[:10]),
        )
    return sorted(found)


def scan_segment(
    files: Files, number: int, path: Path, fingerprint: str | None = None, shape: BlockShape | None = None
) -> SegmentScan:
    """Find the records of one segment. Blocks the thread; raises no error.

    The size of a torn or foreign file is the room that it takes on the disk, where holes take none.

    Args:
        files: the file system.
        number: of the segment.
        path: of its file.
        fingerprint: the fingerprint that the segment must have; None for any.
        shape: the shape that each record must have; None for any.
    """
    scan = SegmentScan(number, path, 0, [])
    try:
        fd = files.open_read(path)
    except OSError:
        scan.has_failed = True
        scan.num_bytes = _size_of(path)
        return scan
    try:
        scan.num_bytes = files.size(fd)
        found = decode_segment_header(read_up_to(files, fd, SEGMENT_HEADER_BYTES, 0))
        is_foreign = found is None or fingerprint not in (None, found)
        if not is_foreign:
            _scan_records(files, fd, scan, shape)
        if is_foreign or scan.is_torn:
            scan.num_bytes = _bytes_taken(os.fstat(fd))
    except OSError:
        scan.has_failed = True
    finally:
        files.close(fd)
    return scan


def _size_of(path: Path) -> int:
    """Return the room that a segment which cannot be opened takes."""
    try:
        return _bytes_taken(path.lstat())
    except OSError:
        return 0


def _bytes_taken(status: os.stat_result) -> int:
    return min(status.st_size, status.st_blocks * 512)  # 512: the unit of st_blocks on any file system


def _scan_records(files: Files, fd: int, scan: SegmentScan, shape: BlockShape | None) -> None:
    offset = SEGMENT_HEADER_BYTES
    while offset < scan.num_bytes:
        data = read_up_to(files, fd, min(HEAD_READ_BYTES, scan.num_bytes - offset), offset)
        head = decode_head(data)
        if head is None or shape not in (None, head.shape) or offset + head.record_bytes > scan.num_bytes:
            scan.is_torn = True
            return
        if len(data) < head.keys_end:
            data = read_up_to(files, fd, head.keys_end, offset)
        keys = decode_keys(head, data)
        if keys is None:
            scan.is_torn = True
            return
        scan.records.append((RecordPlace(scan.number, offset, head.num_blocks, head.owner), keys))
        offset += head.record_bytes


def live_blocks(scans: Iterable[SegmentScan]) -> Iterator[tuple[BlockKey, RecordPlace, int]]:
    """Yield every block as (key, record, position), oldest first; the later one of a repeated key counts."""
    for scan in scans:
        for record, keys in scan.records:
            for position, key in enumerate(keys):
                yield key, record, position
