"""Adapters that come, change, go, are loaded, unloaded and pinned while disks fail, at random, on the real registry, folder and copies.

Whatever happens: what is served was whole, is checked and can be read; what was loaded from elsewhere is not lost; pins hold; and once the faults
have ended, what lies in the folder is what is served.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from engine_bridge.adapters.contents import contents_of
from engine_bridge.adapters.copies import PAUSE_S
from engine_bridge.adapters.errors import AdapterRejected, RegistryFailed
from engine_bridge.adapters.follower import FolderFollower
from engine_bridge.adapters.retries import LONGEST_WAIT_S
from engine_bridge.adapters.watch import SETTLE_S
from tests.adapter_corpus import CONFIG_FILE, WEIGHTS_FILE, make_adapter
from tests.unit.cluster.catalog_node import MODULES
from tests.unit.engine_bridge import catalog_server
from tests.unit.engine_bridge.catalog_server import CatalogServer, Clock, no_files_left, put

NAMES = ("a", "b", "c")
NUM_ACTIONS = 60
NUM_VERSIONS = 6


class Play:
    """What is served, and what should be.

    Attributes:
        whole: by path, the hash of each version that ever lay there whole. lies: by name, the one that lies in the folder now, "" for a broken one.
        loaded: by name, what a client loaded from elsewhere: its path and hash. away: names whose own of the folder a client has unloaded.
    """

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.random = Random(seed)
        self.root, self.state, self.other = tmp_path / "adapters", tmp_path / "state", tmp_path / "other"
        self.root.mkdir()
        places = [tmp_path / "versions" / str(number) for number in range(NUM_VERSIONS)]
        self.versions = [make_adapter(place, modules=MODULES, seed=n) for n, place in enumerate(places)]
        self.hashes = [contents_of(path).content_hash for path in self.versions]
        self.clock, self.copies_clock, self.num_changes = Clock(), Clock(), 0
        self.whole: dict[str, set[str]] = {}
        self.lies: dict[str, str] = {}
        self.loaded: dict[str, tuple[str, str]] = {}
        self.pinned: set[str] = set()
        self.away: set[str] = set()
        self.has_copy_faults = bool(seed % 2)
        self.faults: set[str] = set()

    async def begin(self) -> None:
        self.server = CatalogServer(self.state, self.copies_clock)
        self.follower = FolderFollower(self.server, self.root, clock=self.clock)
        await self.follower.start()
        self.server.catalog.look_after()

    # -- actions -------------------------------------------------------------------------------------------------------

    def place(self, folder: Path, name: str) -> str:
        """A version comes, or takes the place of another, as a whole or written over it."""
        number = self.random.randrange(NUM_VERSIONS)
        self.num_changes += 1
        when = 1_600_000_000.0 + NUM_VERSIONS * self.num_changes
        target = folder / name
        if target.is_dir() and self.random.random() < 0.5:
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                (target / file).write_bytes((self.versions[number] / file).read_bytes())
            for path in (*target.iterdir(), target):
                os.utime(path, (when, when))
        else:
            put(folder, name, number, when=when)
        self.whole.setdefault(str(target), set()).add(self.hashes[number])
        return self.hashes[number]

    async def change(self, name: str) -> None:
        self.lies[name] = self.place(self.root, name)
        self.away.discard(name)

    async def half_write(self, name: str) -> None:
        """Just now; left like that for long enough, it is refused."""
        weights = self.root / name / WEIGHTS_FILE
        if weights.exists():
            os.truncate(weights, self.random.randrange(weights.stat().st_size))
            os.utime(weights, (self.clock.now, self.clock.now))
            self.lies[name] = ""
            self.away.discard(name)

    async def remove(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)
        self.lies.pop(name, None)
        self.away.discard(name)

    async def load(self, name: str) -> None:
        self.other.mkdir(exist_ok=True)
        path = self.other / f"{name}-{self.random.randrange(2)}"
        content = self.place(self.other, path.name)
        with suppress(AdapterRejected, RegistryFailed):
            self.server.load(name, path)
            self.loaded[name] = (str(path), content)
            self.away.discard(name)
        if self.random.random() < 0.3:
            shutil.rmtree(path)

    async def unload(self, name: str) -> None:
        if name not in self.server.served_paths():
            return
        with suppress(RegistryFailed):
            self.server.unload(name)
            self.pinned.discard(name)
            if self.loaded.pop(name, None) is None:
                self.away.add(name)

    async def pin(self, name: str) -> None:
        is_pinned = self.random.random() < 0.7
        with suppress(RegistryFailed):
            if self.server.catalog.set_pinned(name, is_pinned) is not None:
                (self.pinned.add if is_pinned else self.pinned.discard)(name)

    async def restart(self, name: str) -> None:
        self.end_faults()
        self.server.catalog.close()
        self.loaded.clear()
        self.away.clear()
        await self.begin()

    async def fail(self, name: str) -> None:
        fault = self.random.choice(["registry", *(["copies"] if self.has_copy_faults else [])])
        self.faults.add(fault)
        if fault == "registry":
            catalog_server.fill_disk(self.server.registry)
        else:
            self.set_free_bytes(1 << 60)

    async def mend(self, name: str) -> None:
        self.end_faults()

    async def look_without_files(self, name: str) -> None:
        with no_files_left():
            await self.follower.follow()

    def end_faults(self) -> None:
        self.faults.clear()
        catalog_server.free_disk(self.server.registry)
        self.set_free_bytes(0)

    def set_free_bytes(self, num_bytes: int) -> None:
        self.server.copies._store._free_bytes = num_bytes

    async def look(self, name: str = "") -> None:
        self.clock.now += self.random.choice([0.5, SETTLE_S, LONGEST_WAIT_S])
        self.copies_clock.now += PAUSE_S
        await self.follower.follow()
        self.server.catalog.look_after()

    async def act(self) -> None:
        actions: dict[Callable[[str], object], int] = {
            self.look: 8, self.change: 6, self.half_write: 2, self.remove: 2, self.load: 2, self.unload: 2, self.pin: 2,
            self.fail: 2, self.mend: 2, self.look_without_files: 1, self.restart: 1,
        }  # fmt: skip
        (action,) = self.random.choices(list(actions), list(actions.values()))
        await action(self.random.choice(NAMES))  # type: ignore[misc]

    # -- what holds ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for record in self.server.catalog.served():
            assert record.content_hash in self.whole[record.path], "what was never whole is served"
            assert record.is_pinned is (record.name in self.pinned)
            if not self.has_copy_faults:
                assert self.is_readable(record.path, record.content_hash), "its next request would fail"
        served = {record.name: record for record in self.server.catalog.served()}
        for name, (path, content) in self.loaded.items():
            assert (served[name].path, served[name].content_hash) == (path, content)

    def is_readable(self, path: str, content_hash: str) -> bool:
        for place in (path, self.server.copies.path_of(content_hash)):
            with suppress(AdapterRejected):
                if place and contents_of(Path(place)).content_hash == content_hash:
                    return True
        return False

    async def converge(self) -> None:
        self.end_faults()
        self.clock.now += SETTLE_S
        for _ in range(2):
            self.clock.now += LONGEST_WAIT_S
            self.copies_clock.now += PAUSE_S
            await self.follower.follow()
            self.server.catalog.look_after()
        self.check()
        served = {name: self.server.version(name) for name in self.server.served_paths()}
        for name in NAMES:
            if name in self.loaded:
                continue
            lies = self.lies.get(name)
            if lies is None:
                assert name not in served
            elif lies:
                assert served.get(name) == (None if name in self.away else lies)
        problems = self.follower.problems()
        assert all(name in self.loaded or self.lies[name] == "" for name in problems), problems
        assert not any(path.name.startswith("incoming-") for path in self.state.glob("*/*"))


@pytest.mark.parametrize("seed", range(8))
async def test_what_is_served_is_whole_and_in_the_end_what_is_there(tmp_path: Path, seed: int) -> None:
    play = Play(tmp_path, seed)
    await play.begin()
    play.end_faults()
    for _ in range(NUM_ACTIONS):
        await play.act()
        play.check()
        if play.random.random() < 0.1:
            await play.converge()
    await play.converge()
    play.server.catalog.close()
