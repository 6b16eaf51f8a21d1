"""Draining and restarting nodes on an operator's request."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from msgspec.structs import replace

from engine_bridge.protocol.errors import BridgeError
from gateway.errors import GatewayError
from gateway.nodes.node_states import Nodes, NodeStatus

log = logging.getLogger(__name__)

# How long a request waits to be refused; other failures show in the node's state. Chosen: far longer than a refusal takes, and not felt.
REFUSAL_S = 0.1
MAX_QUOTED_CHARS = 100


class NodeMaintenance:
    """Drains and restarts nodes while the others go on, one thing at a time for each node.

    Args:
        nodes: the nodes.
        timeout_s: how long a node's running answers may take to end, unless a request says otherwise.
    """

    def __init__(self, nodes: Nodes, timeout_s: float) -> None:
        self._nodes, self._timeout_s = nodes, timeout_s
        self._work: dict[str, tuple[str, asyncio.Task[Any]]] = {}
        self._failures: dict[str, str] = {}

    def states(self) -> list[NodeStatus]:
        """Return the nodes' states, each with the failure of the last work on it."""
        return [
            replace(node, error=node.error or self._failures.get(node.id)) for node in self._nodes.states()
        ]

    async def drain(self, node_id: str, timeout_s: float | None, *, is_forced: bool) -> NodeStatus:
        """Begin to drain a node.

        Raises:
            GatewayError: `not_found`; `conflict` where other work on the node is under way, or where it is the only node that takes requests.
        """
        return await self._begin("drain", node_id, timeout_s, is_forced)

    async def restart(self, node_id: str, timeout_s: float | None, *, is_forced: bool) -> NodeStatus:
        """Begin to restart a node. Raises as `drain` does."""
        return await self._begin("restart", node_id, timeout_s, is_forced)

    def reopen(self, node_id: str) -> NodeStatus:
        """Send a drained node requests again. Raises GatewayError `not_found`, `conflict` (other work on it is under way, or it cannot be)."""
        self._status(node_id)
        if (under_way := self._work.get(node_id)) is not None:
            raise GatewayError("conflict", f"A {under_way[0]} of this node is under way.", param="id")
        self._nodes.reopen(node_id)
        return self._status(node_id)

    async def close(self) -> None:
        """Leave work that is under way as it is: the server goes down."""
        tasks = [task for _, task in self._work.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, what: str, node_id: str, timeout_s: float | None, is_forced: bool) -> NodeStatus:
        before = self._status(node_id)
        under_way = self._work.get(node_id)
        if under_way is None:
            if not is_forced:
                self._check_others(node_id)
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            under_way = self._start(what, node_id, timeout_s, is_forced)
        elif under_way[0] != what:
            raise GatewayError("conflict", f"A {under_way[0]} of this node is under way.", param="id")
        # Most refusals come at once; any other failure is seen in the node's state.
        done, _ = await asyncio.wait({under_way[1]}, timeout=REFUSAL_S)
        if done and (error := under_way[1].exception()) is not None:
            raise error
        return self._find(node_id) or replace(before, state="closed", is_draining=True)

    def _start(
        self, what: str, node_id: str, timeout_s: float, is_forced: bool
    ) -> tuple[str, asyncio.Task[Any]]:
        log.info("node %s: a %s begins", node_id, what)
        self._failures.pop(node_id, None)
        action = self._nodes.drain if what == "drain" else self._nodes.restart
        task = asyncio.create_task(action(node_id, timeout_s, is_forced=is_forced), name=f"{what} of a node")
        self._work[node_id] = what, task
        task.add_done_callback(lambda task: self._over(what, node_id, task))
        return what, task

    def _over(self, what: str, node_id: str, task: asyncio.Task[Any]) -> None:
        del self._work[node_id]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            log.info("node %s: the %s is over", node_id, what)
            return
        is_told = isinstance(error, (GatewayError, BridgeError))
        self._failures[node_id] = str(error) if is_told else f"the {what} failed; the server's log says why"
        log.error("node %s: the %s failed", node_id, what, exc_info=None if is_told else error)

    def _find(self, node_id: str) -> NodeStatus | None:
        return next((node for node in self.states() if node.id == node_id), None)

    def _status(self, node_id: str) -> NodeStatus:
        """Return a node's state. Raises GatewayError `not_found`."""
        node = self._find(node_id)
        if node is None:
            name = node_id[:MAX_QUOTED_CHARS]
            raise GatewayError("not_found", f"There is no node named {name!r}.", param="id")
        return node

    def _check_others(self, node_id: str) -> None:
        """Raise GatewayError `conflict` where no other node would be left to take requests."""
        nodes = {node.id: node for node in self.states()}
        if nodes[node_id].is_open and sum(node.is_open for node in nodes.values()) == 1:
            raise GatewayError(
                "conflict",
                "This is the only node that takes requests: all would be refused meanwhile. "
                'Send {"force": true} (--force) to do it all the same.',
                param="force",
            )
