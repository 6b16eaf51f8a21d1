"""The nodes of a placement as a router sees them: which of them take requests, and what each has reported since it was last looked at."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct

from engine_bridge.cluster.process import SILENT_S, STARTING_SILENT_S, Silence
from engine_bridge.cluster.ray_placement import RayPlacement
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.wire import NodeReport
from engine_bridge.policy.nodes.session_locations import Homes
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.figures import NodeState, Progress
from engine_bridge.protocol.node_facts import NodeFacts, Ranks

log = logging.getLogger(__name__)

# A node reports four times a second. A node without a report for this time gets nothing new; later its answers are ended, for they may have stopped.
# Chosen: a machine under load was seen to send no report for up to three seconds.
QUIET_S = 5.0
LOOK_EVERY_S = 0.5
# Stands in for the facts of a node that is ready and has reported none.
NO_FACTS = NodeFacts(
    node_id="", running=Ranks(), queued=Ranks(), num_tokens=0, queued_tokens=0, free_tokens=1 << 40
)

MemberState = NodeState | Literal["away", "quiet"]


class MemberStatus(Struct, frozen=True, kw_only=True):
    """A node's state and load, as they are shown.

    Attributes:
        state: the node's own state, or `away` (no connection), `quiet` (no report for QUIET_S), `draining` (also where only this gateway sends it
            nothing).
        stage: a phrase for people.
        incarnation: another one after each start of the node's process.
        address: where other nodes ask for its KV.
        quiet_s: seconds since its last report.
        num_sessions: sessions whose KV is there, as far as is known.
        num_requests: requests that this gateway has sent there and that have not ended.
    """

    node_id: str
    state: MemberState
    stage: str
    error: str | None
    incarnation: str
    address: str
    quiet_s: float
    num_sessions: int
    num_requests: int
    facts: NodeFacts | None
    report: NodeReport | None


class _Member:
    def __init__(self, node: RemoteNode) -> None:
        self.node = node
        self.incarnation = ""
        self.report: NodeReport | None = None
        self.is_draining = False
        self.is_open = False


class Members:
    """The nodes of one router. They are looked at before each choice, which costs a few comparisons a node, and twice a second besides.

    Args:
        placement: has the nodes.
        homes: is told of all that changes.
    """

    def __init__(self, placement: RayPlacement, homes: Homes) -> None:
        self.placement, self.homes = placement, homes
        self._members: dict[str, _Member] = {}
        self._silence = Silence(LOOK_EVERY_S)

    # -- looking -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take over the changes since the last look: nodes that came or went, their reports, and whether they take requests."""
        now = asyncio.get_running_loop().time()
        self._silence.look(now)
        nodes = self.placement.nodes
        for node_id in self._members.keys() - nodes.keys():
            del self._members[node_id]
            self.homes.removed(node_id)
        for node_id, node in nodes.items():
            member = self._members.get(node_id)
            if member is not None and member.node is not node:
                self.homes.lost(node_id)
                member = None
            if member is None:
                member = self._members[node_id] = _Member(node)
            self._look_at(node_id, member, now)

    def _look_at(self, node_id: str, member: _Member, now: float) -> None:
        node = member.node
        if member.incarnation not in ("", node.incarnation):
            log.warning("node %s is lost", node_id)
            self.homes.lost(node_id)
        member.incarnation = node.incarnation
        if node.is_up and node.report is not member.report:
            member.report = node.report
            self.homes.reported(node_id, node.figures().facts or NO_FACTS, node.reported_s)
        is_open = self._state(member, now) == "ready"
        if is_open is not member.is_open:
            member.is_open = is_open
            log.info("node %s %s", node_id, "takes requests" if is_open else "takes no requests")
        self.homes.set_open(node_id, is_open)

    def _state(self, member: _Member, now: float) -> MemberState:
        progress = member.node.progress
        if not member.node.is_up:
            return "away" if progress.state == "ready" else progress.state
        if self._silence.seconds(member.node.reported_s, now) > QUIET_S:
            return "quiet"
        return "draining" if member.is_draining and progress.state == "ready" else progress.state

    async def watch(self, then: Callable[[], None]) -> None:
        """End the answers of nodes that are silent, and notice changes between requests, until the task is cancelled.

        Args:
            then: called after each look.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self.look()
                for node_id, member in self._members.items():
                    silent_s = self._silence.seconds(member.node.reported_s, loop.time())
                    patience_s = STARTING_SILENT_S if member.node.is_starting else SILENT_S
                    if member.node.is_up and silent_s > patience_s:
                        log.error(
                            "node %s has said nothing for %.0f s: its answers are ended", node_id, silent_s
                        )
                        member.node.cut()
                then()
            except Exception:
                log.exception("the nodes could not be looked at")

    # -- the nodes as last looked at -----------------------------------------------------------------------------------

    def all(self) -> list[RemoteNode]:
        """Return all nodes, also those without a connection. From any thread."""
        return list(self.placement.nodes.values())

    def open(self) -> dict[str, RemoteNode]:
        """Return the nodes that take requests, by name, as last looked at."""
        return {name: member.node for name, member in self._members.items() if member.is_open}

    def node(self, node_id: str) -> RemoteNode | None:
        """Return the node of this name; None for an unknown name."""
        member = self._members.get(node_id)
        return member.node if member is not None else None

    def address(self, node_id: str) -> str:
        """Return where a node's KV can be asked for; "" for nowhere, also while the node is quiet: it would not answer."""
        member = self._members.get(node_id)
        if member is None or self._state(member, asyncio.get_running_loop().time()) == "quiet":
            return ""
        return member.node.peer_address

    def statuses(self) -> Iterator[MemberStatus]:
        """Yield the state, load and progress of each node, as people see them."""
        now = asyncio.get_running_loop().time()
        seen = {facts.node_id: facts for facts in self.homes.facts()}
        for node_id, member in self._members.items():
            node = member.node
            progress = node.progress
            yield MemberStatus(
                node_id=node_id,
                state=self._state(member, now),
                stage=progress.stage,
                error=progress.error,
                incarnation=node.incarnation,
                address=node.peer_address,
                quiet_s=max(now - node.reported_s, 0.0) if node.is_up else 0.0,
                num_sessions=self.homes.num_sessions(node_id),
                num_requests=self.homes.num_requests(node_id),
                facts=seen.get(node_id),
                report=node.report,
            )

    def progress(self) -> Progress:
        """Return the progress of all nodes together: `ready` as soon as one node is, `failed` only if all nodes have failed."""
        now = asyncio.get_running_loop().time()
        found: dict[MemberState, Progress] = {}
        for member in self._members.values():
            found.setdefault(self._state(member, now), member.node.progress)
        if "ready" in found:
            return found["ready"]
        if not found:
            return Progress("starting", "waiting for the first node", 0.0)
        if found.keys() <= {"failed", "closed"}:
            return found.get("failed") or found["closed"]
        # A node that has served before comes back by itself; any other is still to start.
        order: tuple[tuple[MemberState, NodeState], ...] = (
            ("rebuilding", "rebuilding"),
            ("away", "rebuilding"),
            ("quiet", "rebuilding"),
            ("draining", "draining"),
            ("starting", "starting"),
        )
        state, together = next((state, together) for state, together in order if state in found)
        return Progress(together, found[state].stage, found[state].elapsed_s)

    def in_words(self) -> str:
        """Return why no node takes a request, in words: `2 are starting, 1 is draining`."""
        now = asyncio.get_running_loop().time()
        counts = Counter(self._state(member, now) for member in self._members.values())
        words = [f"{num} {'is' if num == 1 else 'are'} {state}" for state, num in counts.items()]
        return ", ".join(words) or "there are none yet"

    # -- draining ------------------------------------------------------------------------------------------------------

    def set_draining(self, node_id: str, is_draining: bool, *, is_forced: bool = False) -> None:
        """Set whether this gateway sends a node no new requests.

        Raises:
            InvalidRequest: for an unknown node, and, unless `is_forced`, before the last open node drains.
        """
        self.look()
        member = self._members.get(node_id)
        if member is None:
            raise InvalidRequest(
                f"There is no node named {node_id[:100]!r} here.", param="node_id", code="not_found"
            )
        others = [other for other in self._members.values() if other.is_open and other is not member]
        if is_draining and member.is_open and not (others or is_forced):
            raise InvalidRequest(
                f"{node_id} is the only node that takes requests: wait until another one does, or end the server.",
                param="node_id",
            )
        member.is_draining = is_draining
        self.look()
