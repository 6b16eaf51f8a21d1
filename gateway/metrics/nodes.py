"""What each node does, in figures for Prometheus: the same names for one node as for many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine_bridge.protocol.node import NodeState
from gateway.metrics.snapshots import SnapshotCollector
from gateway.nodes.members import MemberState
from gateway.nodes.node_states import NodeKv, NodeLoad, NodeStanding

_STATES: tuple[MemberState, ...] = (*get_args(NodeState), "away", "quiet")
# (family, metric, help, field of NodeLoad)
_LOAD = (
    (GaugeMetricFamily, "overture_node_running", "Requests that run on a node", "num_running"),
    (GaugeMetricFamily, "overture_node_waiting", "Requests that wait there", "num_waiting"),
    (GaugeMetricFamily, "overture_node_kv_blocks", "KV blocks that its device has", "num_kv_blocks"),
    (
        GaugeMetricFamily,
        "overture_node_kv_free_blocks",
        "KV blocks of its device that are free",
        "num_free_kv_blocks",
    ),
    (CounterMetricFamily, "overture_node_steps", "Steps of its engine", "num_steps"),
    (CounterMetricFamily, "overture_node_answer_tokens", "Tokens that it generated", "num_answer_tokens"),
)
# (family, metric, help, field of TierUse)
_KV = (
    (GaugeMetricFamily, "overture_node_tier_bytes", "KV in a node's host memory or on its disk", "bytes"),
    (
        GaugeMetricFamily,
        "overture_node_tier_capacity_bytes",
        "Memory or disk space that KV may occupy",
        "capacity_bytes",
    ),
    (CounterMetricFamily, "overture_node_tier_hits", "KV blocks found in a tier", "num_hits"),
)


class NodeCollector(SnapshotCollector[Sequence[NodeStanding]]):
    """Makes metrics of what it was told last: nodes come and go on the event loop, and metrics are rendered beside it."""

    def __init__(self) -> None:
        super().__init__(lambda: self._noted)
        self._noted: Sequence[NodeStanding] | None = None

    def note(self, nodes: Sequence[NodeStanding]) -> None:
        """For the next scrape."""
        self._noted = nodes

    def metrics_of(self, stats: Sequence[NodeStanding]) -> Iterator[Metric]:
        yield _states(stats)
        loads = {node.id: node.load for node in stats if node.load is not None}
        yield from _of_loads(loads)
        tiers = {node.id: node.kv for node in stats if node.kv is not None}
        yield from _of_tiers(tiers)
        yield _of_peers(tiers)


def _states(nodes: Sequence[NodeStanding]) -> Metric:
    metric = GaugeMetricFamily(
        "overture_node_state", "1 for the state that a node is in, 0 for others", labels=["node", "state"]
    )
    for node in nodes:
        for state in _STATES:
            metric.add_metric([node.id, state], node.state == state)
    return metric


def _of_loads(loads: dict[str, NodeLoad]) -> Iterator[Metric]:
    for family, name, documentation, field in _LOAD:
        metric = family(name, documentation, labels=["node"])
        for node_id, load in loads.items():
            metric.add_metric([node_id], getattr(load, field))
        yield metric


def _of_tiers(tiers: dict[str, NodeKv]) -> Iterator[Metric]:
    for family, name, documentation, field in _KV:
        metric = family(name, documentation, labels=["node", "tier"])
        for node_id, kv in tiers.items():
            for tier, use in (("host", kv.host), ("disk", kv.disk)):
                if use is not None:
                    metric.add_metric([node_id, tier], getattr(use, field))
        yield metric


def _of_peers(tiers: dict[str, NodeKv]) -> Metric:
    metric = CounterMetricFamily(
        "overture_node_peer_bytes",
        "KV that a node fetched from others (in), and lent to them (out)",
        labels=["node", "direction"],
    )
    for node_id, kv in tiers.items():
        if kv.peers is not None:
            metric.add_metric([node_id, "in"], kv.peers.bytes_fetched)
            metric.add_metric([node_id, "out"], kv.peers.bytes_lent)
    return metric
