"""What the methods of SessionStore do, under their names: each function runs on a connection's thread, inside BEGIN and COMMIT."""

from __future__ import annotations

import re
import sqlite3
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UnsetType

from gateway.errors import GatewayError
from gateway.sessions.database import has_index
from gateway.sessions.records import (
    BeginResult,
    End,
    Message,
    Outlook,
    Session,
    SessionId,
    SessionSummary,
    Turn,
    TurnId,
)
from gateway.sessions.text import clean, clean_text, encode_cursor, is_id, title_from
from gateway.sessions.token_ids import MAX_SEQ, store_token_ids, token_ids_before

RESTORE_WINDOW_S: Final = 30.0  # docs/protocol.md, DELETE /api/sessions/{id}.
TRIGRAM_CHARS: Final = 3  # The trigram index finds nothing shorter.


class _Row(NamedTuple):
    """A session that is not deleted."""

    row: int
    id: SessionId
    title: str | None
    adapter: str | None
    created_at: float
    updated_at: float


_TURN_COLUMNS = "id, content, answer, status, adapter, finish_reason, usage, timings, created_at"


def _turn(columns: tuple[Any, ...]) -> Turn:
    turn_id, content, answer, status, adapter, finish_reason, usage, timings, created_at = columns
    return Turn(
        id=turn_id,
        content=content,
        answer=answer,
        status=status,
        adapter=adapter,
        finish_reason=finish_reason,
        usage=None if usage is None else msgspec.json.decode(usage),
        timings=None if timings is None else msgspec.json.decode(timings),
        created_at=created_at,
    )


def _session(conn: sqlite3.Connection, row: _Row) -> Session:
    turns = _turns(conn, row.row)
    return Session(
        id=row.id,
        title=row.title,
        adapter=row.adapter,
        created_at=row.created_at,
        updated_at=row.updated_at,
        turns=turns,
    )


def _turns(conn: sqlite3.Connection, row: int, *, before: int | None = None) -> list[Turn]:
    """The turns of a session, oldest first; before: a `seq`, only the turns that stand before it."""
    where, args = ("session = ?", (row,)) if before is None else ("session = ? AND seq < ?", (row, before))
    return [
        _turn(columns)
        for columns in conn.execute(f"SELECT {_TURN_COLUMNS} FROM turns WHERE {where} ORDER BY seq", args)
    ]


def _find(conn: sqlite3.Connection, owner: str, session_id: str) -> _Row | None:
    # No session has an id that we would not have let in; and SQLite would choke on some of them.
    if not is_id(session_id):
        return None
    sql = "SELECT row, id, title, adapter, created_at, updated_at FROM sessions WHERE owner = ? AND id = ? AND deleted_at IS NULL"
    columns = conn.execute(sql, (owner, session_id)).fetchone()
    return None if columns is None else _Row(*columns)


def _live(conn: sqlite3.Connection, owner: str, session_id: str) -> _Row:
    row = _find(conn, owner, session_id)
    if row is None:
        raise GatewayError("not_found", "There is no such session.", param="session_id")
    return row


def _place(conn: sqlite3.Connection, row: int, turn_id: str, param: str) -> int:
    """The `seq` of a turn. Raises ``not_found``."""
    found = None
    if is_id(turn_id):
        found = conn.execute("SELECT seq FROM turns WHERE session = ? AND id = ?", (row, turn_id)).fetchone()
    if found is None:
        raise GatewayError("not_found", "There is no such turn in this session.", param=param)
    return int(found[0])


def _known(conn: sqlite3.Connection, row: int, turn_id: str, content: str) -> Turn | None:
    """The turn that has this id already, if any. Raises ``conflict`` if it asks something else."""
    columns = conn.execute(
        f"SELECT {_TURN_COLUMNS} FROM turns WHERE session = ? AND id = ?", (row, turn_id)
    ).fetchone()
    if columns is None:
        return None
    turn = _turn(columns)
    if turn.content != content:
        raise GatewayError("conflict", "This id was used for a message with another content.", param="id")
    return turn


def create(
    conn: sqlite3.Connection,
    owner: str,
    session_id: str,
    title: str | None,
    adapter: str | None,
    exist_ok: bool,
    now: float,
) -> Session:
    sql = "SELECT deleted_at IS NOT NULL FROM sessions WHERE owner = ? AND id = ?"
    taken = conn.execute(sql, (owner, session_id)).fetchone()
    if taken is not None:
        if exist_ok and not taken[0]:
            return _session(conn, _live(conn, owner, session_id))
        advice = "was deleted a moment ago: restore it, or wait 30 s" if taken[0] else "exists already"
        raise GatewayError("conflict", f"A session of this id {advice}.", param="session_id")
    sql = "INSERT INTO sessions (owner, id, title, adapter, created_at, updated_at) VALUES (?, ?, ?, ?, ?, ?)"
    conn.execute(sql, (owner, session_id, title, adapter, now, now))
    return Session(
        id=SessionId(session_id), title=title, adapter=adapter, created_at=now, updated_at=now, turns=[]
    )


def get(conn: sqlite3.Connection, owner: str, session_id: str) -> Session:
    return _session(conn, _live(conn, owner, session_id))


_SUMMARY = """SELECT s.id, s.title, s.adapter, s.created_at, s.updated_at, (SELECT count(*) FROM turns t WHERE t.session = s.row)
    FROM sessions s WHERE s.owner = ? AND s.deleted_at IS NULL"""
_BY_INDEX = """ AND (s.row IN (SELECT rowid FROM session_titles WHERE session_titles MATCH ?)
    OR s.row IN (SELECT session FROM turns WHERE seq IN (SELECT rowid FROM turn_texts WHERE turn_texts MATCH ?)))"""
_BY_READING = r""" AND (s.title LIKE ? ESCAPE '\' OR EXISTS (SELECT 1 FROM turns t WHERE t.session = s.row AND t.status <> 'running'
    AND (t.content LIKE ? ESCAPE '\' OR t.answer LIKE ? ESCAPE '\')))"""


def _summary(columns: tuple[Any, ...]) -> SessionSummary:
    session_id, title, adapter, created_at, updated_at, num_turns = columns
    return SessionSummary(
        id=session_id,
        title=title,
        adapter=adapter,
        created_at=created_at,
        updated_at=updated_at,
        num_turns=num_turns,
    )


def list_sessions(
    conn: sqlite3.Connection, owner: str, q: str, limit: int, cursor: tuple[float, str] | None
) -> tuple[list[SessionSummary], str | None]:
    sql = _SUMMARY
    args: list[Any] = [owner]
    if q:
        condition, values = _search(conn, q)
        sql, args = sql + condition, args + values
    if cursor is not None:
        sql, args = sql + " AND (s.updated_at, s.id) < (?, ?)", [*args, *cursor]
    # One more than asked for tells whether there is a next page.
    rows = conn.execute(sql + " ORDER BY s.updated_at DESC, s.id DESC LIMIT ?", [*args, limit + 1]).fetchall()
    page = [_summary(columns) for columns in rows[:limit]]
    return page, encode_cursor(page[-1].updated_at, page[-1].id) if len(rows) > limit else None


def _search(conn: sqlite3.Connection, q: str) -> tuple[str, list[str]]:
    """The condition that finds `q`, and its arguments. The text is quoted for both query languages, so none of it is an operator."""
    if len(q) >= TRIGRAM_CHARS and has_index(conn):
        return _BY_INDEX, ['"' + q.replace('"', '""') + '"'] * 2
    return _BY_READING, ["%" + re.sub(r"([\\%_])", r"\\\1", q) + "%"] * 3


def patch(
    conn: sqlite3.Connection,
    owner: str,
    session_id: str,
    title: str | None | UnsetType,
    adapter: str | None | UnsetType,
) -> SessionSummary:
    row = _live(conn, owner, session_id)
    new_title = row.title if isinstance(title, UnsetType) else title
    new_adapter = row.adapter if isinstance(adapter, UnsetType) else adapter
    conn.execute(
        "UPDATE sessions SET title = ?, adapter = ? WHERE row = ?", (new_title, new_adapter, row.row)
    )
    return _summary(conn.execute(_SUMMARY + " AND s.id = ?", (owner, session_id)).fetchone())


def delete(conn: sqlite3.Connection, owner: str, session_id: str, now: float) -> None:
    conn.execute(
        "UPDATE sessions SET deleted_at = ? WHERE row = ?", (now, _live(conn, owner, session_id).row)
    )


def restore(conn: sqlite3.Connection, owner: str, session_id: str, now: float) -> Session:
    if is_id(session_id):
        sql = "UPDATE sessions SET deleted_at = NULL WHERE owner = ? AND id = ? AND deleted_at >= ?"
        conn.execute(sql, (owner, session_id, now - RESTORE_WINDOW_S))
    return _session(conn, _live(conn, owner, session_id))


def purge(conn: sqlite3.Connection, now: float) -> int:
    return conn.execute("DELETE FROM sessions WHERE deleted_at < ?", (now - RESTORE_WINDOW_S,)).rowcount


def begin(conn: sqlite3.Connection, owner: str, session_id: str, message: Message) -> BeginResult:
    row = _live(conn, owner, session_id)
    content = clean_text(message.content)
    known = _known(conn, row.row, message.id, content)
    if known is not None and known.status != "failed":
        return BeginResult(turn=known, outcome="existing", title=row.title, history=[], replaced=[])
    _refuse_second(conn, row.row)
    replaced = _drop_later(conn, row.row, message)
    adapter = row.adapter if isinstance(message.adapter, UnsetType) else clean(message.adapter)
    seq = _set_running(conn, row.row, message, content, adapter)
    title = row.title or title_from(content)
    sql = "UPDATE sessions SET title = ?, adapter = ?, updated_at = max(updated_at, ?) WHERE row = ?"
    conn.execute(sql, (title, adapter, message.now, row.row))
    return BeginResult(
        turn=_turn(conn.execute(f"SELECT {_TURN_COLUMNS} FROM turns WHERE seq = ?", (seq,)).fetchone()),
        outcome="new" if known is None else "retried",
        title=title,
        history=[turn for turn in _turns(conn, row.row, before=seq) if turn.is_history],
        replaced=replaced,
        history_token_ids=token_ids_before(conn, row.row, seq),
    )


def _refuse_second(conn: sqlite3.Connection, row: int) -> None:
    if conn.execute("SELECT 1 FROM turns WHERE session = ? AND status = 'running'", (row,)).fetchone():
        raise GatewayError(
            "busy", "Another message of this session is being answered. Wait for it, or stop it."
        )


def _drop_later(conn: sqlite3.Connection, row: int, message: Message) -> list[TurnId]:
    """Delete what an edit replaces; returns the ids of the turns that are gone.

    A turn that failed and is asked again with an `after` goes too: it is about to stand at the end, right behind `after`.
    """
    if isinstance(message.after, UnsetType):
        return []
    if message.after == message.id:
        raise GatewayError("bad_request", "A turn cannot come after itself.", param="after")
    last = -1 if message.after is None else _place(conn, row, message.after, "after")
    gone = "FROM turns WHERE session = ? AND (seq > ? OR id = ?)"
    ids = [found[0] for found in conn.execute(f"SELECT id {gone} ORDER BY seq", (row, last, message.id))]
    conn.execute(f"DELETE {gone}", (row, last, message.id))
    return [turn_id for turn_id in ids if turn_id != message.id]


def _set_running(
    conn: sqlite3.Connection, row: int, message: Message, content: str, adapter: str | None
) -> int:
    """Add the turn, or wipe the failed one that stands there; returns its `seq`."""
    conn.execute(
        """INSERT INTO turns (session, id, content, status, adapter, created_at) VALUES (?, ?, ?, 'running', ?, ?)
           ON CONFLICT (session, id) DO UPDATE SET status = 'running', adapter = excluded.adapter, answer = '', finish_reason = NULL,
           usage = NULL, timings = NULL, token_ids = NULL""",
        (row, message.id, content, adapter, message.now),
    )
    return _place(conn, row, message.id, "id")


def finish(
    conn: sqlite3.Connection,
    owner: str,
    session_id: str,
    turn_id: str,
    end: End,
    token_ids: bytes,
    now: float,
) -> Turn | None:
    sql = """SELECT t.seq, t.status, s.row, s.deleted_at IS NOT NULL FROM turns t JOIN sessions s ON s.row = t.session
        WHERE s.owner = ? AND s.id = ? AND t.id = ?"""
    found = None
    if is_id(session_id) and is_id(turn_id):
        found = conn.execute(sql, (owner, session_id, turn_id)).fetchone()
    if found is None:
        return None
    seq, status, row, is_deleted = found
    if status == "running":
        # Also in a deleted session: after `restore` a turn must not be left running that nobody runs.
        sql = (
            "UPDATE turns SET answer = ?, status = ?, finish_reason = ?, usage = ?, timings = ? WHERE seq = ?"
        )
        conn.execute(sql, (*end._replace(answer=clean_text(end.answer)), seq))
        if token_ids and end.status != "failed":
            store_token_ids(conn, row, seq, token_ids)
        conn.execute("UPDATE sessions SET updated_at = max(updated_at, ?) WHERE row = ?", (now, row))
    if is_deleted:
        return None
    return _turn(conn.execute(f"SELECT {_TURN_COLUMNS} FROM turns WHERE seq = ?", (seq,)).fetchone())


def record(
    conn: sqlite3.Connection,
    owner: str,
    session_id: str,
    message: Message,
    end: End,
    response_id: str | None,
) -> Turn | None:
    row = _find(conn, owner, session_id)
    if row is None:
        return None
    content = clean_text(message.content)
    known = _known(conn, row.row, message.id, content)
    if known is not None:
        return known
    clean_end = end._replace(answer=clean_text(end.answer))
    conn.execute(
        """INSERT INTO turns (session, id, content, adapter, created_at, response_id, answer, status, finish_reason, usage, timings)
           VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (row.row, message.id, content, message.adapter, message.now, response_id, *clean_end),
    )
    sql = "UPDATE sessions SET title = ?, adapter = ?, updated_at = max(updated_at, ?) WHERE row = ?"
    conn.execute(sql, (row.title or title_from(content), message.adapter, message.now, row.row))
    return _known(conn, row.row, message.id, content)


def find_response(conn: sqlite3.Connection, owner: str, response_id: str) -> tuple[SessionId, TurnId] | None:
    sql = """SELECT s.id, t.id FROM turns t JOIN sessions s ON s.row = t.session
        WHERE t.response_id = ? AND s.owner = ? AND s.deleted_at IS NULL ORDER BY t.seq DESC LIMIT 1"""
    found = conn.execute(sql, (clean(response_id), owner)).fetchone()
    return None if found is None else (found[0], found[1])


def find_turn(conn: sqlite3.Connection, owner: str, turn_id: str) -> SessionId | None:
    sql = """SELECT s.id FROM turns t JOIN sessions s ON s.row = t.session
        WHERE t.id = ? AND s.owner = ? AND s.deleted_at IS NULL ORDER BY t.seq DESC LIMIT 1"""
    found = conn.execute(sql, (clean(turn_id), owner)).fetchone()
    return None if found is None else SessionId(found[0])


def outlook(conn: sqlite3.Connection, owner: str, session_id: str) -> Outlook:
    row = _live(conn, owner, session_id)
    history = [turn for turn in _turns(conn, row.row) if turn.is_history]
    return Outlook(history=history, token_ids=token_ids_before(conn, row.row, MAX_SEQ))


def history_until(conn: sqlite3.Connection, owner: str, session_id: str, turn_id: str) -> list[Turn]:
    row = _live(conn, owner, session_id)
    seq = _place(conn, row.row, turn_id, "turn_id")
    return [turn for turn in _turns(conn, row.row, before=seq + 1) if turn.is_history]
