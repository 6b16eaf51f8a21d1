"""The server goes down whatever fails on the way: what is left behind is closed, and what failed is in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_bridge.protocol.errors import EngineUnavailable
from gateway.app import Server
from gateway.errors import GatewayError
from gateway.sessions import SessionStore
from gateway.settings.config import Config

from .fake_node import PATIENCE_S
from .front import Gateway


class BrokenSocket:
    """One that cannot even be closed."""

    blocked_since = None
    is_given_up = False

    async def close(self, code: int, reason: str) -> None:
        raise RuntimeError("the transport is gone")


async def fails(*args: Any, **fields: Any) -> Any:
    raise RuntimeError("broken on purpose")


async def is_closed(store: SessionStore) -> bool:
    try:
        await store.get_session("ann", "s")
    except GatewayError as error:
        return error.code == "draining"
    return False


@pytest.fixture
async def down(store: SessionStore, tmp_path: Any) -> Gateway:
    return Gateway(store, Config(port=0, data_dir=tmp_path, drain_timeout_s=1, kv_host_gib=0.25))


async def test_all_is_closed_though_each_step_fails(
    down: Gateway, store: SessionStore, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    async def closes_badly() -> None:
        closed.append("node")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def cannot_cancel(request_id: Any) -> bool:
        raise EngineUnavailable("the engine's process has gone")

    async with asyncio.timeout(PATIENCE_S):
        async with Server(down.server.services, lambda: closed.append("drained")) as server:
            await down.ask("a")
            await down.node.asked()
            server.services.connections.add(BrokenSocket())  # type: ignore[arg-type]
            down.node.drain, down.node.close = fails, closes_badly  # type: ignore[method-assign]
            down.node.cancel = cannot_cancel  # type: ignore[method-assign]
            for part in ("steward", "drafts", "titles", "learned"):
                broken = getattr(server.services, part)
                setattr(broken, "save" if part == "learned" else "close", fails)
            down.node.answers[0].fail(EngineUnavailable("it ends with its process"))
    assert closed == ["drained", "node"]
    assert await is_closed(store)
    for what in ("the node's answers", "the node could", "the chat sockets", "titles", "drafts"):
        assert what in caplog.text


async def test_a_node_that_says_nothing_of_its_drain_holds_nobody_up(
    down: Gateway, store: SessionStore
) -> None:
    async def hangs(timeout_s: float) -> bool:
        return await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE_S):
        async with down.server:
            down.node.drain = hangs  # type: ignore[method-assign]
    assert down.node.state == "closed" and await is_closed(store)


async def test_a_watch_that_fails_begins_again(down: Gateway, store: SessionStore) -> None:
    begun = asyncio.Queue[int]()

    async def watch() -> None:
        begun.put_nowait(begun.qsize())
        raise OSError("a file of the system's cannot be read")

    store.watch = watch  # type: ignore[method-assign]
    async with asyncio.timeout(PATIENCE_S), down.server:
        for _ in range(2):
            await begun.get()
