"""One SQLite connection on a thread of its own, and the client's view of its errors."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import aiosqlite

from gateway.errors import GatewayError, StartupError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Database(sqlite3.Connection):
    """A connection to the session file, with the settings of its transactions.

    is_indexing: whether this process keeps the search index. max_bytes_of: how much an owner may store; 0: no limit.
    """

    is_indexing = False
    max_bytes_of: Callable[[str], int] = staticmethod(lambda owner: 0)


class SqliteConnection(aiosqlite.Connection):
    """One SQLite connection with its thread. Each call of `transact` is one transaction.

    Args:
        on_failure: called, on the event loop, with each error that says that the file itself has failed.
    """

    def __init__(
        self,
        connector: Callable[[], sqlite3.Connection],
        begin: str,
        on_failure: Callable[[sqlite3.Error], None] = lambda error: None,
    ) -> None:
        super().__init__(connector, iter_chunk_size=64)
        self._begin = begin
        self._on_failure = on_failure
        self._is_closing = False
        # A process that dies without `close` must not hang on this thread; SQLite survives being cut off at any point.
        self._thread.daemon = True

    async def start(self) -> SqliteConnection:
        """Start the thread and connect. Raises what the connector raises."""
        await self
        return self

    async def transact(self, work: Callable[..., _T], *args: Any) -> _T:
        """Run ``work(connection, *args)`` in one transaction on the thread and return its result; if it raises, nothing is changed."""
        if self._is_closing:
            raise GatewayError("draining", "The server is going away.")
        try:
            # aiosqlite's own way of running a function on its thread. Its public methods cover single statements only, with an await,
            # and so a chance to interleave, between each two.
            job = partial(transaction, self._conn, self._begin, work, args)
            return await self._execute(job)  # type: ignore[no-any-return, no-untyped-call]
        except sqlite3.Error as error:
            if has_failed(error):
                self._on_failure(error)
            raise _as_gateway_error(error) from error

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run ``work(connection)`` on the thread outside a transaction and return its result."""
        if self._is_closing:
            raise GatewayError("draining", "The server is going away.")
        try:
            return await self._execute(work, self._conn)  # type: ignore[no-any-return, no-untyped-call]
        except sqlite3.Error as error:
            if has_failed(error):
                self._on_failure(error)
            raise _as_gateway_error(error) from error

    async def close(self) -> None:
        """Finish the calls under way, then close. Later calls of `transact` raise `draining`."""
        self._is_closing = True
        await super().close()


def transaction(conn: sqlite3.Connection, begin: str, work: Callable[..., _T], args: tuple[Any, ...]) -> _T:
    """Run ``work(conn, *args)`` between `begin` and COMMIT and return its result; if it raises, nothing is changed."""
    try:
        conn.execute(begin)
        result = work(conn, *args)
        conn.execute("COMMIT")
        return result
    except BaseException as error:
        # SQLite has rolled back by itself after some errors, a full disk among them.
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        if has_failed(error):
            _forget_pages(conn)
        raise


def _forget_pages(conn: sqlite3.Connection) -> None:
    """Drop cached pages, damaged ones among them; otherwise a mended file is not noticed until something is written."""
    try:
        conn.execute("PRAGMA shrink_memory")
    except sqlite3.Error:
        pass  # The next failure tries it again.


def is_full(error: BaseException | None) -> bool:
    """Return whether the error says that the disk is full. SQLite calls it an I/O error if the shared memory of the log cannot grow."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE


def has_failed(error: BaseException | None) -> bool:
    """Return whether the file is at fault and not the request: damaged, unreadable, or replaced by another file.

    Our statements are all correct on a sound file, so "no such table" (SQLITE_ERROR) says that it is another file now, an empty one for example.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in _FAILURES and not is_full(error) and not is_index_damaged(error)


def is_index_damaged(error: BaseException | None) -> bool:
    """Return whether a search index contradicts itself. It is made of the texts, so it can be dropped and built again."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CORRUPT_VTAB


_FAILURES: Final = frozenset(
    {
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_PERM,
    }
)


def file_error(what: str, error: sqlite3.Error | OSError, message: str) -> GatewayError:
    """Return what a client may know of an error of another file than the session database. message: unless the disk is full. The cause is logged."""
    logger.error("%s: %s", what, error)
    return disk_full() if is_full(error) else GatewayError("storage_failed", message)


def disk_full() -> GatewayError:
    """Return what a client may know of a full disk."""
    return GatewayError("overloaded", "The server's disk is full; nothing was stored.")


def _as_gateway_error(error: sqlite3.Error) -> GatewayError:
    """Return what a client may know of a database error. The cause goes to the log, because it names what the operator must mend."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    logger.error("session database: %s", error)
    if is_full(error):
        return disk_full()
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return GatewayError(
            "overloaded", "The session database is in use by another program; nothing was stored."
        )
    if has_failed(error) or is_index_damaged(error):
        return GatewayError(
            "storage_failed",
            "The session database failed: conversations cannot be read or stored now. The server's log says why.",
            retryable=code == sqlite3.SQLITE_IOERR,
        )
    return GatewayError(
        "internal", "The session database failed; nothing was stored. The server's log says why."
    )


def unusable(what: str, file: Path, error: sqlite3.Error | OSError) -> StartupError:
    """Return why the server cannot start with this file, and what the operator can do. what: names it."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return StartupError(
            f"The {what} {file} is damaged ({error}). Move it and its -wal and -shm files away to start with none, put a backup in "
            f"its place, or try to save what is left with: sqlite3 {file} .recover"
        )
    if is_full(error):
        return StartupError(
            f"The disk that holds the {what} {file} is full. Make some room on it, then start again."
        )
    return StartupError(f"The {what} {file} cannot be opened: {error}.")
