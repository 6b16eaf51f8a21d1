"""The file: opening it safely, and bringing it up to date."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Final

from gateway.errors import StartupError
from gateway.sessions import search
from gateway.sessions.connection import Database, is_full, transaction
from gateway.sessions.schema import SCHEMA_VERSION, drop_old_search, migrate, version_of

logger = logging.getLogger(__name__)

MAX_IDLE_LOG_BYTES: Final = 16 << 20  # Chosen: what the log keeps of the disk after a large transaction.
LOG_PAGES: Final = 256  # Chosen: 1 MiB, a quarter of SQLite's own choice, for gateway/sessions/reserve.py.
_INCREMENTAL: Final = 2  # SQLite's number for auto_vacuum = INCREMENTAL.
_REWRITE_ROOM: Final = 3  # Chosen: a rewrite takes the file's size twice, for its copy and for the log.
_PART_PAGES: Final = 256  # Chosen: 1 MiB of log, as a purge's transactions.

BUSY_TIMEOUT_S: Final = (
    5.0  # How long a transaction waits for another program (a backup, say) that holds the file.
)


def lock(file: Path) -> int:
    """Make sure that no other process has this store open; returns the descriptor that holds the lock until it is closed.

    Without it a second server would declare the first one's running turns dead. A POSIX record lock, because it goes with the process,
    even a killed one, and a forked child does not keep it alive. On a file of its own, because closing any descriptor of the database
    would drop SQLite's locks on it.
    """
    try:
        lock_fd = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartupError(f"The session database {file} cannot be opened: {error.strerror}.") from error
    try:
        fcntl.lockf(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        raise StartupError(
            f"The session database {file} is in use by another process. Stop that one, or use another file."
        ) from error
    return lock_fd


def unusable(file: Path, error: sqlite3.Error) -> StartupError:
    """Why the server cannot start with this file, and what the operator can do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return StartupError(
            f"The session database {file} is damaged ({error}). Move it and its -wal and -shm files away to start with none, put a backup in "
            f"its place, or try to save what is left with: sqlite3 {file} .recover"
        )
    if is_full(error):
        return StartupError(
            f"The disk that holds the session database {file} is full. Make some room on it, then start again."
        )
    return StartupError(f"The session database {file} cannot be opened: {error}.")


def _connect(file: Path, *, makes: bool = False) -> Database:
    # isolation_level=None: we say BEGIN and COMMIT ourselves.
    uri = f"{file.absolute().as_uri()}?mode={'rwc' if makes else 'rw'}"
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S, factory=Database)
    conn.execute("PRAGMA foreign_keys = ON")
    return conn


def open_writer(file: Path, full_text: bool, max_owner_bytes: int) -> Database:
    """Make or check the file and bring it up to date. Raises StartupError or sqlite3.Error."""
    # Conversations are private. SQLite gives its log files the mode of the database file, so that is made first.
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        pass  # It is there already; or it cannot be made, which SQLite is about to say.
    conn = _connect(file, makes=True)
    conn.max_owner_bytes = max_owner_bytes
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
    """A connection that cannot write."""
    conn = _connect(file)
    conn.execute("PRAGMA query_only = ON")
    return conn


def _check_file(conn: sqlite3.Connection, file: Path) -> None:
    """Refuse, before anything is written to it, a file that is not a sound database of ours of a version that we know."""
    version = version_of(conn)
    if version > SCHEMA_VERSION:
        raise StartupError(
            f"The session database {file} was written by a newer version of Overture (schema {version}; this one knows up to "
            f"{SCHEMA_VERSION}). Upgrade Overture, or use another file."
        )
    if version == 0 and conn.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise StartupError(f"{file} is a database of another program. Use another file for the sessions.")
    # Reads the whole file, 2 GB/s when it is cached (measured): better a refusal now than a lost turn later.
    quick_check(conn)


def _allow_shrinking(conn: sqlite3.Connection, file: Path) -> None:
    """Rewrite a file of version 1, which never gives room back to the disk, where the disk has room for that now."""
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
    """Bring what the log holds into the file and empty it; False if a reader is in the way. Raises sqlite3.Error where there is no room."""
    return bool(conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)


def growth_bytes(file: Path, conn: sqlite3.Connection) -> int:
    """By how much the file grows when the log is folded into it."""
    num_pages, page_bytes = (
        conn.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
    )
    return max(int(num_pages * page_bytes) - file.stat().st_size, 0)


def num_free_pages(conn: sqlite3.Connection) -> int:
    """How many pages of the file hold nothing."""
    return int(conn.execute("PRAGMA freelist_count").fetchone()[0])


def compact(conn: sqlite3.Connection) -> bool:
    """Give a part of the free pages, and the log, back to the disk, outside a transaction; whether there is more to give.

    One part, so that messages get in between. Raises sqlite3.Error, then with a part of it done.
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
    """Bring the tables up to date, declare dead what was running when the last process died, and set the search index right.

    A process that dies on the way leaves whole steps behind, and the next one goes on from there.
    """
    transaction(conn, "BEGIN IMMEDIATE", migrate, ())
    conn.is_indexing = full_text and search.can_index(conn)
    transaction(conn, "BEGIN IMMEDIATE", _settle, ())
    if conn.is_indexing:
        _index(conn, file)


def _settle(conn: Database) -> None:
    """Declare dead what was running. Its questions are over now, and so enter the index."""
    if not conn.is_indexing:
        search.forget_all(conn)
    running = conn.execute(
        """SELECT t.seq, o.row, o.is_indexed FROM turns t JOIN sessions s ON s.row = t.session JOIN owners o ON o.name = s.owner
           WHERE t.status = 'running'"""
    ).fetchall()
    conn.execute("UPDATE turns SET status = 'failed' WHERE status = 'running'")
    for seq, owner, is_indexed in running:
        search.add_turns(conn, search.SearchOwner(owner, bool(is_indexed)), "seq = ?", (seq,))


def _index(conn: Database, file: Path) -> None:
    """Build what the index lacks. A search can do without it, so a disk that has no room for it keeps nobody from starting."""
    try:
        transaction(conn, "BEGIN IMMEDIATE", drop_old_search, ())
        _allow_shrinking(conn, file)
        search.build_missing(conn)
    except sqlite3.OperationalError as error:
        logger.warning(
            "the search index could not be brought up to date, so searches read every text: %s", error
        )
