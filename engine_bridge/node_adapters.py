"""The adapters that a node serves from its start on, and those that come, change and go in its folder."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine_bridge.adapters.catalog import Catalog, NoCatalog
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.adapters.watch import Changes, Folder, is_odd
from engine_bridge.node import AdapterInfo, AdapterPlace

if TYPE_CHECKING:
    from engine_bridge.driver.absent import NoAdapters
    from engine_bridge.driver.adapters.residency import Residency
    from engine_bridge.driver.serving import Serving

log = logging.getLogger(__name__)

# How often the folder of adapters is looked at. Chosen: a listing of hundreds takes milliseconds.
WATCH_EVERY_S = 2.0
# Of a content's hash, what people see.
VERSION_CHARS = 12


async def serve_found(
    serving: Serving,
    given: tuple[tuple[str, str], ...],
    folder: Path | None,
    report: Callable[[str], None],
) -> None:
    """Check all adapters that are there at the start. One that fails is left out. given: (name, path) beside those in the folder."""
    found = (*given, *await asyncio.to_thread(find_adapters, folder))
    for number, (name, path) in enumerate(found, 1):
        report(f"checking adapter {name} ({number} of {len(found)})")
        problem = await serving.add_adapter(name, path)
        if problem is not None:
            log.error("adapter %s is left out: %s", name, problem)


async def watch(serving: Serving, catalog: Catalog, path: Path | None) -> None:
    """Follow the folder of adapters, and write down now and then what was used. Until it is cancelled."""
    folder = _folder(path, catalog)
    while True:
        await asyncio.sleep(WATCH_EVERY_S)
        try:
            if folder is not None:
                await _follow(serving, await asyncio.to_thread(folder.changes, time.time()))
            await asyncio.to_thread(catalog.flush)
        except Exception:
            log.exception("looking after the adapters failed; it is tried again")


async def _follow(serving: Serving, changes: Changes) -> None:
    for name, path in (*changes.added, *changes.changed):
        problem = await serving.add_adapter(name, str(path))
        if problem is not None:
            log.error("adapter %s is left as it was: %s", name, problem)
    for name in changes.removed:
        log.info("adapter %s has gone from its folder", name)
        await serving.drop_adapter(name)


def catch_up(adapters: Residency | NoAdapters, catalog: Catalog | NoCatalog) -> None:
    """Tell an engine which adapters came, went or were pinned while it was built. On its thread."""
    served = catalog.served()
    for record in served:
        adapters.add(record)
    for version_id in adapters.places().keys() - {record.version_id for record in served}:
        adapters.remove(version_id)


def listed(
    records: Iterable[AdapterRecord], places: Mapping[int, AdapterPlace], serving: Serving | None
) -> list[AdapterInfo]:
    """Those that can be asked for: an adapter is written down a moment before requests for it are let in. places: by version, where not on disk."""
    return [
        info_of(record, places.get(record.version_id, "disk"))
        for record in records
        if serving is None or serving.serves(record.name)
    ]


def info_of(record: AdapterRecord, place: AdapterPlace) -> AdapterInfo:
    """What is told about an adapter: its record, with the place it has on this node."""
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


def _folder(path: Path | None, catalog: Catalog) -> Folder | None:
    """The folder of adapters, told what of it is served since the start."""
    if path is None:
        return None
    known = {
        record.name: record.signature for record in catalog.served() if record.path == str(path / record.name)
    }
    return Folder(path, known)


def find_adapters(folder: Path | None) -> tuple[tuple[str, str], ...]:
    """(name, path) of every PEFT adapter directly under `folder`, by name. Missing folder: none."""
    if folder is None or not folder.is_dir():
        return ()
    return tuple(
        (path.name, str(path))
        for path in sorted(folder.iterdir())
        if (path / "adapter_config.json").is_file() and not is_odd(path.name)
    )
