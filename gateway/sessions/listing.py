"""The list of an owner's sessions: pages of it, what a search finds, and what is pinned."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any, Final

from gateway.errors import GatewayError
from gateway.sessions import search, tree
from gateway.sessions.connection import SqliteConnection
from gateway.sessions.records import Origin, SessionSummary
from gateway.sessions.text import encode_cursor

MAX_PINNED: Final = 50  # Chosen: they are listed all at once, before everything else.
MAX_FILED: Final = 500  # Of conversations in folders, for the same reason.

_SUMMARY = f"""SELECT s.row, s.id, s.title, s.adapter, s.created_at, s.updated_at, ({tree.shown("= s.row")} SELECT count(*) FROM shown), s.origin,
    s.pinned_at IS NOT NULL, s.folder FROM sessions s WHERE s.owner = ? AND s.deleted_at IS NULL"""


def _summary(columns: tuple[Any, ...], found: search.Found | None = None) -> SessionSummary:
    _, session_id, title, adapter, created_at, updated_at, num_turns, origin, is_pinned, folder = columns
    return SessionSummary(
        id=session_id,
        title=title,
        adapter=adapter,
        created_at=created_at,
        updated_at=updated_at,
        num_turns=num_turns,
        found_in=found.turn_id if found else None,
        excerpt=found.excerpt if found else None,
        origin=origin,
        is_pinned=bool(is_pinned),
        folder=folder,
    )


def summary_of(conn: sqlite3.Connection, owner: str, session_id: str) -> SessionSummary | None:
    """Return one session as the list shows it; None if it does not exist or was deleted."""
    columns = conn.execute(_SUMMARY + " AND s.id = ?", (owner, session_id)).fetchone()
    return None if columns is None else _summary(columns)


def list_sessions(
    conn: sqlite3.Connection,
    owner: str,
    q: str,
    limit: int,
    cursor: tuple[float, str] | None,
    origin: Origin | None,
) -> tuple[list[SessionSummary], str | None]:
    """Return one page, the session used last first, and the cursor of the next page; see `SessionStore.list_sessions`."""
    sql = _SUMMARY
    args: list[Any] = [owner]
    keeper = search.find_owner(conn, owner)
    if keeper is None:
        return [], None
    if q:
        condition, values = search.condition(keeper, q)
        sql, args = sql + condition, args + values
    if origin is not None:
        sql, args = sql + " AND s.origin = ?", [*args, origin]
    if cursor is not None:
        sql, args = sql + " AND (s.updated_at, s.id) < (?, ?)", [*args, *cursor]
    # One more than asked for tells whether there is a next page.
    rows = conn.execute(sql + " ORDER BY s.updated_at DESC, s.id DESC LIMIT ?", [*args, limit + 1]).fetchall()
    found = search.found_in(conn, keeper, q, [row for row, *_ in rows]) if q else {}
    page = [_summary(columns, found.get(columns[0])) for columns in rows[:limit]]
    return page, encode_cursor(page[-1].updated_at, page[-1].id) if len(rows) > limit else None


def pinned_sessions(conn: sqlite3.Connection, owner: str) -> list[SessionSummary]:
    """Return the sessions that an owner has pinned, the latest pin first, then those in folders, the one used last first."""
    which = " AND (s.pinned_at IS NOT NULL OR s.folder IS NOT NULL)"
    order = " ORDER BY s.pinned_at DESC NULLS LAST, s.updated_at DESC, s.id DESC"
    rows = conn.execute(_SUMMARY + which + order, (owner,))
    return [_summary(columns) for columns in rows]


def pin(conn: sqlite3.Connection, owner: str, row: int, pinned_at: float | None) -> None:
    """Pin a session at this time, or unpin it (None). Raises GatewayError `conflict` above MAX_PINNED: pins are listed all at once."""
    sql = "SELECT count(*) FROM sessions WHERE owner = ? AND pinned_at IS NOT NULL AND deleted_at IS NULL AND row <> ?"
    if pinned_at is not None and conn.execute(sql, (owner, row)).fetchone()[0] >= MAX_PINNED:
        raise GatewayError(
            "conflict", f"{MAX_PINNED} conversations are pinned already: unpin one first.", param="is_pinned"
        )
    conn.execute("UPDATE sessions SET pinned_at = ? WHERE row = ?", (pinned_at, row))


def put_into(conn: sqlite3.Connection, owner: str, row: int, folder: str | None) -> None:
    """Put a session into a folder, or out of all (None). Raises GatewayError `conflict` above MAX_FILED, which are listed all at once."""
    sql = "SELECT count(*) FROM sessions WHERE owner = ? AND folder IS NOT NULL AND deleted_at IS NULL AND row <> ?"
    if folder is not None and conn.execute(sql, (owner, row)).fetchone()[0] >= MAX_FILED:
        message = f"{MAX_FILED} conversations are in folders already: take one out first."
        raise GatewayError("conflict", message, param="folder")
    conn.execute("UPDATE sessions SET folder = ? WHERE row = ?", (folder, row))


def ids_of(conn: sqlite3.Connection, owner: str) -> list[str]:
    """Return the ids of all sessions of an owner, the oldest first, without deleted ones."""
    sql = "SELECT id FROM sessions WHERE owner = ? AND deleted_at IS NULL ORDER BY created_at, row"
    return [session_id for (session_id,) in conn.execute(sql, (owner,))]


def missing(conn: sqlite3.Connection, sessions: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return those of these sessions, each an owner and an id, that do not exist or were deleted."""
    sql = "SELECT 1 FROM sessions WHERE owner = ? AND id = ? AND deleted_at IS NULL"
    return [named for named in sessions if conn.execute(sql, tuple(named)).fetchone() is None]


def stored(conn: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """Return the bytes and the number of sessions that each owner has, deleted ones that can be restored among them."""
    sql = "SELECT o.name, o.num_bytes, count(s.row) FROM owners o LEFT JOIN sessions s ON s.owner = o.name GROUP BY o.row"
    return {name: (num_bytes, num_sessions) for name, num_bytes, num_sessions in conn.execute(sql)}


class Rows:
    """Rows of the list that are read by themselves. `SessionStore.list_sessions` reads the list page by page."""

    def __init__(self, reader: SqliteConnection) -> None:
        self._reader = reader

    async def one(self, owner: str, session_id: str) -> SessionSummary | None:
        """Return one session as the list shows it; None if it does not exist or was deleted."""
        return await self._reader.transact(summary_of, owner, session_id)

    async def pinned(self, owner: str) -> list[SessionSummary]:
        """Return the sessions that this owner has pinned or put into folders, of chat and API alike; see `pinned_sessions`."""
        return await self._reader.transact(pinned_sessions, owner)

    async def ids_of(self, owner: str) -> list[str]:
        """Return the ids of all sessions of this owner, the oldest first, without deleted ones."""
        return await self._reader.transact(ids_of, owner)

    async def missing(self, sessions: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return those of these sessions, each an owner and an id, that do not exist or were deleted."""
        return await self._reader.transact(missing, sessions)

    async def stored(self) -> dict[str, tuple[int, int]]:
        """Return the bytes and the number of sessions of each owner."""
        return await self._reader.transact(stored)
