"""A conversation's own settings: a system prompt, and how its answers are sampled. A session without any has no row here."""

from __future__ import annotations

import sqlite3

import msgspec
from msgspec import UNSET, structs

from gateway.sessions import quota
from gateway.sessions.connection import Database
from gateway.sessions.records import SessionSettings, SettingsPatch
from gateway.sessions.text import clean, encoded

_COLUMNS = SessionSettings.__struct_fields__
# Lists of strings are kept as JSON; an empty one is as good as none.
_LISTS = ("stop", "tools", "allowed_tools")
_STORE = f"""INSERT INTO session_settings (session, {", ".join(_COLUMNS)}) VALUES (?{", ?" * len(_COLUMNS)})
    ON CONFLICT (session) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)}"""


def read(conn: sqlite3.Connection, session: int) -> SessionSettings:
    """Return the settings of the session of that row."""
    sql = f"SELECT {', '.join(_COLUMNS)} FROM session_settings WHERE session = ?"
    found = conn.execute(sql, (session,)).fetchone()
    if found is None:
        return SessionSettings()
    stored = dict(zip(_COLUMNS, found, strict=True))
    lists = {
        name: msgspec.json.decode(stored[name], type=list[str]) for name in _LISTS if stored[name] is not None
    }
    return SessionSettings(**stored | lists)


def change(conn: Database, owner: str, session: int, patch: SettingsPatch, now: float) -> None:
    """Store what `patch` changes. A blank system prompt counts as none.

    Every prompt of the session begins with its system prompt. When that changes, the stored token ids spell prompts that will not be sent again,
    so they are removed; those of a turn that runs now are not stored when it ends (see `is_outdated`).

    Raises:
        GatewayError: `quota_exceeded`.
    """
    before = read(conn, session)
    changes = {name: value for name, value in structs.asdict(patch).items() if value is not UNSET}
    if "system_prompt" in changes:
        text = clean(changes["system_prompt"]) or ""
        changes["system_prompt"] = text if text.strip() else None
    for name in changes.keys() & set(_LISTS):
        changes[name] = changes[name] or None
    after = structs.replace(before, **changes)
    if after == before:
        return
    added_bytes = quota.size_of(after.system_prompt or "") - quota.size_of(before.system_prompt or "")
    if added_bytes > 0:
        quota.check(conn, owner, added_bytes, now)
    stored = structs.asdict(after)
    stored |= {name: encoded(stored[name]) for name in _LISTS}
    conn.execute(_STORE, (session, *stored.values()))
    if after.system_prompt != before.system_prompt:
        conn.execute("UPDATE turns SET token_ids = NULL WHERE session = ?", (session,))
        conn.execute(
            """UPDATE session_settings SET outdated_seq = (SELECT seq FROM turns WHERE session = ?1 AND status = 'running')
               WHERE session = ?1""",
            (session,),
        )


def is_outdated(conn: sqlite3.Connection, session: int, seq: int) -> bool:
    """Return whether the system prompt was changed while the turn at `seq` ran, so that its token ids are of no use to the next turn."""
    sql = "SELECT 1 FROM session_settings WHERE session = ? AND outdated_seq = ?"
    return conn.execute(sql, (session, seq)).fetchone() is not None
