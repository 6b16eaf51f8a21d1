"""What SQLite would silently leave out of a damaged write-ahead log.

After a crash SQLite takes from the log what stands before the first frame whose checksum is wrong, and forgets the rest without a word: right
for a transaction that was being written, wrong for a bit that flipped in the middle of many. So the log is read before SQLite sees it.

A log is a header of 32 bytes and frames: 24 bytes (page, size of the file if the frame ends a transaction, two salts, two checksums) and a
page. The salts are those of the header in all frames since the log was last begun anew; each checksum goes on from the one before. The shared
memory beside the log (`-shm`) outlives a killed process, and says how many frames were committed and how many of those are in the file already.
Source: https://www.sqlite.org/walformat.html, and "WAL-Index File Format" there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

MAX_COPIES: Final = 3  # Chosen: of damaged logs; the oldest goes.

_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
_MAGIC: Final = 0x377F0682  # and, where checksums are made of big-endian words, one more
_SHM_BYTES: Final = 136
_SHM_LOCK_BYTE: Final = 128  # Held by every process that has the log open.
_WRAP: Final = 1 << 32


class Damage(NamedTuple):
    """num_frames: frames that were committed and cannot be read. num_commits: how many transactions these were, at most.

    is_in_file: all of them are in the database file already, so that the log is not needed.
    """

    num_frames: int
    num_commits: int
    is_in_file: bool


class _Frame(NamedTuple):
    page: int
    size_after_commit: int
    salts: bytes
    checksum: tuple[int, int]


class _Shared(NamedTuple):
    """What the shared memory says. num_frames: committed. num_in_file: of these, copied to the file."""

    num_frames: int
    salts: bytes
    page_bytes: int
    num_in_file: int


class _Log:
    """A log whose header may be damaged; frames count from 1."""

    def __init__(self, data: bytes | mmap.mmap, shared: _Shared | None) -> None:
        self._data = data
        page_bytes: int
        magic, _, page_bytes = struct.unpack_from(">III", data)
        self._words = ">u4" if magic & 1 else "<u4"
        self.start = _checksum(self._read(0, 24), (0, 0))
        self.is_header_good = magic >> 1 == _MAGIC >> 1 and self.start == struct.unpack_from(">II", data, 24)
        self.salts = bytes(data[16:24])
        if not self.is_header_good:
            page_bytes = shared.page_bytes if shared else 4096
            self.salts = shared.salts if shared else bytes(data[_HEADER_BYTES + 8 : _HEADER_BYTES + 16])
        self._frame_bytes = _FRAME_HEADER_BYTES + page_bytes
        self.num_frames = (len(data) - _HEADER_BYTES) // self._frame_bytes

    @property
    def has_frames(self) -> bool:
        """Whether what follows the header are frames: the second one's checksum goes on from the first one's."""
        return self.num_frames > 1 and self.checksum(2, self.frame(1).checksum) == self.frame(2).checksum

    def frame(self, number: int) -> _Frame:
        page, size, salts, one, two = struct.unpack_from(">II8sII", self._data, self._at(number))
        return _Frame(page, size, salts, (one, two))

    def checksum(self, number: int, before: tuple[int, int]) -> tuple[int, int]:
        """What the frame's checksum must be if `before` is that of the frame before."""
        at = self._at(number)
        head = _checksum(self._read(at, 8), before)
        return _checksum(self._read(at + _FRAME_HEADER_BYTES, self._frame_bytes - _FRAME_HEADER_BYTES), head)

    def _at(self, number: int) -> int:
        return _HEADER_BYTES + (number - 1) * self._frame_bytes

    def _read(self, at: int, num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.frombuffer(self._data[at : at + num_bytes], self._words).astype(np.uint32)


def find_damage(data: bytes | mmap.mmap, shm: bytes) -> Damage | None:
    """What a log has lost, None if nothing that was committed. shm: the shared memory beside it, b"" if there is none.

    The transaction that was being written when the process or the machine stopped is no loss: nobody was told that it is stored. Where the
    shared memory is of another time, two transactions behind the damage are one more than that, and one is, if what it holds is whole.
    """
    shared = _shared(shm)
    if len(data) < _HEADER_BYTES + _FRAME_HEADER_BYTES:
        is_lost = shared is not None and shared.num_frames > shared.num_in_file
        return Damage(shared.num_frames, shared.num_frames, is_in_file=False) if shared and is_lost else None
    log = _Log(data, shared)
    num_good, first_bad = _read_good(log) if log.is_header_good else (0, 1)
    known = shared if shared is not None and shared.salts == log.salts else None
    if not log.is_header_good and known is None and not log.has_frames:
        return None
    frames = [(number, log.frame(number)) for number in range(num_good + 1, log.num_frames + 1)]
    commits = [number for number, frame in frames if frame.size_after_commit and frame.salts == log.salts]
    behind = [number for number in commits if number >= first_bad]
    if known is not None and known.num_frames > num_good:
        num_commits = sum(number <= known.num_frames for number in commits)
        is_in_file = known.num_in_file >= known.num_frames
        return Damage(known.num_frames - num_good, max(num_commits, 1), is_in_file)
    if len(behind) > 1 or (known is None and behind and _goes_on(log, first_bad, behind[0])):
        return Damage(behind[-1] - num_good, len(behind), is_in_file=False)
    return None


def _read_good(log: _Log) -> tuple[int, int]:
    """How many frames SQLite will take (up to the end of a transaction), and the first one that is not sound."""
    num_good, checksum = 0, log.start
    for number in range(1, log.num_frames + 1):
        frame = log.frame(number)
        checksum = log.checksum(number, checksum)
        if frame.salts != log.salts or frame.page == 0 or frame.checksum != checksum:
            return num_good, number
        if frame.size_after_commit:
            num_good = number
    return num_good, log.num_frames + 1


def _goes_on(log: _Log, bad: int, commit: int) -> bool:
    """Whether the frames behind a bad one are sound up to the end of its transaction, as they are when it went bad later."""
    if bad == commit:
        return not log.is_header_good
    before = log.frame(bad).checksum
    for number in range(bad + 1, commit + 1):
        checksum = log.checksum(number, before)
        if checksum != log.frame(number).checksum:
            return False
        before = checksum
    return True


def _shared(shm: bytes) -> _Shared | None:
    """What the shared memory says, in this machine's byte order; None if it was being changed or is none."""
    if len(shm) < _SHM_BYTES or shm[:48] != shm[48:96]:
        return None
    words = np.frombuffer(shm[:40], "=u4").astype(np.uint32)
    if _checksum(words, (0, 0)) != struct.unpack_from("=II", shm, 40):
        return None
    page_bytes, num_frames = struct.unpack_from("=HI", shm, 14)
    (num_in_file,) = struct.unpack_from("=I", shm, 96)
    return _Shared(num_frames, bytes(shm[32:40]), 65536 if page_bytes == 1 else page_bytes, num_in_file)


def _checksum(words: np.ndarray[tuple[int], np.dtype[np.uint32]], before: tuple[int, int]) -> tuple[int, int]:
    """SQLite's checksum: for each two words x, y: `a += x + b; b += y + a`, modulo 2**32.

    That is linear, so each word has a factor that depends on its place alone, and a page takes microseconds and not a loop of 512 steps.
    """
    factors, ahead = _factors(len(words) // 2)
    sums = (factors * words).sum(axis=1, dtype=np.uint32)
    return (
        (ahead[0][0] * before[0] + ahead[0][1] * before[1] + int(sums[0])) % _WRAP,
        (ahead[1][0] * before[0] + ahead[1][1] * before[1] + int(sums[1])) % _WRAP,
    )


@functools.lru_cache(maxsize=8)
def _factors(num_pairs: int) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint32]], list[list[int]]]:
    """For each sum its factor of each word, and of the two sums before."""
    rows: list[list[int]] = [[], []]
    ahead = [[1, 0], [0, 1]]
    for _ in range(num_pairs):
        for row, (one, two) in zip(rows, ahead, strict=True):
            # Filled from the end: a pair adds (x, x + y), which every later pair carries on by `ahead`.
            row += [two, (one + two) % _WRAP]
        ahead = [[(one + two) % _WRAP, (one + 2 * two) % _WRAP] for one, two in ahead]
    return np.array([row[::-1] for row in rows], np.uint32), ahead


def check_log(file: Path) -> int:
    """Look at the log beside a database that nobody has open; returns how many committed frames it has lost.

    A damaged log is kept in a copy beside it and said in the log of this process. If all that it held is in the file already it is moved away
    instead, for with a part of it SQLite would put old pages over newer ones.
    """
    try:
        return _check_log(file)
    except OSError as error:
        logger.warning("the log of %s cannot be looked at: %s", file, error)
        return 0


def _check_log(file: Path) -> int:
    wal, shm = Path(f"{file}-wal"), Path(f"{file}-shm")
    if _is_open_elsewhere(shm):
        return 0
    shared = shm.read_bytes()[:_SHM_BYTES] if shm.exists() else b""
    if not wal.exists() or wal.stat().st_size == 0:
        damage = find_damage(b"", shared)
    else:
        with wal.open("rb") as opened, _mapped(opened.fileno()) as data:
            damage = find_damage(data, shared)
    if damage is None:
        return 0
    if damage.is_in_file:
        copy = _next_copy(wal)
        wal.replace(copy)
        shm.unlink(missing_ok=True)
        logger.warning(
            "%s was damaged, but the database holds all of it already. It is kept as %s", wal, copy
        )
        return 0
    logger.error(
        "%s is damaged: %d frames cannot be read, so up to %d of the last commits (turns or other changes) are lost. %s",
        wal,
        damage.num_frames,
        damage.num_commits,
        _keep(wal),
    )
    return damage.num_frames


@contextlib.contextmanager
def _mapped(fd: int) -> Iterator[mmap.mmap]:
    data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    try:
        yield data
    finally:
        data.close()


def _is_open_elsewhere(shm: Path) -> bool:
    """Whether another process has the database open: then its log is in use, and nothing is read back from it."""
    try:
        with shm.open("r+b") as opened:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _SHM_LOCK_BYTE)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _keep(wal: Path) -> str:
    """Copy a damaged log; returns a sentence that says where to, or why not."""
    copy = _next_copy(wal)
    try:
        fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as target, wal.open("rb") as source:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(fd)
    except OSError as error:
        copy.unlink(missing_ok=True)
        return f"No copy of it could be kept: {error.strerror}."
    return f"A copy of it is kept as {copy}: what was lost may be read from there by hand."


def _next_copy(wal: Path) -> Path:
    """A free name for a copy of a damaged log. The newest is number 1, and the oldest of too many is removed."""
    names = [Path(f"{wal}.damaged-{number}") for number in range(1, MAX_COPIES + 1)]
    for older, newer in zip(reversed(names), [*reversed(names[:-1]), None], strict=True):
        older.unlink(missing_ok=True)
        if newer is not None and newer.exists():
            newer.replace(older)
    return names[0]
