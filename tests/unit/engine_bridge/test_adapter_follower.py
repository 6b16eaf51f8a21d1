import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_bridge.adapters.follower import FolderFollower
from engine_bridge.adapters.retries import LONGEST_WAIT_S
from tests.unit.engine_bridge import catalog_server
from tests.unit.engine_bridge.catalog_server import CatalogServer, Clock, no_files_left, put


class Served:
    """A server and its folder."""

    def __init__(self, tmp_path: Path, given: tuple[tuple[str, str], ...] = ()) -> None:
        self.root, self.state, self.elsewhere = tmp_path / "adapters", tmp_path / "state", tmp_path / "other"
        self.root.mkdir(exist_ok=True)
        self.clock = Clock()
        self.server = CatalogServer(self.state)
        self.follower = FolderFollower(self.server, self.root, given, self.clock)

    async def later(self, seconds: float = LONGEST_WAIT_S) -> None:
        self.clock.now += seconds
        await self.follower.follow()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.server.catalog.close()


@contextmanager
def full_disk(served: Served) -> Iterator[None]:
    catalog_server.fill_disk(served.server.registry)
    try:
        yield
    finally:
        catalog_server.free_disk(served.server.registry)


@contextmanager
def database_in_use(served: Served) -> Iterator[None]:
    catalog_server.set_busy_timeout(served.server.registry, 1)
    other = sqlite3.connect(served.state / "adapters.db")
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


# With no file left the folder cannot be listed, so that nobody can say what waits.
FAULTS = {
    "full disk": full_disk,
    "no files left": lambda play: no_files_left(),
    "database in use": database_in_use,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_is_not_the_files_fault_is_tried_again(served: Served, fault: str) -> None:
    """One arrives, one is replaced and one goes; the old weights answer on meanwhile, and the status says what waits for what."""
    put(served.root, "changing"), put(served.root, "going")
    await served.follower.start()
    old = served.server.version("changing")
    # Of which the registry has to write many pages, whatever is free in those that it has.
    for number in range(60):
        put(served.root, f"arriving-{number:02}", seed=number)
    put(served.root, "changing", seed=100)
    shutil.rmtree(served.root / "going")
    with FAULTS[fault](served):
        for _ in range(3):
            await served.later()
        assert served.server.version("changing") == old
        assert ("going" in served.server.served_paths()) is (fault == "no files left")
        waiting = served.follower.problems()
        assert ("changing" in waiting) is (fault != "no files left")
        assert all("tried again" in text for text in waiting.values())
    for _ in range(2):
        await served.later()
    assert served.server.version("changing") != old
    assert len(served.server.served_paths()) == 61
    assert served.follower.problems() == {}


async def test_one_named_at_the_start_goes_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put(tmp_path / "elsewhere", "twin", seed=1)
    served = Served(tmp_path, (("twin", str(path)),))
    with database_in_use(served):
        await served.follower.start()
        assert served.server.served_paths() == {} and "tried again" in served.follower.problems()["twin"]
    await served.later()
    put(served.root, "twin")
    await served.later()
    caplog.clear()
    for _ in range(5):
        await served.later()
        assert served.server.served_paths() == {"twin": str(path)}
        assert "loaded from elsewhere" in served.follower.problems()["twin"]
    assert caplog.messages == [], "it is said once"
    served.server.catalog.close()
