"""The child's side of `engine_bridge.cluster.process`: a node on the socket that its parent left open for it."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from engine_bridge.cluster.server import NodeServer
from engine_bridge.process_end import leave, leave_within, stop_collecting
from engine_bridge.protocol.node import Node
from kvtiers.closing import going_on

log = logging.getLogger(__name__)

# From the end of the parent to ours: KV that is not on disk yet goes there. After that, whatever still hangs is cut off.
CLOSE_S = 20.0
# Of the kernel's out-of-memory killer (0 to 1000; the parent has 0 as a rule): the engine goes before the gateway. Chosen.
OOM_SCORE = 500


def serve(node: Node, fd: int, peer_address: str = "") -> NoReturn:
    """Until the parent has gone or asks for the end. Runs its own event loop; ends the process.

    peer_address: where other nodes may ask it for KV.
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
    """What went wrong is in the node's reports."""
    try:
        await node.start()
    except Exception:
        log.exception("the engine could not be started")
    tell_crashes_quickly()


def tell_crashes_quickly() -> None:
    """Python's own traceback takes no time; a handler that came with torch looks up native symbols for 3 s, in which clients wait (measured).

    From whatever thread: Python's `signal` would want the main one.
    """
    faulthandler.disable()
    libc = ctypes.CDLL(None)
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        libc.signal(int(number), None)  # SIG_DFL
    faulthandler.enable(all_threads=False)
