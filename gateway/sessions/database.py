"""The session file: checking its log before SQLite reads it, opening it safely, and bringing it up to date."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from gateway.errors import StartupError
from gateway.sessions import search
from gateway.sessions.connection import Database, is_full, transaction
from gateway.sessions.schema import SCHEMA_VERSION, drop_old_search, migrate, version_of

logger = logging.getLogger(__name__)

MAX_IDLE_LOG_BYTES: Final = 16 << 20  # Chosen: what the log keeps of the disk after a large transaction.
LOG_PAGES: Final = (
    256  # Chosen: 1 MiB, a quarter of SQLite's own choice, see RESERVE_BYTES in gateway/sessions/room.py.
)
_INCREMENTAL: Final = 2  # SQLite's number for auto_vacuum = INCREMENTAL.
_REWRITE_ROOM: Final = 3  # Chosen: a rewrite takes the file's size twice, for its copy and for the log.
_PART_PAGES: Final = 256  # Chosen: 1 MiB of log, as a purge's transactions.

BUSY_TIMEOUT_S: Final = (
    5.0  # How long a transaction waits for another program (a backup, say) that holds the file.
)


class StoreInUse(StartupError):
    """Another process, a server, has the session file."""


def lock(file: Path) -> int:
    """Lock the store against other processes; the returned descriptor holds the lock until it is closed.

    Without the lock a second server would declare the first one's running turns dead. A POSIX record lock ends with the process, even a killed
    one, and a forked child does not keep it. It is on a separate file, because closing any descriptor of the database would drop SQLite's own
    locks on it.

    Raises:
        StoreInUse: another process holds the lock.
        StartupError: the file cannot be opened.
    """
    try:
        lock_fd = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartupError(f"The session database {file} cannot be opened: {error.strerror}.") from error
    try:
        fcntl.lockf(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        raise StoreInUse(
            f"The session database {file} is in use by another process. Stop that one, or use another file."
        ) from error
    return lock_fd


# -- the log, before SQLite reads it -----------------------------------------------------------------------------------
#
# After a crash SQLite takes from its write-ahead log what stands before the first frame with a wrong checksum, and drops the rest without a
# word. That is right for a transaction that was being written, and wrong for a bit that flipped in the middle of committed ones.
#
# The log is a header of 32 bytes (its last 16: two salts, two checksums) and frames: 24 bytes (page, size of the file if the frame ends a
# transaction, the header's salts, two checksums) and a page. Each checksum continues the one before. The shared memory beside the log
# (`-shm`), which outlives a killed process, holds how many frames were committed and how many of these the database file has already.
# Source: https://www.sqlite.org/walformat.html.

_LOG_HEADER_BYTES, _FRAME_HEADER_BYTES, _SHM_BYTES = 32, 24, 136
_SHM_LOCK_BYTE: Final = (
    128  # Every process that has the database open holds a lock on this byte of the shared memory.
)


class LostFrames(NamedTuple):
    """Frames that were committed and that SQLite will not read.

    num_commits: transactions that these frames make up, at most. is_in_file: whether the database file holds all committed frames already.
    """

    num_frames: int
    num_commits: int
    is_in_file: bool


class _SharedMemory(NamedTuple):
    salts: bytes
    page_bytes: int
    num_committed: int
    num_in_file: int


def find_lost_frames(log: bytes | mmap.mmap, shm: bytes) -> LostFrames | None:
    """Find committed frames that SQLite will not read; None if there are none.

    The transaction that was being written when the process or the machine stopped is no loss, for no client was told that it is stored. Where
    the shared memory does not tell, at most one transaction can have been under way, so two behind the damage are a loss.

    Args:
        log: the write-ahead log; b"" if there is none.
        shm: the shared memory beside it; b"" if there is none.
    """
    shared = _shared_memory(shm)
    salts, num_good = b"", 0
    ends: list[int] = []  # numbers, from 1, of the frames that end a transaction
    if len(log) > _LOG_HEADER_BYTES + _FRAME_HEADER_BYTES:
        order = ">" if log[3] & 1 else "<"
        salts, page_bytes = log[16:24], int.from_bytes(log[8:12], "big")
        sums = _checksum(log[:24], (0, 0), order)
        is_header_good = sums == struct.unpack(">II", log[24:32])
        if not is_header_good:
            page_bytes = shared.page_bytes if shared else 4096
            salts = shared.salts if shared else log[_LOG_HEADER_BYTES + 8 : _LOG_HEADER_BYTES + 16]
        frame_bytes = _FRAME_HEADER_BYTES + page_bytes
        starts = range(_LOG_HEADER_BYTES, len(log) - frame_bytes + 1, frame_bytes)
        ends = [
            n
            for n, at in enumerate(starts, 1)
            if log[at + 8 : at + 16] == salts and any(log[at + 4 : at + 8])
        ]
        for number, at in enumerate(starts[: ends[-1] if ends and is_header_good else 0], 1):
            frame = log[at : at + frame_bytes]
            sums = _checksum(frame[_FRAME_HEADER_BYTES:], _checksum(frame[:8], sums, order), order)
            if frame[8:16] != salts or sums != struct.unpack(">II", frame[16:24]):
                break
            if any(frame[4:8]):
                num_good = number
    behind = [number for number in ends if number > num_good]
    is_told = shared is not None and shared.salts == (salts or shared.salts)
    num_committed = shared.num_committed if shared and is_told else 0
    if len(behind) > 1:
        num_committed = max(num_committed, behind[-1])
    if num_committed <= num_good:
        return None
    num_commits = sum(number <= num_committed for number in behind)
    is_in_file = shared is not None and is_told and shared.num_in_file >= num_committed
    return LostFrames(num_committed - num_good, max(num_commits, 1), is_in_file)


def _shared_memory(shm: bytes) -> _SharedMemory | None:
    """Read the shared memory, which is in this machine's byte order; None if it was being changed or is damaged."""
    if len(shm) < _SHM_BYTES or shm[:48] != shm[48:96] or shm[12] != 1:
        return None
    page_bytes, num_committed = struct.unpack_from("=HI", shm, 14)
    (num_in_file,) = struct.unpack_from("=I", shm, 96)
    return _SharedMemory(shm[32:40], 65536 if page_bytes == 1 else page_bytes, num_committed, num_in_file)


def _checksum(data: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    """Continue SQLite's checksum over data. A log of 1 MiB takes 0.03 s (measured), and only a crash leaves a log."""
    one, two = sums
    for first, second in struct.iter_unpack(f"{order}II", data):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two


def check_log(file: Path) -> int:
    """Check the log of a database that no process has open, and return how many committed frames it has lost.

    A damaged log is copied and the loss logged. If the database file holds all of it already the log is moved away instead, because SQLite
    would put the old pages of the sound part over newer ones.
    """
    log, shm = Path(f"{file}-wal"), Path(f"{file}-shm")
    try:
        if _is_open_elsewhere(shm):
            return 0  # That process has read the log already, so nothing is dropped from it now.
        lost = _lost_frames_of(log, shm)
        if lost is None:
            return 0
        copy = Path(f"{log}.damaged")
        if lost.is_in_file:
            log.replace(copy) if log.exists() else None
            shm.unlink()
            logger.warning(
                "%s was damaged, but the database holds all of it already. It is kept as %s", log, copy
            )
            return 0
        logger.error(
            "%s is damaged: %d frames cannot be read, so up to %d of the last commits (turns or other changes) are lost. %s",
            log,
            lost.num_frames,
            lost.num_commits,
            _keep(log, copy),
        )
        return lost.num_frames
    except OSError as error:
        logger.warning("the log of %s cannot be checked: %s", file, error)
        return 0


def _lost_frames_of(log: Path, shm: Path) -> LostFrames | None:
    shared = shm.read_bytes()[:_SHM_BYTES] if shm.exists() else b""
    if not log.exists() or log.stat().st_size == 0:
        return find_lost_frames(b"", shared)
    with log.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
        return find_lost_frames(data, shared)


def _is_open_elsewhere(shm: Path) -> bool:
    try:
        with shm.open("r+b") as opened:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _SHM_LOCK_BYTE)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _keep(log: Path, copy: Path) -> str:
    """Copy a damaged log, and return a sentence that says where the copy is, or why there is none."""
    try:
        shutil.copy(log, copy)  # with the log's mode: readable by its owner only
    except OSError as error:
        copy.unlink(missing_ok=True)
        return f"No copy of it could be kept: {error.strerror}."
    return f"A copy of it is kept as {copy}: what was lost may be read from there by hand."


# -- opening -----------------------------------------------------------------------------------------------------------


def _connect(file: Path, *, makes: bool = False) -> Database:
    # isolation_level=None: we say BEGIN and COMMIT ourselves.
    uri = f"{file.absolute().as_uri()}?mode={'rwc' if makes else 'rw'}"
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S, factory=Database)
    conn.execute("PRAGMA foreign_keys = ON")
    return conn


def open_writer(file: Path, full_text: bool, max_bytes_of: Callable[[str], int]) -> Database:
    """Make or check the file and bring it up to date. Raises StartupError or sqlite3.Error."""
    # Conversations are private. SQLite gives its log files the mode of the database file, so that is made first.
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        pass  # It is there already; or it cannot be made, which SQLite is about to say.
    conn = _connect(file, makes=True)
    conn.max_bytes_of = max_bytes_of
    try:
        _check_file(conn, file)
        # Of a new file only; an older one is rewritten (`_allow_shrinking`).
        conn.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        conn.execute("PRAGMA journal_mode = WAL")
        conn.execute(f"PRAGMA journal_size_limit = {MAX_IDLE_LOG_BYTES}")
        conn.execute("PRAGMA synchronous = FULL")
        conn.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        _prepare(conn, file, full_text)
    except BaseException:
        conn.close()
        raise
    return conn


def open_reader(file: Path) -> sqlite3.Connection:
    """Return a connection that cannot write."""
    conn = _connect(file)
    conn.execute("PRAGMA query_only = ON")
    return conn


def _check_file(conn: sqlite3.Connection, file: Path) -> None:
    """Refuse, before anything is written to it, a file that is not a sound database of ours of a version that we know."""
    version = version_of(conn)
    if version > SCHEMA_VERSION:
        raise StartupError(
            f"The session database {file} was written by a newer version of Overture (schema {version}; this one knows up to "
            f"{SCHEMA_VERSION}). Upgrade Overture, or restore a backup that was made before the upgrade."
        )
    if version == 0 and conn.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise StartupError(f"{file} is a database of another program. Use another file for the sessions.")
    # Reads the whole file, 2 GB/s when it is cached (measured): better a refusal now than a lost turn later.
    quick_check(conn)


def _allow_shrinking(conn: sqlite3.Connection, file: Path) -> None:
    """Rewrite a file of version 1, which never gives room back to the disk, if the disk has room for that now."""
    if conn.execute("PRAGMA auto_vacuum").fetchone()[0] == _INCREMENTAL:
        return
    num_bytes = file.stat().st_size
    if shutil.disk_usage(file.parent).free < _REWRITE_ROOM * num_bytes:
        return
    logger.info("rewriting the session database (%d MiB) so that it can give room back", num_bytes >> 20)
    try:
        conn.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        conn.execute("VACUUM")
    except sqlite3.OperationalError as error:
        logger.warning("the session database could not be rewritten, and stays as it is: %s", error)


def fold_log(conn: sqlite3.Connection) -> bool:
    """Fold the log into the file and empty it; return False if a reader is in the way. Raises sqlite3.Error if there is no room."""
    return bool(conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)


def growth_bytes(file: Path, conn: sqlite3.Connection) -> int:
    """Return by how many bytes the file grows when the log is folded into it."""
    num_pages, page_bytes = (
        conn.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
    )
    return max(int(num_pages * page_bytes) - file.stat().st_size, 0)


def num_free_pages(conn: sqlite3.Connection) -> int:
    """Return the number of pages of the file that hold nothing."""
    return int(conn.execute("PRAGMA freelist_count").fetchone()[0])


def compact(conn: sqlite3.Connection) -> bool:
    """Give a part of the free pages, and the log, back to the disk, outside a transaction; return whether there is more to give.

    Only a part, so that messages get in between. Raises sqlite3.Error; a part may be done then.
    """
    try:
        fold_log(conn)
    except sqlite3.OperationalError as error:
        if not is_full(error):
            raise
        # The file first has to become smaller, as far as the log has room for that.
    if num_free_pages(conn) == 0:
        return False
    before = conn.execute("PRAGMA page_count").fetchone()[0]
    conn.execute(f"PRAGMA incremental_vacuum({_PART_PAGES})").fetchall()
    # A file of version 1 that was never rewritten stays as large as it is.
    return bool(conn.execute("PRAGMA page_count").fetchone()[0] != before)


def rewrite_version(conn: sqlite3.Connection) -> None:
    """Write a page of the file as it is. Raises sqlite3.Error, here or at the end of the transaction, where the disk takes no writes."""
    conn.execute(f"PRAGMA user_version = {version_of(conn)}")


def quick_check(conn: sqlite3.Connection) -> None:
    """Read the whole file. Raises sqlite3.Error if it is damaged."""
    verdict = conn.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        error = sqlite3.DatabaseError(" ".join(verdict.split()))
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _prepare(conn: Database, file: Path, full_text: bool) -> None:
    """Bring the tables up to date, declare turns dead that ran when the last process died, and update the search index.

    A process that dies meanwhile leaves whole steps behind, and the next process continues from there.
    """
    transaction(conn, "BEGIN IMMEDIATE", migrate, ())
    conn.is_indexing = full_text and search.can_index(conn)
    transaction(conn, "BEGIN IMMEDIATE", _settle, ())
    if conn.is_indexing:
        _index(conn, file)


def _settle(conn: Database) -> None:
    """Mark turns that ran when the last process died as failed, those whose answer went on as cut, as before. They are over now: they are indexed."""
    if not conn.is_indexing:
        search.forget_all(conn)
    running = conn.execute(
        """SELECT t.seq, o.row, o.is_indexed FROM turns t JOIN sessions s ON s.row = t.session JOIN owners o ON o.name = s.owner
           WHERE t.status = 'running'"""
    ).fetchall()
    # A running turn has a finish reason only if it continues an answer that ended earlier.
    conn.execute(
        """UPDATE turns SET status = CASE finish_reason WHEN 'length' THEN 'done' WHEN 'stopped' THEN 'stopped' ELSE 'failed' END
           WHERE status = 'running'"""
    )
    for seq, owner, is_indexed in running:
        search.add_turns(conn, search.SearchOwner(owner, bool(is_indexed)), "seq = ?", (seq,))


def _index(conn: Database, file: Path) -> None:
    """Build the missing parts of the index. A search works without it, so a full disk does not keep the server from starting."""
    try:
        transaction(conn, "BEGIN IMMEDIATE", drop_old_search, ())
        _allow_shrinking(conn, file)
        search.build_missing(conn)
    except sqlite3.OperationalError as error:
        logger.warning(
            "the search index could not be brought up to date, so searches read every text: %s", error
        )
