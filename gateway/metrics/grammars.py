"""The figures of checking grammars for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from engine_bridge.protocol.node import GrammarStats
from gateway.metrics.snapshots import SnapshotCollector

_COUNTERS = (
    ("overture_grammars_checked", "Grammars that a helper process compiled", "num_checked"),
    ("overture_grammars_refused", "Grammars that the helper process refused", "num_refused"),
    ("overture_grammar_helper_deaths", "Helper processes that died of a grammar", "num_deaths"),
    ("overture_grammar_check_seconds", "Time that checking grammars took", "seconds"),
)


class GrammarCollector(SnapshotCollector[GrammarStats]):
    def metrics_of(self, stats: GrammarStats) -> Iterator[Metric]:
        for name, documentation, field in _COUNTERS:
            yield CounterMetricFamily(name, documentation, value=getattr(stats, field))
