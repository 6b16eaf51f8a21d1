"""Rows of the list of conversations that are read by themselves, not page by page."""

from __future__ import annotations

from gateway.sessions import listing
from gateway.sessions.connection import SqliteConnection
from gateway.sessions.records import SessionSummary


class Rows:
    """Of one database. `SessionStore.list_sessions` reads the list's pages."""

    def __init__(self, reader: SqliteConnection) -> None:
        self._reader = reader

    async def one(self, owner: str, session_id: str) -> SessionSummary | None:
        """One session as a list shows it; None if it does not exist or was deleted."""
        return await self._reader.transact(listing.summary_of, owner, session_id)

    async def pinned(self, owner: str) -> list[SessionSummary]:
        """The sessions that this owner has pinned, wherever they were made, the one that was pinned last first."""
        return await self._reader.transact(listing.pinned_sessions, owner)
