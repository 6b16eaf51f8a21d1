"""Which adapters this node has: their versions, in one SQLite file.

Replacing an adapter's files makes a new version under a new number; numbers are never used again, so a request that runs on an old version
is never taken for a request on the new one. Callers may rely on these:

* A method that returned has its changes on disk (WAL with ``synchronous=FULL``). One that raised changed nothing.
* A name has at most one current version (`ready` or `missing`); the database itself enforces it.
* Any thread may call; calls take turns. They wait for the disk: not for the event loop.

All of it but the pins and the counts can be made again from the folders. So a file that is damaged, or not ours, is set aside with a
warning, and an empty registry begun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from engine_bridge.adapters.errors import RegistryFailed

logger = logging.getLogger(__name__)

State = Literal["ready", "replaced", "removed", "missing"]

SCHEMA_VERSION: Final = 2
APPLICATION_ID: Final = (
    0x4F564C41  # "OVLA": tells our file from another program's with the same schema number.
)
SAY_AGAIN_S: Final = (
    60.0  # Chosen: while a disk is full, each adapter that waits for room fails every few seconds.
)
BUSY_TIMEOUT_S: Final = 5.0  # How long a write waits for another program (a backup, say) that holds the file.


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an adapter's two files.

    content_hash: as `files.content_hash`. checksum: of the weights in the file, see `files.checksum_of`. signature: see `files.signature_of`.
    num_bytes: of the weights.
    """

    content_hash: str
    checksum: int
    signature: str
    rank: int
    num_bytes: int
    target_modules: tuple[str, ...]
    base_model: str | None


class AdapterRecord(AdapterFacts, frozen=True, kw_only=True):
    """One version of an adapter.

    state: `ready`; `missing` (current, but its files are away); `replaced` by a newer version of its name; `removed`. Times are Unix seconds.
    """

    version_id: int
    name: str
    path: str
    state: State
    is_pinned: bool
    added_at: float
    last_used_at: float | None
    num_uses: int


_COLUMNS: Final = ", ".join(AdapterRecord.__struct_fields__)
# ended_at: when the version was replaced or removed.
_SCHEMA: Final = (
    """CREATE TABLE versions (
        version_id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        path TEXT NOT NULL,
        content_hash TEXT NOT NULL,
        checksum INTEGER NOT NULL,
        signature TEXT NOT NULL,
        rank INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        target_modules TEXT NOT NULL,
        base_model TEXT,
        state TEXT NOT NULL CHECK (state IN ('ready', 'replaced', 'removed', 'missing')),
        is_pinned INTEGER NOT NULL DEFAULT 0,
        added_at REAL NOT NULL,
        ended_at REAL,
        last_used_at REAL,
        num_uses INTEGER NOT NULL DEFAULT 0
    )""",
    "CREATE UNIQUE INDEX current_versions ON versions (name) WHERE state IN ('ready', 'missing')",
    "CREATE INDEX versions_by_path ON versions (path, signature)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
# From version 1, whose checksums were others: no signature is known, so each adapter is read once more, and keeps its number, pin and counts.
_FROM_VERSION_1: Final = (
    "ALTER TABLE versions RENAME COLUMN crc32 TO checksum",
    "UPDATE versions SET signature = ''",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_CURRENT: Final = "name = ? AND state IN ('ready', 'missing')"


class Registry:
    """The adapters of one node. `path`: the file (its folder must exist), or None to keep it in memory. Raises RegistryFailed."""

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = _open(path)
        self._said: dict[str, float] = {}
        """Recent errors: text -> time of its line in the log, on the monotonic clock."""

    def close(self) -> None:
        """Close the file. A second call does nothing; any other call afterwards raises RegistryFailed (`closed`)."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def known(self, path: str, signature: str) -> AdapterRecord | None:
        """Return the `ready` version that was read from these very files, which then need not be read and hashed again."""
        where = "path = ? AND signature = ? AND state = 'ready' ORDER BY version_id DESC LIMIT 1"
        with self._use() as connection:
            return next(iter(_select(connection, where, path, signature)), None)

    def register(self, name: str, path: str, facts: AdapterFacts, now: float) -> AdapterRecord:
        """Make the adapter at `path` the current version of `name`, and return its record.

        With the path and content of the current version it stays that version, ready again if it was missing. Otherwise it becomes a new
        version, pinned if the old one was, and the old one becomes `replaced`. Raises RegistryFailed; ValueError for text with lone surrogates.
        """
        with self._transaction() as connection:
            old = _current(connection, name)
            if old is not None and (old.path, old.content_hash) == (path, facts.content_hash):
                connection.execute(
                    "UPDATE versions SET signature = ?, checksum = ?, state = 'ready' WHERE version_id = ?",
                    (facts.signature, facts.checksum, old.version_id),
                )
                return _record(connection, old.version_id)
            if old is not None:
                connection.execute(
                    "UPDATE versions SET state = 'replaced', ended_at = ? WHERE version_id = ?",
                    (now, old.version_id),
                )
            fields = {name: getattr(facts, name) for name in AdapterFacts.__struct_fields__} | {
                "target_modules": msgspec.json.encode(facts.target_modules).decode(),
                "name": name,
                "path": path,
                "state": "ready",
                "is_pinned": old is not None and old.is_pinned,
                "added_at": now,
            }
            marks = ", ".join(f":{field}" for field in fields)
            cursor = connection.execute(
                f"INSERT INTO versions ({', '.join(fields)}) VALUES ({marks})", fields
            )
            assert cursor.lastrowid is not None
            return _record(connection, cursor.lastrowid)

    def remove(self, name: str, now: float) -> AdapterRecord | None:
        """Take the name out of service. Returns the version that was current, now `removed`; None if there was none."""
        return self._change(name, "state = 'removed', ended_at = ?", now)

    def mark_missing(self, version_id: int) -> bool:
        """Note that a ready version's files are away; `register` makes it ready again. False if it was not ready: nothing is done then."""
        with self._transaction() as connection:
            cursor = connection.execute(
                "UPDATE versions SET state = 'missing' WHERE version_id = ? AND state = 'ready'",
                (version_id,),
            )
            return cursor.rowcount > 0

    def set_pinned(self, name: str, is_pinned: bool) -> AdapterRecord | None:
        """Pin or unpin the name's current version, and later versions with it. Returns the version; None if there is none."""
        return self._change(name, "is_pinned = ?", is_pinned)

    def _change(self, name: str, columns: str, value: Any) -> AdapterRecord | None:
        with self._transaction() as connection:
            old = _current(connection, name)
            if old is None:
                return None
            connection.execute(f"UPDATE versions SET {columns} WHERE version_id = ?", (value, old.version_id))
            return _record(connection, old.version_id)

    def note_uses(self, uses: Mapping[int, tuple[int, float]]) -> None:
        """Add to the counts. uses: version_id -> (uses since the last call, time of the last one). Unknown ids are passed over."""
        if not uses:
            return
        rows = [(num_uses, used_at, used_at, version_id) for version_id, (num_uses, used_at) in uses.items()]
        with self._transaction() as connection:
            connection.executemany(
                "UPDATE versions SET num_uses = num_uses + ?, last_used_at = max(ifnull(last_used_at, ?), ?) WHERE version_id = ?",
                rows,
            )

    # --- the connection ----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._use() as connection, _transaction(connection):
            yield connection

    @contextlib.contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._connection is None:
                raise RegistryFailed("The registry of adapters is closed.", code="closed")
            try:
                yield self._connection
            except (sqlite3.Error, msgspec.MsgspecError) as error:
                self._say(error)
                raise _failed(error) from error

    def _say(self, error: Exception) -> None:
        """Log an error for the operator, but not each time that the same call is repeated."""
        text, now = str(error), time.monotonic()
        self._said = {each: at_s for each, at_s in self._said.items() if now - at_s < SAY_AGAIN_S}
        logger.log(logging.DEBUG if text in self._said else logging.ERROR, "registry of adapters: %s", text)
        self._said.setdefault(text, now)


# --- statements, each within a caller's transaction --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some errors, a full disk among them.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _select(connection: sqlite3.Connection, where: str, *args: Any) -> list[AdapterRecord]:
    try:
        rows = connection.execute(f"SELECT {_COLUMNS} FROM versions WHERE {where}", args).fetchall()
    except UnicodeEncodeError:  # A client's name with lone surrogates, which no record can have.
        return []
    return [_from_row(row) for row in rows]


def _from_row(row: tuple[Any, ...]) -> AdapterRecord:
    """Raises msgspec.MsgspecError if the row is not one of ours."""
    fields = dict(zip(AdapterRecord.__struct_fields__, row, strict=True))
    fields["target_modules"] = msgspec.json.decode(fields["target_modules"])
    fields["is_pinned"] = bool(fields["is_pinned"])
    return msgspec.convert(fields, AdapterRecord)


def _current(connection: sqlite3.Connection, name: str) -> AdapterRecord | None:
    return next(iter(_select(connection, _CURRENT, name)), None)


def _record(connection: sqlite3.Connection, version_id: int) -> AdapterRecord:
    return _select(connection, "version_id = ?", version_id)[0]


def _failed(error: Exception) -> RegistryFailed:
    """Make the error for a client; its cause is for the log."""
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        return RegistryFailed("The server's disk is full; nothing was stored.", code="disk_full")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RegistryFailed(
            "The registry of adapters is in use by another program; nothing was stored.", code="busy"
        )
    return RegistryFailed(
        "The registry of adapters failed; nothing was stored. The server's log says why.",
        code="registry_failed",
    )


def _code(error: Exception) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


# --- opening -----------------------------------------------------------------------------------------------------------------------------


class _Unusable(Exception):
    """The file is no registry that this version can use. The text says why, for the log."""


def _open(path: Path | None) -> sqlite3.Connection:
    try:
        try:
            return _connect(path, first_id=1)
        except _Unusable as reason:
            assert path is not None  # nothing that is in memory is old
            aside = _set_aside(path)
            logger.warning(
                "the registry of adapters %s is set aside as %s: %s. A new one is begun; pins are lost",
                path,
                aside.name,
                reason,
            )
            # Numbers of the old file must not come again, and it cannot be asked for them. One a second on average is never reached.
            return _connect(path, first_id=int(time.time()))
    except (sqlite3.Error, _Unusable, OSError) as error:
        logger.error("registry of adapters: %s", error)
        raise _failed(error) from error


def _connect(path: Path | None, first_id: int) -> sqlite3.Connection:
    if path is not None and path.exists() and not path.is_file() and not path.is_dir():
        raise _Unusable("it is no file")  # a pipe, a socket, a device: SQLite would only call it a disk error
    if path is not None:
        # Paths and names of adapters are the operator's. SQLite gives its log files the mode of the database file, so that is made first.
        with contextlib.suppress(
            OSError
        ):  # it is there already; or it cannot be made, which SQLite is about to say
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    # isolation_level=None: we say BEGIN and COMMIT ourselves. Our lock does what check_same_thread would.
    connection = sqlite3.connect(
        path or ":memory:", isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=False
    )
    try:
        is_new = _check(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        if is_new:
            _create(connection, first_id)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> bool:
    """Return whether the database is new, that is, empty. Version 1 is brought up to date.

    Raises _Unusable for a damaged or foreign database; nothing is written to it.
    """
    try:
        if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            return True
        found = tuple(_pragma(connection, name) for name in ("application_id", "user_version"))
        if found not in ((APPLICATION_ID, 1), (APPLICATION_ID, SCHEMA_VERSION)):
            raise _Unusable("another program or version wrote it")
        verdict = _pragma(connection, "quick_check(1)")
        if verdict != "ok":
            raise _Unusable(" ".join(str(verdict).split()))
        if found[1] < SCHEMA_VERSION:
            _upgrade(connection)
        else:
            _select(connection, "1")
    except (msgspec.MsgspecError, sqlite3.Error) as error:
        if isinstance(error, sqlite3.Error) and _code(error) not in _DAMAGE:
            raise
        raise _Unusable(str(error)) from error
    return False


def _upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade the whole database, or nothing if a row is not ours, or another process has done it meanwhile."""
    with _transaction(connection):
        is_done = _pragma(connection, "user_version") == SCHEMA_VERSION
        for statement in () if is_done else _FROM_VERSION_1:
            connection.execute(statement)
        _select(connection, "1")


# SQLITE_ERROR: a table or a column is not there. 0: not from SQLite but from Python's module, which met text that is not UTF-8.
_DAMAGE: Final = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR, 0})


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _create(connection: sqlite3.Connection, first_id: int) -> None:
    with _transaction(connection):
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('versions', ?)", (first_id - 1,))


def _set_aside(path: Path) -> Path:
    """Rename the file, and its logs with it, to a name that is free. Raises OSError.

    The logs go first: a log that stayed behind would be played into the new file.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.set-aside-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if suffix == "" or part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside
