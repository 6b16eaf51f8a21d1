"""What people used on each day, whose the keys are that do not say so, and which browsers are signed in: one small SQLite file in the data folder.

It holds numbers, owner ids, names and hashes, but no text, no key and no cookie. Days are UTC days, written as 2026-11-29.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gateway.errors import StartupError
from gateway.sessions.connection import unusable

NAME = "people.sqlite3"
VERSION = 1
_SCHEMA = (
    """CREATE TABLE usage (
        owner TEXT NOT NULL,
        day TEXT NOT NULL,
        num_requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        answer_tokens INTEGER NOT NULL,
        PRIMARY KEY (owner, day)
    ) WITHOUT ROWID""",
    "CREATE TABLE links (mark TEXT PRIMARY KEY, owner TEXT NOT NULL, expires_s REAL NOT NULL) WITHOUT ROWID",
    """CREATE TABLE browsers (row INTEGER PRIMARY KEY, mark TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, expires_s REAL NOT NULL)""",
    "CREATE TABLE key_owners (mark TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL) WITHOUT ROWID",
)
_ADD = """INSERT INTO usage (owner, day, num_requests, prompt_tokens, answer_tokens) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (owner, day) DO UPDATE SET num_requests = num_requests + excluded.num_requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens, answer_tokens = answer_tokens + excluded.answer_tokens"""
_LEARN = """INSERT INTO key_owners (mark, owner, name) VALUES (?, ?, ?)
    ON CONFLICT (mark) DO UPDATE SET owner = excluded.owner, name = excluded.name"""
BUSY_TIMEOUT_S = 5.0


class Spent(NamedTuple):
    """Requests that were answered, and the tokens of their prompts and answers."""

    num_requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers together, which the limit of a day counts."""
        return self.prompt_tokens + self.answer_tokens

    def plus(self, other: Spent) -> Spent:
        """Return the sum of both."""
        return Spent(*(mine + more for mine, more in zip(self, other, strict=True)))


class Day(NamedTuple):
    """The usage of one person on one day."""

    owner: str
    day: str
    spent: Spent


class Ledger:
    """The open file. Its methods block and may be called from any thread: not from the event loop. Each raises sqlite3.Error."""

    def __init__(self, conn: sqlite3.Connection) -> None:
        self._conn = conn
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Open or make the file, for its owner only. Raises StartupError for a file that is damaged, not ours, or of a newer version."""
        try:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            conn = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            conn.execute("PRAGMA secure_delete = ON").fetchall()
            (version,) = conn.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise StartupError(
                    f"{path} was written by a newer version of Overture. Upgrade Overture, or move the file away."
                )
            if version == 0:
                with _transaction(conn):
                    for statement in _SCHEMA:
                        conn.execute(statement)
                    conn.execute(f"PRAGMA user_version = {VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise unusable("record of usage and sign-ins", path, error) from error
        return cls(conn)

    def add(self, days: list[Day], learned: Mapping[str, tuple[str, str]]) -> None:
        """Add usage, and note the owners of keys. learned: owner and name by `KeyLine.mark`."""
        with self._lock, _transaction(self._conn):
            self._conn.executemany(_ADD, [(owner, day, *spent) for owner, day, spent in days])
            self._conn.executemany(_LEARN, [(mark, *whose) for mark, whose in learned.items()])

    def days(self, since: str, owner: str | None = None) -> list[Day]:
        """Return the usage since that day, of one person or of all, the latest day first."""
        sql = "SELECT owner, day, num_requests, prompt_tokens, answer_tokens FROM usage WHERE day >= ?"
        with self._lock:
            rows = self._conn.execute(
                f"{sql} AND (? IS NULL OR owner = ?) ORDER BY day DESC, owner", (since, owner, owner)
            ).fetchall()
        return [Day(row[0], row[1], Spent(*row[2:])) for row in rows]

    def key_owners(self) -> dict[str, tuple[str, str]]:
        """Return the owner and name of keys whose lines do not name their owner, by `KeyLine.mark`."""
        with self._lock:
            rows = self._conn.execute("SELECT mark, owner, name FROM key_owners").fetchall()
        return {mark: (owner, name) for mark, owner, name in rows}

    def add_link(self, mark: str, owner: str, expires_s: float) -> None:
        """Keep a link by its hash."""
        with self._lock, _transaction(self._conn):
            self._conn.execute("INSERT INTO links VALUES (?, ?, ?)", (mark, owner, expires_s))

    def take_link(self, mark: str, now: float) -> str | None:
        """Remove a link, and return whose it is; None if there is none, or it is too old. Other links that are too old go, too."""
        with self._lock, _transaction(self._conn):
            self._conn.execute("DELETE FROM links WHERE expires_s <= ?", (now,))
            found = self._conn.execute("SELECT owner FROM links WHERE mark = ?", (mark,)).fetchone()
            self._conn.execute("DELETE FROM links WHERE mark = ?", (mark,))
        return None if found is None else str(found[0])

    def add_browser(self, mark: str, owner: str, expires_s: float) -> None:
        """Keep a browser that is signed in by the hash of its cookie."""
        with self._lock, _transaction(self._conn):
            sql = "INSERT INTO browsers (mark, owner, expires_s) VALUES (?, ?, ?)"
            self._conn.execute(sql, (mark, owner, expires_s))

    def browsers(self, now: float) -> list[tuple[str, str, float]]:
        """Return the browsers that are signed in, the oldest first, as (hash, owner, until when). Expired ones are deleted."""
        with self._lock, _transaction(self._conn):
            self._conn.execute("DELETE FROM browsers WHERE expires_s <= ?", (now,))
            return self._conn.execute("SELECT mark, owner, expires_s FROM browsers ORDER BY row").fetchall()

    def drop_browser(self, mark: str) -> None:
        """Forget a browser."""
        with self._lock, _transaction(self._conn):
            self._conn.execute("DELETE FROM browsers WHERE mark = ?", (mark,))

    def drop_old(self, now: float) -> None:
        """Forget the links and browsers whose time is over."""
        with self._lock, _transaction(self._conn):
            self._conn.execute("DELETE FROM links WHERE expires_s <= ?", (now,))
            self._conn.execute("DELETE FROM browsers WHERE expires_s <= ?", (now,))

    def drop_sign_ins(self, owner: str) -> None:
        """Forget the links and browsers of a person."""
        with self._lock, _transaction(self._conn):
            self._conn.execute("DELETE FROM links WHERE owner = ?", (owner,))
            self._conn.execute("DELETE FROM browsers WHERE owner = ?", (owner,))

    def forget(self, owner: str) -> None:
        """Remove all that is known of a person."""
        with self._lock, _transaction(self._conn):
            for table in ("usage", "key_owners", "links", "browsers"):
                self._conn.execute(f"DELETE FROM {table} WHERE owner = ?", (owner,))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._conn.close()


def known_owners(data_dir: Path) -> dict[str, str]:
    """Return the owners of keys whose lines do not name theirs, by `KeyLine.mark`, as a server over this folder has learned them.

    A server may be running. Raises StartupError for a file that cannot be read; without one nothing is known.
    """
    path = data_dir / NAME
    if not path.exists():
        return {}
    ledger = Ledger.open(path)
    try:
        return {mark: owner for mark, (owner, _) in ledger.key_owners().items()}
    finally:
        ledger.close()


@contextlib.contextmanager
def _transaction(conn: sqlite3.Connection) -> Iterator[None]:
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise
