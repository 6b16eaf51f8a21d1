"""The engine room, pushed to the sockets that watch it. Source: docs/protocol.md, "The engine room".

Without watchers no picture is made. A socket that has not taken the last picture gets no further one, so a slow reader costs one picture; a socket
that takes nothing at all is closed as elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from gateway.access.auth import KeyRing, Principal
from gateway.advisories.advisories import Advisories
from gateway.errors import GatewayError
from gateway.nodes.maintenance import NodeMaintenance
from gateway.nodes.node_states import listed
from gateway.recognition.runs import AgentRuns
from gateway.turns.protocol import encode

log = logging.getLogger(__name__)

# Chosen: the eye takes this for live, and nodes elsewhere report no more than twice as often.
PUSH_EVERY_S = 0.5
# Sockets that may watch at once. Chosen: more than there are people to look; a picture for each takes tens of microseconds.
MAX_WATCHERS = 256
# Sockets that are shown a picture before other work gets its turn on the event loop. Chosen: half a millisecond.
SENDS_AT_ONCE = 16


class Watcher(Protocol):
    """A socket that watches."""

    @property
    def principal(self) -> Principal | None:
        """The key that the socket came with."""

    def show(self, picture: bytes) -> None:
        """Send a picture, unless an earlier one still waits for this peer."""


class EngineFeed:
    """The sockets that watch the engine room, and the task that shows them pictures while there are any."""

    def __init__(
        self, maintenance: NodeMaintenance, advisories: Advisories, runs: AgentRuns, keys: KeyRing
    ) -> None:
        self._maintenance, self._advisories, self._runs, self._keys = maintenance, advisories, runs, keys
        self._watchers: dict[Watcher, None] = {}
        self._showing: asyncio.Task[None] | None = None

    def add(self, watcher: Watcher) -> None:
        """Show a socket a picture now, and one each PUSH_EVERY_S. Raises GatewayError `overloaded`."""
        if len(self._watchers) >= MAX_WATCHERS and watcher not in self._watchers:
            raise GatewayError(
                "overloaded", f"{MAX_WATCHERS} windows show the engine already: close one of them."
            )
        self._watchers[watcher] = None
        if self._showing is None:
            self._showing = asyncio.create_task(self._show_on(), name="engine room")
        self._show([watcher])

    def remove(self, watcher: Watcher) -> None:
        """Show a socket no more pictures. A socket that does not watch is ignored."""
        self._watchers.pop(watcher, None)
        if not self._watchers and self._showing is not None:
            self._showing.cancel()
            self._showing = None

    async def close(self) -> None:
        """End all watching."""
        for watcher in list(self._watchers):
            self.remove(watcher)

    async def _show_on(self) -> None:
        while True:
            await asyncio.sleep(PUSH_EVERY_S)
            watchers = list(self._watchers)
            for start in range(0, len(watchers), SENDS_AT_ONCE):
                self._show(watchers[start : start + SENDS_AT_ONCE])
                await asyncio.sleep(0)

    def _show(self, watchers: list[Watcher]) -> None:
        """Show sockets a picture. Each owner's picture is made once, and a socket that cannot be shown it hinders no other."""
        pictures: dict[tuple[str, bool], bytes] = {}
        for watcher in watchers:
            try:
                self._show_to(watcher, pictures)
            except Exception:
                log.exception("the engine room could not be shown")

    def _show_to(self, watcher: Watcher, pictures: dict[tuple[str, bool], bytes]) -> None:
        principal = self._current(watcher)
        if principal is None:
            return
        key = principal.owner, self._keys.is_operator(principal)
        if key not in pictures:
            pictures[key] = encode(self._picture(*key))
        watcher.show(pictures[key])

    def _current(self, watcher: Watcher) -> Principal | None:
        """Return a socket's key as it is now: an operator's may have become an ordinary one. None for a withdrawn key."""
        if watcher.principal is None:
            return None
        try:
            return self._keys.current(watcher.principal)
        except GatewayError:
            return None

    def _picture(self, owner: str, is_operator: bool) -> dict[str, Any]:
        """Return the `engine` frame. It has the owner's own advisories and agents' runs; only operators see how many there are of all owners."""
        nodes, now = listed(self._maintenance.states(), to_operator=is_operator), time.monotonic()
        return {
            "type": "engine",
            "at_s": round(now, 3),
            "nodes": nodes.nodes,
            "totals": nodes.totals,
            "advisories": self._advisories.trails.of(owner),
            "runs": self._runs.of(owner, now),
            "advisory_counts": self._advisories.counts() if is_operator else None,
        }
