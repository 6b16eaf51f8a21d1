"""Stored Responses calls, found by the ids that their clients know."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson

from gateway.sessions import search, transactions, tree
from gateway.sessions.connection import SqliteConnection
from gateway.sessions.records import ResponseHistory, SessionId, StoredResponse, Turn, TurnId
from gateway.sessions.text import clean
from gateway.sessions.token_ids import drop_token_ids_below, token_ids_up_to
from gateway.sessions.transactions import TURN_COLUMNS, Row, turn_from


class StoredResponses:
    """Turns that `SessionStore.record_turn` stored with a `response_id`.

    Args:
        write: runs a transaction that changes an owner's texts.
    """

    def __init__(self, reader: SqliteConnection, write: Callable[..., Awaitable[Any]]) -> None:
        self._reader = reader
        self._write = write

    async def find(self, owner: str, response_id: str) -> tuple[SessionId, TurnId] | None:
        """Return the session and turn of this owner with this `response_id`; None if there is none."""
        return await self._reader.transact(transactions.find_response, owner, response_id)

    async def read(self, owner: str, response_id: str) -> tuple[Turn, StoredResponse | None] | None:
        """Return the turn with this `response_id`, and the call itself if it was stored, too. None if there is no such turn."""
        return await self._reader.transact(_read_response, owner, response_id)

    async def history(self, owner: str, response_id: str) -> ResponseHistory | None:
        """Return the turns up to and including that of `response_id`, oldest first, without failed turns that have no text.

        None if there is none.
        """
        return await self._reader.transact(_response_history, owner, response_id)

    async def of_session(self, owner: str, session_id: str) -> ResponseHistory | None:
        """Return all turns of a session, in the form of `history`. None if the session does not exist."""
        return await self._reader.transact(_session_history, owner, session_id)

    async def items(self, owner: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return items of this owner's stored responses, of inputs and outputs alike, by id. Unknown ids are left out."""
        found: dict[str, dict[str, Any]] = await self._reader.transact(_items, owner, ids)
        return found

    async def delete(self, owner: str, response_id: str, now: float) -> bool:
        """Delete the turn of `response_id` for good, and its session if that has no other turn.

        The turns that follow it then follow its parent. Returns False if there is no such turn.
        """
        is_gone: bool = await self._write(owner, _delete_response, owner, response_id, now)
        return is_gone


_FIND_ITEM = """SELECT r.reply, r.items FROM response_items i JOIN responses r ON r.seq = i.seq JOIN sessions s ON s.row = r.session
    WHERE i.owner = (SELECT row FROM owners WHERE name = ?) AND i.id = ? AND s.deleted_at IS NULL ORDER BY i.seq DESC LIMIT 1"""


def _items(conn: sqlite3.Connection, owner: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return items of stored responses by their ids; see `StoredResponses.items`."""
    found: dict[str, dict[str, Any]] = {}
    for item_id in ids:
        if item_id in found:
            continue  # It came along with an item of the same response.
        columns = conn.execute(_FIND_ITEM, (owner, clean(item_id))).fetchone()
        if columns is not None:
            reply, given = map(orjson.loads, columns)
            for item in [*given, *(reply.get("output") or [])]:
                if isinstance(item, dict) and isinstance(item.get("id"), str):
                    found[item["id"]] = item
    return {item_id: found[item_id] for item_id in ids if item_id in found}


def _read_response(
    conn: sqlite3.Connection, owner: str, response_id: str
) -> tuple[Turn, StoredResponse | None] | None:
    """Read a stored response; see `StoredResponses.read`."""
    found = transactions.find_response(conn, owner, response_id)
    if found is None:
        return None
    row = transactions.live(conn, owner, found[0])
    seq = transactions.place_of(conn, row.row, found[1], "turn_id")
    (columns,) = conn.execute(f"SELECT {TURN_COLUMNS} FROM turns WHERE seq = ?", (seq,))
    return turn_from(columns), _response(conn, seq)


def _response(conn: sqlite3.Connection, seq: int) -> StoredResponse | None:
    columns = conn.execute("SELECT reply, items, previous FROM responses WHERE seq = ?", (seq,)).fetchone()
    return (
        None if columns is None else StoredResponse(reply=columns[0], items=columns[1], previous=columns[2])
    )


def _delete_response(conn: sqlite3.Connection, owner: str, response_id: str, now: float) -> bool:
    """Delete the turn of a response; see `StoredResponses.delete`."""
    found = transactions.find_response(conn, owner, response_id)
    if found is None:
        return False
    row = transactions.live(conn, owner, found[0])
    seq = transactions.place_of(conn, row.row, found[1], "turn_id")
    search.drop_turns(conn, row.owner, "seq = ?", (seq,))
    drop_token_ids_below(conn, seq)
    tree.remove(conn, row.row, seq)
    conn.execute("DELETE FROM turns WHERE seq = ?", (seq,))
    if conn.execute("SELECT 1 FROM turns WHERE session = ?", (row.row,)).fetchone() is None:
        transactions.delete(conn, owner, row.id, now)
    return True


def _response_history(conn: sqlite3.Connection, owner: str, response_id: str) -> ResponseHistory | None:
    """Return the turns up to a response; see `StoredResponses.history`."""
    found = transactions.find_response(conn, owner, response_id)
    if found is None:
        return None
    row = transactions.live(conn, owner, found[0])
    return _history(conn, row, transactions.place_of(conn, row.row, found[1], "turn_id"))


def _session_history(conn: sqlite3.Connection, owner: str, session_id: str) -> ResponseHistory | None:
    """Return the turns of a session; see `StoredResponses.of_session`."""
    row = transactions.find(conn, owner, session_id)
    return _history(conn, row, tree.tip(conn, row.row)) if row is not None else None


def _history(conn: sqlite3.Connection, row: Row, last: int) -> ResponseHistory:
    """Return the turns of a session up to and including `last`."""
    sql = f"{tree.PATH} SELECT seq, {TURN_COLUMNS} FROM path JOIN turns USING (seq) ORDER BY seq"
    turns = [(turn_from(columns), _response(conn, seq)) for seq, *columns in conn.execute(sql, (last,))]
    return ResponseHistory(
        session_id=row.id,
        turns=[(turn, response) for turn, response in turns if turn.is_history],
        token_ids=token_ids_up_to(conn, last),
    )
