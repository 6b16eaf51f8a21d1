"""A node's adapters without an engine: the real catalog, registry and folder."""

import asyncio
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_bridge.adapters.catalog import Catalog, open_registry
from engine_bridge.adapters.copies import Copies
from engine_bridge.adapters.errors import AdapterRejected, RegistryFailed
from engine_bridge.adapters.registry import AdapterRecord, Registry
from engine_bridge.adapters.retries import AdapterRefusal
from tests.adapter_corpus import make_adapter
from tests.unit.cluster.catalog_node import MODULES, contract

LONG_AGO = 1_600_000_000.0
MAX_BYTES = 1 << 30


class CatalogServer:
    """See `adapters.follower.Server`. One at a time calls it."""

    def __init__(self, state: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = open_registry(state)
        self.copies = Copies(state, clock)
        self.catalog = Catalog(self.registry, contract(), MAX_BYTES, self.copies)

    def served_paths(self) -> dict[str, str]:
        return {record.name: record.path for record in self.catalog.served()}

    def unloaded_paths(self) -> dict[str, str]:
        return self.catalog.unloaded

    async def serve_found(self, name: str, path: str) -> AdapterRefusal | None:
        served = self.catalog.current(name)
        if served is not None and served.path != path:
            return AdapterRefusal("An adapter of this name was loaded from elsewhere.", "name_taken")
        try:
            await asyncio.to_thread(self.catalog.add, name, path)
        except (AdapterRejected, RegistryFailed) as error:
            return AdapterRefusal(str(error), error.code)
        return None

    async def drop_found(self, name: str, path: str) -> None:
        served = self.catalog.current(name)
        if served is not None and served.path == path:
            await asyncio.to_thread(lambda: self.catalog.remove(name, is_missing=True))

    def load(self, name: str, path: Path) -> AdapterRecord:
        """As a client does."""
        return self.catalog.add(name, str(path))

    def unload(self, name: str) -> None:
        self.catalog.remove(name)

    def version(self, name: str) -> str:
        served = self.catalog.current(name)
        return served.content_hash if served is not None else ""


def put(folder: Path, name: str, seed: int = 0, *, when: float = LONG_AGO) -> Path:
    """An adapter that was left alone for long enough. One that lies there is replaced as a whole."""
    made = make_adapter(folder.parent / f"making-{name}", modules=MODULES, seed=seed)
    for path in (*made.iterdir(), made):
        os.utime(path, (when + seed, when + seed))
    target = folder / name
    if target.exists():
        for path in made.iterdir():
            path.replace(target / path.name)
        made.rmdir()
        os.utime(target, (when + seed, when + seed))
    else:
        folder.mkdir(exist_ok=True)
        made.rename(target)
    return target


class Clock:
    """A clock that a test puts forward."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@contextmanager
def no_files_left() -> Iterator[None]:
    """Not one more file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fill_disk(registry: Registry) -> None:
    """From now on the registry finds no room for another page."""
    (num_pages,) = registry._connection.execute("PRAGMA page_count").fetchone()
    registry._connection.execute(f"PRAGMA max_page_count = {num_pages}")


def free_disk(registry: Registry) -> None:
    registry._connection.execute("PRAGMA max_page_count = 1000000")


def set_busy_timeout(registry: Registry, timeout_ms: int) -> None:
    """How long a write waits for another program that holds the file."""
    registry._connection.execute(f"PRAGMA busy_timeout = {timeout_ms}")
