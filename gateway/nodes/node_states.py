"""The nodes behind this gateway, as people see them: the facts about each node, and who may see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.protocol.figures import AdapterStats, LaneStats, LeftOut, NodeFigures, WaitReason
from engine_bridge.protocol.node import AdapterInfo, AdapterPlace, Node
from gateway.nodes.members import MemberState
from kvtiers.stats import TierStats

# Adapters in memory that are named one by one. Chosen: a screenful; the counts by place tell of all.
MAX_RESIDENT = 64


# -- the facts about a node --------------------------------------------------------------------------------------------


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


class PeerUse(Struct, frozen=True, kw_only=True):
    """KV that a node fetched from others, and that it lent to them, since its start."""

    bytes_fetched: int
    num_fetched: int
    bytes_lent: int
    num_lent: int


class NodeKv(Struct, frozen=True, kw_only=True):
    """The KV tiers of a node. disk, peers: null where there are none. problem: why a tier is off, in words."""

    host: TierUse
    disk: TierUse | None
    peers: PeerUse | None
    problem: str | None


class ResidentAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that a node has in memory."""

    name: str
    place: AdapterPlace
    is_pinned: bool


class NodeAdapters(Struct, frozen=True, kw_only=True):
    """A node's adapters.

    num_by_place: by the nearest place of each. resident: the first adapters in memory, by name. failed: why the node does not
    serve an adapter, by name, for operators.
    """

    num_by_place: dict[AdapterPlace, int]
    resident: list[ResidentAdapter]
    failed: dict[str, str]


class NodeStatus(Struct, frozen=True, kw_only=True):
    """A node as it is now.

    state: `away`: there is no connection to it; `quiet`: nothing was heard of it for some seconds. elapsed_s: since it was started, or since its
    engine failed. num_ranks: devices that its model is split over, a process for each. incarnation: another one after each start of its process, ""
    while it cannot be reached. load: null until its engine is up, and while it cannot be reached. kv: null then, too, where there are no tiers, and
    without an operator's key. left_out: what its engine runs without, though it was set up with it; only operators are told why. error: what went
    wrong with it last, for operators.
    """

    id: str
    model: str
    state: MemberState
    stage: str
    elapsed_s: float
    incarnation: str
    is_draining: bool
    num_rebuilds: int
    num_ranks: int
    load: NodeLoad | None
    kv: NodeKv | None
    adapters: NodeAdapters
    left_out: tuple[LeftOut, ...]
    error: str | None

    @property
    def is_open(self) -> bool:
        """Whether the node takes new requests."""
        return self.state == "ready" and not self.is_draining


class NodeTotals(Struct, frozen=True, kw_only=True):
    """Sums over all nodes. num_open: nodes that take requests."""

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

    nodes: list[NodeStatus]
    totals: NodeTotals


class Nodes(Protocol):
    """The nodes behind a gateway. All methods are called from the event loop, with names that `states` gave."""

    def states(self) -> list[NodeStatus]:
        """Return the state of each node."""

    async def drain(self, node_id: str, timeout_s: float, *, is_forced: bool) -> bool:
        """Give a node no new work. Returns True when all that ran there has ended in time. Raises InvalidRequest for the last open node."""
        ...

    async def restart(self, node_id: str, timeout_s: float, *, is_forced: bool) -> None:
        """Drain a node for at most `timeout_s` seconds, and start it again. Returns when it is ready.

        Raises InvalidRequest as `drain` does, and GatewayError `conflict` where the node cannot be started again.
        """
        ...

    def reopen(self, node_id: str) -> None:
        """Give a drained node work again. Raises GatewayError `conflict` where that cannot be."""
        ...


def listed(statuses: Iterable[NodeStatus], *, to_operator: bool) -> NodeList:
    """Return the nodes as a client may see them: only operators see all tenants' KV, and failures."""
    nodes = list(statuses)
    totals = totals_of(nodes)
    if not to_operator:
        nodes = [
            replace(
                node,
                kv=None,
                error=None,
                adapters=replace(node.adapters, failed={}),
                left_out=tuple(replace(each, why="") for each in node.left_out),
            )
            for node in nodes
        ]
    return NodeList(nodes=nodes, totals=totals)


def totals_of(nodes: list[NodeStatus]) -> NodeTotals:
    """Return the sums over all nodes that have reported their load."""
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


def status_of(
    node_id: str,
    node: Node | RemoteNode,
    *,
    incarnation: str,
    state: MemberState | None = None,
    failed_adapters: Mapping[str, str] = {},
) -> NodeStatus:
    """Return a node's state as it reports it.

    Args:
        node_id: the node's name.
        node: the node.
        incarnation: see `NodeStatus`.
        state: the state as the router knows it, if it knows better than the node.
        failed_adapters: as in `NodeAdapters`.
    """
    progress, figures, adapters = node.progress, node.figures(), node.adapters()
    if not incarnation:  # its last report tells of a process that may have ended, with its requests and all that it had in memory
        figures, adapters = replace(figures, scheduling_stats=None, kv_tiers=None, adapter_stats=None), []
    state = state or progress.state
    return NodeStatus(
        id=node_id,
        model=node.model_names[0],
        state=state,
        stage=progress.stage,
        elapsed_s=round(progress.elapsed_s, 3),
        incarnation=incarnation,
        is_draining=state == "draining",
        num_rebuilds=figures.num_rebuilds,
        num_ranks=figures.num_ranks,
        load=_load(figures),
        kv=_kv(figures.kv_tiers),
        adapters=_adapters(adapters, figures.adapter_stats, failed_adapters),
        left_out=figures.left_out,
        error=progress.error,
    )


def _load(figures: NodeFigures) -> NodeLoad | None:
    stats = figures.scheduling_stats
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
        num_steps=figures.num_steps,
        num_answer_tokens=stats.num_answer_tokens,
    )


def _kv(stats: TierStats | None) -> NodeKv | None:
    if stats is None:
        return None
    host, disk, peers = stats.host, stats.disk, stats.peers
    return NodeKv(
        host=TierUse(bytes=host.bytes, capacity_bytes=host.capacity_bytes, num_hits=host.num_hits),
        disk=TierUse(bytes=disk.bytes, capacity_bytes=disk.capacity_bytes, num_hits=disk.num_hits)
        if disk.is_on
        else None,
        peers=PeerUse(
            bytes_fetched=peers.bytes_fetched,
            num_fetched=peers.num_fetched,
            bytes_lent=peers.bytes_lent,
            num_lent=peers.num_lent,
        )
        if peers.is_on
        else None,
        problem=stats.problem,
    )


def _adapters(
    infos: Iterable[AdapterInfo], stats: AdapterStats | None, failed: Mapping[str, str]
) -> NodeAdapters:
    num_by_place: dict[AdapterPlace, int] = {}
    resident: list[ResidentAdapter] = []
    for info in infos:
        num_by_place[info.place] = num_by_place.get(info.place, 0) + 1
        if info.place != "disk" and len(resident) < MAX_RESIDENT:
            resident.append(ResidentAdapter(name=info.name, place=info.place, is_pinned=info.is_pinned))
    failed = {**(stats.failed if stats is not None else {}), **failed}
    shown = {name: failed[name] for name in sorted(failed)[:MAX_RESIDENT]}
    return NodeAdapters(num_by_place=num_by_place, resident=resident, failed=shown)
