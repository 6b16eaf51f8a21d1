"""Responses calls that are stored, by the ids that their clients know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gateway.sessions import transactions
from gateway.sessions.connection import SqliteConnection
from gateway.sessions.records import ResponseHistory, SessionId, StoredResponse, Turn, TurnId


class StoredResponses:
    """What was recorded with a `response_id`. `SessionStore.record_turn` records it.

    write: runs a transaction that changes an owner's texts.
    """

    def __init__(self, reader: SqliteConnection, write: Callable[..., Awaitable[Any]]) -> None:
        self._reader = reader
        self._write = write

    async def find(self, owner: str, response_id: str) -> tuple[SessionId, TurnId] | None:
        """Which turn of this owner was recorded under `response_id`; None if there is none, or no longer."""
        return await self._reader.transact(transactions.find_response, owner, response_id)

    async def read(self, owner: str, response_id: str) -> tuple[Turn, StoredResponse | None] | None:
        """A turn that was recorded under `response_id`, and the call itself, if that was recorded, too. None if there is none, or no longer."""
        return await self._reader.transact(transactions.read_response, owner, response_id)

    async def history(self, owner: str, response_id: str) -> ResponseHistory | None:
        """The turns up to and including that of `response_id`, oldest first, without those that came to nothing. None if there is none."""
        return await self._reader.transact(transactions.response_history, owner, response_id)

    async def of_session(self, owner: str, session_id: str) -> ResponseHistory | None:
        """All turns of a session, as `history`. None if there is no such session."""
        return await self._reader.transact(transactions.session_history, owner, session_id)

    async def items(self, owner: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Items of this owner's stored responses by their ids, of what was said and of what was given; those that there are."""
        found: dict[str, dict[str, Any]] = await self._reader.transact(
            transactions.response_items, owner, ids
        )
        return found

    async def delete(self, owner: str, response_id: str, now: float) -> bool:
        """Delete the turn of `response_id` for good, and its session if it was the only turn there; what follows the turn then follows the one
        before it. False if there is none."""
        is_gone: bool = await self._write(owner, transactions.delete_response, owner, response_id, now)
        return is_gone
