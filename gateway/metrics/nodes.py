"""Prometheus figures of each node, under the same names for one node as for many, and of the router that chooses among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine_bridge.protocol.figures import NodeState
from gateway.metrics.snapshots import SnapshotCollector, labelled, rows_of
from gateway.nodes.chosen_node import HOW
from gateway.nodes.members import MemberState
from gateway.nodes.node_states import NodeKv, NodeLoad, NodeStatus

_STATES: tuple[MemberState, ...] = (*get_args(NodeState), "away", "quiet")
_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
# Kind, metric, field of `NodeLoad`, help.
_LOAD = rows_of("""
gauge   | overture_node_running        | num_running        | Requests that run on a node
gauge   | overture_node_waiting        | num_waiting        | Requests that wait there
gauge   | overture_node_kv_blocks      | num_kv_blocks      | KV blocks that its device has
gauge   | overture_node_kv_free_blocks | num_free_kv_blocks | KV blocks of its device that are free
counter | overture_node_steps          | num_steps          | Steps of its engine
counter | overture_node_answer_tokens  | num_answer_tokens  | Tokens that it generated
""")
# Kind, metric, field of `TierUse`, help.
_KV = rows_of("""
gauge   | overture_node_tier_bytes          | bytes          | KV in a node's host memory or on its disk
gauge   | overture_node_tier_capacity_bytes | capacity_bytes | Memory or disk space that KV may occupy
counter | overture_node_tier_hits           | num_hits       | KV blocks found in a tier
""")


class NodeCollector(SnapshotCollector[Sequence[NodeStatus]]):
    """Figures of each node, from the facts noted last.

    Nodes come and go on the event loop while metrics are rendered on another thread, so `note` hands the facts over.
    """

    def __init__(self) -> None:
        super().__init__(lambda: self._noted)
        self._noted: Sequence[NodeStatus] | None = None

    def note(self, nodes: Sequence[NodeStatus]) -> None:
        """Keep the nodes' facts for the next scrape."""
        self._noted = nodes

    def metrics_of(self, stats: Sequence[NodeStatus]) -> Iterator[Metric]:
        """Yield each node's state, load and KV."""
        yield _states(stats)
        loads = {node.id: node.load for node in stats if node.load is not None}
        yield from _of_loads(loads)
        tiers = {node.id: node.kv for node in stats if node.kv is not None}
        yield from _of_tiers(tiers)
        yield _of_peers(tiers)


class RouterCollector(SnapshotCollector[Mapping[str, int]]):
    """Figures of routing: why nodes were chosen, and what became of requests whose node failed."""

    def metrics_of(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        """Yield the counts of `Router.counts`."""
        yield labelled(
            CounterMetricFamily,
            "overture_router_requests",
            "Requests by why their node was chosen: announced, at home, moved from home, new",
            ["how"],
            {how: stats.get(how, 0) for how in HOW},
        )
        yield CounterMetricFamily(
            "overture_router_tried_again",
            "Requests that another node took over before any token was sent",
            value=stats.get("tried_again", 0),
        )
        yield CounterMetricFamily(
            "overture_router_cut",
            "Requests that ended with an error because their node failed",
            value=stats.get("cut", 0),
        )


def _states(nodes: Sequence[NodeStatus]) -> Metric:
    return labelled(
        GaugeMetricFamily,
        "overture_node_state",
        "1 for the state that a node is in, 0 for others",
        ["node", "state"],
        {(node.id, state): node.state == state for node in nodes for state in _STATES},
    )


def _of_loads(loads: dict[str, NodeLoad]) -> Iterator[Metric]:
    for kind, name, field, documentation in _LOAD:
        values = {node_id: getattr(load, field) for node_id, load in loads.items()}
        yield labelled(_FAMILIES[kind], name, documentation, ["node"], values)


def _of_tiers(tiers: dict[str, NodeKv]) -> Iterator[Metric]:
    for kind, name, field, documentation in _KV:
        uses = {
            (node_id, tier): use
            for node_id, kv in tiers.items()
            for tier, use in (("host", kv.host), ("disk", kv.disk))
        }
        values = {labels: getattr(use, field) for labels, use in uses.items() if use is not None}
        yield labelled(_FAMILIES[kind], name, documentation, ["node", "tier"], values)


def _of_peers(tiers: dict[str, NodeKv]) -> Metric:
    peers = {node_id: kv.peers for node_id, kv in tiers.items() if kv.peers is not None}
    return labelled(
        CounterMetricFamily,
        "overture_node_peer_bytes",
        "KV that a node fetched from others (in), and lent to them (out)",
        ["node", "direction"],
        {(node_id, "in"): peer.bytes_fetched for node_id, peer in peers.items()}
        | {(node_id, "out"): peer.bytes_lent for node_id, peer in peers.items()},
    )
