"""One real engine with the demo model for all integration tests, and gateways on real loopback ports in front of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from msgspec import structs
from prometheus_client import CollectorRegistry

from engine_bridge.cluster.peers import PeerConfig
from engine_bridge.local_node import LocalNode
from gateway.app import Server, build_services, node_config
from gateway.metrics.metrics import Metrics
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR, Config
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts
from overture_client.chat import ChatClient
from tests.blocking import checked

KEYS = ("ov-first-key-for-tests-only", "ov-second-key-for-tests-only")
MODEL = "overture-demo"
PEERS = PeerConfig(token="of the tests' cluster")
# Files whose engines must be gone before the shared one starts: vLLM keeps the state of its process groups per process.
ALONE = (
    "test_mixed_batch.py",
    "test_models.py",
    "test_kv_pressure.py",
    "test_promotion.py",
    "test_adapters.py",
    "test_adapter_changes.py",
    "test_scheduling.py",
    "test_priority_api.py",
    "test_engine_state.py",
    "test_profile.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests, and run all of them on one event loop: the engine's node belongs to it."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.name not in ALONE if here in item.path.parents else False)
    for item in items:
        if here in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(autouse=True)
def nothing_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which code of ours blocks the event loop. Not where engines start: vLLM reads the model's files there."""
    with contextlib.nullcontext() if request.path.name in ALONE else checked():
        yield


def demo_config(data_dir: Path, **changes: Any) -> Config:
    return Config(
        model=str(DEMO_MODEL_DIR),
        adapters_dir=DEMO_ADAPTERS_DIR,
        port=0,
        data_dir=data_dir,
        drain_timeout_s=5,
        **{"kv_host_gib": 0.25} | changes,
    )


class SharedNode(LocalNode):
    """A node that outlives the gateways in front of it: they drain and close it, it does not mind."""

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        pass

    async def really_close(self) -> None:
        await super().close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedNode]:
    config = node_config(demo_config(tmp_path_factory.mktemp("node"), max_num_seqs=32))
    node = SharedNode(structs.replace(config, peers=PEERS))
    await node.start()
    yield node
    await node.really_close()


Gateways = Callable[..., Awaitable[Server]]


@pytest_asyncio.fixture(loop_scope="session")
async def gateways(node: SharedNode, tmp_path: Path) -> AsyncIterator[Gateways]:
    """Makes gateways with settings of their own, all in front of the one engine."""
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> Server:
            data_dir = changes.pop("data_dir", tmp_path / "data")
            services = await build_services(
                demo_config(data_dir, **changes), node=node, metrics=Metrics(CollectorRegistry())
            )
            return await stack.enter_async_context(Server(services))

        yield make


@pytest_asyncio.fixture(loop_scope="session")
async def server(gateways: Gateways) -> Server:
    return await gateways()


@pytest_asyncio.fixture(loop_scope="session")
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


@pytest_asyncio.fixture(loop_scope="session")
async def chat(server: Server) -> AsyncIterator[ChatClient]:
    async with ChatClient(server.url) as client:
        yield client


class WaitsForTheDisk:
    """Restores whatever a tier holds, however slow this machine's copies and disk are at the moment."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        is_there = facts.num_ready_blocks == facts.num_blocks
        return RestoreDecision(Action.LOAD if is_there else Action.WAIT, facts.num_blocks, "patient", 0.0)


@asynccontextmanager
async def starts(node: LocalNode) -> AsyncIterator[list[int]]:
    """Priorities of the requests that the engine starts meanwhile, in its order. Whose client hears first of the end is up to the machine."""
    found: list[int] = []

    def note(driver: Any) -> None:
        own = driver.scheduling.dispatcher
        admitted = own.policy.admitted

        def noted(request_id: str, now: float) -> None:
            found.append(own.known(request_id).base.priority)
            admitted(request_id, now)

        own.policy.admitted = noted

    def forget(driver: Any) -> None:
        del driver.scheduling.dispatcher.policy.admitted

    await node.run_on_engine(note)
    yield found
    await node.run_on_engine(forget)


async def engine_has(node: LocalNode, num_requests: int) -> None:
    """Wait until the engine holds as many requests; fails if it does not come to that within a minute."""
    async with asyncio.timeout(60):
        while (stats := await node.stats()).num_running + stats.num_waiting < num_requests:
            await asyncio.sleep(0.01)


async def engine_is_empty(node: LocalNode) -> None:
    """Wait until the engine holds no request; fails if it does not come to that within a minute."""
    async with asyncio.timeout(60):
        while True:
            stats = await node.stats()
            if stats.num_running == stats.num_waiting == 0:
                return
            await asyncio.sleep(0.01)
