"""The file: opening it safely, and bringing it up to date."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from pathlib import Path
from typing import Final

from gateway.errors import StartupError
from gateway.sessions import search
from gateway.sessions.connection import Database, transaction
from gateway.sessions.schema import SCHEMA_VERSION, drop_old_search, migrate, version_of

logger = logging.getLogger(__name__)

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
        conn.execute("PRAGMA journal_mode = WAL")
        conn.execute("PRAGMA synchronous = FULL")
        _prepare(conn, full_text)
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


def quick_check(conn: sqlite3.Connection) -> None:
    """Read the whole file. Raises sqlite3.Error if it is damaged."""
    verdict = conn.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        error = sqlite3.DatabaseError(" ".join(verdict.split()))
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _prepare(conn: Database, full_text: bool) -> None:
    """Bring the tables up to date, declare dead what was running when the last process died, and set the search index right.

    A process that dies on the way leaves whole steps behind, and the next one goes on from there.
    """
    transaction(conn, "BEGIN IMMEDIATE", migrate, ())
    conn.is_indexing = full_text and search.can_index(conn)
    transaction(conn, "BEGIN IMMEDIATE", _settle, ())
    if conn.is_indexing:
        _index(conn)


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
        search.add_turns(conn, search.Owner(owner, bool(is_indexed)), "seq = ?", (seq,))


def _index(conn: Database) -> None:
    """Build what the index lacks. A search can do without it, so a disk that has no room for it keeps nobody from starting."""
    try:
        transaction(conn, "BEGIN IMMEDIATE", drop_old_search, ())
        search.build_missing(conn)
    except sqlite3.OperationalError as error:
        logger.warning(
            "the search index could not be brought up to date, so searches read every text: %s", error
        )
