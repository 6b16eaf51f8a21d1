"""A conversation's own settings: a system prompt, and how its answers are sampled. A session without any has no row here."""

from __future__ import annotations

import sqlite3

import msgspec
from msgspec import UNSET, structs

from gateway.sessions import quota
from gateway.sessions.connection import Database
from gateway.sessions.records import SessionSettings, SettingsPatch
from gateway.sessions.text import clean


def read(conn: sqlite3.Connection, session: int) -> SessionSettings:
    """Return the settings of the session of that row."""
    sql = "SELECT system_prompt, temperature, max_tokens, top_p, stop, seed FROM session_settings WHERE session = ?"
    found = conn.execute(sql, (session,)).fetchone()
    if found is None:
        return SessionSettings()
    prompt, temperature, max_tokens, top_p, stop, seed = found
    return SessionSettings(
        system_prompt=prompt,
        temperature=temperature,
        max_tokens=max_tokens,
        top_p=top_p,
        stop=None if stop is None else msgspec.json.decode(stop, type=list[str]),
        seed=seed,
    )


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
    if "stop" in changes:
        changes["stop"] = changes["stop"] or None
    after = structs.replace(before, **changes)
    if after == before:
        return
    added_bytes = quota.size_of(after.system_prompt or "") - quota.size_of(before.system_prompt or "")
    if added_bytes > 0:
        quota.check(conn, owner, added_bytes, now)
    conn.execute(
        """INSERT INTO session_settings (session, system_prompt, temperature, max_tokens, top_p, stop, seed) VALUES (?, ?, ?, ?, ?, ?, ?)
           ON CONFLICT (session) DO UPDATE SET system_prompt = excluded.system_prompt, temperature = excluded.temperature,
           max_tokens = excluded.max_tokens, top_p = excluded.top_p, stop = excluded.stop, seed = excluded.seed""",
        (
            *(session, after.system_prompt, after.temperature, after.max_tokens, after.top_p),
            *(None if after.stop is None else msgspec.json.encode(after.stop).decode(), after.seed),
        ),
    )
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
