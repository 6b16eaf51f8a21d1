"""The nodes behind this gateway, as people see and steer them: what each one does, draining it, starting it again."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from engine_bridge.cluster.process import ProcessNode
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.errors import BridgeError
from engine_bridge.node import AdapterPlace, LaneStats, Node, NodeState, WaitReason
from gateway.errors import GatewayError

log = logging.getLogger(__name__)

# The name of the one node of a server that has no others.
LOCAL = "local"
# Adapters in memory that are named one by one. Chosen: a screenful; the counts by place tell of all.
MAX_RESIDENT = 64
# What is refused at once is refused within this time. Chosen: far more than a refusal takes, and nobody minds waiting so long.
REFUSAL_S = 0.1
MAX_QUOTED_CHARS = 100


# -- what is told of a node --------------------------------------------------------------------------------------------


class NodeLoad(Struct, frozen=True, kw_only=True):
    """Requests and KV blocks of one engine. lanes: null where the policy has none. num_steps, num_answer_tokens: since its start."""

    policy: str
    num_running: int
    num_waiting: int
    num_by_reason: dict[WaitReason, int]
    lanes: LaneStats | None
    num_kv_blocks: int
    num_free_kv_blocks: int
    block_size: int
    num_steps: int
    num_answer_tokens: int


class TierUse(Struct, frozen=True, kw_only=True):
    """A KV tier behind the device. num_hits: blocks that it gave since the start."""

    bytes: int
    capacity_bytes: int
    num_hits: int


class NodeKv(Struct, frozen=True, kw_only=True):
    """The KV tiers of a node. disk: null where there is none. problem: why a tier is off, in words."""

    host: TierUse
    disk: TierUse | None
    problem: str | None


class ResidentAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that a node has in memory."""

    name: str
    place: AdapterPlace
    is_pinned: bool


class NodeAdapters(Struct, frozen=True, kw_only=True):
    """A node's adapters. num_by_place: by the nearest place of each. resident: the first of those in memory, by name. failed: by name, why the node
    does not serve what it should, for operators.
    """

    num_by_place: dict[AdapterPlace, int]
    resident: list[ResidentAdapter]
    failed: dict[str, str]


class NodeStanding(Struct, frozen=True, kw_only=True):
    """A node as it is now.

    elapsed_s: since it was started, or since its engine failed. incarnation: another one after each start of its process, "" while it cannot be
    reached. load: null until its engine is up. kv: null where there are no tiers, and without an operator's key. error: what went wrong with it
    last, for operators.
    """

    id: str
    model: str
    state: NodeState
    stage: str
    elapsed_s: float
    incarnation: str
    is_draining: bool
    num_rebuilds: int
    load: NodeLoad | None
    kv: NodeKv | None
    adapters: NodeAdapters
    error: str | None

    @property
    def is_open(self) -> bool:
        """Takes new requests."""
        return self.state == "ready" and not self.is_draining


class NodeTotals(Struct, frozen=True, kw_only=True):
    """All nodes together. num_open: of those that take requests."""

    num_nodes: int
    num_open: int
    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_steps: int
    num_answer_tokens: int


class NodeList(Struct, frozen=True, kw_only=True):
    """The nodes in the order in which they joined."""

    nodes: list[NodeStanding]
    totals: NodeTotals


class Nodes(Protocol):
    """Whatever knows the nodes. All methods are called from the event loop, with names that `states` gave."""

    def states(self) -> list[NodeStanding]: ...

    async def drain(self, node_id: str, timeout_s: float) -> bool:
        """Give it no new work. True when all that ran there has ended in time."""
        ...

    async def restart(self, node_id: str, timeout_s: float) -> None:
        """Drain it for so long at most, and start it again. Returns when it is ready; raises GatewayError `conflict` where it cannot be done."""
        ...


def listed(standings: Iterable[NodeStanding], *, to_operator: bool) -> NodeList:
    """What somebody may see: of everybody's KV and of failures only operators are told."""
    nodes = list(standings)
    totals = totals_of(nodes)
    if not to_operator:
        nodes = [
            replace(node, kv=None, error=None, adapters=replace(node.adapters, failed={})) for node in nodes
        ]
    return NodeList(nodes=nodes, totals=totals)


def totals_of(nodes: list[NodeStanding]) -> NodeTotals:
    loads = [node.load for node in nodes if node.load is not None]
    return NodeTotals(
        num_nodes=len(nodes),
        num_open=sum(node.is_open for node in nodes),
        num_running=sum(load.num_running for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_kv_blocks=sum(load.num_kv_blocks for load in loads),
        num_free_kv_blocks=sum(load.num_free_kv_blocks for load in loads),
        num_steps=sum(load.num_steps for load in loads),
        num_answer_tokens=sum(load.num_answer_tokens for load in loads),
    )


# -- of a `Node` -------------------------------------------------------------------------------------------------------


def standing_of(
    node_id: str,
    node: Node,
    *,
    incarnation: str,
    is_draining: bool = False,
    failed_adapters: Mapping[str, str] = {},
) -> NodeStanding:
    """What a node says of itself. is_draining: whoever routes gives it no new work, whatever the node knows of that. failed_adapters: as in
    `NodeAdapters`.
    """
    progress = node.progress
    is_draining = is_draining or progress.state == "draining"
    return NodeStanding(
        id=node_id,
        model=node.model_name,
        state="draining" if is_draining and progress.state == "ready" else progress.state,
        stage=progress.stage,
        elapsed_s=round(progress.elapsed_s, 3),
        incarnation=incarnation,
        is_draining=is_draining,
        num_rebuilds=node.num_rebuilds,
        load=_load(node),
        kv=_kv(node),
        adapters=_adapters(node, failed_adapters),
        error=progress.error,
    )


def _load(node: Node) -> NodeLoad | None:
    stats = node.scheduling_stats()
    if stats is None:
        return None
    return NodeLoad(
        policy=stats.policy,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_by_reason=stats.num_by_reason,
        lanes=stats.lanes,
        num_kv_blocks=stats.num_kv_blocks,
        num_free_kv_blocks=stats.num_free_kv_blocks,
        block_size=stats.block_size,
        num_steps=node.num_steps,
        num_answer_tokens=stats.num_answer_tokens,
    )


def _kv(node: Node) -> NodeKv | None:
    stats = node.kv_tiers()
    if stats is None:
        return None
    host, disk = stats.host, stats.disk
    return NodeKv(
        host=TierUse(bytes=host.bytes, capacity_bytes=host.capacity_bytes, num_hits=host.num_hits),
        disk=TierUse(bytes=disk.bytes, capacity_bytes=disk.capacity_bytes, num_hits=disk.num_hits)
        if disk.is_on
        else None,
        problem=stats.problem,
    )


def _adapters(node: Node, failed: Mapping[str, str]) -> NodeAdapters:
    num_by_place: dict[AdapterPlace, int] = {}
    resident: list[ResidentAdapter] = []
    for info in node.adapters():
        num_by_place[info.place] = num_by_place.get(info.place, 0) + 1
        if info.place != "disk" and len(resident) < MAX_RESIDENT:
            resident.append(ResidentAdapter(name=info.name, place=info.place, is_pinned=info.is_pinned))
    shown = {name: failed[name] for name in sorted(failed)[:MAX_RESIDENT]}
    return NodeAdapters(num_by_place=num_by_place, resident=resident, failed=shown)


# -- one node ----------------------------------------------------------------------------------------------------------


class OneNode:
    """The node of a server that has no others."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._incarnation = secrets.token_hex(8)

    def states(self) -> list[NodeStanding]:
        node = self._node
        incarnation = node.incarnation if isinstance(node, RemoteNode) else self._incarnation
        return [standing_of(LOCAL, node, incarnation=incarnation)]

    async def drain(self, node_id: str, timeout_s: float) -> bool:
        return await self._node.drain(timeout_s)

    async def restart(self, node_id: str, timeout_s: float) -> None:
        if not isinstance(self._node, ProcessNode):
            raise GatewayError(
                "conflict",
                "This engine runs in the server's own process: restart the server, or run it with --engine process.",
            )
        await self._node.drain(timeout_s)
        await self._node.restart()


# -- changes -----------------------------------------------------------------------------------------------------------


class Steward:
    """Drains and restarts nodes while others go on. One thing at a time is done to a node.

    Args:
        timeout_s: how long a node's running answers get to end, where nobody says otherwise.
    """

    def __init__(self, nodes: Nodes, timeout_s: float) -> None:
        self._nodes, self._timeout_s = nodes, timeout_s
        self._work: dict[str, tuple[str, asyncio.Task[Any]]] = {}
        self._failures: dict[str, str] = {}

    def states(self) -> list[NodeStanding]:
        """As the nodes say, with what failed of the last thing that was done to them."""
        return [
            replace(node, error=node.error or self._failures.get(node.id)) for node in self._nodes.states()
        ]

    async def drain(self, node_id: str, timeout_s: float | None, *, is_forced: bool) -> NodeStanding:
        """Begin. Raises GatewayError `not_found`, `conflict` (other work on it is under way; it is the only one that takes requests)."""
        return await self._begin("drain", node_id, timeout_s, is_forced)

    async def restart(self, node_id: str, timeout_s: float | None, *, is_forced: bool) -> NodeStanding:
        """As `drain`."""
        return await self._begin("restart", node_id, timeout_s, is_forced)

    async def close(self) -> None:
        """What is under way is left as it is: the server goes down."""
        tasks = [task for _, task in self._work.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, what: str, node_id: str, timeout_s: float | None, is_forced: bool) -> NodeStanding:
        before = self._standing(node_id)
        under_way = self._work.get(node_id)
        if under_way is None:
            if not is_forced:
                self._check_others(node_id)
            under_way = self._start(what, node_id, self._timeout_s if timeout_s is None else timeout_s)
        elif under_way[0] != what:
            raise GatewayError("conflict", f"A {under_way[0]} of this node is under way.", param="id")
        # What cannot be done is mostly known at once; all else is seen in the node's state.
        done, _ = await asyncio.wait({under_way[1]}, timeout=REFUSAL_S)
        if done and (error := under_way[1].exception()) is not None:
            raise error
        return self._find(node_id) or replace(before, state="closed", is_draining=True)

    def _start(self, what: str, node_id: str, timeout_s: float) -> tuple[str, asyncio.Task[Any]]:
        log.info("node %s: a %s begins", node_id, what)
        self._failures.pop(node_id, None)
        action = self._nodes.drain if what == "drain" else self._nodes.restart
        task = asyncio.create_task(action(node_id, timeout_s), name=f"{what} of a node")
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

    def _find(self, node_id: str) -> NodeStanding | None:
        return next((node for node in self.states() if node.id == node_id), None)

    def _standing(self, node_id: str) -> NodeStanding:
        """Raises GatewayError `not_found`."""
        node = self._find(node_id)
        if node is None:
            name = node_id[:MAX_QUOTED_CHARS]
            raise GatewayError("not_found", f"There is no node named {name!r}.", param="id")
        return node

    def _check_others(self, node_id: str) -> None:
        """Raises GatewayError `conflict` where nobody would be left to take requests."""
        nodes = {node.id: node for node in self.states()}
        if nodes[node_id].is_open and sum(node.is_open for node in nodes.values()) == 1:
            raise GatewayError(
                "conflict",
                "This is the only node that takes requests: all would be refused meanwhile. "
                'Send {"force": true} (--force) to do it all the same.',
                param="force",
            )
