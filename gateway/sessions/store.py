"""The store: each of its methods is one transaction."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import UNSET, UnsetType

from gateway.errors import GatewayError
from gateway.sessions import listing, search, transactions, transfers
from gateway.sessions.archive import Archive
from gateway.sessions.connection import SqliteConnection, is_full, is_index_damaged, unusable
from gateway.sessions.database import check_log, lock, open_reader, open_writer, rewrite_version
from gateway.sessions.health import Health
from gateway.sessions.pictures import StoredPictures
from gateway.sessions.records import (
    ANY_PICTURES,
    NO_CHANGES,
    BeginResult,
    End,
    FinishResult,
    NewMessage,
    NextPrompt,
    Origin,
    PictureRoom,
    Session,
    SessionId,
    SessionSummary,
    SettingsPatch,
    StoredPicture,
    StoredResponse,
    Turn,
    TurnCall,
    TurnStatus,
)
from gateway.sessions.responses import StoredResponses
from gateway.sessions.room import FileRoom, Reserve
from gateway.sessions.text import checked_end, checked_id, checked_title, clean, decode_cursor, encoded
from kvtiers.closing import going_on

_T = TypeVar("_T")

MAX_PAGE: Final = 200
MAX_QUERY_CHARS: Final = 500


class SessionStore:
    """The sessions of one SQLite file. Only one process may have a file open. Make a store with `open`, end it with `close`."""

    def __init__(
        self,
        writer: SqliteConnection,
        readers: tuple[SqliteConnection, SqliteConnection],
        health: Health,
        reserve: Reserve,
        file: Path,
        lock_fd: int,
        wal_lost_frames: int,
        picture_room: PictureRoom,
    ) -> None:
        self.wal_lost_frames = wal_lost_frames
        """Frames of the write-ahead log that were committed and could not be read when the file was opened; 0 as a rule."""
        self.file = file
        self._writer = writer
        self._reader, self._searcher = readers
        self._health = health
        health.write = partial(writer.transact, rewrite_version)
        self._room = FileRoom(writer, self._reader, reserve, file)
        self._searches = search.Searches()
        self.responses = StoredResponses(self._reader, self._write)
        self.rows = listing.Rows(self._reader)
        self.pictures = StoredPictures(self._reader, self._write, picture_room)
        self._lock_fd: int | None = lock_fd

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        full_text: bool = True,
        max_bytes_of: Callable[[str], int] = lambda owner: 0,
        picture_room: PictureRoom = ANY_PICTURES,
    ) -> SessionStore:
        """Open or make the file at `path` (its folder must exist) and bring its schema up to date.

        Turns that were running when the last process died become ``failed``. full_text: keep a search index where this SQLite can
        (3.34 or newer with FTS5); without it a search reads every text of its owner. max_bytes_of: how much an owner may store,
        0: no limit; called in another thread. picture_room: what a prompt can hold of a conversation's pictures. Raises StartupError, with a text
        for the operator, if the file is damaged, from a newer version, not ours, in use by another process, or cannot be opened.
        """
        file = Path(path)
        health = Health(file)
        reserve = Reserve(Path(f"{file}.reserve"))
        lock_fd = await asyncio.to_thread(lock, file)
        try:
            wal_lost_frames = await asyncio.to_thread(check_log, file)
            open_file = partial(open_writer, file, full_text, max_bytes_of)
            writer = await _opened(open_file, "BEGIN IMMEDIATE", health, reserve)
            readers: list[SqliteConnection] = []
            try:
                for _ in range(2):
                    readers.append(await _opened(partial(open_reader, file), "BEGIN", health, reserve))
            except BaseException:
                for connection in (*readers, writer):
                    await connection.close()
                raise
        except BaseException as error:
            os.close(lock_fd)
            if isinstance(error, sqlite3.Error):
                raise unusable("session database", file, error) from error
            raise
        await asyncio.to_thread(health.opened)
        await asyncio.to_thread(reserve.take_back)
        return cls(
            writer, (readers[0], readers[1]), health, reserve, file, lock_fd, wal_lost_frames, picture_room
        )

    async def close(self) -> None:
        """Finish the transactions under way and close the file. A second call does nothing; any other call afterwards raises `draining`."""
        if self._lock_fd is None:
            return
        lock_fd, self._lock_fd = self._lock_fd, None
        # The writer goes last: only the last connection folds the write-ahead log back into the file.
        for connection in (self._reader, self._searcher, self._writer):
            with going_on("a connection to the session database"):
                await connection.close()
        os.close(lock_fd)

    @property
    def has_failed(self) -> bool:
        """Whether the file failed a request and has not been read and written since, which takes ``watch``. Asking costs nothing."""
        return self._health.has_failed

    async def watch(self) -> None:
        """Run until cancelled beside the store: check a file that has failed until it can be read and written again."""
        await self._health.watch()

    async def create_session(
        self,
        owner: str,
        *,
        title: str | None = None,
        adapter: str | None = None,
        session_id: str | None = None,
        exist_ok: bool = False,
        settings: SettingsPatch = NO_CHANGES,
        now: float,
    ) -> Session:
        """Make a session.

        Args:
            owner: whose session it will be.
            title: None leaves it to the first message.
            adapter: the adapter that answers; None for the base model.
            session_id: the client's own name for it (1–128 visible ASCII characters); None makes an unguessable one.
            exist_ok: return the session that this owner already has under that id, unchanged.
            settings: the system prompt and how to sample, if given.
            now: seconds since the epoch.

        Raises:
            GatewayError: `bad_request` for a malformed id or title; `conflict` if the id is taken, also by a deleted session that can still be
                restored; `quota_exceeded`.
        """
        chosen = uuid.uuid4().hex if session_id is None else checked_id(session_id, "session_id")
        return await self._write(
            owner,
            transactions.create,
            owner,
            chosen,
            checked_title(title),
            clean(adapter),
            exist_ok,
            settings,
            now,
        )

    async def get_session(self, owner: str, session_id: str) -> Session:
        """Return the session with the turns that are shown. Raises GatewayError `not_found`."""
        return await self._reader.transact(transactions.get, owner, session_id)

    async def list_sessions(
        self,
        owner: str,
        *,
        q: str | None = None,
        limit: int = 50,
        before: str | None = None,
        origin: Origin | None = None,
    ) -> tuple[list[SessionSummary], str | None]:
        """Return one page of sessions, the one touched last first, and the cursor of the next page (None: this is the last).

        Args:
            owner: whose sessions to list.
            q: only sessions that hold this text in their title or in a turn that is over; any characters, taken literally, without regard to
                case (short queries, and all without an index: ASCII case only).
            limit: 1 to 200.
            before: a cursor from the page before; a session touched meanwhile moves to the front and is not shown twice.
            origin: only sessions made there.

        Raises:
            GatewayError: `bad_request`; for a search `rate_limited`, if two searches of this owner wait or run already, or it took longer than
                `search.MAX_SEARCH_S`.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise GatewayError("bad_request", f"'limit' must be from 1 to {MAX_PAGE}.", param="limit")
        if q is not None and len(q) > MAX_QUERY_CHARS:
            raise GatewayError(
                "bad_request", f"'q' may have {MAX_QUERY_CHARS} characters at most.", param="q"
            )
        cursor = None if before is None else decode_cursor(before)
        text = (clean(q) or "").strip()
        # A search that reads every text of its owner takes seconds for a gigabyte, so it has a separate connection.
        if not text:
            return await self._reader.transact(listing.list_sessions, owner, text, limit, cursor, origin)
        with self._searches.enter(owner) as one:
            return await self._search(
                owner, search.bounded, one, listing.list_sessions, owner, text, limit, cursor, origin
            )

    async def _search(self, owner: str, work: Callable[..., _T], *args: Any) -> _T:
        """Run a transaction that reads an owner's index; if the index is damaged, run it again without."""
        return await self._past_damage(self._searcher, owner, work, *args)

    async def patch(
        self,
        owner: str,
        session_id: str,
        *,
        title: str | None | UnsetType = UNSET,
        adapter: str | None | UnsetType = UNSET,
        is_pinned: bool | UnsetType = UNSET,
        folder: str | None | UnsetType = UNSET,
        settings: SettingsPatch = NO_CHANGES,
        now: float = 0.0,
    ) -> SessionSummary:
        """Change the given fields. A title of None or blanks makes the session untitled: its next message names it again.

        This does not count as activity: the session keeps its place in the list.

        Args:
            owner: whose session it is.
            session_id: of the session to change.
            title: the new title.
            adapter: the adapter that answers from now on; None for the base model.
            is_pinned: whether `Rows.pinned` lists it.
            folder: the name of the folder that it lies in; None or blanks: in none.
            settings: changes of the system prompt and of sampling.
            now: seconds since the epoch, for the quota of a system prompt and the order of pins.

        Raises:
            GatewayError: `not_found`; `bad_request` for a title too long; `quota_exceeded`; `conflict` above MAX_PINNED or MAX_FILED.
        """
        new_title = title if isinstance(title, UnsetType) else checked_title(title)
        new_adapter = adapter if isinstance(adapter, UnsetType) else clean(adapter)
        folder = folder if isinstance(folder, UnsetType) else (clean(folder or "") or "").strip() or None
        return await self._write(
            owner,
            transactions.patch,
            owner,
            session_id,
            new_title,
            new_adapter,
            is_pinned,
            folder,
            settings,
            now,
        )

    async def export(self, owner: str, session_id: str) -> Archive:
        """Return all of a session, its other versions included. Raises GatewayError `not_found`."""
        return await self._searcher.transact(transfers.export, owner, session_id)

    async def bring_in(
        self,
        owner: str,
        archive: Archive,
        adapters: frozenset[str],
        now: float,
        described: Sequence[Sequence[StoredPicture]] | None = None,
    ) -> Session:
        """Store an archive as a new session. See `transfers.bring_in` for the parts taken over and the errors.

        described: of each turn's pictures, what `pictures.describe` says; None for an archive without pictures.
        """
        shown = [()] * len(archive.turns) if described is None else described
        return await self._write(owner, transfers.bring_in, owner, archive, shown, adapters, now)

    async def delete(self, owner: str, session_id: str, now: float) -> None:
        """Hide the session; for 30 s `restore` brings it back. The caller must stop its running turn. Raises GatewayError `not_found`."""
        await self._room.making(transactions.delete, owner, session_id, now)

    async def restore(self, owner: str, session_id: str, now: float) -> Session:
        """Bring back a session deleted at most 30 s ago, with the answers that its turns got meanwhile. A session that exists stays as it is.

        Raises:
            GatewayError: `not_found`.
        """
        return await self._writer.transact(transactions.restore, owner, session_id, now)

    async def _write(self, owner: str, work: Callable[..., _T], *args: Any) -> _T:
        """Run a transaction that changes an owner's texts. If the owner's index is damaged, run it again without: texts matter more."""
        return await self._past_damage(self._writer, owner, work, *args)

    async def _past_damage(
        self, connection: SqliteConnection, owner: str, work: Callable[..., _T], *args: Any
    ) -> _T:
        try:
            return await connection.transact(work, *args)
        except GatewayError as error:
            if not is_index_damaged(error.__cause__):
                raise
        await self._writer.transact(search.forget_damaged, owner)
        return await connection.transact(work, *args)

    async def purge(self, now: float) -> int:
        """Remove for ever the sessions that can no longer be restored, and return how many. A sweeper calls it now and then."""
        return await self._room.purge(now)

    async def erase_owner(self, owner: str, now: float) -> int:
        """Remove all that an owner has, at once and for ever, and return the number of sessions. The caller must have stopped the owner's turns."""
        return await self._room.erase_owner(owner, now)

    async def make_room(self) -> bool:
        """Give up some room that is kept for a full disk, for a write that must not wait until there is room; return False if none is left."""
        return await self._room.give_some()

    async def begin_turn(
        self,
        owner: str,
        session_id: str,
        turn_id: str,
        content: str,
        *,
        adapter: str | None | UnsetType = UNSET,
        after: str | None | UnsetType = UNSET,
        pictures: Sequence[str] = (),
        continues: bool = False,
        now: float,
    ) -> BeginResult:
        """Store a message before it is answered. Source: docs/protocol.md, rules 1–3 and the `message` frame.

        A known turn id with the same content is not stored again; if that turn failed, it runs again in its old place. In all other cases the
        turn is shown from now on. A session without a title gets one from the content. NUL and lone surrogates in the content become U+FFFD:
        SQLite cannot hold the one and stops searching at the other.

        When the result says `is_new`, the caller must run the turn and call `finish_turn`, however it ends.

        Args:
            owner: whose session it is.
            session_id: of the session.
            turn_id: the client's name for the message.
            content: the message.
            adapter: if left out, the session's last one.
            after: the id of the turn that the message follows (None: it is the first); if left out, the last one shown. Turns that followed that
                turn before are kept as other versions (see `choose_version`).
            pictures: ids of pictures that `StoredPictures.put` has stored, which the message shows.
            continues: if the turn is known and its answer was cut, continue the answer.
            now: seconds since the epoch.

        Raises:
            GatewayError: `not_found` (session, `after`, `pictures`), `conflict` (known id, other content or another `after`), `busy` (another turn
                runs), `bad_request`, `quota_exceeded`.
        """
        message = NewMessage(
            checked_id(turn_id, "id"), content, adapter, after, now, tuple(pictures), continues
        )
        return await self._write(owner, transactions.begin, owner, session_id, message)

    async def retitle(self, owner: str, session_id: str, was: str, title: str) -> bool:
        """Replace the title `was`; return False if the session has another one, or no longer exists."""
        return await self._write(owner, transactions.retitle, owner, session_id, was, title)

    async def choose_version(self, owner: str, session_id: str, turn_id: str) -> Session:
        """Show a turn of the session, with the turns before it and those last shown after it. Return the session as it is shown then.

        This does not count as activity. Raises GatewayError `not_found` (session, turn), `busy` (a turn of the session runs).
        """
        return await self._writer.transact(transactions.choose, owner, session_id, turn_id)

    async def discard_turn(self, owner: str, session_id: str, turn_id: str) -> Session:
        """Remove a turn whose answer failed; what followed it follows the turn before it. Return the session as it is shown then.

        Raises GatewayError `not_found` (session, turn), `conflict` (its answer did not fail).
        """
        return await self._writer.transact(transactions.discard, owner, session_id, turn_id)

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
        reasoning: str = "",
        calls: Sequence[TurnCall] = (),
        token_ids: bytes = b"",
        home: str = "",
        now: float,
    ) -> FinishResult | None:
        """Store how a running turn ended (status `done`, `stopped` or `failed`); it is on disk when this returns.

        Args:
            owner: whose session it is.
            session_id: of the session.
            turn_id: as given to `begin_turn`.
            answer: its text, as far as it came.
            status: how it ended.
            finish_reason: the engine's word for it.
            usage: token counts, as docs/protocol.md has them.
            timings: durations in ms, as docs/protocol.md has them.
            reasoning: what the model thought before the answer.
            calls: the tools that the answer called.
            token_ids: all ids that the engine read and wrote up to the end of this turn, as little-endian uint32 (b"": not known).
            home: the node that has the session's KV now ("": as before).
            now: seconds since the epoch.

        Returns:
            The turn, unchanged if it was over already, and the session's title. None if the session or the turn was deleted meanwhile; a session
                that can still be restored keeps the answer, but stays deleted.
        """
        figures, made = (encoded(usage), encoded(timings)), encoded(list(calls) or None)
        end = End(answer, checked_end(status), finish_reason, *figures, reasoning, made)
        told = (owner, session_id, turn_id, end, token_ids, home, now)
        return await self._write(owner, transactions.finish, *told)

    async def homes(self, limit: int) -> list[tuple[str, SessionId, str]]:
        """Return (owner, session, node) for the latest sessions whose `home` `finish_turn` was given, the latest last."""
        return await self._reader.transact(transactions.homes, limit)

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
        token_ids: bytes = b"",
        response_id: str | None = None,
        response: StoredResponse | None = None,
        previous: str | None = None,
        is_version: bool = False,
        makes_session: bool = False,
        pictures: Sequence[str] = (),
        now: float,
    ) -> Turn | None:
        """Store a turn that is already over, even while another runs (API requests may overlap), and show it.

        The same turn id with the same content is stored once. Most arguments are those of `begin_turn` and `finish_turn`. response_id: the name
        by which `responses.find` finds the turn. response: the call itself, for `responses.read`. previous: the response that the call
        continues; if that is in this session, the turn follows its turn, else the last one shown. is_version: make the turn another version of the
        last one shown instead, if that has the same content: each step of a program of tools answers the same message.
        makes_session: make the session in the same
        transaction if it does not exist; if it was deleted, that is a `conflict`.

        Returns:
            The turn; None if the session does not exist or was deleted.

        Raises:
            GatewayError: `conflict` (known id, other content), `bad_request`, `quota_exceeded`.
        """
        if makes_session:
            checked_id(session_id, "session_id")
        end = End(answer, checked_end(status), finish_reason, encoded(usage), timings=None)
        message = NewMessage(checked_id(turn_id, "id"), content, clean(adapter), UNSET, now, tuple(pictures))
        call = (clean(response_id), response, clean(previous))
        told = (owner, session_id, message, end, token_ids, *call, is_version, makes_session)
        return await self._write(owner, transactions.record, *told)

    async def find_turn(self, owner: str, turn_id: str) -> SessionId | None:
        """Return the session in which this owner has a turn of this id (the latest, if there are several); None if there is none."""
        return await self._reader.transact(transactions.find_turn, owner, turn_id)

    async def token_ids(self, owner: str, session_id: str) -> bytes:
        """Return the packed ids of everything that the engine has seen of the shown turns; b"" for an unknown session."""
        return await self._reader.transact(transactions.token_ids, owner, session_id)

    async def outlook(self, owner: str, session_id: str) -> NextPrompt:
        """Return what the next prompt of a session begins with. Raises GatewayError `not_found`."""
        return await self._reader.transact(transactions.outlook, owner, session_id)


async def _opened(
    connector: Callable[[], sqlite3.Connection], begin: str, health: Health, reserve: Reserve
) -> SqliteConnection:
    """Start a connection. On a full disk it uses the reserve, because reading the log back takes room, too."""
    while True:
        try:
            return await SqliteConnection(connector, begin, health.note).start()
        except sqlite3.Error as error:
            if not is_full(error) or not await asyncio.to_thread(reserve.give_some):
                raise
