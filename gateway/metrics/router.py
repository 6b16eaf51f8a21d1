"""What the router has done, in figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from gateway.metrics.snapshots import SnapshotCollector
from gateway.nodes.chosen_node import HOW


class RouterCollector(SnapshotCollector[Mapping[str, int]]):
    def metrics_of(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        """stats: as `Router.counts` gives them."""
        routed = CounterMetricFamily(
            "overture_router_requests",
            "Requests by why their node was chosen: announced, at home, moved from home, new",
            labels=["how"],
        )
        for how in HOW:
            routed.add_metric([how], stats.get(how, 0))
        yield routed
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
