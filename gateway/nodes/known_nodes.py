"""The nodes that a server knows: its only one, or the nodes that a router sends requests to."""

from __future__ import annotations

import secrets

from engine_bridge.cluster.process import ProcessNode
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.protocol.node import Node
from gateway.errors import GatewayError
from gateway.nodes.node_states import Nodes, NodeStatus, status_of
from gateway.nodes.router import Router

# The name of the one node of a server that has no others.
LOCAL = "local"


def nodes_of(node: Node) -> Nodes:
    """Return the nodes behind the node that the gateway asks."""
    return RoutedNodes(node) if isinstance(node, Router) else OneNode(node)


class OneNode:
    """The node of a server that has no others. `Nodes` says what each method promises."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._incarnation = secrets.token_hex(8)

    def states(self) -> list[NodeStatus]:
        """Return the node's state."""
        node = self._node
        incarnation = node.incarnation if isinstance(node, RemoteNode) else self._incarnation
        return [status_of(LOCAL, node, incarnation=incarnation)]

    async def drain(self, node_id: str, timeout_s: float, *, is_forced: bool) -> bool:
        """Drain the node."""
        return await self._node.drain(timeout_s)

    async def restart(self, node_id: str, timeout_s: float, *, is_forced: bool) -> None:
        """Restart the engine's process. Raises GatewayError `conflict` where the engine has none but the server's."""
        if not isinstance(self._node, ProcessNode):
            raise GatewayError(
                "conflict",
                "This engine runs in the server's own process: restart the server, or run it with --engine process.",
            )
        await self._node.drain(timeout_s)
        await self._node.restart()

    def reopen(self, node_id: str) -> None:
        """Raise GatewayError `conflict`: the only node takes requests again after a restart."""
        raise GatewayError(
            "conflict", "The only node takes requests again after it, or the server, has been restarted."
        )


class RoutedNodes:
    """The nodes of a router's placement. `Nodes` says what each method promises."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def states(self) -> list[NodeStatus]:
        """Return the states of all nodes."""
        members = self._router.nodes_state()
        nodes = self._router.nodes
        return [
            status_of(
                member.node_id,
                nodes[member.node_id],
                incarnation=member.incarnation,
                state=member.state,
                failed_adapters=self._router.failed_adapters(member.node_id),
            )
            for member in members
        ]

    async def drain(self, node_id: str, timeout_s: float, *, is_forced: bool) -> bool:
        """Drain one node."""
        return await self._router.drain_node(node_id, timeout_s, is_forced=is_forced)

    async def restart(self, node_id: str, timeout_s: float, *, is_forced: bool) -> None:
        """Restart one node."""
        await self._router.restart_node(node_id, timeout_s, is_forced=is_forced)

    def reopen(self, node_id: str) -> None:
        """Send a drained node requests again."""
        self._router.reopen_node(node_id)
