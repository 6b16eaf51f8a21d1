"""Nodes that Ray places: the gateway's side. Does not import ray, and so neither does the gateway: a process of its own drives it (`actors.drive`).

That process and all of Ray's live under a guard (`guard`), and end with it when the gateway ends, however it ended. When Ray itself fails, all of
it is started again; nodes come back under their names, with what they have on disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from engine_bridge.cluster import guard, orders
from engine_bridge.cluster.orders import ClusterSettings
from engine_bridge.cluster.placed_node import PlacedNode
from engine_bridge.cluster.process import CLOSE_S, FIRST_PAUSE_S, pause_before_restart
from engine_bridge.protocol.errors import EngineUnavailable

log = logging.getLogger(__name__)

GUARD = (sys.executable, "-m", "engine_bridge.cluster.guard")
# Ray's unix sockets lie below its folder, and a socket's path has 107 characters at most. Source: unix(7).
MAX_TEMP_DIR_CHARS = 24


class RayPlacement:
    """The nodes of a router, which come and go. All methods are called from one event loop.

    Args:
        command: of the process that calls `actors.drive`; the number of its socket is put behind it.
        settings: without a folder: each start gets a new one.
        on_stage: called with a node's name, or "", and each phrase of how far it has come.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: ClusterSettings,
        model_names: tuple[str, ...],
        on_stage: Callable[[str, str], None] = lambda node_id, stage: None,
    ) -> None:
        self._command, self._settings = command, settings
        self._model_names, self._on_stage = model_names, on_stage
        self._nodes = {node.node_id: self._make_node(node.node_id) for node in settings.nodes}
        self._ours = set(self._nodes)
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stages: dict[str, str] = {}
        self._changed, self._closing = asyncio.Event(), asyncio.Event()
        self._problem = ""
        self._orders: asyncio.StreamWriter | None = None
        self._life: int | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def nodes(self) -> Mapping[str, PlacedNode]:
        """The nodes by name, in the order in which they joined.

        A node keeps its object while its process dies and is started again: its link is lost and another one attached. A node that has left for
        good is no longer listed.
        """
        return self._nodes

    async def start(self) -> None:
        """Start Ray and the nodes of this machine. Returns when one is ready; the others go on starting. Raises EngineUnavailable, ClusterError."""
        self._tls = await asyncio.to_thread(self._settings.trust.client_tls)
        for node in self._nodes.values():
            self._look_after(node)
        self._keeping = asyncio.create_task(self._keep(), name="Ray")
        await self._until(lambda: bool(self._problem) or self._is_decided())
        if self._closing.is_set():
            raise EngineUnavailable("it was closed while it started")
        if not any(node.progress.state == "ready" for node in self._nodes.values()):
            told = (f"{node.node_id}: {node.progress.error}" for node in self._nodes.values())
            raise EngineUnavailable(self._problem or "; ".join(told))

    def _is_decided(self) -> bool:
        states = [node.progress.state for node in self._nodes.values()]
        return "ready" in states or (bool(states) and set(states) == {"failed"})

    async def restart(self, node_id: str) -> None:
        """Restart a drained node. Returns when it is ready; raises EngineUnavailable if it does not come up, KeyError for an unknown node."""
        node = self._nodes[node_id]
        before = node.last_incarnation
        self._order(orders.Restart(node_id))
        # A node that had failed says so until its process has ended.
        await self._until(
            lambda: (
                node.progress.state == "closed"
                or bool(node.problem)
                or (node.last_incarnation != before and node.progress.state in ("ready", "failed"))
            )
        )
        if self._closing.is_set() or node.progress.state != "ready":
            problem = node.problem or node.progress.error or "it has left"
            raise EngineUnavailable(f"{node_id} did not come up again: {problem}")

    async def remove(self, node_id: str) -> None:
        """End a node, which was drained, for good. Raises KeyError for an unknown node."""
        if node_id not in self._nodes:
            raise KeyError(node_id)
        self._order(orders.Remove(node_id))
        await self._until(lambda: node_id not in self._nodes)

    async def emptied(self) -> None:
        """Returns when there is no node any more."""
        await self._until(lambda: not self._nodes)

    async def close(self) -> None:
        """End Ray and all that it started."""
        self._closing.set()
        self._changed.set()
        if self._keeping is not None:
            has_served = any(node.last_incarnation for node in self._nodes.values())
            if has_served and self._orders is not None:
                self._order(orders.Close())
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(self._keeping), CLOSE_S)
            self._kill()
            await asyncio.gather(self._keeping, return_exceptions=True)
        for node_id in list(self._nodes):
            self._drop(node_id)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _make_node(self, node_id: str) -> PlacedNode:
        return PlacedNode(
            node_id,
            self._model_names,
            self._settings.trust.token,
            on_change=lambda: self._node_changed(node_id),
            on_silent=lambda node_id: self._order(orders.Kill(node_id)),
            on_failed=self._replace,
        )

    def _replace(self, node_id: str) -> None:
        """Start a node's process again whose engine cannot be built: the next process may fare better. Nodes of others are theirs to start again."""
        if node_id in self._ours:
            log.error(
                "%s has an engine that cannot be built (%s): its process is started again",
                node_id,
                self._nodes[node_id].progress.error,
            )
            self._order(orders.Restart(node_id))

    def _look_after(self, node: PlacedNode) -> None:
        task = self._keepers[node.node_id] = asyncio.create_task(node.keep(self._tls), name=node.node_id)
        task.add_done_callback(_say_why)

    def _drop(self, node_id: str) -> None:
        self._nodes.pop(node_id).end()
        self._keepers.pop(node_id).cancel()

    def _node_changed(self, node_id: str) -> None:
        self._changed.set()
        if (node := self._nodes.get(node_id)) is not None:
            self._say(node_id, node.progress.stage)

    def _say(self, node_id: str, stage: str) -> None:
        if self._stages.get(node_id) != stage and not self._closing.is_set():
            self._stages[node_id] = stage
            self._on_stage(node_id, stage)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Returns when it is so, or when the placement is closed: nothing changes after that."""
        while not (is_so() or self._closing.is_set()):
            self._changed.clear()
            await self._changed.wait()

    # -- the process that drives Ray -----------------------------------------------------------------------------------

    def _order(self, order: orders.Order) -> None:
        """Send an order. While Ray is being started again it is dropped: the nodes are new then anyway."""
        if self._orders is not None:
            self._orders.write(orders.line_of(order))

    def _kill(self) -> None:
        """End Ray and everything under it at once."""
        if self._life is not None:
            with suppress(OSError):
                os.write(self._life, b"k")

    async def _keep(self) -> None:
        """Start it, listen to it, and start it again when it has ended."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began_s = time.monotonic()
            problem = "could not be looked after"
            try:
                problem = await self._live()
            except Exception:
                log.exception("Ray could not be looked after")
            if self._closing.is_set():
                break
            is_new = not any(node.last_incarnation for node in self._nodes.values())
            self._forget_places()
            if is_new:
                # The next start would fail in the same way.
                self._problem = problem
                self._changed.set()
                return
            log.error("there is no Ray (%s); it is started again", problem)
            pause_s = await pause_before_restart(self._closing, pause_s, began_s)

    def _forget_places(self) -> None:
        """Forget where our own nodes are: they ended with Ray. Nodes of others may be up still; the rest will be reported anew."""
        for node_id, node in list(self._nodes.items()):
            if node_id in self._ours:
                node.move_to(None, "starting Ray again")
            elif not node.is_up:
                self._drop(node_id)

    async def _live(self) -> str:
        """One life of Ray's; returns what ended it."""
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        try:
            with theirs:
                folder = await asyncio.to_thread(_make_folder)
                process = await asyncio.create_subprocess_exec(
                    *(*GUARD, str(life), folder, *self._command, str(theirs.fileno())),
                    pass_fds=(life, theirs.fileno()),
                    stdin=DEVNULL,
                )
            reader, self._orders = await asyncio.open_connection(sock=ours)
            # Without the nodes that were removed meanwhile.
            nodes = tuple(node for node in self._settings.nodes if node.node_id in self._nodes)
            self._order(orders.Begin(msgspec.structs.replace(self._settings, folder=folder, nodes=nodes)))
            listening = asyncio.create_task(self._listen(reader))
            # The guard is the last to go.
            if await process.wait() != 0:
                await asyncio.to_thread(guard.clear, folder)
            return await listening
        finally:
            if self._orders is not None:
                self._orders.close()
            self._orders = None
            os.close(life)
            os.close(self._life)
            self._life = None

    async def _listen(self, reader: asyncio.StreamReader) -> str:
        """Until nothing comes any more; returns why."""
        problem = "its process has ended"
        with suppress(ConnectionError):  # the process ended before it was told anything
            while line := await reader.readline():
                try:
                    problem = self._hear(orders.news_of(line)) or problem
                except Exception:
                    # It is about one node; who listens no more hears of none.
                    log.exception("news of a node could not be taken")
        return problem

    def _hear(self, news: orders.News) -> str:
        """Returns what ends it, if that is the news."""
        match news:
            case orders.StartStage(text=text):
                for node in self._nodes.values():
                    node.stage = text
                self._say("", text)
            case orders.Placed(node_id=node_id, place=place, problem=problem):
                if node_id not in self._nodes:
                    log.info("%s has joined", node_id)
                    self._nodes[node_id] = self._make_node(node_id)
                    self._look_after(self._nodes[node_id])
                self._nodes[node_id].move_to(place, "starting its process", problem)
            case orders.NodeLeft(node_id=node_id):
                if node_id in self._nodes:
                    log.info("%s has left", node_id)
                    self._drop(node_id)
                self._changed.set()
            case orders.ClusterFailed(problem=problem):
                return problem
        return ""


def _make_folder() -> str:
    """Only we can read it; the guard removes it."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="ov-", dir=base if len(base) <= MAX_TEMP_DIR_CHARS else "/tmp")


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a node is no longer looked after", exc_info=error)
