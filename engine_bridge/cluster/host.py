"""A node on a thread and an event loop of its own, served on a TCP port: for processes that are not ours to arrange, such as a Ray actor's."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from msgspec import Struct

from engine_bridge.adapters.store import AdapterStore
from engine_bridge.cluster.child import tell_crashes_quickly
from engine_bridge.cluster.file_locks import locked
from engine_bridge.cluster.server import NodeServer
from engine_bridge.cluster.trust import Trust
from engine_bridge.protocol.node import Node
from kvtiers.closing import going_on

log = logging.getLogger(__name__)

LOCK = "lock"
# As in `child`: KV that is not on disk yet goes there; whatever still hangs after that is cut off.
CLOSE_S = 20.0


class NodeAddress(Struct, frozen=True, kw_only=True):
    """Where a node can be reached. incarnation: another one after each start of its process. is_leaving: whoever started it is asked to end it."""

    host: str
    port: int
    incarnation: str
    pid: int
    is_leaving: bool = False


class NodeHost:
    """`start` it, and `close` it from whatever thread.

    Args:
        make_node: called on the node's own thread, since what it imports is slow. Gives the node, and where others may ask it for KV.
        listen_on: an address of this machine; a free port is taken.
        load: called with the node before its turn, on a thread: what takes long and may be done beside others. What it raises, `start` raises again.
        folder: of this node's own, for adapters that gateways send, and a lock: one process at a time works with it.
        turns: a file that all nodes of this machine lock while they start, one after another: each looks at how much memory is free, and takes it.
    """

    def __init__(
        self,
        make_node: Callable[[], tuple[Node, str]],
        node_id: str,
        listen_on: str,
        trust: Trust,
        *,
        folder: Path,
        turns: Path,
        load: Callable[[Any], None] = lambda node: None,
    ) -> None:
        self._load = load
        self._make_node, self._node_id, self._folder = make_node, node_id, folder
        self._listen_on, self._trust, self._turns = listen_on, trust, turns
        self._place: Future[NodeAddress] = Future()
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)

    def start(self) -> NodeAddress:
        """Returns when it can be connected to; the engine is brought up meanwhile. Raises what stopped it."""
        self._thread.start()
        return self._place.result()

    def close(self) -> None:
        """Returns when the engine has ended and its KV is on disk, or after CLOSE_S."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        import uvloop

        try:
            uvloop.run(self._serve())
        except BaseException as error:
            if not self._place.done():
                self._place.set_exception(error)
                return
            log.exception("the node's thread has ended")
            # Nobody could be answered any more; whoever placed this process starts it again.
            os._exit(1)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        # A process before this one may still be bringing its KV to the disk.
        async with locked(self._folder / LOCK):
            await self._host()

    async def _host(self) -> None:
        node, peer_address = self._make_node()
        server = NodeServer(
            node, self._node_id, self._trust.token, store=AdapterStore(self._folder / "adapters")
        )
        server.peer_address = peer_address
        listener = await self._loop.create_server(
            server.connection, self._listen_on, 0, ssl=self._trust.server_tls()
        )
        starting = asyncio.create_task(self._bring_up(node))
        host, port = listener.sockets[0].getsockname()[:2]
        self._place.set_result(
            NodeAddress(host=host, port=port, incarnation=server.incarnation, pid=os.getpid())
        )
        await self._over.wait()
        listener.close()
        starting.cancel()
        with going_on("the node"):
            await node.drain(0.0)
        await node.close()

    async def _bring_up(self, node: Node) -> None:
        """What goes wrong is in the node's reports."""
        try:
            await asyncio.to_thread(self._load, node)
        except Exception:
            log.info("nothing was loaded before this node's turn to start", exc_info=True)
        try:
            async with locked(self._turns):
                await node.start()
        except Exception:
            log.exception("the engine could not be started")
        tell_crashes_quickly()
