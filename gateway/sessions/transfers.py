"""Export and import of whole conversations: transactions of the session store."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from engine_bridge.adapters.errors import quoted
from engine_bridge.adapters.names import problem_of
from engine_bridge.protocol.engine_request import Picture
from gateway.sessions import pictures, quota, search, settings, transactions, tree
from gateway.sessions.archive import Archive, ArchivedPicture, ArchivedTurn
from gateway.sessions.connection import Database
from gateway.sessions.records import Session, SettingsPatch, StoredPicture
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES
from gateway.sessions.text import checked_title, clean, clean_text, encoded, title_from

_ALL_TURNS = """SELECT t.seq, x.parent, x.is_chosen, t.id, t.content, t.answer, t.reasoning, t.status, t.adapter, t.finish_reason, t.usage,
    t.timings, t.created_at, t.calls FROM turns t JOIN tree x USING (seq) WHERE t.session = ? ORDER BY t.seq"""


def export(conn: sqlite3.Connection, owner: str, session_id: str) -> Archive:
    """Return all of a session, every version of its messages included. Raises GatewayError `not_found`."""
    row = transactions.live(conn, owner, session_id)
    names: dict[int, str] = {}
    turns = []
    for seq, parent, is_chosen, *columns in conn.execute(_ALL_TURNS, (row.row,)):
        turns.append(_archived(names.get(parent), bool(is_chosen), columns, pictures.of_turn(conn, seq)))
        names[seq] = columns[0]
    wanted = msgspec.structs.asdict(settings.read(conn, row.row))
    return Archive(
        title=row.title,
        adapter=_named(row.adapter),
        created_at=row.created_at,
        updated_at=row.updated_at,
        settings=SettingsPatch(**{name: value for name, value in wanted.items() if value is not None}),
        turns=turns,
    )


def _named(adapter: str | None) -> str | None:
    """Return an adapter's name as an archive takes it: names that are no longer allowed stand quoted in old conversations."""
    if adapter is None or not problem_of(adapter):
        return adapter
    return quoted(adapter)


def _archived(parent: str | None, is_chosen: bool, columns: list[Any], shown: list[Picture]) -> ArchivedTurn:
    turn_id, content, answer, reasoning, status, adapter, finish_reason, usage, timings, at, calls = columns
    return msgspec.convert(
        {
            "id": turn_id,
            "parent": parent,
            "is_chosen": is_chosen,
            "content": content,
            "answer": answer,
            "reasoning": reasoning,
            # Nothing is stored yet of an answer that is being written.
            "status": "stopped" if status == "running" else status,
            "adapter": _named(adapter),
            "finish_reason": finish_reason,
            "usage": None if usage is None else msgspec.json.decode(usage),
            "timings": None if timings is None else msgspec.json.decode(timings),
            "created_at": at,
            "calls": [] if calls is None else msgspec.json.decode(calls),
            "pictures": [ArchivedPicture(each.media_type, each.data) for each in shown],
        },
        ArchivedTurn,
    )


def bring_in(
    conn: Database,
    owner: str,
    archive: Archive,
    described: Sequence[Sequence[StoredPicture]],
    adapters: frozenset[str],
    now: float,
) -> Session:
    """Store a checked archive as a new session under new ids, in one transaction.

    Args:
        conn: the writer's connection.
        owner: whose session it will be.
        archive: as `read_archive` returned it.
        described: of each of its turns, what `pictures.describe` says of its pictures.
        adapters: names of the adapters that this server has; other names in the archive are left out.
        now: seconds since the epoch.

    Raises:
        GatewayError: `quota_exceeded`; `bad_request` for a title that is too long.
    """
    quota.check(conn, owner, _num_bytes(archive), now)
    session_id = uuid.uuid4().hex
    first = archive.turns[0].content if archive.turns else ""
    title = checked_title(archive.title) or title_from(clean_text(first))
    adapter = archive.adapter if archive.adapter in adapters else None
    # Whoever wrote the file has no say in which tools this person's conversations use.
    wanted = msgspec.structs.replace(archive.settings, tools=msgspec.UNSET, allowed_tools=msgspec.UNSET)
    transactions.create(conn, owner, session_id, title, adapter, False, wanted, now)
    row = transactions.live(conn, owner, session_id)
    conn.execute(
        "UPDATE sessions SET created_at = ? WHERE row = ?", (_past(archive.created_at, now), row.row)
    )
    places: dict[str | None, int] = {None: tree.START}
    for turn, shown in zip(archive.turns, described, strict=True):
        seq = places[turn.id] = _add(conn, row.row, turn, places[turn.parent], now)
        for picture, whole in zip(shown, turn.pictures, strict=True):
            pictures.put(conn, owner, picture, whole.data, now)
        pictures.attach(conn, owner, seq, [picture.id for picture in shown])
    search.add_turns(conn, row.owner, "session = ?", (row.row,))
    return transactions.get(conn, owner, session_id)


def _add(conn: sqlite3.Connection, session: int, turn: ArchivedTurn, parent: int, now: float) -> int:
    sql = """INSERT INTO turns (session, id, content, answer, status, adapter, finish_reason, usage, timings, created_at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
    columns = (
        session,
        uuid.uuid4().hex,
        clean_text(turn.content),
        clean_text(turn.answer),
        turn.status,
        turn.adapter if turn.adapter and not problem_of(turn.adapter) else None,
        clean(turn.finish_reason),
        encoded(None if turn.usage is None else msgspec.to_builtins(turn.usage)),
        encoded(None if turn.timings is None else msgspec.to_builtins(turn.timings)),
        _past(turn.created_at, now),
    )
    seq = conn.execute(sql, columns).lastrowid
    assert seq is not None
    if turn.reasoning:  # A separate UPDATE, because the trigger that counts its bytes runs on updates.
        conn.execute("UPDATE turns SET reasoning = ? WHERE seq = ?", (clean_text(turn.reasoning), seq))
    if turn.calls:  # likewise
        conn.execute("UPDATE turns SET calls = ? WHERE seq = ?", (encoded(turn.calls), seq))
    sql = "INSERT INTO tree (seq, session, parent, is_chosen) VALUES (?, ?, ?, ?)"
    conn.execute(sql, (seq, session, parent, turn.is_chosen))
    return seq


def _num_bytes(archive: Archive) -> int:
    texts = sum(
        quota.size_of(clean_text(text))
        for turn in archive.turns
        for text in (turn.content, turn.answer, turn.reasoning, encoded(turn.calls) or "")
    )
    return SESSION_BYTES + TURN_BYTES * len(archive.turns) + texts


def _past(time_s: float, now: float) -> float:
    """Return the time if it lies in the past, else now."""
    return time_s if 0 < time_s <= now else now
