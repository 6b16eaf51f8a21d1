"""The tokenizer's figures for Prometheus, read when Prometheus asks: sums only, no word of whose text it was."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine_bridge.protocol.node import TokenizerStats
from gateway.metrics.snapshots import SnapshotCollector


class TokenizerCollector(SnapshotCollector[TokenizerStats]):
    def metrics_of(self, stats: TokenizerStats) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "overture_tokenizer_seconds", "Time spent rendering and tokenising", value=stats.seconds
        )
        yield CounterMetricFamily(
            "overture_tokenizer_jobs", "Pieces of rendering and tokenising done", value=stats.num_jobs
        )
        yield GaugeMetricFamily(
            "overture_tokenizer_waiting", "Pieces that wait for the tokenizer", value=stats.num_waiting
        )
