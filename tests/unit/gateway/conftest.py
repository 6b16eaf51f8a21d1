"""The gateway's parts on a fake node and a real store, on an event loop whose clock tests can put forward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from gateway.sessions import SessionStore

from .parts import Parts, SkippingLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"skipping": SkippingLoop}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(tmp_path / "sessions.sqlite3")
    yield store
    await store.close()


@pytest.fixture
async def parts(store: SessionStore) -> AsyncIterator[Parts]:
    parts = Parts(store)
    yield parts
    await parts.close()
