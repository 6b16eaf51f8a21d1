"""The adapters that a node serves from its start on, and those that come, change and go in its folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine_bridge.adapters.catalog import Catalog
from engine_bridge.adapters.follower import WATCH_EVERY_S, AdapterServer, FolderFollower
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.protocol.figures import AdapterStats
from engine_bridge.protocol.node import AdapterInfo, AdapterPlace

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency
    from engine_bridge.driver.engine.absent import NoAdapters
    from engine_bridge.driver.serving.serving import Serving

log = logging.getLogger(__name__)

# The number of characters of a content's hash that people see.
VERSION_CHARS = 12


class AdapterWatch:
    """Serves a node's own adapters, looks after them until it is closed, and writes their use down now and then.

    Args:
        folder: a folder whose adapters are served, as they come, change and go.
        given: (name, path) of other adapters that are served from the start.
    """

    def __init__(self, folder: Path | None, given: Iterable[tuple[str, str]]) -> None:
        self._folder, self._given = folder, given
        self._follower: FolderFollower | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, server: AdapterServer, catalog: Catalog, report: Callable[[str], None]) -> None:
        """Serve the adapters. Returns when all adapters are served that can be; at once on a node without adapters, whose log says so."""
        if not catalog.has_adapters:
            return
        self._follower = FolderFollower(server, self._folder, self._given)
        await self._follower.start(report)
        self._task = asyncio.create_task(self._look_after(self._follower, catalog))

    @staticmethod
    async def _look_after(follower: FolderFollower, catalog: Catalog) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                await follower.follow()
                await asyncio.to_thread(catalog.look_after)
            except Exception:
                log.exception("looking after the adapters failed; it is tried again")

    def told(self, stats: AdapterStats | None) -> AdapterStats | None:
        """Return a node's figures, with the adapters that are not served as their files are. From any thread."""
        if stats is None or self._follower is None:
            return stats
        return replace(stats, failed=self._follower.problems())

    async def close(self) -> None:
        """Look after the adapters no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def catch_up(adapters: Residency | NoAdapters, catalog: Catalog) -> None:
    """Tell an engine which adapters came, went or were pinned while it was built. On its thread."""
    served = catalog.served()
    for record in served:
        adapters.add(record)
    for version_id in adapters.places().keys() - {record.version_id for record in served}:
        adapters.remove(version_id)


def listed(
    records: Iterable[AdapterRecord], places: Mapping[int, AdapterPlace], serving: Serving | None
) -> list[AdapterInfo]:
    """Return the adapters that requests may name: an adapter is registered a moment before requests for it are let in (by `serving`).

    places: of adapters that are not only on disk, by version.
    """
    return [
        info_of(record, places.get(record.version_id, "disk"))
        for record in records
        if serving is None or serving.serves(record.name)
    ]


def info_of(record: AdapterRecord, place: AdapterPlace) -> AdapterInfo:
    """Return an adapter's record in the form in which it is shown, with its place on this node."""
    return AdapterInfo(
        name=record.name,
        rank=record.rank,
        num_bytes=record.num_bytes,
        target_modules=record.target_modules,
        base_model=record.base_model,
        version=record.content_hash[:VERSION_CHARS],
        place=place,
        is_pinned=record.is_pinned,
        num_uses=record.num_uses,
        last_used_at=record.last_used_at,
    )
