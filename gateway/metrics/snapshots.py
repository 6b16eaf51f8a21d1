"""Metrics that are made of a snapshot when Prometheus asks. No scrape waits for a step of the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Stats = TypeVar("Stats")


class SnapshotCollector(Collector, Generic[Stats]):
    """Makes metrics of a snapshot.

    Args:
        stats: gives the snapshot, or None while there is nothing to tell. Called on whatever thread renders the metrics.
    """

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    @abstractmethod
    def metrics_of(self, stats: Stats) -> Iterator[Metric]:
        """Of one snapshot."""

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is not None:
            yield from self.metrics_of(stats)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry must not take a snapshot of an engine that has not started."""
        yield from ()
