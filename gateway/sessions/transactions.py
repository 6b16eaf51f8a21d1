"""What the methods of SessionStore do, under their names: each function runs on a connection's thread, inside BEGIN and COMMIT."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UnsetType

from gateway.errors import GatewayError
from gateway.sessions import listing, pictures, quota, search, settings, tree
from gateway.sessions.connection import Database
from gateway.sessions.quota import RESTORE_WINDOW_S
from gateway.sessions.records import (
    NO_CHANGES,
    BeginResult,
    End,
    FinishResult,
    NewMessage,
    NextPrompt,
    Origin,
    Session,
    SessionId,
    SessionSummary,
    SettingsPatch,
    StoredPicture,
    StoredResponse,
    Turn,
    TurnCall,
    TurnId,
)
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES, without_zeros
from gateway.sessions.text import clean, clean_text, is_id, title_from
from gateway.sessions.token_ids import drop_token_ids_below, store_token_ids, token_ids_up_to


class Row(NamedTuple):
    """A session that is not deleted."""

    row: int
    id: SessionId
    title: str | None
    adapter: str | None
    created_at: float
    updated_at: float
    owner: search.SearchOwner


# Ids have no spaces (`text.is_id`). The inner SELECT is there for its order, which group_concat keeps.
_VERSIONS = """(SELECT group_concat(id, ' ') FROM (SELECT v.id FROM tree own JOIN tree other ON other.session = own.session
    AND other.parent = own.parent JOIN turns v ON v.seq = other.seq WHERE own.seq = turns.seq ORDER BY v.seq))"""
_PLAIN = "id content answer status adapter finish_reason created_at reasoning".split()
_AS_JSON = {"usage": Any, "timings": Any, "calls": list[TurnCall], "pictures": list[StoredPicture]}
TURN_COLUMNS = f"{', '.join(_PLAIN)}, {_VERSIONS}, usage, timings, calls, {pictures.OF_TURN}"


def turn_from(columns: Sequence[Any]) -> Turn:
    """Return the turn in a row of TURN_COLUMNS."""
    plain, versions, encoded = columns[: len(_PLAIN)], columns[len(_PLAIN)], columns[len(_PLAIN) + 1 :]
    found = dict(zip(_PLAIN, plain, strict=True)) | {"usage": None, "timings": None}
    for (name, kind), text in zip(_AS_JSON.items(), encoded, strict=True):
        if text:
            found[name] = msgspec.json.decode(text, type=kind)
    return Turn(**found, versions=versions.split(" "))


# A person goes on with the session.
_AS_CHAT = "UPDATE sessions SET origin = 'chat' WHERE row = ? AND origin <> 'chat'"


def _session(conn: sqlite3.Connection, row: Row) -> Session:
    turns = _turns_up_to(conn, tree.tip(conn, row.row))
    return Session(
        id=row.id,
        title=row.title,
        adapter=row.adapter,
        created_at=row.created_at,
        updated_at=row.updated_at,
        turns=turns,
        settings=settings.read(conn, row.row),
    )


def _turns_up_to(conn: sqlite3.Connection, last: int) -> list[Turn]:
    """Return the turn `last` and the turns that it follows, oldest first; none for tree.START."""
    sql = f"{tree.PATH} SELECT {TURN_COLUMNS} FROM path JOIN turns USING (seq) ORDER BY seq"
    return [turn_from(columns) for columns in conn.execute(sql, (last,))]


def find(conn: sqlite3.Connection, owner: str, session_id: str) -> Row | None:
    """Return a session; None if it does not exist or was deleted."""
    # No session has an id that `is_id` refuses, and SQLite cannot take some of them.
    if not is_id(session_id):
        return None
    sql = """SELECT s.row, s.id, s.title, s.adapter, s.created_at, s.updated_at, o.row, o.is_indexed FROM sessions s
        JOIN owners o ON o.name = s.owner WHERE s.owner = ? AND s.id = ? AND s.deleted_at IS NULL"""
    columns = conn.execute(sql, (owner, session_id)).fetchone()
    if columns is None:
        return None
    *own, keeper, is_indexed = columns
    return Row._make((*own, search.SearchOwner(keeper, bool(is_indexed))))


def live(conn: sqlite3.Connection, owner: str, session_id: str) -> Row:
    """Return a session that is not deleted.

    Raises:
        GatewayError: `not_found`.
    """
    row = find(conn, owner, session_id)
    if row is None:
        raise GatewayError("not_found", "There is no such session.", param="session_id")
    return row


def place_of(conn: sqlite3.Connection, row: int, turn_id: str, param: str) -> int:
    """Return the `seq` of a turn. Raises GatewayError `not_found`."""
    found = None
    if is_id(turn_id):
        found = conn.execute("SELECT seq FROM turns WHERE session = ? AND id = ?", (row, turn_id)).fetchone()
    if found is None:
        raise GatewayError("not_found", "There is no such turn in this session.", param=param)
    return int(found[0])


def _known(conn: sqlite3.Connection, row: int, message: NewMessage) -> Turn | None:
    """Return the turn that has a message's id already, if any. Raises GatewayError `conflict` if its content differs."""
    columns = conn.execute(
        f"SELECT {TURN_COLUMNS} FROM turns WHERE session = ? AND id = ?", (row, message.id)
    ).fetchone()
    if columns is None:
        return None
    turn = turn_from(columns)
    if not turn.is_of(clean_text(message.content), message.pictures):
        raise GatewayError("conflict", "This id was used for a message with another content.", param="id")
    return turn


def create(
    conn: Database,
    owner: str,
    session_id: str,
    title: str | None,
    adapter: str | None,
    exist_ok: bool,
    wanted: SettingsPatch,
    now: float,
    origin: Origin = "chat",
) -> Session:
    """Make a session; see `SessionStore.create_session`. origin: `api` for a session that a call of an API makes."""
    # A deleted session that can no longer be restored gives up its id until the purge: no client can ask for an id with a space.
    sql = "UPDATE sessions SET id = id || ' ' || row WHERE owner = ? AND id = ? AND deleted_at < ?"
    conn.execute(sql, (owner, session_id, now - RESTORE_WINDOW_S))
    sql = "SELECT deleted_at IS NOT NULL FROM sessions WHERE owner = ? AND id = ?"
    taken = conn.execute(sql, (owner, session_id)).fetchone()
    if taken is not None:
        if exist_ok and not taken[0]:
            return _session(conn, live(conn, owner, session_id))
        advice = "was deleted a moment ago: restore it, or wait 30 s" if taken[0] else "exists already"
        raise GatewayError("conflict", f"A session of this id {advice}.", param="session_id")
    quota.check(conn, owner, SESSION_BYTES, now)
    keeper = search.make_owner(conn, owner)
    sql = "INSERT INTO sessions (owner, id, title, adapter, created_at, updated_at, origin) VALUES (?, ?, ?, ?, ?, ?, ?)"
    row = conn.execute(sql, (owner, session_id, title, adapter, now, now, origin)).lastrowid
    assert row is not None
    search.add_title(conn, keeper, row, title)
    settings.change(conn, owner, row, wanted, now)
    return _session(conn, live(conn, owner, session_id))


def get(conn: sqlite3.Connection, owner: str, session_id: str) -> Session:
    """Return a session; see `SessionStore.get_session`."""
    return _session(conn, live(conn, owner, session_id))


def patch(
    conn: Database,
    owner: str,
    session_id: str,
    title: str | None | UnsetType,
    adapter: str | None | UnsetType,
    is_pinned: bool | UnsetType,
    folder: str | None | UnsetType,
    wanted: SettingsPatch,
    now: float,
) -> SessionSummary:
    """Change the given fields of a session; see `SessionStore.patch`."""
    row = live(conn, owner, session_id)
    settings.change(conn, owner, row.row, wanted, now)
    new_title = row.title if isinstance(title, UnsetType) else title
    new_adapter = row.adapter if isinstance(adapter, UnsetType) else adapter
    conn.execute("UPDATE sessions SET adapter = ? WHERE row = ?", (new_adapter, row.row))
    if not isinstance(is_pinned, UnsetType):
        listing.pin(conn, owner, row.row, now if is_pinned else None)
    if not isinstance(folder, UnsetType):
        listing.put_into(conn, owner, row.row, folder)
    _set_title(conn, row, new_title)
    summary = listing.summary_of(conn, owner, session_id)
    assert summary is not None, "it was there when this transaction began"
    return summary


def retitle(conn: sqlite3.Connection, owner: str, session_id: str, was: str, title: str) -> bool:
    """Replace a title; see `SessionStore.retitle`."""
    row = find(conn, owner, session_id)
    if row is None or row.title != was:
        return False
    _set_title(conn, row, title)
    return True


def _set_title(conn: sqlite3.Connection, row: Row, title: str | None) -> None:
    if title != row.title:
        search.drop_title(conn, row.owner, row.row, row.title)
        conn.execute("UPDATE sessions SET title = ? WHERE row = ?", (title, row.row))
        search.add_title(conn, row.owner, row.row, title)


def delete(conn: sqlite3.Connection, owner: str, session_id: str, now: float) -> None:
    """Hide a session; see `SessionStore.delete`."""
    conn.execute("UPDATE sessions SET deleted_at = ? WHERE row = ?", (now, live(conn, owner, session_id).row))


def restore(conn: sqlite3.Connection, owner: str, session_id: str, now: float) -> Session:
    """Bring a deleted session back; see `SessionStore.restore`."""
    if is_id(session_id):
        sql = "UPDATE sessions SET deleted_at = NULL WHERE owner = ? AND id = ? AND deleted_at >= ?"
        conn.execute(sql, (owner, session_id, now - RESTORE_WINDOW_S))
    return _session(conn, live(conn, owner, session_id))


# Chosen: what one transaction of a purge removes, so that messages do not wait for it and a nearly full disk holds its log.
PURGE_BYTES: Final = 1 << 20
_GONE = """SELECT s.row, s.title, s.num_bytes, o.row, o.is_indexed FROM owners o JOIN sessions s ON s.owner = o.name
    WHERE s.deleted_at IS NOT NULL AND s.deleted_at < ? LIMIT 1000"""


def purge_some(conn: sqlite3.Connection, now: float) -> tuple[int, bool]:
    """Remove some of the sessions that can no longer be restored.

    A session whose deletion lies in the future, because the clock was put back since, would stay until the clock is there again: its restore
    window begins anew.

    Returns:
        The number of sessions removed, and whether there is more to do.
    """
    conn.execute("UPDATE sessions SET deleted_at = ? WHERE deleted_at > ?", (now, now))
    num_gone, left_bytes = 0, PURGE_BYTES
    found = conn.execute(_GONE, (now - RESTORE_WINDOW_S,)).fetchall()
    for row, title, num_bytes, owner, is_indexed in found:
        keeper = search.SearchOwner(owner, bool(is_indexed))
        if num_bytes > left_bytes and (num_gone or _erase_turns(conn, keeper, row, left_bytes)):
            return num_gone, True
        _erase(conn, keeper, row, title)
        num_gone += 1
        left_bytes -= num_bytes
    return num_gone, bool(found)


def purge_barely(conn: sqlite3.Connection, now: float) -> tuple[int, bool]:
    """Purge where even `purge_some` finds no room: without zeros over freed pages, and dropping the index instead of updating it.

    Both would write about as much as is removed. This way a purge writes a few pages, however long the texts are.
    """
    with without_zeros(conn):
        owners = {(row[3], row[4]) for row in conn.execute(_GONE, (now - RESTORE_WINDOW_S,))}
        for owner, is_indexed in owners:
            if is_indexed:
                search.forget(conn, owner)
        return purge_some(conn, now)


def _erase_turns(conn: sqlite3.Connection, owner: search.SearchOwner, row: int, max_bytes: int) -> bool:
    """Remove the first turns of a session, one at least, and return whether more are left. The session cannot be restored from then on."""
    conn.execute("UPDATE sessions SET deleted_at = 0 WHERE row = ?", (row,))
    sql = "SELECT seq, length(content) + length(answer) FROM turns WHERE session = ? ORDER BY seq LIMIT 1001"
    last, num_bytes = -1, 0
    for seq, num_chars in conn.execute(sql, (row,)):
        if last >= 0 and num_bytes + num_chars > max_bytes:
            break
        last, num_bytes = seq, num_bytes + num_chars
    gone, args = "session = ? AND seq <= ?", (row, last)
    search.drop_turns(conn, owner, gone, args)
    conn.execute(f"DELETE FROM turns WHERE {gone}", args)
    return conn.execute("SELECT 1 FROM turns WHERE session = ?", (row,)).fetchone() is not None


def _erase(conn: sqlite3.Connection, owner: search.SearchOwner, row: int, title: str | None) -> None:
    """Remove a session. Its turns go first, for what follows them (names, index) is found through it."""
    search.drop_turns(conn, owner, "session = ?", (row,))
    search.drop_title(conn, owner, row, title)
    conn.execute("DELETE FROM turns WHERE session = ?", (row,))
    conn.execute("DELETE FROM sessions WHERE row = ?", (row,))


def begin(conn: Database, owner: str, session_id: str, message: NewMessage) -> BeginResult:
    """Store a message before it is answered; see `SessionStore.begin_turn`."""
    row = live(conn, owner, session_id)
    content = clean_text(message.content)
    known = _known(conn, row.row, message)
    if known is not None and known.status != "failed":
        if message.continues and known.can_go_on:
            quota.check(conn, owner, 0, message.now)
            return _go_on(conn, row, known)
        return BeginResult(turn=known, outcome="existing", title=row.title, history=[])
    _refuse_second(conn, row.row)
    parent = _parent(conn, row.row, message, is_known=known is not None)
    added_bytes = TURN_BYTES + quota.size_of(content) if known is None else 0
    quota.check(conn, owner, added_bytes, message.now)
    adapter = row.adapter if isinstance(message.adapter, UnsetType) else clean(message.adapter)
    seq = _set_running(conn, row, message, content, adapter)
    if known is None:
        pictures.attach(conn, owner, seq, message.pictures)
        tree.add(conn, row.row, seq, parent)
    else:
        tree.choose(conn, row.row, seq)
    title = _title_of(row, message)
    _touch(conn, row, title, adapter, message.now)
    conn.execute(_AS_CHAT, (row.row,))
    return BeginResult(
        turn=turn_from(conn.execute(f"SELECT {TURN_COLUMNS} FROM turns WHERE seq = ?", (seq,)).fetchone()),
        outcome="new" if known is None else "retried",
        title=title,
        history=[turn for turn in _turns_up_to(conn, parent) if turn.is_history],
        history_token_ids=token_ids_up_to(conn, parent),
        settings=settings.read(conn, row.row),
    )


def _go_on(conn: Database, row: Row, turn: Turn) -> BeginResult:
    """Let the last turn shown run again with the answer that it has. Raises GatewayError `bad_request` for an earlier turn."""
    _refuse_second(conn, row.row)
    seq = place_of(conn, row.row, turn.id, "id")
    if seq != tree.tip(conn, row.row):
        raise GatewayError("bad_request", "Only the last answer of a session can go on.", param="continues")
    search.drop_turns(conn, row.owner, "seq = ?", (seq,))
    conn.execute("UPDATE turns SET status = 'running' WHERE seq = ?", (seq,))
    conn.execute(_AS_CHAT, (row.row,))
    parent = tree.parent_of(conn, seq)
    (has_ids,) = conn.execute("SELECT token_ids IS NOT NULL FROM turns WHERE seq = ?", (seq,)).fetchone()
    return BeginResult(
        turn=turn,
        outcome="continued",
        title=row.title,
        history=[each for each in _turns_up_to(conn, parent) if each.is_history],
        history_token_ids=token_ids_up_to(conn, parent),
        answer_token_ids=token_ids_up_to(conn, seq) if has_ids else b"",
        settings=settings.read(conn, row.row),
    )


def _title_of(row: Row, message: NewMessage) -> str | None:
    """Return a session's title, or one made from its new message."""
    made = title_from(clean_text(message.content))
    return row.title or made or ("Picture" if message.pictures else None)


def _touch(conn: sqlite3.Connection, row: Row, title: str | None, adapter: str | None, now: float) -> None:
    """Update the session of a new turn: its adapter, its time and its title."""
    sql = "UPDATE sessions SET adapter = ?, updated_at = max(updated_at, ?) WHERE row = ?"
    conn.execute(sql, (adapter, now, row.row))
    _set_title(conn, row, title)


def _refuse_second(conn: sqlite3.Connection, row: int) -> None:
    if _is_answering(conn, row):
        raise GatewayError(
            "busy", "Another message of this session is being answered. Wait for it, or stop it."
        )


def _parent(conn: sqlite3.Connection, row: int, message: NewMessage, *, is_known: bool) -> int:
    """Return the `seq` of the turn that a message follows.

    Args:
        conn: the writer's connection.
        row: of the session.
        message: the message to store.
        is_known: the message failed before, so it has its place in the tree.

    Raises:
        GatewayError: `bad_request`, `not_found`, `conflict`.
    """
    parent = tree.parent_of(conn, place_of(conn, row, message.id, "id")) if is_known else None
    if isinstance(message.after, UnsetType):
        return tree.tip(conn, row) if parent is None else parent
    if message.after == message.id:
        raise GatewayError("bad_request", "A turn cannot come after itself.", param="after")
    after = tree.START if message.after is None else place_of(conn, row, message.after, "after")
    if parent not in (None, after):
        raise GatewayError(
            "conflict", "This id belongs to a message that follows another turn: use a new id.", param="after"
        )
    return after


def _cleaned(end: End) -> End:
    return end._replace(answer=clean_text(end.answer), reasoning=clean_text(end.reasoning))


def _set_running(
    conn: sqlite3.Connection, row: Row, message: NewMessage, content: str, adapter: str | None
) -> int:
    """Add the turn, or reset the failed turn that has its id; return its `seq`."""
    search.drop_turns(conn, row.owner, "session = ? AND id = ?", (row.row, message.id))
    conn.execute(
        """INSERT INTO turns (session, id, content, status, adapter, created_at) VALUES (?, ?, ?, 'running', ?, ?)
           ON CONFLICT (session, id) DO UPDATE SET status = 'running', adapter = excluded.adapter, answer = '', reasoning = '', finish_reason = NULL,
           usage = NULL, timings = NULL, token_ids = NULL, calls = NULL""",
        (row.row, message.id, content, adapter, message.now),
    )
    return place_of(conn, row.row, message.id, "id")


def finish(
    conn: sqlite3.Connection,
    owner: str,
    session_id: str,
    turn_id: str,
    end: End,
    token_ids: bytes,
    home: str,
    now: float,
) -> FinishResult | None:
    """Store how a running turn ended; see `SessionStore.finish_turn`."""
    sql = """SELECT t.seq, t.status, s.row, s.title, s.deleted_at IS NOT NULL, o.row, o.is_indexed FROM turns t JOIN sessions s ON s.row = t.session
        JOIN owners o ON o.name = s.owner WHERE s.owner = ? AND s.id = ? AND t.id = ?"""
    found = None
    if is_id(session_id) and is_id(turn_id):
        found = conn.execute(sql, (owner, session_id, turn_id)).fetchone()
    if found is None:
        return None
    seq, status, row, title, is_deleted, keeper, is_indexed = found
    if status == "running":
        # In a deleted session, too: a turn must not be `running` after `restore` when nothing answers it.
        # The ids of an answer that went on are those of its earlier part.
        sql = """UPDATE turns SET answer = ?1, status = ?2, finish_reason = ?3, usage = ?4, timings = ?5, reasoning = ?6,
            calls = ?7, token_ids = CASE answer WHEN ?1 THEN token_ids END WHERE seq = ?8"""
        conn.execute(sql, (*_cleaned(end), seq))
        if token_ids and end.status != "failed" and not settings.is_outdated(conn, row, seq):
            store_token_ids(conn, row, seq, token_ids)
        search.add_turns(conn, search.SearchOwner(keeper, bool(is_indexed)), "seq = ?", (seq,))
        sql = "UPDATE sessions SET updated_at = max(updated_at, ?), home = ifnull(?, home) WHERE row = ?"
        conn.execute(sql, (now, home or None, row))
    if is_deleted:
        return None
    turn = turn_from(conn.execute(f"SELECT {TURN_COLUMNS} FROM turns WHERE seq = ?", (seq,)).fetchone())
    return FinishResult(turn, title)


def record(
    conn: Database,
    owner: str,
    session_id: str,
    message: NewMessage,
    end: End,
    token_ids: bytes,
    response_id: str | None,
    response: StoredResponse | None,
    previous: str | None,
    is_version: bool,
    makes_session: bool,
) -> Turn | None:
    """Store a turn that is over already; see `SessionStore.record_turn`."""
    if makes_session:
        create(conn, owner, session_id, None, None, True, NO_CHANGES, message.now, "api")
    row = find(conn, owner, session_id)
    if row is None:
        return None
    content = clean_text(message.content)
    known = _known(conn, row.row, message)
    if known is not None:
        return known
    clean_end = _cleaned(end)
    added_bytes = TURN_BYTES + quota.size_of(content) + quota.size_of(clean_end.answer)
    if response is not None:
        added_bytes += len(response.reply) + len(response.items)
    quota.check(conn, owner, added_bytes, message.now)
    parent = _parent_of_call(conn, owner, row, previous)
    if is_version and parent != tree.START:
        # A person's message that is being answered stays in sight, whatever it says.
        sql = "SELECT content = ? AND status <> 'running' FROM turns WHERE seq = ?"
        (is_same,) = conn.execute(sql, (content, parent)).fetchone()
        parent = tree.parent_of(conn, parent) if is_same else parent
    conn.execute(
        """INSERT INTO turns (session, id, content, adapter, created_at, response_id, answer, status, finish_reason, usage, timings)
           VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (row.row, message.id, content, message.adapter, message.now, response_id, *clean_end[:5]),
    )
    seq = place_of(conn, row.row, message.id, "id")
    pictures.attach(conn, owner, seq, message.pictures)
    tree.add(conn, row.row, seq, parent)
    if token_ids:
        store_token_ids(conn, row.row, seq, token_ids)
    if response is not None:
        added = (seq, row.row, response.reply, response.items, response.previous)
        conn.execute(
            "INSERT INTO responses (seq, session, reply, items, previous) VALUES (?, ?, ?, ?, ?)", added
        )
    search.add_turns(conn, row.owner, "session = ? AND id = ?", (row.row, message.id))
    adapter = row.adapter if isinstance(message.adapter, UnsetType) else message.adapter
    _touch(conn, row, _title_of(row, message), adapter, message.now)
    return _known(conn, row.row, message)


def _parent_of_call(conn: sqlite3.Connection, owner: str, row: Row, previous: str | None) -> int:
    """Return the `seq` of the turn that an API call follows: the turn of its previous response in this session, else the last one shown."""
    found = None if previous is None else find_response(conn, owner, previous)
    if found is None or found[0] != row.id:
        return tree.tip(conn, row.row)
    return place_of(conn, row.row, found[1], "previous_response_id")


def choose(conn: sqlite3.Connection, owner: str, session_id: str, turn_id: str) -> Session:
    """Show another version of a message; see `SessionStore.choose_version`."""
    row = live(conn, owner, session_id)
    seq = place_of(conn, row.row, turn_id, "turn_id")
    _refuse_second(conn, row.row)
    tree.choose(conn, row.row, seq)
    return _session(conn, row)


def discard(conn: sqlite3.Connection, owner: str, session_id: str, turn_id: str) -> Session:
    """Remove a failed turn; see `SessionStore.discard_turn`."""
    row = live(conn, owner, session_id)
    seq = place_of(conn, row.row, turn_id, "turn_id")
    (status,) = conn.execute("SELECT status FROM turns WHERE seq = ?", (seq,)).fetchone()
    if status != "failed":
        raise GatewayError(
            "conflict", "Only a message whose answer failed can be dismissed.", param="turn_id"
        )
    search.drop_turns(conn, row.owner, "seq = ?", (seq,))
    drop_token_ids_below(conn, seq)
    tree.remove(conn, row.row, seq)
    conn.execute("DELETE FROM turns WHERE seq = ?", (seq,))
    return _session(conn, row)


def homes(conn: sqlite3.Connection, limit: int) -> list[tuple[str, SessionId, str]]:
    """Return the nodes of the latest sessions; see `SessionStore.homes`."""
    sql = """SELECT owner, id, home FROM sessions WHERE home IS NOT NULL AND deleted_at IS NULL ORDER BY updated_at DESC LIMIT ?"""
    return conn.execute(sql, (limit,)).fetchall()[::-1]


_FIND_NAME = """SELECT s.id, t.id FROM turn_names n JOIN turns t ON t.seq = n.seq JOIN sessions s ON s.row = t.session
    WHERE n.owner = (SELECT row FROM owners WHERE name = ?) AND n.is_response = ? AND n.name = ? AND s.deleted_at IS NULL
    ORDER BY n.seq DESC LIMIT 1"""


def find_response(conn: sqlite3.Connection, owner: str, response_id: str) -> tuple[SessionId, TurnId] | None:
    """Find a turn by its response's id; see `StoredResponses.find`."""
    found = conn.execute(_FIND_NAME, (owner, 1, clean(response_id))).fetchone()
    return None if found is None else (found[0], found[1])


def find_turn(conn: sqlite3.Connection, owner: str, turn_id: str) -> SessionId | None:
    """Find the session of a turn; see `SessionStore.find_turn`."""
    found = conn.execute(_FIND_NAME, (owner, 0, clean(turn_id))).fetchone()
    return None if found is None else SessionId(found[0])


def token_ids(conn: sqlite3.Connection, owner: str, session_id: str) -> bytes:
    """Return a session's token ids; see `SessionStore.token_ids`."""
    row = find(conn, owner, session_id)
    return token_ids_up_to(conn, tree.tip(conn, row.row)) if row is not None else b""


def outlook(conn: sqlite3.Connection, owner: str, session_id: str) -> NextPrompt:
    """Return what the next prompt begins with; see `SessionStore.outlook`."""
    row = live(conn, owner, session_id)
    last = tree.tip(conn, row.row)
    history = [turn for turn in _turns_up_to(conn, last) if turn.is_history]
    return NextPrompt(
        history=history,
        token_ids=token_ids_up_to(conn, last),
        is_answering=_is_answering(conn, row.row),
        settings=settings.read(conn, row.row),
    )


def _is_answering(conn: sqlite3.Connection, row: int) -> bool:
    sql = "SELECT 1 FROM turns WHERE session = ? AND status = 'running'"
    return conn.execute(sql, (row,)).fetchone() is not None
