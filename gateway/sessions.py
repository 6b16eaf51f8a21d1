"""Conversations on disk: sessions, their turns and the search over them, in one SQLite file.

What the rest of the gateway may rely on:

* A method that returned has its changes on disk (WAL with ``synchronous=FULL``: the commit is synced before it returns).
* A method that raised changed nothing. A *cancelled* one may or may not have taken effect: shield what must be known.
* Each method is one transaction, run as one plain function on the connection's own thread. Transactions never interleave, and the event
  loop never waits for the disk.
* An owner sees its own sessions only; another's are answered as if they did not exist.

Reads go to a second connection: under WAL they see the last commit and never wait for a writer's sync. Times are seconds since the epoch and
are always passed in. Every method raises GatewayError: ``overloaded`` when the disk is full or the file locked by another program,
``draining`` after ``close``, ``internal`` when the file went bad under a running server.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import bisect
import fcntl
import logging
import os
import re
import sqlite3
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NewType, TypeVar

import aiosqlite
import msgspec
from msgspec import UNSET, UnsetType

from engine_bridge.node import ChatMessage
from gateway.errors import GatewayError, StartupError

logger = logging.getLogger(__name__)

SessionId = NewType("SessionId", str)
TurnId = NewType("TurnId", str)
TurnStatus = Literal["running", "done", "stopped", "failed"]
Outcome = Literal["new", "retried", "existing"]

RESTORE_WINDOW_S: Final = 30.0  # docs/protocol.md, DELETE /api/sessions/{id}.
MAX_ID_CHARS: Final = 128
MAX_TITLE_CHARS: Final = 200  # Chosen: what a person types; titles made from a message are shorter.
MAX_AUTO_TITLE_CHARS: Final = 60
MAX_PAGE: Final = 200
MAX_QUERY_CHARS: Final = 500
TRIGRAM_CHARS: Final = 3  # The trigram index finds nothing shorter.
BUSY_TIMEOUT_S: Final = (
    5.0  # How long a transaction waits for another program (a backup, say) that holds the file.
)

_T = TypeVar("_T")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message and its answer, as docs/protocol.md gives it. `answer` is "" while the turn runs and when it failed without text."""

    id: TurnId
    content: str
    answer: str
    status: TurnStatus
    adapter: str | None
    finish_reason: str | None
    usage: dict[str, Any] | None
    timings: dict[str, Any] | None
    created_at: float

    @property
    def is_history(self) -> bool:
        """Whether later turns are answered in the light of this one."""
        return self.status in ("done", "stopped") or (self.status == "failed" and self.answer != "")


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation with all its turns, oldest first."""

    id: SessionId
    title: str | None
    adapter: str | None
    created_at: float
    updated_at: float
    turns: list[Turn]


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation in a list."""

    id: SessionId
    title: str | None
    adapter: str | None
    created_at: float
    updated_at: float
    num_turns: int


class BeginResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``begin_turn`` did.

    outcome: ``new`` and ``retried`` (it had failed before): the caller must run the turn and call ``finish_turn``. ``existing``: it runs
    already or is over, nothing was written. history: the turns to answer in the light of, oldest first; empty for ``existing``.
    replaced: ids of the turns that an edit deleted. title: the session's, perhaps just made. history_token_ids: what ``finish_turn`` was
    given for the last turn of the history that has ids, b"" if none has.
    """

    turn: Turn
    outcome: Outcome
    title: str | None
    history: list[Turn]
    replaced: list[TurnId]
    history_token_ids: bytes = b""

    @property
    def is_new(self) -> bool:
        """Whether the caller must run the turn."""
        return self.outcome != "existing"


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a session's next prompt begins with: the turns so far, and the token ids of all that the engine has seen of them (packed)."""

    history: list[Turn]
    token_ids: bytes


class SessionStore:
    """The sessions of one SQLite file. One store a file: a second process is refused. Make it with ``open``, end it with ``close``."""

    def __init__(self, writer: _Connection, reader: _Connection, lock_fd: int) -> None:
        self._writer = writer
        self._reader = reader
        self._lock_fd: int | None = lock_fd

    @classmethod
    async def open(cls, path: str | os.PathLike[str], *, full_text: bool = True) -> SessionStore:
        """Open or make the file at `path` (its folder must exist) and bring its schema up to date.

        Turns that were running when the last process died become ``failed``. full_text: keep a search index where this SQLite can
        (3.34 or newer with FTS5); without it a search reads every text. Raises StartupError, with a text for the operator, if the file is
        damaged, from a newer version, not ours, in use by another process, or cannot be opened.
        """
        file = Path(path)
        lock_fd = await asyncio.to_thread(_lock, file)
        try:
            writer = await _Connection(partial(_open_writer, file, full_text), "BEGIN IMMEDIATE").start()
            try:
                reader = await _Connection(partial(_open_reader, file), "BEGIN").start()
            except BaseException:
                await writer.close()
                raise
        except BaseException as error:
            os.close(lock_fd)
            if isinstance(error, sqlite3.Error):
                raise _unusable(file, error) from error
            raise
        return cls(writer, reader, lock_fd)

    async def close(self) -> None:
        """Finish what is under way and close the file. A second call does nothing; any other call afterwards raises ``draining``."""
        if self._lock_fd is None:
            return
        lock_fd, self._lock_fd = self._lock_fd, None
        # The writer goes last: only the last connection folds the write-ahead log back into the file.
        try:
            try:
                await self._reader.close()
            finally:
                await self._writer.close()
        finally:
            os.close(lock_fd)

    async def create_session(
        self,
        owner: str,
        *,
        title: str | None = None,
        adapter: str | None = None,
        session_id: str | None = None,
        exist_ok: bool = False,
        now: float,
    ) -> Session:
        """Make a session. session_id: the client's own name for it (1–128 visible ASCII characters); None makes an unguessable one.

        exist_ok: answer with the session that this owner already has under that id, unchanged. Raises ``bad_request`` for a malformed id
        or title, ``conflict`` if the id is taken, also by a session that was deleted and can still be restored.
        """
        chosen = uuid.uuid4().hex if session_id is None else checked_id(session_id, "session_id")
        return await self._writer.transact(
            _create, owner, chosen, _checked_title(title), _clean(adapter), exist_ok, now
        )

    async def get_session(self, owner: str, session_id: str) -> Session:
        """The session with all its turns. Raises ``not_found``."""
        return await self._reader.transact(_get, owner, session_id)

    async def list_sessions(
        self, owner: str, *, q: str | None = None, limit: int = 50, before: str | None = None
    ) -> tuple[list[SessionSummary], str | None]:
        """One page of sessions, the one touched last first, and the cursor of the next page (None: this is the last).

        q: only sessions that hold this text in their title or in a turn that is over; any characters, taken as they are, without regard to
        case (short queries, and all where there is no index: ASCII case only). limit: 1 to 200. before: a cursor from the page
        before; a session touched meanwhile moves to the front and is not shown twice. Raises ``bad_request``.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise GatewayError("bad_request", f"'limit' must be from 1 to {MAX_PAGE}.", param="limit")
        if q is not None and len(q) > MAX_QUERY_CHARS:
            raise GatewayError(
                "bad_request", f"'q' may have {MAX_QUERY_CHARS} characters at most.", param="q"
            )
        cursor = None if before is None else _decode_cursor(before)
        return await self._reader.transact(_list, owner, (_clean(q) or "").strip(), limit, cursor)

    async def patch(
        self,
        owner: str,
        session_id: str,
        *,
        title: str | None | UnsetType = UNSET,
        adapter: str | None | UnsetType = UNSET,
    ) -> SessionSummary:
        """Change what is given. A title of None or blanks makes the session untitled: its next message names it again.

        Does not count as activity: the session keeps its place in the list. Raises ``not_found``, ``bad_request`` for a title too long.
        """
        new_title = title if isinstance(title, UnsetType) else _checked_title(title)
        new_adapter = adapter if isinstance(adapter, UnsetType) else _clean(adapter)
        return await self._writer.transact(_patch, owner, session_id, new_title, new_adapter)

    async def delete(self, owner: str, session_id: str, now: float) -> None:
        """Hide the session; for 30 s ``restore`` brings it back. Its running turn is the caller's to stop. Raises ``not_found``."""
        await self._writer.transact(_delete, owner, session_id, now)

    async def restore(self, owner: str, session_id: str, now: float) -> Session:
        """Bring back a session deleted at most 30 s ago, with what its turns came to meanwhile. One that is not deleted stays as it is.

        Raises ``not_found``.
        """
        return await self._writer.transact(_restore, owner, session_id, now)

    async def purge(self, now: float) -> int:
        """Remove for ever what can no longer be restored; returns how many sessions. To be called now and then by a sweeper."""
        return await self._writer.transact(_purge, now)

    async def begin_turn(
        self,
        owner: str,
        session_id: str,
        turn_id: str,
        content: str,
        *,
        adapter: str | None | UnsetType = UNSET,
        after: str | None | UnsetType = UNSET,
        now: float,
    ) -> BeginResult:
        """Store a message before it is answered. Source: docs/protocol.md, rules 1–3 and the ``message`` frame.

        adapter: left out, the session's last one. after: the id of the last turn to keep (None: none), later ones are deleted in the same
        transaction; left out, nothing is. A turn id that is known with the same content is answered, not stored again; if it failed it
        runs again, in its old place unless `after` is given. A session without a title gets one from the content. NUL and lone
        surrogates in the content become U+FFFD: SQLite cannot hold the one and stops searching at the other.

        When the result says ``is_new``, the caller must run the turn and call ``finish_turn``, however it ends.
        Raises ``not_found`` (session, `after`), ``conflict`` (known id, other content), ``busy`` (another turn runs), ``bad_request``.
        """
        message = _Message(checked_id(turn_id, "id"), content, adapter, after, now)
        return await self._writer.transact(_begin, owner, session_id, message)

    async def finish_turn(
        self,
        owner: str,
        session_id: str,
        turn_id: str,
        *,
        answer: str,
        status: TurnStatus,
        finish_reason: str | None = None,
        usage: dict[str, Any] | None = None,
        timings: dict[str, Any] | None = None,
        token_ids: bytes = b"",
        now: float,
    ) -> Turn | None:
        """Store how a running turn ended (status ``done``, ``stopped`` or ``failed``); on disk when this returns.

        token_ids: all that the engine read and wrote up to the end of this turn, as little-endian uint32 (b"": not known).
        Returns the turn, unchanged if it was over already. Returns None if the session or the turn was deleted meanwhile; a session that
        can still be restored keeps the answer, but stays deleted.
        """
        return await self._writer.transact(
            _finish,
            owner,
            session_id,
            turn_id,
            _End(answer, _over(status), finish_reason, _json(usage), _json(timings)),
            token_ids,
            now,
        )

    async def record_turn(
        self,
        owner: str,
        session_id: str,
        turn_id: str,
        content: str,
        *,
        answer: str,
        status: TurnStatus = "done",
        adapter: str | None = None,
        finish_reason: str | None = None,
        usage: dict[str, Any] | None = None,
        timings: dict[str, Any] | None = None,
        response_id: str | None = None,
        now: float,
    ) -> Turn | None:
        """Store at once a turn that is already over, at the session's end, whether or not another runs (API requests may overlap).

        response_id: the name by which ``find_response`` finds it. The same turn id with the same content is stored once.
        Returns None if the session does not exist or was deleted: make it with ``create_session(exist_ok=True)`` before asking.
        Raises ``conflict`` (known id, other content), ``bad_request``.
        """
        end = _End(answer, _over(status), finish_reason, _json(usage), _json(timings))
        message = _Message(checked_id(turn_id, "id"), content, _clean(adapter), UNSET, now)
        return await self._writer.transact(_record, owner, session_id, message, end, _clean(response_id))

    async def find_response(self, owner: str, response_id: str) -> tuple[SessionId, TurnId] | None:
        """Which turn of this owner was recorded under `response_id`; None if there is none, or no longer."""
        return await self._reader.transact(_find_response, owner, response_id)

    async def find_turn(self, owner: str, turn_id: str) -> SessionId | None:
        """The session in which this owner has a turn of this id (the latest, if in several); None if there is none."""
        return await self._reader.transact(_find_turn, owner, turn_id)

    async def outlook(self, owner: str, session_id: str) -> Outlook:
        """What the next prompt of a session begins with. Raises ``not_found``."""
        return await self._reader.transact(_outlook, owner, session_id)

    async def history_until(self, owner: str, session_id: str, turn_id: str) -> list[Turn]:
        """The turns up to and including `turn_id`, oldest first, without those that came to nothing. Raises ``not_found``."""
        return await self._reader.transact(_history_until, owner, session_id, turn_id)


class _Connection(aiosqlite.Connection):
    """One SQLite connection with its thread, on which each call of ``transact`` is one transaction."""

    def __init__(self, connector: Callable[[], sqlite3.Connection], begin: str) -> None:
        super().__init__(connector, iter_chunk_size=64)
        self._begin = begin
        self._is_closing = False
        # A process that dies without `close` must not hang on this thread; SQLite survives being cut off at any point.
        self._thread.daemon = True

    async def start(self) -> _Connection:
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
            job = partial(_transaction, self._conn, self._begin, work, args)
            return await self._execute(job)  # type: ignore[no-any-return, no-untyped-call]
        except sqlite3.Error as error:
            raise _as_gateway_error(error) from error

    async def close(self) -> None:
        """Let what was asked for before finish, then close; later calls of ``transact`` raise ``draining``."""
        self._is_closing = True
        await super().close()


def _transaction(conn: sqlite3.Connection, begin: str, work: Callable[..., _T], args: tuple[Any, ...]) -> _T:
    try:
        conn.execute(begin)
        result = work(conn, *args)
        conn.execute("COMMIT")
        return result
    except BaseException:
        # SQLite has rolled back by itself after some errors, a full disk among them.
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def _as_gateway_error(error: sqlite3.Error) -> GatewayError:
    """What a client may know of a database error; the cause goes to the log here, for it names what the operator must mend."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    logger.error("session database: %s", error)
    if code == sqlite3.SQLITE_FULL:
        return GatewayError("overloaded", "The server's disk is full; nothing was stored.")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return GatewayError(
            "overloaded", "The session database is in use by another program; nothing was stored."
        )
    return GatewayError(
        "internal", "The session database failed; nothing was stored. The server's log says why."
    )


# --- opening -------------------------------------------------------------------------------------------------------------------------

# Turns keep their order by `seq`. At most one runs in a session: begin_turn looks, the index makes sure.
_SCHEMA_1 = (
    """CREATE TABLE sessions (
        row INTEGER PRIMARY KEY,
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        title TEXT,
        adapter TEXT,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        deleted_at REAL,
        UNIQUE (owner, id)
    )""",
    "CREATE INDEX sessions_by_time ON sessions (owner, updated_at, id) WHERE deleted_at IS NULL",
    "CREATE INDEX sessions_deleted ON sessions (deleted_at) WHERE deleted_at IS NOT NULL",
    """CREATE TABLE turns (
        seq INTEGER PRIMARY KEY,
        session INTEGER NOT NULL REFERENCES sessions (row) ON DELETE CASCADE,
        id TEXT NOT NULL,
        content TEXT NOT NULL,
        answer TEXT NOT NULL DEFAULT '',
        status TEXT NOT NULL CHECK (status IN ('running', 'done', 'stopped', 'failed')),
        adapter TEXT,
        finish_reason TEXT,
        usage TEXT,
        timings TEXT,
        created_at REAL NOT NULL,
        response_id TEXT,
        token_ids BLOB,
        UNIQUE (session, id)
    )""",
    "CREATE UNIQUE INDEX turns_running ON turns (session) WHERE status = 'running'",
    "CREATE INDEX turns_by_id ON turns (id)",
    "CREATE INDEX turns_by_response ON turns (response_id) WHERE response_id IS NOT NULL",
)
_MIGRATIONS: Final = (_SCHEMA_1,)
SCHEMA_VERSION: Final = len(_MIGRATIONS)

# The index holds no text of its own (`content=`). A turn enters it when it is over: indexing a 4 kB text takes 3 ms and a 1 MB text
# 340 ms (measured, 2 cores), too long to stand between a message and its first token, and long enough to do it once only.
_SEARCH_TABLES = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS turn_texts USING fts5(content, answer, content='turns', content_rowid='seq', tokenize='trigram')",
    "CREATE VIRTUAL TABLE IF NOT EXISTS session_titles USING fts5(title, content='sessions', content_rowid='row', tokenize='trigram')",
)
_ADD_TEXT = """INSERT INTO turn_texts (rowid, content, answer)
    SELECT new.seq, new.content, new.answer WHERE new.status <> 'running';"""
_DROP_TEXT = """INSERT INTO turn_texts (turn_texts, rowid, content, answer)
    SELECT 'delete', old.seq, old.content, old.answer WHERE old.status <> 'running';"""
_ADD_TITLE = "INSERT INTO session_titles (rowid, title) VALUES (new.row, new.title);"
_DROP_TITLE = (
    "INSERT INTO session_titles (session_titles, rowid, title) VALUES ('delete', old.row, old.title);"
)
_SEARCH_TRIGGERS = {
    "turn_texts_insert": f"AFTER INSERT ON turns BEGIN {_ADD_TEXT} END",
    "turn_texts_update": f"AFTER UPDATE OF content, answer, status ON turns BEGIN {_DROP_TEXT} {_ADD_TEXT} END",
    "turn_texts_delete": f"AFTER DELETE ON turns BEGIN {_DROP_TEXT} END",
    "session_titles_insert": f"AFTER INSERT ON sessions BEGIN {_ADD_TITLE} END",
    "session_titles_update": f"AFTER UPDATE OF title ON sessions BEGIN {_DROP_TITLE} {_ADD_TITLE} END",
    "session_titles_delete": f"AFTER DELETE ON sessions BEGIN {_DROP_TITLE} END",
}


def _lock(file: Path) -> int:
    """Make sure that no other process has this store open; returns the descriptor that holds the lock until it is closed.

    Without it a second server would declare the first one's running turns dead. A POSIX record lock, because it goes with the process,
    even a killed one, and a forked child does not keep it alive. On a file of its own, because closing any descriptor of the database
    would drop SQLite's locks on it.
    """
    try:
        lock_fd = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartupError(f"The session database {file} cannot be opened: {error.strerror}.") from error
    try:
        fcntl.lockf(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        raise StartupError(
            f"The session database {file} is in use by another process. Stop that one, or use another file."
        ) from error
    return lock_fd


def _unusable(file: Path, error: sqlite3.Error) -> StartupError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return StartupError(
            f"The session database {file} is damaged ({error}). Move it and its -wal and -shm files away to start with none, put a backup in "
            f"its place, or try to save what is left with: sqlite3 {file} .recover"
        )
    return StartupError(f"The session database {file} cannot be opened: {error}.")


def _connect(file: Path) -> sqlite3.Connection:
    # isolation_level=None: we say BEGIN and COMMIT ourselves.
    conn = sqlite3.connect(file, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    conn.execute("PRAGMA foreign_keys = ON")
    return conn


def _open_writer(file: Path, full_text: bool) -> sqlite3.Connection:
    # Conversations are private. SQLite gives its log files the mode of the database file, so that is made first.
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        pass  # It is there already; or it cannot be made, which SQLite is about to say.
    conn = _connect(file)
    try:
        _check_file(conn, file)
        conn.execute("PRAGMA journal_mode = WAL")
        conn.execute("PRAGMA synchronous = FULL")
        _transaction(conn, "BEGIN IMMEDIATE", _prepare, (full_text,))
    except BaseException:
        conn.close()
        raise
    return conn


def _open_reader(file: Path) -> sqlite3.Connection:
    conn = _connect(file)
    conn.execute("PRAGMA query_only = ON")
    return conn


def _check_file(conn: sqlite3.Connection, file: Path) -> None:
    """Refuse, before anything is written to it, a file that is not a sound database of ours of a version that we know."""
    version = conn.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StartupError(
            f"The session database {file} was written by a newer version of Overture (schema {version}; this one knows up to "
            f"{SCHEMA_VERSION}). Upgrade Overture, or use another file."
        )
    if version == 0 and conn.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise StartupError(f"{file} is a database of another program. Use another file for the sessions.")
    # Reads the whole file, 2 GB/s when it is cached (measured): better a refusal now than a lost turn later.
    verdict = conn.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        error = sqlite3.DatabaseError(" ".join(verdict.split()))
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _migrate(conn: sqlite3.Connection) -> None:
    version = conn.execute("PRAGMA user_version").fetchone()[0]
    for statements in _MIGRATIONS[version:]:
        for statement in statements:
            conn.execute(statement)
    conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _prepare(conn: sqlite3.Connection, full_text: bool) -> None:
    """Bring the schema up to date, declare dead what was running when the last process died, and set the search index right."""
    _migrate(conn)
    can_index = full_text and _has_trigrams(conn)
    if not can_index:
        # Only the triggers: without the FTS5 module its tables cannot even be dropped.
        for name in _SEARCH_TRIGGERS:
            conn.execute(f"DROP TRIGGER IF EXISTS {name}")
    conn.execute("UPDATE turns SET status = 'failed' WHERE status = 'running'")
    if can_index and not _has_index(conn):
        _build_index(conn)


def _build_index(conn: sqlite3.Connection) -> None:
    """Index all that is stored, and from now on what will be. No turn may be running: those are not in the index."""
    for statement in _SEARCH_TABLES:
        conn.execute(statement)
    for table in ("turn_texts", "session_titles"):
        conn.execute(f"INSERT INTO {table} ({table}) VALUES ('rebuild')")
    for name, body in _SEARCH_TRIGGERS.items():
        conn.execute(f"CREATE TRIGGER {name} {body}")


def _has_trigrams(conn: sqlite3.Connection) -> bool:
    try:
        conn.execute("CREATE VIRTUAL TABLE temp.probe USING fts5(text, tokenize='trigram')")
    except sqlite3.OperationalError:
        return False
    conn.execute("DROP TABLE temp.probe")
    return True


def _has_index(conn: sqlite3.Connection) -> bool:
    found = conn.execute(
        "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name = 'turn_texts_insert'"
    ).fetchone()
    return bool(found[0])


# --- text and ids --------------------------------------------------------------------------------------------------------------------

# SQLite's text is UTF-8, which has no lone surrogates, and its text functions (LIKE, FTS5) stop at a NUL.
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")
_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")


def messages_of(history: Iterable[Turn]) -> list[ChatMessage]:
    """Turns as the messages of a conversation."""
    messages = []
    for turn in history:
        messages.append(ChatMessage("user", turn.content))
        if turn.answer:
            messages.append(ChatMessage("assistant", turn.answer))
    return messages


def clean_text(text: str) -> str:
    """`text` as the store keeps it: NUL and lone surrogates become U+FFFD. Compare this, not the raw text, with what was stored."""
    return _UNSTORABLE.sub("\ufffd", text)


def _clean(text: str | None) -> str | None:
    return None if text is None else clean_text(text)


def checked_id(value: str, param: str) -> str:
    if not _ID.fullmatch(value):
        raise GatewayError(
            "bad_request", f"'{param}' must have 1 to {MAX_ID_CHARS} visible ASCII characters.", param=param
        )
    return value


def _checked_title(title: str | None) -> str | None:
    """The title on one line without outer blanks; None for one of blanks only. Raises ``bad_request`` if it is too long."""
    tidy = " ".join((_clean(title) or "").split())
    if len(tidy) > MAX_TITLE_CHARS:
        raise GatewayError(
            "bad_request", f"'title' may have {MAX_TITLE_CHARS} characters at most.", param="title"
        )
    return tidy or None


def title_from(content: str) -> str | None:
    """A title for a session that begins with `content`: its first line with text, cut at a word's end to 60 characters with the "…"."""
    line = next((line for line in content.splitlines() if line.strip()), "")
    # A first line of 1 MB is looked at no further than a title can reach.
    text = " ".join(line.lstrip()[: 4 * MAX_AUTO_TITLE_CHARS].split())
    if len(text) <= MAX_AUTO_TITLE_CHARS:
        return text or None
    head = text[:MAX_AUTO_TITLE_CHARS]
    words, space, _ = head.rpartition(" ")
    return (words if space else head[:-1]).rstrip() + "…"


def _over(status: TurnStatus) -> TurnStatus:
    if status not in ("done", "stopped", "failed"):
        raise ValueError(f"a turn does not end as {status!r}")
    return status


def _json(value: dict[str, Any] | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _encode_cursor(updated_at: float, session_id: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((updated_at, session_id))).decode().rstrip("=")


def _decode_cursor(cursor: str) -> tuple[float, str]:
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(raw, type=tuple[float, str])
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise GatewayError(
            "bad_request", "'before' is not a cursor of this server.", param="before"
        ) from error


# --- transactions: each of these functions runs on a connection's thread, inside BEGIN and COMMIT ----------------------------------------


class _Message(NamedTuple):
    id: str
    content: str
    adapter: str | None | UnsetType
    after: str | None | UnsetType
    now: float


class _End(NamedTuple):
    answer: str
    status: TurnStatus
    finish_reason: str | None
    usage: str | None
    timings: str | None


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
    if not _ID.fullmatch(session_id):
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
    if _ID.fullmatch(turn_id):
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


def _create(
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


def _get(conn: sqlite3.Connection, owner: str, session_id: str) -> Session:
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


def _list(
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
    return page, _encode_cursor(page[-1].updated_at, page[-1].id) if len(rows) > limit else None


def _search(conn: sqlite3.Connection, q: str) -> tuple[str, list[str]]:
    """The condition that finds `q`, and its arguments. The text is quoted for both query languages, so none of it is an operator."""
    if len(q) >= TRIGRAM_CHARS and _has_index(conn):
        return _BY_INDEX, ['"' + q.replace('"', '""') + '"'] * 2
    return _BY_READING, ["%" + re.sub(r"([\\%_])", r"\\\1", q) + "%"] * 3


def _patch(
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


def _delete(conn: sqlite3.Connection, owner: str, session_id: str, now: float) -> None:
    conn.execute(
        "UPDATE sessions SET deleted_at = ? WHERE row = ?", (now, _live(conn, owner, session_id).row)
    )


def _restore(conn: sqlite3.Connection, owner: str, session_id: str, now: float) -> Session:
    if _ID.fullmatch(session_id):
        sql = "UPDATE sessions SET deleted_at = NULL WHERE owner = ? AND id = ? AND deleted_at >= ?"
        conn.execute(sql, (owner, session_id, now - RESTORE_WINDOW_S))
    return _session(conn, _live(conn, owner, session_id))


def _purge(conn: sqlite3.Connection, now: float) -> int:
    return conn.execute("DELETE FROM sessions WHERE deleted_at < ?", (now - RESTORE_WINDOW_S,)).rowcount


def _begin(conn: sqlite3.Connection, owner: str, session_id: str, message: _Message) -> BeginResult:
    row = _live(conn, owner, session_id)
    content = clean_text(message.content)
    known = _known(conn, row.row, message.id, content)
    if known is not None and known.status != "failed":
        return BeginResult(turn=known, outcome="existing", title=row.title, history=[], replaced=[])
    _refuse_second(conn, row.row)
    replaced = _drop_later(conn, row.row, message)
    adapter = row.adapter if isinstance(message.adapter, UnsetType) else _clean(message.adapter)
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
        history_token_ids=_token_ids_before(conn, row.row, seq),
    )


def _refuse_second(conn: sqlite3.Connection, row: int) -> None:
    if conn.execute("SELECT 1 FROM turns WHERE session = ? AND status = 'running'", (row,)).fetchone():
        raise GatewayError(
            "busy", "Another message of this session is being answered. Wait for it, or stop it."
        )


def _drop_later(conn: sqlite3.Connection, row: int, message: _Message) -> list[TurnId]:
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
    conn: sqlite3.Connection, row: int, message: _Message, content: str, adapter: str | None
) -> int:
    """Add the turn, or wipe the failed one that stands there; returns its `seq`."""
    conn.execute(
        """INSERT INTO turns (session, id, content, status, adapter, created_at) VALUES (?, ?, ?, 'running', ?, ?)
           ON CONFLICT (session, id) DO UPDATE SET status = 'running', adapter = excluded.adapter, answer = '', finish_reason = NULL,
           usage = NULL, timings = NULL, token_ids = NULL""",
        (row, message.id, content, adapter, message.now),
    )
    return _place(conn, row, message.id, "id")


def _finish(
    conn: sqlite3.Connection,
    owner: str,
    session_id: str,
    turn_id: str,
    end: _End,
    token_ids: bytes,
    now: float,
) -> Turn | None:
    sql = """SELECT t.seq, t.status, s.row, s.deleted_at IS NOT NULL FROM turns t JOIN sessions s ON s.row = t.session
        WHERE s.owner = ? AND s.id = ? AND t.id = ?"""
    found = None
    if _ID.fullmatch(session_id) and _ID.fullmatch(turn_id):
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
            _store_token_ids(conn, row, seq, token_ids)
        conn.execute("UPDATE sessions SET updated_at = max(updated_at, ?) WHERE row = ?", (now, row))
    if is_deleted:
        return None
    return _turn(conn.execute(f"SELECT {_TURN_COLUMNS} FROM turns WHERE seq = ?", (seq,)).fetchone())


# A turn keeps only the ids that it added: in front stands, as one more uint32, how many ids of the turns before it its prompt repeats
# (all of them, as a rule; fewer where the chat template rewrote history). So a session holds each id once, 200 turns of 500 tokens
# 400 kB and not 40 MB; turns that an edit deletes take their own ids along, and what is left is the path that the next prompt repeats.
_ID_BYTES: Final = 4
# Chosen: where prompts repeat little of each other (a template that begins with the time), a session may hold this many times the
# ids of its last turn; then that turn keeps all of its own, and those before it none.
_MAX_STORED_RATIO: Final = 4


_MAX_SEQ: Final = (1 << 63) - 1


def _token_ids_before(conn: sqlite3.Connection, row: int, seq: int) -> bytes:
    """The ids of the turns that stand before `seq`, put together. Turns without any (failed, from the API) add none."""
    sql = "SELECT token_ids FROM turns WHERE session = ? AND seq < ? AND token_ids IS NOT NULL ORDER BY seq"
    ids = bytearray()
    for (added,) in conn.execute(sql, (row, seq)):
        del ids[int.from_bytes(added[:_ID_BYTES], "little") * _ID_BYTES :]
        ids += memoryview(added)[_ID_BYTES:]
    return bytes(ids)


def _store_token_ids(conn: sqlite3.Connection, row: int, seq: int, ids: bytes) -> None:
    before = _token_ids_before(conn, row, seq)
    num_same = _num_common_ids(before, ids)
    added = num_same.to_bytes(_ID_BYTES, "little") + ids[num_same * _ID_BYTES :]
    sql = "SELECT coalesce(sum(length(token_ids)), 0) FROM turns WHERE session = ? AND seq < ?"
    if conn.execute(sql, (row, seq)).fetchone()[0] + len(added) > _MAX_STORED_RATIO * len(ids):
        conn.execute("UPDATE turns SET token_ids = NULL WHERE session = ? AND seq < ?", (row, seq))
        added = bytes(_ID_BYTES) + ids
    conn.execute("UPDATE turns SET token_ids = ? WHERE seq = ?", (added, seq))
    # A failed turn that was asked again in its old place: what stands behind it was added to other ids.
    conn.execute("UPDATE turns SET token_ids = NULL WHERE session = ? AND seq > ?", (row, seq))


def _num_common_ids(one: bytes, other: bytes) -> int:
    """With how many equal ids both begin."""
    longest = min(len(one), len(other)) // _ID_BYTES
    return bisect.bisect_left(
        range(1, longest + 1), True, key=lambda n: one[: n * _ID_BYTES] != other[: n * _ID_BYTES]
    )


def _record(
    conn: sqlite3.Connection,
    owner: str,
    session_id: str,
    message: _Message,
    end: _End,
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


def _find_response(conn: sqlite3.Connection, owner: str, response_id: str) -> tuple[SessionId, TurnId] | None:
    sql = """SELECT s.id, t.id FROM turns t JOIN sessions s ON s.row = t.session
        WHERE t.response_id = ? AND s.owner = ? AND s.deleted_at IS NULL ORDER BY t.seq DESC LIMIT 1"""
    found = conn.execute(sql, (_clean(response_id), owner)).fetchone()
    return None if found is None else (found[0], found[1])


def _find_turn(conn: sqlite3.Connection, owner: str, turn_id: str) -> SessionId | None:
    sql = """SELECT s.id FROM turns t JOIN sessions s ON s.row = t.session
        WHERE t.id = ? AND s.owner = ? AND s.deleted_at IS NULL ORDER BY t.seq DESC LIMIT 1"""
    found = conn.execute(sql, (_clean(turn_id), owner)).fetchone()
    return None if found is None else SessionId(found[0])


def _outlook(conn: sqlite3.Connection, owner: str, session_id: str) -> Outlook:
    row = _live(conn, owner, session_id)
    history = [turn for turn in _turns(conn, row.row) if turn.is_history]
    return Outlook(history=history, token_ids=_token_ids_before(conn, row.row, _MAX_SEQ))


def _history_until(conn: sqlite3.Connection, owner: str, session_id: str, turn_id: str) -> list[Turn]:
    row = _live(conn, owner, session_id)
    seq = _place(conn, row.row, turn_id, "turn_id")
    return [turn for turn in _turns(conn, row.row, before=seq + 1) if turn.is_history]
