"""The nodes of a placement as a router sees them: which of them takes requests, and what each has said since it was last looked at."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct

from engine_bridge.cluster.placement import Placement
from engine_bridge.cluster.process import SILENT_S, STARTING_SILENT_S
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.silence import Silence
from engine_bridge.cluster.wire import NodeReport
from engine_bridge.policy.nodes.session_locations import Homes
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import NodeState, Progress
from engine_bridge.protocol.node_facts import NodeFacts, Ranks

log = logging.getLogger(__name__)

# A node reports four times a second. One that has not for so long gets nothing new; later its answers are ended, for nobody knows whether they go on.
# Chosen: a machine under load was seen to say nothing for up to three seconds.
QUIET_S = 5.0
LOOK_EVERY_S = 0.5
# Of a node that is ready and says nothing of itself.
NO_FACTS = NodeFacts(
    node_id="", running=Ranks(), queued=Ranks(), num_tokens=0, queued_tokens=0, free_tokens=1 << 40
)

MemberState = NodeState | Literal["away", "quiet"]


class MemberStanding(Struct, frozen=True, kw_only=True):
    """A node as it stands.

    state: the node's own, or `away` (no connection), `quiet` (nothing was heard of it for QUIET_S), `draining` (also where only this gateway sends it
    nothing). stage: for people. incarnation: another one after each start of its process. num_sessions: whose KV is there, as far as is known.
    num_requests: that this gateway has sent there and that have not ended. address: of its KV for other nodes. quiet_s: since its last report.
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
    """Looked at before each choice, which costs a few comparisons a node, and now and then besides.

    Args:
        homes: is told of all that changes.
    """

    def __init__(self, placement: Placement, homes: Homes) -> None:
        self.placement, self.homes = placement, homes
        self._members: dict[str, _Member] = {}
        self._silence = Silence(LOOK_EVERY_S)

    # -- looking -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take over what has changed."""
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
            self.homes.reported(node_id, node.facts() or NO_FACTS, node.reported_s)
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
        """For ever: end the answers of nodes that are silent, and notice what changes while nobody asks. then: called after each look."""
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

    # -- what was seen -------------------------------------------------------------------------------------------------

    def all(self) -> list[RemoteNode]:
        """Also those that are away. From any thread."""
        return list(self.placement.nodes.values())

    def open(self) -> dict[str, RemoteNode]:
        """By name, as last looked at."""
        return {name: member.node for name, member in self._members.items() if member.is_open}

    def node(self, node_id: str) -> RemoteNode | None:
        member = self._members.get(node_id)
        return member.node if member is not None else None

    def address(self, node_id: str) -> str:
        """Where a node's KV can be asked for; "" for nowhere. One that says nothing would answer nobody."""
        member = self._members.get(node_id)
        if member is None or self._state(member, asyncio.get_running_loop().time()) == "quiet":
            return ""
        return member.node.peer_address

    def standing(self) -> Iterator[MemberStanding]:
        """The state, load and progress of each node, as people see them."""
        now = asyncio.get_running_loop().time()
        seen = {facts.node_id: facts for facts in self.homes.facts()}
        for node_id, member in self._members.items():
            node = member.node
            progress = node.progress
            yield MemberStanding(
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
        """Of all together: ready as soon as one is, failed only if all have."""
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
        # What has served before comes back by itself; what has not is still to start.
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
        """Why nobody takes a request: `2 are starting, 1 is draining`."""
        now = asyncio.get_running_loop().time()
        counts = Counter(self._state(member, now) for member in self._members.values())
        words = [f"{num} {'is' if num == 1 else 'are'} {state}" for state, num in counts.items()]
        return ", ".join(words) or "there are none yet"

    # -- draining ------------------------------------------------------------------------------------------------------

    def set_draining(self, node_id: str, is_draining: bool, *, is_forced: bool = False) -> None:
        """Whether this gateway sends it nothing new.

        Raises InvalidRequest for one that there is not, and, unless it is forced, before the last open one drains.
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
