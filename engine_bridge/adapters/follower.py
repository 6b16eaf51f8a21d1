"""Serves the adapters of a folder, and those that were named at the start, as they come, change and go.

A name belongs to the place whose adapter is served under it. An adapter that was loaded from elsewhere, over HTTP or by name from the start on, is
neither replaced nor ended by changes in the folder; the folder's own adapter of that name is served once the other has been unloaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from engine_bridge.adapters.errors import quoted
from engine_bridge.adapters.retries import AdapterRefusal, Retries
from engine_bridge.adapters.watch import Folder, FolderChanges

log = logging.getLogger(__name__)

# How often the folder of adapters is looked at. Chosen: a listing of hundreds takes milliseconds.
WATCH_EVERY_S = 2.0


class AdapterServer(Protocol):
    """A node, or a group of nodes, that serves adapters."""

    def served_paths(self) -> Mapping[str, str]:
        """Return the path of each served adapter by name."""

    def unloaded_paths(self) -> Mapping[str, str]:
        """Return the path of each adapter that was unloaded on purpose and not replaced, by name."""

    async def serve_found(self, name: str, path: str) -> AdapterRefusal | None:
        """Check an adapter and serve it, in place of an earlier one from the same path. None: it is served."""

    async def drop_found(self, name: str, path: str) -> None:
        """End the service of an adapter whose files were removed. Nothing happens if the name is served from another path."""


class FolderFollower:
    """Follows one folder. Every method but `problems` is called from the event loop.

    Args:
        folder: None: no folder is followed.
        given: (name, path) of further adapters, which are served from the start on, or once they can be.
    """

    def __init__(
        self,
        server: AdapterServer,
        folder: Path | None,
        given: Iterable[tuple[str, str]] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._server = server
        self._retries, self._given_retries = Retries(), Retries()
        self._folder = Folder(folder, self._retries) if folder is not None else None
        self._given = dict(given)
        self._clock = clock

    async def start(self, report: Callable[[str], None] = lambda stage: None) -> None:
        """Serve all adapters so far. An adapter that cannot be served is left out, with a line in the log."""
        for name, path in self._given.items():
            report(f"checking adapter {name}")
            await self._serve(name, path, self._given_retries)
        changes = await self._changes(is_settled=True)
        for number, (name, path_found) in enumerate(changes.found, 1):
            report(f"checking adapter {name} ({number} of {len(changes.found)})")
            await self._serve(name, str(path_found), self._retries)

    async def follow(self) -> None:
        """Look for changes once, and repeat tries that are due."""
        for name in self._given_retries.due(self._clock()):
            await self._serve(name, self._given[name], self._given_retries)
        changes = await self._changes()
        for name in changes.removed:
            log.info("adapter %s has gone from its folder", quoted(name))
            assert self._folder is not None
            await self._contained(name, self._server.drop_found(name, str(self._folder.path / name)))
        for name, path in changes.found:
            await self._serve(name, str(path), self._retries)

    def problems(self) -> dict[str, str]:
        """Return by name why an adapter is not served as its files are. From any thread."""
        return self._retries.texts() | self._given_retries.texts()

    async def _changes(self, *, is_settled: bool = False) -> FolderChanges:
        folder = self._folder
        if folder is None:
            return FolderChanges()
        served, unloaded = self._server.served_paths(), self._server.unloaded_paths()
        elsewhere = {name for name, path in served.items() if path != str(folder.path / name)}
        own = {name for name, path in unloaded.items() if path == str(folder.path / name)}
        # An adapter out of service comes back unless it was unloaded itself; another one of its name may have replaced it for a while.
        folder.tell_again(folder.told - served.keys() - own - self._retries.names)
        now = self._clock()
        return await asyncio.to_thread(folder.changes, now, elsewhere, is_settled=is_settled)

    async def _serve(self, name: str, path: str, retries: Retries) -> None:
        """Try to serve an adapter. retries: the folder's, or that of the given adapters. Both may have this name."""
        refusal = await self._contained(name, self._server.serve_found(name, path))
        if refusal is None:
            retries.forget(name)
        elif retries.failed(name, refusal, self._clock()):
            log.error("adapter %s is left as it was: %s", quoted(name), retries.texts()[name])

    @staticmethod
    async def _contained(name: str, doing: Awaitable[AdapterRefusal | None]) -> AdapterRefusal | None:
        """Turn any error into a refusal: one adapter's trouble must not reach the others."""
        try:
            return await doing
        except Exception as error:
            log.exception("adapter %s could not be looked after", quoted(name))
            return AdapterRefusal(f"The server failed on it ({type(error).__name__}).")
