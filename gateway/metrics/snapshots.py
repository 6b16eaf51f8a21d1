"""Metrics that are made of a snapshot when Prometheus asks. No scrape waits for a step of the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Stats = TypeVar("Stats")
Label = TypeVar("Label", bound=str | tuple[str, ...])


class SnapshotCollector(Collector, Generic[Stats]):
    """Makes metrics of a snapshot.

    Args:
        stats: returns the snapshot, or None while there is none. It is called on the thread that renders the metrics.
    """

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    @abstractmethod
    def metrics_of(self, stats: Stats) -> Iterator[Metric]:
        """Yield the metrics of one snapshot."""

    def collect(self) -> Iterator[Metric]:
        """Take a snapshot and yield its metrics; none while there is no snapshot."""
        stats = self._stats()
        if stats is not None:
            yield from self.metrics_of(stats)

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics, so that the registry takes no snapshot of an engine that has not started."""
        yield from ()


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of a table: a line for each row, with `|` between its cells."""
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    documentation: str,
    labels: Sequence[str],
    values: Mapping[Label, float],
) -> Metric:
    """Return a metric with a value for each label, or for each tuple of labels where it has several."""
    metric = kind(name, documentation, labels=labels)
    for label, value in values.items():
        metric.add_metric([label] if isinstance(label, str) else label, value)
    return metric
