"""The process of a node: `serve` for a child of the gateway's on a pair of sockets, `NodeHost` for a Ray actor's process on a TCP port."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from engine_bridge.adapters.store import AdapterStore
from engine_bridge.cluster.file_locks import locked
from engine_bridge.cluster.server import NodeServer
from engine_bridge.cluster.trust import Trust
from engine_bridge.process_end import leave, leave_within, stop_collecting
from engine_bridge.protocol.node import Node
from kvtiers.closing import going_on

log = logging.getLogger(__name__)

LOCK = "lock"
# From the end of the gateway, or its order, to the end of the process: KV that is not on disk yet goes there. After that, hanging work is cut off.
CLOSE_S = 20.0
# For the kernel's out-of-memory killer (0 to 1000; the parent has 0 as a rule): the engine goes before the gateway. Chosen.
OOM_SCORE = 500


class NodeAddress(Struct, frozen=True, kw_only=True):
    """A node's address. incarnation: differs after each start of its process. is_leaving: the gateway that started the node is asked to end it."""

    host: str
    port: int
    incarnation: str
    pid: int
    is_leaving: bool = False


class NodeHost:
    """A node on a separate thread and event loop. `start` it, and `close` it from any thread.

    Args:
        make_node: makes the node, on the node's own thread, since its imports are slow. Returns the node and its address for KV.
        listen_on: an address of this machine; a free port is taken.
        load: called with the node before its turn, on a thread: slow work that may run beside others'. If it raises, `start` raises the same.
        folder: the node's own, for adapters that gateways send, and a lock: one process at a time works with it.
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
            # The node can answer nothing any more; Ray starts its process again.
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
        """Load, wait for the turn, and start. A failure shows in the node's reports."""
        try:
            await asyncio.to_thread(self._load, node)
        except Exception:
            log.info("nothing was loaded before this node's turn to start", exc_info=True)
        async with locked(self._turns):
            await _start(node)


# -- a child of the gateway's ------------------------------------------------------------------------------------------


def serve(node: Node, fd: int, peer_address: str = "") -> NoReturn:
    """Serve a node on the socket that the parent (`process.ProcessNode`) left open, until the parent ends or asks for the end. Ends the process.

    peer_address: host:port where other nodes may ask this one for KV.
    """
    import uvloop

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Else the parent would hear of a crash only when all of this process's memory, gigabytes, is written down.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    uvloop.run(_serve_and_leave(node, fd, peer_address))
    raise AssertionError("the process has ended")


async def _serve_and_leave(node: Node, fd: int, peer_address: str) -> None:
    with going_on("the node"):
        await _serve(node, fd, peer_address)
    # Before the event loop's own end, which waits for threads that a disk may hold up.
    leave(0)


async def _serve(node: Node, fd: int, peer_address: str) -> None:
    over = asyncio.Event()
    server = NodeServer(node, node_id="local", on_close=over.set)
    server.peer_address = peer_address
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
        server.connection, socket.socket(fileno=fd)
    )
    starting = asyncio.create_task(_start(node))
    await over.wait()
    # vLLM may hang in native code: a process without a parent must not stay.
    leave_within(CLOSE_S)
    starting.cancel()
    await node.drain(0.0)
    stop_collecting()
    await node.close()
    transport.close()


async def _start(node: Node) -> None:
    """Bring up the engine. Its failure shows in the node's reports."""
    try:
        await node.start()
    except Exception:
        log.exception("the engine could not be started")
    tell_crashes_quickly()


def tell_crashes_quickly() -> None:
    """Install Python's own crash handler, which takes no time; that of torch looks up native symbols for 3 s, in which clients wait (measured).

    May be called from any thread; Python's `signal` would want the main one.
    """
    faulthandler.disable()
    libc = ctypes.CDLL(None)
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        libc.signal(int(number), None)  # SIG_DFL
    faulthandler.enable(all_threads=False)
