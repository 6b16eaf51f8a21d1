"""The gateway's parts on a fake node and a real store, on an event loop whose clock tests can put forward."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.access.key_file import key_file_line
from gateway.sessions import SessionStore
from gateway.settings.config import Config
from tests.blocking import nothing_blocks  # noqa: F401 - an autouse fixture

from .front import Gateway, Gateways
from .parts import IN_MEMORY, KEY, OTHER, Parts, SkippingLoop, key_file


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time"):
        return {"skipping": SkippingLoop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory where the machine has one: syncing a disk takes most of the time of these tests, and no test is about that."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the session file lies."""
    return tmp_path / "sessions.db"


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A key file with ada, an operator, and bob."""
    return key_file(tmp_path, key_file_line("ada", KEY, is_operator=True), key_file_line("bob", OTHER))


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(path)
    yield store
    await store.close()


@pytest.fixture
async def parts(store: SessionStore) -> AsyncIterator[Parts]:
    parts = Parts(store)
    yield parts
    await parts.close()


@pytest.fixture
async def gateways(store: SessionStore, tmp_path: Path) -> AsyncIterator[Gateways]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(**settings: Any) -> Gateway:
            config = Config(port=0, data_dir=tmp_path, drain_timeout_s=1, **{"kv_host_gib": 0.25} | settings)
            gateway = Gateway(store, config)
            await stack.enter_async_context(gateway.server)
            stack.callback(gateway.node.cut_off)  # or the server would wait for what a test left unanswered
            return gateway

        yield make


@pytest.fixture
async def gateway(gateways: Gateways) -> Gateway:
    return await gateways()
