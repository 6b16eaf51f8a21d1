"""Links to shared conversations, and presets: one small SQLite file in the data folder.

It holds a preset's texts, and of a link its token and the conversation's id, but no text of a conversation: the link shows it as it is now, and
nothing once it is deleted. Each call opens the file anew, as calls are rare.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gateway.errors import GatewayError
from gateway.sessions import SettingsPatch
from gateway.sessions.connection import file_error

NAME = "shelf.sqlite3"
MAX_PRESETS = 100  # of one person; chosen: a list that can still be read
TOKEN_BYTES = 18  # chosen: 24 characters in a link; it cannot be guessed
BUSY_TIMEOUT_S = 5.0
_SCHEMA_1 = (
    "CREATE TABLE links (token TEXT PRIMARY KEY, owner TEXT NOT NULL, session_id TEXT NOT NULL, UNIQUE (owner, session_id)) WITHOUT ROWID",
    """CREATE TABLE presets (owner TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, is_shared INTEGER NOT NULL, body TEXT NOT NULL,
        PRIMARY KEY (owner, id)) WITHOUT ROWID""",
)
# Version 2: when the conversation of a link was made, so that a later one of the same id is not read by the link. NULL: made by version 1.
_SCHEMA_2 = ("ALTER TABLE links ADD COLUMN created_at REAL",)
_SCHEMAS = (_SCHEMA_1, _SCHEMA_2)
VERSION = len(_SCHEMAS)


class PresetBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A preset as its maker gives it.

    Attributes:
        name: for people.
        adapter: the model id that new chats take; None: the base model.
        settings: those of new chats.
        is_shared: whether the whole team has it; for operators.
    """

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    adapter: Annotated[str, Meta(max_length=200)] | None = None
    settings: SettingsPatch = SettingsPatch()
    is_shared: bool = False


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A preset as one of its readers sees it. is_own: the reader made it, and may change it."""

    id: str
    name: str
    adapter: str | None
    settings: SettingsPatch
    is_shared: bool
    is_own: bool


class SharedSession(NamedTuple):
    """The conversation behind a link. created_at: when it was made, in seconds since the epoch; None where that is not known."""

    owner: str
    session_id: str
    created_at: float | None


class Shelf:
    """The file. Its methods block: not for the event loop.

    Each raises GatewayError `storage_failed` where the disk or the file fails, `overloaded` where the disk is full, and otherwise only the errors
    that it names.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    # -- links -----------------------------------------------------------------------------------------------------------

    def link(self, owner: str, session_id: str, created_at: float) -> str:
        """Return the token of a conversation's link; one is made where there is none. created_at: when the conversation was made."""
        with self._open() as conn:
            sql = "DELETE FROM links WHERE owner = ? AND session_id = ? AND created_at <> ?"
            conn.execute(sql, (owner, session_id, created_at))
            conn.execute(
                "INSERT OR IGNORE INTO links (token, owner, session_id, created_at) VALUES (?, ?, ?, ?)",
                (secrets.token_urlsafe(TOKEN_BYTES), owner, session_id, created_at),
            )
            sql = "SELECT token FROM links WHERE owner = ? AND session_id = ?"
            return str(conn.execute(sql, (owner, session_id)).fetchone()[0])

    def withdraw(self, owner: str, session_id: str) -> None:
        """End a conversation's link, if it has one."""
        if not self._path.exists():
            return
        with self._open() as conn:
            conn.execute("DELETE FROM links WHERE owner = ? AND session_id = ?", (owner, session_id))

    def links(self) -> list[tuple[str, str]]:
        """Return the owners and ids of the conversations that have a link."""
        if not self._path.exists():
            return []
        with self._open() as conn:
            return conn.execute("SELECT owner, session_id FROM links").fetchall()

    def behind(self, token: str) -> SharedSession:
        """Return the conversation behind a link. Raises GatewayError `not_found`."""
        with self._open() as conn:
            sql = "SELECT owner, session_id, created_at FROM links WHERE token = ?"
            found = conn.execute(sql, (token,)).fetchone()
        if found is None:
            raise GatewayError("not_found", "There is no such link, or it was withdrawn.", param="token")
        return SharedSession(*found)

    # -- presets ---------------------------------------------------------------------------------------------------------

    def presets(self, owner: str) -> list[Preset]:
        """Return a person's own presets and those of the team, by name."""
        sql = "SELECT owner, id, body FROM presets WHERE owner = ? OR is_shared ORDER BY lower(name), id"
        with self._open() as conn:
            rows = conn.execute(sql, (owner,)).fetchall()
        found = []
        for maker, preset_id, text in rows:
            body = msgspec.json.decode(text, type=PresetBody)
            fields = {name: getattr(body, name) for name in PresetBody.__struct_fields__}
            found.append(Preset(id=preset_id, is_own=maker == owner, **fields))
        return found

    def put(self, owner: str, preset_id: str, body: PresetBody) -> None:
        """Store a person's preset, in place of one of that id. Raises GatewayError `quota_exceeded`."""
        with self._open() as conn:
            sql = "SELECT count(*) FROM presets WHERE owner = ? AND id != ?"
            if conn.execute(sql, (owner, preset_id)).fetchone()[0] >= MAX_PRESETS:
                raise GatewayError("quota_exceeded", f"There may be {MAX_PRESETS} presets. Delete one first.")
            conn.execute(
                "INSERT OR REPLACE INTO presets (owner, id, name, is_shared, body) VALUES (?, ?, ?, ?, ?)",
                (owner, preset_id, body.name, body.is_shared, msgspec.json.encode(body).decode()),
            )

    def drop(self, owner: str, preset_id: str) -> None:
        """Delete a person's preset. Raises GatewayError `not_found`."""
        with self._open() as conn:
            found = conn.execute("DELETE FROM presets WHERE owner = ? AND id = ?", (owner, preset_id))
            if found.rowcount == 0:
                raise GatewayError("not_found", "You have no such preset.", param="id")

    def erase(self, owner: str) -> None:
        """Remove all that a person put here."""
        if not self._path.exists():
            return
        with self._open() as conn:
            conn.execute("DELETE FROM links WHERE owner = ?", (owner,))
            conn.execute("DELETE FROM presets WHERE owner = ?", (owner,))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file, which is made for its owner only, for one transaction."""
        try:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            conn = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            with contextlib.closing(conn):
                conn.execute("PRAGMA secure_delete = ON")
                conn.execute("BEGIN IMMEDIATE")
                self._bring_up_to_date(conn)
                yield conn
                conn.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            message = "Links and presets cannot be read or stored now."
            raise file_error("links and presets", error, message) from error

    def _bring_up_to_date(self, conn: sqlite3.Connection) -> None:
        (version,) = conn.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            message = "Links and presets are stored as another version of Overture does it."
            raise GatewayError("storage_failed", message)
        for statement in (each for schema in _SCHEMAS[version:] for each in schema):
            conn.execute(statement)
        if version < VERSION:
            conn.execute(f"PRAGMA user_version = {VERSION}")
