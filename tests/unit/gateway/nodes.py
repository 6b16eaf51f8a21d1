"""Nodes without a model behind real sockets, and a placement that loses and finds them when a test says so."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from engine_bridge.cluster.link import NodeLink
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.server import NodeServer
from engine_bridge.protocol.engine_request import ANONYMOUS, EngineRequest
from engine_bridge.protocol.node import Api, JsonReply, SseReply
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.router import Router
from tests.unit.cluster.catalog_node import CatalogNode
from tests.unit.gateway.fake_node import PATIENCE_S


class Call:
    """A streamed call, of which a test sends the events."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def sent(self) -> AsyncIterator[bytes]:
        try:
            while (event := await self.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.is_closed = True


class PlacedNode(CatalogNode):
    """Serves API calls, too: streamed ones as `streams`, others with what it was asked."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.script = None
        self.name = name
        self.streams: list[Call] = []

    async def serve(
        self, api: Api, body: Any, headers: Mapping[str, str], request: EngineRequest = ANONYMOUS
    ) -> JsonReply | SseReply:
        if body.get("stream"):
            self.streams.append(Call())
            self._changed.set()
            return SseReply(self.streams[-1].sent())
        return JsonReply(200, f"{api} {body['n']} {request.tenant} {dict(headers)}".encode())

    async def called(self) -> Call:
        await self.until(lambda: bool(self.streams))
        return self.streams[0]

    async def models(self) -> JsonReply:
        return JsonReply(200, self.name.encode())


class TestPlacement:
    """As `engine_bridge.cluster.ray_placement.RayPlacement`. A restart makes a new node under the old name."""

    __test__ = False

    def __init__(self, *names: str) -> None:
        self.nodes: dict[str, RemoteNode] = {name: RemoteNode(("fake-model",)) for name in names}
        self.inner: dict[str, PlacedNode] = {}
        self.links: dict[str, NodeLink] = {}
        self.restarted: list[str] = []
        self.is_closed = False

    async def start(self) -> None:
        for name in self.nodes:
            await self.connect(name)

    async def connect(self, name: str) -> PlacedNode:
        """A process of that name is there (again)."""
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        node, remote = self.inner.setdefault(name, PlacedNode(name)), self.nodes[name]
        server = NodeServer(node, name)
        server.peer_address = f"{name}:1"
        await loop.connect_accepted_socket(server.connection, theirs)
        _, link = await loop.create_connection(
            lambda: NodeLink(b"", remote.take_report, remote.detach), sock=ours
        )
        await link.greeted
        self.links[name] = link
        remote.attach(link)
        return node

    def kill(self, name: str) -> None:
        """Its process ends, as by SIGKILL."""
        self.links[name].abort()
        self.inner.pop(name).cut_off()

    async def restart(self, node_id: str) -> None:
        self.restarted.append(node_id)
        self.kill(node_id)
        await self.connect(node_id)

    async def remove(self, node_id: str) -> None:
        self.kill(node_id)
        del self.nodes[node_id]

    async def close(self) -> None:
        self.is_closed = True
        for link in self.links.values():
            link.abort()


@asynccontextmanager
async def routed(*names: str, policy: str = "auto") -> AsyncIterator[tuple[Router, TestPlacement]]:
    """A router that is up over nodes of these names."""
    placement = TestPlacement(*names)
    router = Router(placement, AdapterSync(lambda: placement.nodes), policy)
    async with asyncio.timeout(PATIENCE_S):
        await router.start()
        try:
            yield router, placement
        finally:
            await router.close()
