"""One SQLite connection on a thread of its own, and what a client may know of its errors."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import aiosqlite

from gateway.errors import GatewayError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Database(sqlite3.Connection):
    """A connection to the session file, and what the transactions on it go by.

    is_indexing: whether this process keeps the search index. max_owner_bytes: what one owner may store; 0: no limit.
    """

    is_indexing = False
    max_owner_bytes = 0


class SqliteConnection(aiosqlite.Connection):
    """One SQLite connection with its thread, on which each call of ``transact`` is one transaction.

    on_failure: told, on the event loop, of each error that says that the file itself has failed.
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
        """Start the thread and connect; raises what the connector raises."""
        await self
        return self

    async def transact(self, work: Callable[..., _T], *args: Any) -> _T:
        """What ``work(connection, *args)`` returns, run in one transaction on the thread; nothing is changed if it raises."""
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
        """What ``work(connection)`` returns, run on the thread outside a transaction."""
        if self._is_closing:
            raise GatewayError("draining", "The server is going away.")
        try:
            return await self._execute(work, self._conn)  # type: ignore[no-any-return, no-untyped-call]
        except sqlite3.Error as error:
            if has_failed(error):
                self._on_failure(error)
            raise _as_gateway_error(error) from error

    async def close(self) -> None:
        """Let what was asked for before finish, then close; later calls of ``transact`` raise ``draining``."""
        self._is_closing = True
        await super().close()


def transaction(conn: sqlite3.Connection, begin: str, work: Callable[..., _T], args: tuple[Any, ...]) -> _T:
    """What ``work(conn, *args)`` returns, run between `begin` and COMMIT; nothing is changed if it raises."""
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
    """Drop what was read, damaged pages among it: else a file that was mended is not seen until something is written."""
    try:
        conn.execute("PRAGMA shrink_memory")
    except sqlite3.Error:
        pass  # What it would have dropped is looked at again with the next failure.


def is_full(error: BaseException | None) -> bool:
    """Whether the disk has no room. Without it the shared memory of the log cannot grow either, which SQLite calls an I/O error."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE


def has_failed(error: BaseException | None) -> bool:
    """Whether the file, not the request, is at fault: damaged, unreadable, or no longer what this process made of it.

    Our statements are all right on a file that is whole, so "no such table" (SQLITE_ERROR) says that it is another one now, an empty one say.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in _FAILURES and not is_full(error) and not is_index_damaged(error)


def is_index_damaged(error: BaseException | None) -> bool:
    """Whether a search index contradicts itself. It is made of the texts, so it can be given up and built again."""
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


def _as_gateway_error(error: sqlite3.Error) -> GatewayError:
    """What a client may know of a database error; the cause goes to the log here, for it names what the operator must mend."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    logger.error("session database: %s", error)
    if is_full(error):
        return GatewayError("overloaded", "The server's disk is full; nothing was stored.")
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
