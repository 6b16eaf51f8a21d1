"""The file: its schema and search index, and opening it safely."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Final

from gateway.errors import StartupError
from gateway.sessions.connection import transaction

BUSY_TIMEOUT_S: Final = (
    5.0  # How long a transaction waits for another program (a backup, say) that holds the file.
)

# Turns keep their order by `seq`. At most one runs in a session: begin_turn looks, the index makes sure.
_SCHEMA_1 = (
    """CREATE TABLE sessions (
        row INTEGER PRIMARY KEY,
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        title TEXT,
        adapter TEXT,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        deleted_at REAL,
        UNIQUE (owner, id)
    )""",
    "CREATE INDEX sessions_by_time ON sessions (owner, updated_at, id) WHERE deleted_at IS NULL",
    "CREATE INDEX sessions_deleted ON sessions (deleted_at) WHERE deleted_at IS NOT NULL",
    """CREATE TABLE turns (
        seq INTEGER PRIMARY KEY,
        session INTEGER NOT NULL REFERENCES sessions (row) ON DELETE CASCADE,
        id TEXT NOT NULL,
        content TEXT NOT NULL,
        answer TEXT NOT NULL DEFAULT '',
        status TEXT NOT NULL CHECK (status IN ('running', 'done', 'stopped', 'failed')),
        adapter TEXT,
        finish_reason TEXT,
        usage TEXT,
        timings TEXT,
        created_at REAL NOT NULL,
        response_id TEXT,
        token_ids BLOB,
        UNIQUE (session, id)
    )""",
    "CREATE UNIQUE INDEX turns_running ON turns (session) WHERE status = 'running'",
    "CREATE INDEX turns_by_id ON turns (id)",
    "CREATE INDEX turns_by_response ON turns (response_id) WHERE response_id IS NOT NULL",
)
_MIGRATIONS: Final = (_SCHEMA_1,)
SCHEMA_VERSION: Final = len(_MIGRATIONS)

# The index holds no text of its own (`content=`). A turn enters it when it is over: indexing a 4 kB text takes 3 ms and a 1 MB text
# 340 ms (measured, 2 cores), too long to stand between a message and its first token, and long enough to do it once only.
_SEARCH_TABLES = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS turn_texts USING fts5(content, answer, content='turns', content_rowid='seq', tokenize='trigram')",
    "CREATE VIRTUAL TABLE IF NOT EXISTS session_titles USING fts5(title, content='sessions', content_rowid='row', tokenize='trigram')",
)
_ADD_TEXT = """INSERT INTO turn_texts (rowid, content, answer)
    SELECT new.seq, new.content, new.answer WHERE new.status <> 'running';"""
_DROP_TEXT = """INSERT INTO turn_texts (turn_texts, rowid, content, answer)
    SELECT 'delete', old.seq, old.content, old.answer WHERE old.status <> 'running';"""
_ADD_TITLE = "INSERT INTO session_titles (rowid, title) VALUES (new.row, new.title);"
_DROP_TITLE = (
    "INSERT INTO session_titles (session_titles, rowid, title) VALUES ('delete', old.row, old.title);"
)
_SEARCH_TRIGGERS = {
    "turn_texts_insert": f"AFTER INSERT ON turns BEGIN {_ADD_TEXT} END",
    "turn_texts_update": f"AFTER UPDATE OF content, answer, status ON turns BEGIN {_DROP_TEXT} {_ADD_TEXT} END",
    "turn_texts_delete": f"AFTER DELETE ON turns BEGIN {_DROP_TEXT} END",
    "session_titles_insert": f"AFTER INSERT ON sessions BEGIN {_ADD_TITLE} END",
    "session_titles_update": f"AFTER UPDATE OF title ON sessions BEGIN {_DROP_TITLE} {_ADD_TITLE} END",
    "session_titles_delete": f"AFTER DELETE ON sessions BEGIN {_DROP_TITLE} END",
}


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


def _connect(file: Path) -> sqlite3.Connection:
    # isolation_level=None: we say BEGIN and COMMIT ourselves.
    conn = sqlite3.connect(file, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    conn.execute("PRAGMA foreign_keys = ON")
    return conn


def open_writer(file: Path, full_text: bool) -> sqlite3.Connection:
    """Make or check the file and bring it up to date. Raises StartupError or sqlite3.Error."""
    # Conversations are private. SQLite gives its log files the mode of the database file, so that is made first.
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        pass  # It is there already; or it cannot be made, which SQLite is about to say.
    conn = _connect(file)
    try:
        _check_file(conn, file)
        conn.execute("PRAGMA journal_mode = WAL")
        conn.execute("PRAGMA synchronous = FULL")
        transaction(conn, "BEGIN IMMEDIATE", _prepare, (full_text,))
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
    version = conn.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StartupError(
            f"The session database {file} was written by a newer version of Overture (schema {version}; this one knows up to "
            f"{SCHEMA_VERSION}). Upgrade Overture, or use another file."
        )
    if version == 0 and conn.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise StartupError(f"{file} is a database of another program. Use another file for the sessions.")
    # Reads the whole file, 2 GB/s when it is cached (measured): better a refusal now than a lost turn later.
    verdict = conn.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        error = sqlite3.DatabaseError(" ".join(verdict.split()))
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _migrate(conn: sqlite3.Connection) -> None:
    version = conn.execute("PRAGMA user_version").fetchone()[0]
    for statements in _MIGRATIONS[version:]:
        for statement in statements:
            conn.execute(statement)
    conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _prepare(conn: sqlite3.Connection, full_text: bool) -> None:
    """Bring the schema up to date, declare dead what was running when the last process died, and set the search index right."""
    _migrate(conn)
    can_index = full_text and _has_trigrams(conn)
    if not can_index:
        # Only the triggers: without the FTS5 module its tables cannot even be dropped.
        for name in _SEARCH_TRIGGERS:
            conn.execute(f"DROP TRIGGER IF EXISTS {name}")
    conn.execute("UPDATE turns SET status = 'failed' WHERE status = 'running'")
    if can_index and not has_index(conn):
        _build_index(conn)


def _build_index(conn: sqlite3.Connection) -> None:
    """Index all that is stored, and from now on what will be. No turn may be running: those are not in the index."""
    for statement in _SEARCH_TABLES:
        conn.execute(statement)
    for table in ("turn_texts", "session_titles"):
        conn.execute(f"INSERT INTO {table} ({table}) VALUES ('rebuild')")
    for name, body in _SEARCH_TRIGGERS.items():
        conn.execute(f"CREATE TRIGGER {name} {body}")


def _has_trigrams(conn: sqlite3.Connection) -> bool:
    try:
        conn.execute("CREATE VIRTUAL TABLE temp.probe USING fts5(text, tokenize='trigram')")
    except sqlite3.OperationalError:
        return False
    conn.execute("DROP TABLE temp.probe")
    return True


def has_index(conn: sqlite3.Connection) -> bool:
    """Whether a search may ask the index."""
    found = conn.execute(
        "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name = 'turn_texts_insert'"
    ).fetchone()
    return bool(found[0])
