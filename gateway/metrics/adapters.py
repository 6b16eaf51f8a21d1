"""Prometheus figures of the adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine_bridge.protocol.figures import AdapterStats
from engine_bridge.protocol.node import AdapterPlace
from gateway.metrics.snapshots import SnapshotCollector, labelled, rows_of

_PLACES: tuple[str, ...] = get_args(AdapterPlace)
# Label values that are present from the start, as 0, so that rates can be computed over their first event.
_KNOWN: dict[str, tuple[tuple[str, ...], ...]] = {
    "": ((),),
    "place": tuple((place,) for place in _PLACES),
    "source": (("disk",), ("cached",)),
    "tier, reason": (("slot", ""), ("host", ""), ("cached", "adapter"), ("cached", "kv")),
    "outcome": (("used",), ("in_vain",)),
}
# Metric, field of `AdapterStats`, help.
_GAUGES = rows_of("""
overture_adapter_host_bytes          | host_bytes          | Host memory that adapters occupy
overture_adapter_host_capacity_bytes | host_capacity_bytes | Host memory that adapters may occupy
overture_adapter_cached_bytes        | cached_bytes        | KV memory on the device that currently holds adapters
overture_adapters_waited_for         | num_waiting         | Adapters that requests wait for
overture_adapters_failed             | num_failed          | Adapters that are not served as their files are
""")
# Metric, key, labels, help. A counter is made of the keys `KEY` and `KEY:VALUE[:VALUE]` of the node's `counts` or `seconds`, each value a label.
_COUNTS = rows_of("""
overture_adapter_requests             | found            | place        | \
    Requests by where their adapter was when they arrived; anywhere but in a slot is a cold start
overture_adapter_loads                | loads            | source       | Loads into host memory
overture_adapter_load_bytes           | load_bytes       | source       | Bytes of adapters loaded into host memory
overture_adapter_evictions            | evicted          | tier, reason | Adapters evicted from a tier, by what needed the memory
overture_adapter_slot_fills           | slot_fills       |              | Adapters put into a slot
overture_adapter_slot_bytes           | slot_bytes       |              | Bytes put into slots
overture_adapter_cache_written_bytes  | cache_bytes      |              | Bytes copied into memory lent by KV
overture_adapter_copied_ahead         | copied_ahead     |              | Adapters copied into memory lent by KV before anybody asked for them
overture_adapter_announced_bytes      | announced_bytes  | outcome      | \
    Bytes of adapters moved ahead of announced requests, by whether a request came
overture_adapter_load_failures        | failed           |              | Adapters that could not be loaded when asked for
overture_adapter_prefetched           | prefetched       |              | Adapters loaded ahead because a request was predicted
overture_adapter_worker_deltas        | worker_deltas    |              | LoRA deltas that worker processes computed for cold adapters
overture_adapter_early_layouts        | laid_out_ahead   |              | \
    Adapters that were laid out, or begun to be, before their request came to the engine
overture_adapter_step_layouts         | laid_out_in_step |              | \
    Adapters that an engine step laid out itself for a request that started at once
""")
_SECONDS = rows_of("""
overture_adapter_load_seconds          | load    | source | Time spent loading adapters into host memory
overture_adapter_step_seconds          | step    |        | Time that engine steps spent on adapters, while other requests waited
overture_adapter_between_steps_seconds | between |        | Time spent on adapters between steps
overture_adapter_layout_seconds        | layout  |        | Time to lay adapters out for their slots, beside the steps
""")


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
        for name, field, documentation in _GAUGES:
            yield GaugeMetricFamily(name, documentation, value=getattr(stats, field))
        for rows, source in ((_COUNTS, stats.counts), (_SECONDS, stats.seconds)):
            for name, key, labels, documentation in rows:
                names = labels.split(", ") if labels else []
                values = _values(key, len(names), source, _KNOWN[labels])
                yield labelled(CounterMetricFamily, name, documentation, names, values)


def _values(
    wanted: str, num_labels: int, source: Mapping[str, float], known: Iterable[tuple[str, ...]]
) -> dict[tuple[str, ...], float]:
    """Map label values to counts. A part that a key leaves out is the label ""."""
    values = dict.fromkeys(known, 0.0)
    for key, value in source.items():
        name, *parts = key.split(":", num_labels)
        if name == wanted and len(parts) <= num_labels:
            values[*parts, *[""] * (num_labels - len(parts))] = value
    return values
