"""What lies in the folder of adapters is served, whatever fails meanwhile, and nothing that came from elsewhere is touched by it."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_bridge.adapters.follower import FolderFollower
from engine_bridge.adapters.retries import LONGEST_WAIT_S
from tests.adapter_corpus import WEIGHTS_FILE
from tests.unit.engine_bridge.catalog_server import CatalogServer, fill_disk, free_disk, put


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Play:
    """A server and its folder."""

    def __init__(self, tmp_path: Path, given: tuple[tuple[str, str], ...] = ()) -> None:
        self.root, self.state, self.elsewhere = tmp_path / "adapters", tmp_path / "state", tmp_path / "other"
        self.root.mkdir(exist_ok=True)
        self.clock, self.given = Clock(), given
        self.begin()

    def begin(self) -> None:
        self.server = CatalogServer(self.state)
        self.follower = FolderFollower(self.server, self.root, self.given, self.clock)

    def restart(self) -> None:
        self.server.catalog.close()
        self.begin()

    async def later(self, seconds: float = LONGEST_WAIT_S) -> None:
        self.clock.now += seconds
        await self.follower.follow()

    @property
    def served(self) -> dict[str, str]:
        return self.server.served_paths()


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    play = Play(tmp_path)
    yield play
    play.server.catalog.close()


@contextmanager
def full_disk(play: Play) -> Iterator[None]:
    fill_disk(play.server.registry)
    try:
        yield
    finally:
        free_disk(play.server.registry)


@contextmanager
def no_files_left(play: Play) -> Iterator[None]:
    """Not one more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def database_in_use(play: Play) -> Iterator[None]:
    assert play.server.registry._connection is not None
    play.server.registry._connection.execute("PRAGMA busy_timeout = 1")
    other = sqlite3.connect(play.state / "adapters.db")
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


# With no file left the folder cannot be listed, so that nobody can say what waits.
FAULTS = {"full disk": full_disk, "no files left": no_files_left, "database in use": database_in_use}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_is_not_the_files_fault_is_tried_again(play: Play, fault: str) -> None:
    """One arrives and one is replaced; the old weights answer on meanwhile, and the status says what waits for what."""
    put(play.root, "changing")
    await play.follower.start()
    old = play.server.version("changing")
    # Of which the registry has to write many pages, whatever is free in those that it has.
    for number in range(60):
        put(play.root, f"arriving-{number:02}", seed=number)
    put(play.root, "changing", seed=100)
    with FAULTS[fault](play):
        for _ in range(3):
            await play.later()
        assert play.server.version("changing") == old
        waiting = play.follower.problems()
        assert ("changing" in waiting) is (fault != "no files left")
        assert all("tried again" in text for text in waiting.values())
    for _ in range(2):
        await play.later()
    assert play.server.version("changing") != old
    assert len(play.served) == 61
    assert play.follower.problems() == {}


async def test_what_is_the_files_fault_is_not_read_over_and_over(play: Play) -> None:
    broken = put(play.root, "broken")
    os.truncate(broken / WEIGHTS_FILE, 1000)
    os.utime(broken / WEIGHTS_FILE, (1.0, 1.0))
    await play.follower.start()
    (text,) = play.follower.problems().values()
    assert "tried again" not in text
    put(play.root, "broken", seed=1)
    await play.later()
    assert play.served and play.follower.problems() == {}


async def test_one_that_was_named_at_the_start_is_tried_again_too(tmp_path: Path) -> None:
    path = put(tmp_path / "elsewhere", "given")
    play = Play(tmp_path, (("given", str(path)),))
    with database_in_use(play):
        await play.follower.start()
        assert play.served == {} and "tried again" in play.follower.problems()["given"]
    await play.later()
    assert play.served == {"given": str(path)} and play.follower.problems() == {}
    play.server.catalog.close()


async def test_what_has_gone_takes_no_requests_though_the_disk_is_full(play: Play) -> None:
    put(play.root, "going"), put(play.root, "staying", seed=1)
    await play.follower.start()
    with database_in_use(play):
        shutil.rmtree(play.root / "going")
        put(play.root, "coming", seed=2)
        await play.later()
        assert set(play.served) == {"staying"}
    await play.later()
    assert set(play.served) == {"staying", "coming"}


# -- whose a name is ---------------------------------------------------------------------------------------------------


async def test_one_that_was_loaded_from_elsewhere_outlives_the_folders_of_its_name(play: Play) -> None:
    twin = put(play.root, "twin")
    await play.follower.start()
    other = put(play.elsewhere, "shout", seed=1)
    play.server.load("twin", other)
    loaded = play.server.version("twin")
    for change in (lambda: put(play.root, "twin", seed=2), lambda: shutil.rmtree(twin), lambda: None):
        change()
        await play.later()
        assert play.served == {"twin": str(other)} and play.server.version("twin") == loaded
    assert play.follower.problems() == {}


@pytest.mark.parametrize("is_seen", [False, True])
async def test_the_folders_own_comes_back_when_the_other_is_unloaded(play: Play, is_seen: bool) -> None:
    """Whether or not the folder was looked at in between."""
    twin = put(play.root, "twin")
    await play.follower.start()
    play.server.load("twin", put(play.elsewhere, "shout", seed=1))
    if is_seen:
        await play.later()
        assert "loaded from elsewhere" in play.follower.problems()["twin"]
    play.server.unload("twin")
    await play.later(0.0)
    assert play.served == {"twin": str(twin)} and play.follower.problems() == {}
    play.server.unload("twin")
    await play.later()
    assert play.served == {}, "whoever unloads the folder's own means it"
    put(play.root, "twin", seed=3)
    await play.later()
    assert play.served == {"twin": str(twin)}, "until its files are others"


async def test_one_from_the_folder_that_comes_later_stands_back(play: Play) -> None:
    other = put(play.elsewhere, "shout", seed=1)
    play.server.load("twin", other)
    await play.follower.start()
    twin = put(play.root, "twin")
    await play.later()
    assert play.served == {"twin": str(other)}
    play.restart()
    await play.follower.start()
    assert play.served == {"twin": str(twin)}, "what was loaded over HTTP ends with the server"


async def test_one_that_is_named_at_the_start_goes_before_the_folders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(tmp_path / "elsewhere", "twin", seed=1)
    play = Play(tmp_path, (("twin", str(path)),))
    put(play.root, "twin")
    await play.follower.start()
    caplog.clear()
    for _ in range(5):
        await play.later()
        assert play.served == {"twin": str(path)}
        assert "loaded from elsewhere" in play.follower.problems()["twin"]
    assert caplog.messages == [], "it is said once"
    play.server.catalog.close()


async def test_a_pin_is_the_names_until_it_is_unloaded(play: Play) -> None:
    put(play.root, "twin")
    await play.follower.start()
    play.server.catalog.set_pinned("twin", True)
    play.server.load("twin", put(play.elsewhere, "shout", seed=1))

    def is_pinned() -> bool:
        served = play.server.catalog.current("twin")
        return served is not None and served.is_pinned

    assert is_pinned(), "whoever takes the name over takes the pin over"
    play.restart()
    await play.follower.start()
    assert is_pinned(), "a restart keeps it"
    play.server.unload("twin")
    put(play.root, "twin", seed=2)
    await play.later()
    assert play.served and not is_pinned()
