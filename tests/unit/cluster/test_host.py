import asyncio
import fcntl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine_bridge.cluster.host import NodeAddress, NodeHost
from engine_bridge.cluster.link import NodeLink
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.trust import Trust
from tests.unit.cluster.catalog_node import PATIENCE_S, answer_of
from tests.unit.gateway.fake_node import FakeNode

TRUST = Trust(token=b"of this cluster")


class StartedNode(FakeNode):
    """Tells other threads when it was started and closed."""

    def __init__(self) -> None:
        super().__init__(["one ", "two"])
        self.was_started, self.was_closed = threading.Event(), threading.Event()

    async def start(self) -> None:
        self.was_started.set()

    async def close(self) -> None:
        self.was_closed.set()


def hosted(node: FakeNode, folder: Path, load=lambda node: None, host="127.0.0.1") -> NodeHost:
    places = {"folder": folder, "turns": folder / "turns"}
    return NodeHost(lambda: (node, "127.0.0.1:7"), "n1", host, TRUST, **places, load=load)


@asynccontextmanager
async def linked(place: NodeAddress, token: bytes = TRUST.token) -> AsyncIterator[RemoteNode]:
    remote = RemoteNode()
    transport, link = await asyncio.get_running_loop().create_connection(
        lambda: NodeLink(token, remote.take_report), place.host, place.port
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await link.greeted
            assert link.incarnation == place.incarnation
            remote.attach(link)
            yield remote
    finally:
        transport.abort()


async def test_it_answers_over_tcp_those_who_know_the_token_and_closes(tmp_path: Path) -> None:
    node = StartedNode()
    host, second = hosted(node, tmp_path), hosted(StartedNode(), tmp_path)
    place = await asyncio.to_thread(host.start)
    with pytest.raises(ConnectionError):
        async with linked(place, b"of another one"):
            pass
    async with linked(place) as remote:
        assert await answer_of(remote) == "one two"
        assert remote.peer_address == "127.0.0.1:7"
    starting = asyncio.create_task(asyncio.to_thread(second.start))
    await asyncio.to_thread(host.close)
    assert node.was_closed.is_set()
    async with linked(await starting):  # which waited until the first has let go of the folder
        pass
    await asyncio.to_thread(second.close)


async def test_what_needs_no_turn_is_done_before_it_and_may_fail(tmp_path: Path) -> None:
    node, loaded = StartedNode(), threading.Event()

    def load(made: FakeNode) -> None:
        assert made is node
        loaded.set()
        raise ImportError("the engine is not installed")

    host = hosted(node, tmp_path, load)
    with (tmp_path / "turns").open("w") as others:
        fcntl.flock(others, fcntl.LOCK_EX)
        async with linked(await asyncio.to_thread(host.start)):  # it can be reached meanwhile
            assert await asyncio.to_thread(loaded.wait, PATIENCE_S)
            assert not node.was_started.is_set()
    assert await asyncio.to_thread(node.was_started.wait, PATIENCE_S)
    await asyncio.to_thread(host.close)


def test_what_keeps_it_from_listening_is_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        hosted(StartedNode(), tmp_path, host="192.0.2.1").start()
