"""Prometheus figures of the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine_bridge.protocol.figures import AdapterStats
from engine_bridge.protocol.node import AdapterPlace
from gateway.metrics.snapshots import SnapshotCollector, labelled

_PLACES: tuple[str, ...] = get_args(AdapterPlace)
_SOURCES = (("disk",), ("cached",))
_EVICTIONS = (("slot", ""), ("host", ""), ("cached", "adapter"), ("cached", "kv"))


@dataclass(frozen=True, slots=True)
class _Row:
    """A counter made of the keys `key` and `key:VALUE[:VALUE]` of the node's `counts` or `seconds`, each value a label.

    known: label values that are present from the start, as 0, so that rates can be computed over their first event.
    """

    name: str
    documentation: str
    key: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ((),)
    of: Literal["counts", "seconds"] = "counts"


_GAUGES = (
    ("overture_adapter_host_bytes", "Host memory that adapters occupy", "host_bytes"),
    ("overture_adapter_host_capacity_bytes", "Host memory that adapters may occupy", "host_capacity_bytes"),
    (
        "overture_adapter_cached_bytes",
        "KV memory on the device that currently holds adapters",
        "cached_bytes",
    ),
    ("overture_adapters_waited_for", "Adapters that requests wait for", "num_waiting"),
    ("overture_adapters_failed", "Adapters that are not served as their files are", "num_failed"),
)
_COUNTERS = (
    _Row(
        "overture_adapter_requests",
        "Requests by where their adapter was when they arrived; anywhere but in a slot is a cold start",
        "found",
        ("place",),
        tuple((place,) for place in _PLACES),
    ),
    _Row("overture_adapter_loads", "Loads into host memory", "loads", ("source",), _SOURCES),
    _Row(
        "overture_adapter_load_bytes",
        "Bytes of adapters loaded into host memory",
        "load_bytes",
        ("source",),
        _SOURCES,
    ),
    _Row(
        "overture_adapter_load_seconds",
        "Time spent loading adapters into host memory",
        "load",
        ("source",),
        _SOURCES,
        of="seconds",
    ),
    _Row(
        "overture_adapter_evictions",
        "Adapters evicted from a tier, by what needed the memory",
        "evicted",
        ("tier", "reason"),
        _EVICTIONS,
    ),
    _Row("overture_adapter_slot_fills", "Adapters put into a slot", "slot_fills"),
    _Row("overture_adapter_slot_bytes", "Bytes put into slots", "slot_bytes"),
    _Row("overture_adapter_cache_written_bytes", "Bytes copied into memory lent by KV", "cache_bytes"),
    _Row(
        "overture_adapter_copied_ahead",
        "Adapters copied into memory lent by KV before anybody asked for them",
        "copied_ahead",
    ),
    _Row(
        "overture_adapter_announced_bytes",
        "Bytes of adapters moved ahead of announced requests, by whether a request came",
        "announced_bytes",
        ("outcome",),
        (("used",), ("in_vain",)),
    ),
    _Row("overture_adapter_load_failures", "Adapters that could not be loaded when asked for", "failed"),
    _Row(
        "overture_adapter_prefetched", "Adapters loaded ahead because a request was predicted", "prefetched"
    ),
    _Row(
        "overture_adapter_worker_deltas",
        "LoRA deltas that worker processes computed for cold adapters",
        "worker_deltas",
    ),
    _Row(
        "overture_adapter_early_layouts",
        "Adapters that were laid out, or begun to be, before their request came to the engine",
        "laid_out_ahead",
    ),
    _Row(
        "overture_adapter_step_layouts",
        "Adapters that an engine step laid out itself for a request that started at once",
        "laid_out_in_step",
    ),
    _Row(
        "overture_adapter_step_seconds",
        "Time that engine steps spent on adapters, while other requests waited",
        "step",
        of="seconds",
    ),
    _Row(
        "overture_adapter_between_steps_seconds",
        "Time spent on adapters between steps",
        "between",
        of="seconds",
    ),
    _Row(
        "overture_adapter_layout_seconds",
        "Time to lay adapters out for their slots, beside the steps",
        "layout",
        of="seconds",
    ),
)


class AdapterCollector(SnapshotCollector[AdapterStats]):
    """Figures of where adapters are and what moving them took."""

    def metrics_of(self, stats: AdapterStats) -> Iterator[Metric]:
        """Yield the adapters by place, and one metric a row of the tables above."""
        places = {place: stats.num_by_place.get(place, 0) for place in _PLACES}
        yield labelled(
            GaugeMetricFamily,
            "overture_adapters",
            "Adapters, by the nearest place of each",
            ["place"],
            places,
        )
        for name, documentation, field in _GAUGES:
            yield GaugeMetricFamily(name, documentation, value=getattr(stats, field))
        for row in _COUNTERS:
            values = _values(row, getattr(stats, row.of))
            yield labelled(CounterMetricFamily, row.name, row.documentation, row.labels, values)


def _values(row: _Row, source: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Map label values to counts. A part that a key leaves out is the label ""."""
    values: dict[tuple[str, ...], float] = dict.fromkeys(row.known, 0.0)
    for key, value in source.items():
        name, *parts = key.split(":", len(row.labels))
        if name == row.key and len(parts) <= len(row.labels):
            missing = len(row.labels) - len(parts)
            values[*parts, *[""] * missing] = value
    return values
