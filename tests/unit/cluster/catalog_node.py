"""Nodes without an engine that keep adapters as a real one does, and sockets between them and a gateway."""

import asyncio
import dataclasses
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from engine_bridge.adapters.catalog import Catalog
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import ModelContract
from engine_bridge.adapters.registry import Registry
from engine_bridge.adapters.store import AdapterStore
from engine_bridge.cluster.link import NodeLink
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.server import NodeServer
from engine_bridge.node_adapters import info_of
from engine_bridge.protocol.api_errors import error_body
from engine_bridge.protocol.engine_request import ChatMessage, EngineRequest, RequestId
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import AdapterInfo, AdapterPlace, JsonReply
from tests.adapter_corpus import BASE_MODEL
from tests.unit.gateway.fake_node import FakeNode

PATIENCE_S = 20.0
MODULES = {f"model.layers.{layer}.self_attn.q_proj": (256, 128) for layer in range(2)}
_HALF = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")


def _module_of(name: str) -> tuple[str, bool]:
    match = _HALF.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is unsupported LoRA weight")
    return match[1], match[2] == "A"


def contract(**changes: Any) -> ModelContract:
    plain = ModelContract(MODULES, 64, (BASE_MODEL,), _module_of, lambda config: ())
    return dataclasses.replace(plain, **changes)


class CatalogNode(FakeNode):
    """A node with a real catalog of adapters.

    Attributes:
        places: by name, where an adapter is; the others are on disk. calls: what came, in order.
        may_load: while it is not set, loading an adapter hangs.
    """

    def __init__(self, *, max_rank: int = 64) -> None:
        super().__init__(["hello"])
        self._max_rank = max_rank
        self.places: dict[str, AdapterPlace] = {}
        self.calls: list[tuple[str, str]] = []
        self.may_load = asyncio.Event()
        self.may_load.set()

    @cached_property
    def catalog(self) -> Catalog:
        """Waits for a database, if only in memory: first asked for on a worker thread."""
        return Catalog(Registry(None), contract(max_rank=self._max_rank), 1 << 30)

    def adapters(self) -> list[AdapterInfo]:
        records = self.catalog.served() if "catalog" in self.__dict__ else []
        return [info_of(record, self.places.get(record.name, "disk")) for record in records]

    async def load_adapter(self, body: Any) -> JsonReply:
        if self.state != "ready":
            raise EngineUnavailable("not now", code=self.state)
        self.calls.append(("load", str(body.get("lora_name"))))
        await self.may_load.wait()
        if body["lora_name"] in self.served() and not body.get("load_inplace"):
            return _error(400, "has already been loaded")
        try:
            await asyncio.to_thread(lambda: self.catalog.add(body["lora_name"], body["lora_path"]))
        except AdapterRejected as error:
            return _error(404 if error.code == "adapter_not_found" else 400, str(error))
        return JsonReply(200, msgspec.json.encode({"status": "Success"}))

    async def unload_adapter(self, body: Any) -> JsonReply:
        self.calls.append(("unload", str(body.get("lora_name"))))
        if await asyncio.to_thread(lambda: self.catalog.remove(body.get("lora_name"))) is None:
            return _error(404, "cannot be found")
        return JsonReply(200, msgspec.json.encode({"status": "Success"}))

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        self.calls.append(("pin", name))
        record = await asyncio.to_thread(lambda: self.catalog.set_pinned(name, is_pinned))
        return info_of(record, "host") if record is not None else None

    def served(self) -> dict[str, str]:
        """Name -> path."""
        is_there = "catalog" in self.__dict__
        return {record.name: record.path for record in self.catalog.served()} if is_there else {}


def _error(status: int, message: str) -> JsonReply:
    return JsonReply(status, msgspec.json.encode(error_body(status, message)))


@asynccontextmanager
async def connected(
    node: FakeNode,
    store: AdapterStore | None = None,
    remote: RemoteNode | None = None,
    *,
    token: bytes = b"",
    guess: bytes | None = None,
    on_close: Callable[[], None] = lambda: None,
    through: Callable[[bytes], bytes | None] | None = None,
) -> AsyncIterator[tuple[RemoteNode, NodeLink]]:
    """A gateway's end of a node.

    Args:
        token: the node's. guess: what the gateway takes for it.
        on_close: called when the last gateway has left.
        through: what becomes of the bytes on their way to the node; None: the line is cut there.
    """
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    server = NodeServer(node, "n1", token, on_close, store)
    tasks = []
    if through is not None:
        near, far = socket.socketpair()
        pumps = _pump(theirs, near, through), _pump(near, theirs, bytes)
        tasks = [asyncio.create_task(pump) for pump in pumps]
        theirs = far
    await loop.connect_accepted_socket(server.connection, theirs)
    remote = remote or RemoteNode(("fake-model",))
    _, link = await loop.create_connection(
        lambda: NodeLink(token if guess is None else guess, remote.take_report, remote.detach), sock=ours
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await link.greeted
        remote.attach(link)
        yield remote, link
    finally:
        link.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    source: socket.socket, target: socket.socket, through: Callable[[bytes], bytes | None]
) -> None:
    loop = asyncio.get_running_loop()
    source.setblocking(False)
    target.setblocking(False)
    while data := await loop.sock_recv(source, 1 << 16):
        passed = through(data)
        if passed is None:
            break
        await loop.sock_sendall(target, passed)
    for end in (source, target):
        end.close()


async def answer_of(node: RemoteNode) -> str:
    request = EngineRequest(request_id=RequestId("r"), messages=(ChatMessage("user", "Who are you?"),))
    return "".join([delta.text async for delta in node.generate(request)])


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.005)


class FarStore(AdapterStore):
    """The store of a node on another machine: none of the gateway's paths is there."""

    def make_room(self) -> None:
        self._free_bytes = 0

    def find(self, content_hash: str, path: str) -> str:
        return super().find(content_hash, "/not/on/this/machine")


def store_at(folder: Path) -> AdapterStore:
    """A store that leaves nothing free on the disk of whoever runs the tests."""
    return AdapterStore(folder, free_bytes=0)
