"""Changes in an owner's list of conversations, told to the sockets that watch it. Source: docs/protocol.md, frame `listed`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from msgspec import to_builtins

from gateway.errors import GatewayError
from gateway.sessions import SessionStore

log = logging.getLogger(__name__)


class ListWatcher(Protocol):
    """A socket that shows a list."""

    @property
    def owner(self) -> str | None:
        """The owner of the list."""

    def tell(self, frame: dict[str, Any]) -> None:
        """Send a frame that its client did not ask for."""


class ListFeed:
    """The sockets that watch. The database is read only where a change concerns one of them."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._watchers: set[ListWatcher] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, watcher: ListWatcher) -> None:
        """Tell this socket of changes from now on."""
        self._watchers.add(watcher)

    def remove(self, watcher: ListWatcher) -> None:
        """Tell this socket of no more changes. A socket that does not watch is ignored."""
        self._watchers.discard(watcher)

    def changed(self, owner: str, session_id: str, *, but: ListWatcher | None = None) -> None:
        """Tell the owner's sockets that a session is new, was changed or was deleted, except `but`, which knows it already. Returns at once."""
        if any(watcher.owner == owner and watcher is not but for watcher in self._watchers):
            self._tasks.add(task := asyncio.create_task(self._tell(owner, session_id, but)))
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, owner: str, session_id: str, but: ListWatcher | None) -> None:
        try:
            summary = await self._store.rows.one(owner, session_id)
        except GatewayError as error:
            log.warning("a change of the list of conversations was not announced: %s", error.code)
            return
        frame = {"type": "listed", "session_id": session_id, "session": to_builtins(summary)}
        for watcher in list(self._watchers):
            if watcher.owner == owner and watcher is not but:
                try:
                    watcher.tell(frame)
                except Exception:
                    log.exception("a change of the list of conversations could not be sent to a socket")
