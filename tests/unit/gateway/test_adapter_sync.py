"""Adapters of several nodes: one list that all of them follow, whoever comes, goes, fails or comes back."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from engine_bridge.adapters.store import AdapterStore
from engine_bridge.cluster.link import NodeLink
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import AdapterInfo, JsonReply
from gateway.nodes.adapter_sync import AdapterSync
from tests.adapter_corpus import WEIGHTS_FILE, make_adapter
from tests.unit.cluster.catalog_node import MODULES, CatalogNode, FarStore, connected, store_at, until


class Cluster:
    """Nodes by name, each with a store of its own, and the gateway's ends of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remotes: dict[str, RemoteNode] = {}
        self.nodes: dict[str, CatalogNode] = {}
        self.links: dict[str, NodeLink] = {}
        self._stack = AsyncExitStack()

    async def add(
        self, name: str, node: CatalogNode | None = None, store: AdapterStore | None = None
    ) -> CatalogNode:
        """A node joins, or comes back in another process."""
        node = self.nodes[name] = node or CatalogNode()
        remote = self.remotes.get(name) or RemoteNode(("fake-model",))
        made = connected(node, store or store_at(self.folder / name), remote)
        _, self.links[name] = await self._stack.enter_async_context(made)
        self.remotes[name] = remote
        return node

    async def lose(self, name: str) -> None:
        self.links[name].abort()
        await until(lambda: not self.remotes[name].is_up)

    async def close(self) -> None:
        await self._stack.aclose()

    def adapter(self, name: str, **fields: Any) -> Path:
        """An adapter in the folder that is followed, left alone for long enough to be taken."""
        made = make_adapter(self.folder / "adapters" / name, modules=MODULES, **fields)
        for path in (made, *made.iterdir()):
            os.utime(path, (1.0, 1.0))
        return made


class Trusting(AdapterStore):
    def find(self, content_hash: str, path: str) -> str:
        return path


@asynccontextmanager
async def synced(cluster: Cluster, **fields: Any) -> AsyncIterator[AdapterSync]:
    sync = AdapterSync(lambda: cluster.remotes, **fields)
    await sync.start()
    try:
        yield sync
    finally:
        await sync.close()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.add("n1")
    await cluster.add("n2")
    yield cluster
    await cluster.close()


def loading(name: str, path: Path, **fields: Any) -> dict[str, Any]:
    return {"lora_name": name, "lora_path": str(path)} | fields


def error_of(reply: JsonReply) -> str:
    return str(msgspec.json.decode(reply.body)["error"]["message"])


def shown(sync: AdapterSync, name: str) -> Any:
    return next(info for info in sync.merged() if info.name == name)


def costs(sync: AdapterSync, name: str) -> Mapping[str, float]:
    """By node that can serve it."""
    found = sync.find(name)
    assert found is not None
    return found.load_s


def versions(infos: Iterable[AdapterInfo]) -> set[tuple[str, str, bool]]:
    return {(info.name, info.version, info.is_pinned) for info in infos}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gateway looks at now and then, it looks at all the time."""
    for name in ("WATCH_EVERY_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(f"gateway.nodes.adapter_sync.{name}", 0.01)
    for name in ("FIRST_WAIT_S", "LONGEST_WAIT_S"):
        monkeypatch.setattr(f"engine_bridge.adapters.retries.{name}", 0.01)


async def test_what_a_client_loads_all_nodes_serve(cluster: Cluster) -> None:
    async with synced(cluster) as sync:
        path = cluster.adapter("pirate")
        assert (await sync.load(loading("pirate", path))).status == 200
        assert all(node.served() == {"pirate": str(path)} for node in cluster.nodes.values())
        cluster.nodes["n2"].places["pirate"] = "slot"
        await until(lambda: shown(sync, "pirate").nodes == {"n1": "disk", "n2": "slot"})
        assert shown(sync, "pirate").place == "slot"
        cost = costs(sync, "pirate")
        assert cost["n2"] == 0.0 < cost["n1"]
        assert sync.find("nobody") is None


async def test_what_one_node_cannot_load_none_serves(cluster: Cluster) -> None:
    small = await cluster.add("n3", CatalogNode(max_rank=8))
    async with synced(cluster) as sync:
        old = cluster.adapter("pirate")
        await sync.load(loading("pirate", old))
        for name in ("pirate", "robot"):
            path = cluster.adapter(f"{name}-large", rank=16)
            reply = await sync.load(loading(name, path, load_inplace=True))
            assert (reply.status, "n3 cannot load it" in error_of(reply)) == (400, True)
            for node in cluster.nodes.values():
                assert node.served() == {"pirate": str(old)}
        assert [info.name for info in sync.merged()] == ["pirate"]
        assert ("unload", "robot") not in small.calls, "what it never had is not taken back"
        assert sync.failures("n3") == {}


async def test_what_a_later_node_cannot_have_is_shown_and_served_by_the_others(cluster: Cluster) -> None:
    async with synced(cluster) as sync:
        await sync.load(loading("large", cluster.adapter("large", rank=16)))
        await sync.load(loading("pirate", cluster.adapter("pirate")))
        small = await cluster.add("n3", CatalogNode(max_rank=8))
        await sync.joined("n3")
        assert set(small.served()) == {"pirate"}
        assert "rank" in sync.failures("n3")["large"]
        assert sync.failures("n1") == sync.failures("who") == {}
        await until(lambda: set(costs(sync, "pirate")) == {"n1", "n2", "n3"})
        assert set(costs(sync, "large")) == {"n1", "n2"}
        assert (await sync.unload({"lora_name": "large"})).status == 200
        assert sync.failures("n3") == {}


async def test_nobody_waits_for_a_node_that_is_still_being_brought_up_to_date(cluster: Cluster) -> None:
    async with synced(cluster) as sync:
        await sync.load(loading("pirate", cluster.adapter("pirate")))
        await sync.load(loading("robot", cluster.adapter("robot", seed=1)))
        slow = await cluster.add("n3")
        slow.may_load.clear()
        joining = asyncio.create_task(sync.joined("n3"))
        async with asyncio.timeout(10):
            assert (await sync.load(loading("shout", cluster.adapter("shout", seed=2)))).status == 200
            assert (await sync.unload({"lora_name": "robot"})).status == 200
            assert await sync.pin("pirate", True) is not None
        assert not joining.done()
        slow.may_load.set()
        await joining
        assert {(info.name, info.is_pinned) for info in slow.adapters()} == {
            ("pirate", True),
            ("shout", False),
        }


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_all_nodes_end_with_the_list(
    cluster: Cluster, at_once: None, seed: int
) -> None:
    random, one_at_a_time = Random(seed), asyncio.Lock()
    paths = [cluster.adapter(f"source-{number}", seed=number) for number in range(3)]
    async with synced(cluster) as sync:

        async def load() -> None:
            body = loading(random.choice("ab"), random.choice(paths), load_inplace=True)
            assert (await sync.load(body)).status == 200

        async def unload() -> None:
            assert (await sync.unload({"lora_name": random.choice("ab")})).status in (200, 404)

        async def pin() -> None:
            await sync.pin(random.choice("ab"), random.random() < 0.5)

        async def lose() -> None:
            async with one_at_a_time:
                name = random.choice(["n1", "n2"])
                await cluster.lose(name)
                # The same process, or another one.
                await cluster.add(name, cluster.nodes[name] if random.random() < 0.5 else None)

        for _ in range(15):
            done = await asyncio.gather(
                *(random.choice([load, load, unload, pin, lose])() for _ in range(3)), return_exceptions=True
            )
            assert all(each is None or isinstance(each, EngineUnavailable) for each in done), done
        for name in cluster.remotes:
            await sync.joined(name)
        for node in cluster.nodes.values():
            assert versions(node.adapters()) == versions(sync.merged())
        assert sync.failures("n1") == sync.failures("n2") == {}


async def test_the_folder_is_served_from_the_start_and_followed(cluster: Cluster, at_once: None) -> None:
    pirate = cluster.adapter("pirate")
    broken = cluster.folder / "adapters" / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{")
    given = make_adapter(cluster.folder / "given", modules=MODULES, seed=4)
    async with synced(cluster, folder=cluster.folder / "adapters", given=[("given", str(given))]) as sync:
        assert [info.name for info in sync.merged()] == ["given", "pirate"]
        assert all(set(node.served()) == {"given", "pirate"} for node in cluster.nodes.values())
        cluster.adapter("robot", seed=1)
        await until(lambda: all("robot" in node.served() for node in cluster.nodes.values()))
        pirate.rename(cluster.folder / "moved")
        await until(lambda: all("pirate" not in node.served() for node in cluster.nodes.values()))
        late = await cluster.add("n3")
        await until(lambda: set(late.served()) == {"given", "robot"})


async def test_a_restart_knows_pins(cluster: Cluster) -> None:
    path, state = cluster.adapter("pirate"), cluster.folder / "state"
    given = [("pirate", str(path))]
    async with synced(cluster, state_dir=state, given=given) as sync:
        await sync.pin("pirate", True)
    for name in cluster.remotes:
        await cluster.lose(name)
        await cluster.add(name, store=Trusting(None))
    async with synced(cluster, state_dir=state, given=given) as sync:
        assert all(record.is_pinned for node in cluster.nodes.values() for record in node.catalog.served())
        assert shown(sync, "pirate").is_pinned


async def test_what_a_full_disk_kept_out_is_served_once_there_is_room(
    cluster: Cluster, at_once: None
) -> None:
    store = FarStore(cluster.folder / "n3", free_bytes=1 << 60)
    far = await cluster.add("n3", store=store)
    pirate = cluster.adapter("pirate")
    async with synced(cluster, folder=cluster.folder / "adapters") as sync:
        assert sync.merged() == []
        assert "no room" in sync.problems()["pirate"] and "tried again" in sync.problems()["pirate"]
        store.make_room()
        await until(lambda: all("pirate" in node.served() for node in cluster.nodes.values()))
        await until(lambda: sync.problems() == {})
        other = make_adapter(cluster.folder / "other", modules=MODULES, seed=1)
        assert (await sync.load(loading("pirate", other, load_inplace=True))).status == 200
        version = shown(sync, "pirate").version
        await until(lambda: "loaded from elsewhere" in sync.problems().get("pirate", ""))
        pirate.rename(cluster.folder / "moved")
        await until(lambda: sync.problems() == {})
        assert shown(sync, "pirate").version == version
        assert set(far.served()) == {"pirate"}


async def test_a_node_that_joins_while_files_are_replaced_gets_what_others_serve(cluster: Cluster) -> None:
    pirate = cluster.adapter("pirate")
    folders = {"state_dir": cluster.folder / "state", "folder": cluster.folder / "adapters"}
    async with synced(cluster, **folders) as sync:
        version = shown(sync, "pirate").version
        os.truncate(pirate / WEIGHTS_FILE, 1000)
        await cluster.add("n3")
        await cluster.add("n4", store=FarStore(cluster.folder / "n4", free_bytes=0))
        for name in ("n3", "n4"):
            await sync.joined(name)
            assert sync.failures(name) == {}
            (info,) = cluster.nodes[name].adapters()
            assert info.version == version
