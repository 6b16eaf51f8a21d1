"""Which nodes there are, for a router: whoever starts, watches and ends their processes stands behind `Placement`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine_bridge.cluster.remote_node import RemoteNode


class Placement(Protocol):
    """Nodes that come and go. All methods are called from one event loop."""

    @property
    def nodes(self) -> Mapping[str, RemoteNode]:
        """By name, in the order in which they joined.

        A node keeps its object while its process dies and is started again: its link is lost and another one attached. One that has left for
        good is no longer here.
        """
        ...

    async def start(self) -> None:
        """Returns when a node is ready; the others go on starting. Raises what stopped all of them."""
        ...

    async def restart(self, node_id: str) -> None:
        """End a node's process, and start it again under its name. Returns when it is ready. Whoever asks has drained it."""
        ...

    async def remove(self, node_id: str) -> None:
        """End a node's process for good. Whoever asks has drained it."""
        ...

    async def close(self) -> None:
        """End all that was started here; no process stays."""
        ...
