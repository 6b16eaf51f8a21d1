"""One real engine with the demo model for all integration tests, and gateways on real loopback ports in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from msgspec import structs
from prometheus_client import CollectorRegistry
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from engine_bridge.cluster.peers import PeerConfig
from engine_bridge.cluster.trust import Trust
from engine_bridge.driver.apis.content_tokens import split_contents
from engine_bridge.driver.background import is_background
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.figures import SchedulingStats
from engine_bridge.protocol.node import Node
from gateway.app import Server, build_services, node_config
from gateway.metrics.metrics import Metrics
from gateway.settings import logs
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR, Config
from overture_client.chat import ChatClient
from overture_client.chat_frames import Delta, Done
from tests.blocking import checked
from tests.conftest import BROWSER

from .facts import ALIAS, Http, Patch

PEERS = PeerConfig(trust=Trust(token=b"of the tests' cluster"))
# Files whose engines must be gone before the shared one starts: vLLM keeps the state of its process groups per process.
ALONE = (
    "test_correct.py",
    "test_mixed_batch.py",
    "test_models.py",
    "test_reasoning.py",
    "test_kv_erasure.py",
    "test_kv_pressure.py",
    "test_promotion.py",
    "test_adapters.py",
    "test_adapter_changes.py",
    "test_scheduling.py",
    "test_priority_api.py",
    "test_engine_state.py",
    "test_profile.py",
    "test_ranks.py",
    "test_traces.py",
)

# Longest first, where several processes share the tests, so that none is left with a long file when the others have none. These have no engine in the
# tests' own process, and the browser's has gone when its tests are over, so they may come before all.
FIRST = ("test_process.py", "test_ray.py")
# And of those with the shared engine.
LONG = ("test_router.py", "test_pooling.py", "test_docs.py")

COLLECTOR = {"freeze": gc.freeze, "unfreeze": gc.unfreeze}


def _leave_imports_alone() -> None:
    """Take the place of gc.unfreeze, which vLLM calls when an engine ends.

    It would have the three collections that follow look through a million imported objects, which takes 2.5 s of each engine's end. So what is frozen
    then stays so, and later engines are not frozen, so that each goes when it ends.
    """
    gc.freeze = lambda: None


gc.unfreeze = _leave_imports_alone


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and run all of them on one event loop: the engine's node belongs to it."""
    here = Path(__file__).parent
    has_others = hasattr(config, "workerinput")

    def turn(item: pytest.Item) -> tuple[int, bool]:
        """When a test comes, and whether it comes later among those."""
        name = item.path.name if here in item.path.parents else ""
        if has_others and (name in FIRST or item.nodeid.startswith(BROWSER)):
            return 0, bool(name)
        return (2, name not in LONG) if name and name not in ALONE else (1, False)

    items.sort(key=turn)
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
        **{"kv_host_gib": 0.25, "kv_cache_gib": 0.25} | changes,
    )


@contextlib.contextmanager
def logging_kept() -> Iterator[None]:
    """Logging may be set up in the block as a command does it; everything is as before afterwards."""
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in (None, *root.manager.loggerDict)}
    try:
        yield
    finally:
        for handler in [handler for handler in root.handlers if isinstance(handler, logs._Handler)]:
            root.removeHandler(handler)
        for name in {*levels, *root.manager.loggerDict}:
            logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
        logging.captureWarnings(False)


@asynccontextmanager
async def served(config: Config, node: Node | None = None) -> AsyncIterator[Server]:
    """A gateway with metrics of its own until the block ends, in front of this node or of one that has not been started."""
    services = await build_services(config, node=node, metrics=Metrics(CollectorRegistry()))
    async with Server(services) as server:
        yield server


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
    folder = tmp_path_factory.mktemp("node")
    config = node_config(demo_config(folder, max_num_seqs=32, served_model_aliases=(ALIAS,)))
    node = SharedNode(structs.replace(config, peers=PEERS))
    await node.start()
    yield node
    await node.really_close()


@pytest_asyncio.fixture(loop_scope="session")
async def split(node: SharedNode) -> AsyncIterator[SharedNode]:
    """The shared node as with the setting, until the test is over."""
    client = node._client
    client.continuing.known = split_contents(client.renderer, frozenset())
    yield node
    client.continuing.known = frozenset()
    del client.renderer.render_messages_async, client.renderer.tokenize_prompts_async


Gateways = Callable[..., Awaitable[Server]]


@pytest_asyncio.fixture(loop_scope="session")
async def gateways(node: SharedNode, tmp_path: Path) -> AsyncIterator[Gateways]:
    """Makes gateways with settings of their own, all in front of the one engine."""
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> Server:
            settings = {"served_model_aliases": (ALIAS,)} | changes
            config = demo_config(settings.pop("data_dir", tmp_path / "data"), **settings)
            return await stack.enter_async_context(served(config, node))

        yield make


@pytest_asyncio.fixture(loop_scope="session")
async def server(gateways: Gateways) -> Server:
    return await gateways()


@pytest_asyncio.fixture(loop_scope="session")
async def http(server: Server) -> AsyncIterator[Http]:
    async with Http(server.url) as session:
        yield session


@pytest_asyncio.fixture(loop_scope="session")
async def chat(server: Server) -> AsyncIterator[ChatClient]:
    async with ChatClient(server.url) as client:
        yield client


async def told(asked: AbstractAsyncContextManager[aiohttp.ClientResponse], status: int = 200) -> Any:
    """What the server says to a request, read as JSON where it is that; fails if its status is another one."""
    async with asked as reply:
        said = await reply.text()
        assert reply.status == status, f"{reply.method} {reply.url}: {reply.status} {said[:1000]}"
        return json.loads(said) if reply.content_type == "application/json" else said


async def metrics_of(http: Http, prefix: str = "overture_") -> dict[str, float]:
    """The values of `/metrics` whose lines begin so, by name and labels."""
    lines = (await told(http.get("/metrics"))).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(prefix))
    return {name: float(value) for name, value in pairs}


class Socket:
    """A chat socket, frame by frame: for what a well-behaved client would never send, too."""

    def __init__(self, raw: ClientConnection) -> None:
        self.raw = raw

    async def send(self, **frame: Any) -> None:
        await self.raw.send(json.dumps(frame))

    async def ask(self, name: str, content: str = "Hello!", **fields: Any) -> None:
        await self.send(type="message", id=name, content=content, **fields)

    async def receive(self, *types: str) -> dict[str, Any]:
        """The next frame of one of these types; others are passed over."""
        async with asyncio.timeout(60):
            while True:
                frame: dict[str, Any] = json.loads(await self.raw.recv())
                if not types or frame["type"] in types:
                    return frame

    async def rest(self) -> tuple[str, dict[str, Any]]:
        """The text from here to the end of the turn, and its last frame."""
        text = ""
        while (frame := await self.receive("delta", "done", "error"))["type"] == "delta":
            text += frame["text"]
        return text, frame

    async def closed(self) -> int:
        """The code with which the server closes."""
        with pytest.raises(ConnectionClosed) as closed:
            async with asyncio.timeout(60):
                while True:
                    await self.raw.recv()
        return closed.value.rcvd.code


@asynccontextmanager
async def connected(server: Server, key: str = "", *, hello: bool = True) -> AsyncIterator[Socket]:
    """A socket whose hello was answered, or that has said none."""
    async with connect(server.url.replace("http", "ws") + "/ws", max_size=None) as raw:
        socket = Socket(raw)
        if hello:
            await socket.send(type="hello", **({"api_key": key} if key else {}))
            await socket.receive("ready")
        yield socket


async def settle(look: Callable[[], Any], timeout_s: float = 180) -> Any:
    """What `look` finds, or what can be awaited from it, once that is something; fails if it is nothing for so long.

    A node that is started again took more than a minute on a busy machine.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            found = look()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.01)


async def ask(chat: ChatClient, content: str, **options: Any) -> tuple[str, Done]:
    """A turn over the chat socket, greedy if nothing else is said: its text and its last frame."""
    text, done = "", None
    async for event in chat.ask(content, **{"sampling": {"temperature": 0}} | options):
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Done):
            done = event
    assert done is not None
    return text, done


@asynccontextmanager
async def starts(node: LocalNode) -> AsyncIterator[list[int]]:
    """Priorities of the requests that the engine starts meanwhile, in its order. Whose client hears first of the end is up to the machine."""
    found: list[int] = []

    def note(driver: Any) -> None:
        own = driver.scheduling.dispatcher
        admitted = own.policy.admitted

        def noted(request_id: str, now: float) -> None:
            found.append(own.known(request_id).facts.priority)
            admitted(request_id, now)

        own.policy.admitted = noted

    def forget(driver: Any) -> None:
        del driver.scheduling.dispatcher.policy.admitted

    await node.run_on_engine(note)
    yield found
    await node.run_on_engine(forget)


async def engine_stats(node: LocalNode) -> SchedulingStats:
    """Figures of the engine between two steps."""
    return await node.run_on_engine(lambda driver: driver.report.stats())


async def num_free_blocks(node: LocalNode) -> int:
    """How many KV blocks no request uses."""
    return (await engine_stats(node)).num_free_kv_blocks


async def num_in_engine(node: LocalNode) -> int:
    """How many requests the engine holds."""
    stats = await engine_stats(node)
    return stats.num_running + stats.num_waiting


async def engine_has(node: LocalNode, num_requests: int) -> None:
    """Wait until the engine holds as many requests; fails if it does not come to that within a minute."""
    async with asyncio.timeout(60):
        while await num_in_engine(node) < num_requests:
            await asyncio.sleep(0.01)


async def engine_is_empty(node: LocalNode) -> None:
    """Wait until the engine holds no request; fails if it does not come to that within a minute."""
    async with asyncio.timeout(60):
        while await num_in_engine(node):
            await asyncio.sleep(0.01)


@dataclass
class Seen:
    """What went into the engine and what came out of it, by request in their order.

    prompts: token ids; cached: tokens of each that were not computed, of several choices for the one that found least; generated: the answers' ids.
    """

    prompts: list[list[int]] = field(default_factory=list)
    salts: list[str | None] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    generated: dict[str, list[int]] = field(default_factory=dict)

    @property
    def last(self) -> list[int]:
        """The last request's prompt and answer."""
        return self.prompts[-1] + list(self.generated.values())[-1]

    async def cached_in(self, call: Awaitable[Any]) -> int:
        """Prompt tokens that were not computed in a call: of its first request, and of that the choice that found least.

        What an earlier advisory computes beside the call is not counted.
        """
        self.salts.clear()
        self.generated.clear()
        self.cached.clear()
        await call
        return self.cached[next(name for name in self.generated if not is_background(name))]


@pytest.fixture
def seen(node: SharedNode, monkeypatch: Patch) -> Seen:
    """Reads along between the node and its engine. Replies do not say it all: one of the Messages API has no cached tokens."""
    from engine_bridge.driver.serving.engine_client import BridgeEngineClient  # which imports vLLM

    seen, submit, deliver = Seen(), BridgeEngineClient.submit, node._thread._on_outputs

    def note_request(self: BridgeEngineClient, *args: Any, **kwargs: Any) -> Any:
        unique_id, request = submit(self, *args, **kwargs)
        seen.prompts.append(list(request.prompt_token_ids))
        seen.salts.append(request.cache_salt)
        seen.generated[unique_id] = []
        return unique_id, request

    def note_outputs(outputs: list[Any]) -> None:
        for output in outputs:
            name, num_cached = output.request_id, output.num_cached_tokens
            seen.cached[name] = min(seen.cached.get(name, num_cached), num_cached)
            seen.generated.setdefault(name, []).extend(output.outputs[0].token_ids)
        deliver(outputs)

    monkeypatch.setattr(BridgeEngineClient, "submit", note_request)
    monkeypatch.setattr(node._thread, "_on_outputs", note_outputs)
    return seen
