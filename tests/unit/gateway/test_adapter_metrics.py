"""What Prometheus reads of a node's adapters."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from engine_bridge.protocol.node import AdapterStats
from gateway.metrics.adapters import AdapterCollector

EMPTY: dict[str, Any] = {
    "num_adapters": 0,
    "num_by_place": {},
    "host_bytes": 0,
    "host_capacity_bytes": 1 << 30,
    "cached_bytes": 0,
    "num_waiting": 0,
    "counts": {},
    "seconds": {},
}


def exposed(stats: AdapterStats | None) -> dict[str, float]:
    """What a scrape reads: metric with labels -> value."""
    registry = CollectorRegistry()
    registry.register(AdapterCollector(lambda: stats))
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def stats_with(**changes: Any) -> AdapterStats:
    return AdapterStats(**EMPTY | changes)


def test_a_node_without_adapters_says_nothing() -> None:
    assert exposed(None) == {}


def test_gauges_tell_where_adapters_are() -> None:
    metrics = exposed(
        stats_with(
            num_by_place={"slot": 2, "disk": 7}, host_bytes=300, host_capacity_bytes=1000, cached_bytes=40
        )
    )
    assert metrics['overture_adapters{place="slot"}'] == 2
    assert metrics['overture_adapters{place="disk"}'] == 7
    assert metrics['overture_adapters{place="host"}'] == metrics['overture_adapters{place="cached"}'] == 0
    assert metrics["overture_adapter_host_bytes"] == 300
    assert metrics["overture_adapter_host_capacity_bytes"] == 1000
    assert metrics["overture_adapter_cached_bytes"] == 40
    assert exposed(stats_with(num_waiting=3))["overture_adapters_waited_for"] == 3


def test_counts_become_counters_with_labels() -> None:
    counts = {
        "found:slot": 5,
        "found:disk": 2,
        "loads:disk": 2,
        "load_bytes:disk": 4096,
        "evicted:slot": 3,
        "evicted:cached:kv": 1,
        "slot_fills": 6,
        "slot_bytes": 100,
        "cache_bytes": 200,
        "failed": 1,
        "prefetched": 4,
        "copied_ahead": 8,
        "worker_deltas": 7,
    }
    metrics = exposed(stats_with(counts=counts))
    assert metrics['overture_adapter_requests_total{place="slot"}'] == 5
    assert metrics['overture_adapter_requests_total{place="disk"}'] == 2
    assert metrics['overture_adapter_loads_total{source="disk"}'] == 2
    assert metrics['overture_adapter_load_bytes_total{source="disk"}'] == 4096
    assert metrics['overture_adapter_evictions_total{reason="",tier="slot"}'] == 3
    assert metrics['overture_adapter_evictions_total{reason="kv",tier="cached"}'] == 1
    assert metrics["overture_adapter_slot_fills_total"] == 6
    assert metrics["overture_adapter_slot_bytes_total"] == 100
    assert metrics["overture_adapter_cache_written_bytes_total"] == 200
    assert metrics["overture_adapter_load_failures_total"] == 1
    assert metrics["overture_adapter_prefetched_total"] == 4
    assert metrics["overture_adapter_copied_ahead_total"] == 8
    assert metrics["overture_adapter_worker_deltas_total"] == 7


def test_seconds_become_counters() -> None:
    seconds = {"step": 0.25, "between": 0.5, "load:disk": 2.0, "load:cached": 1.0, "layout": 4.0}
    metrics = exposed(stats_with(seconds=seconds))
    assert metrics["overture_adapter_step_seconds_total"] == 0.25
    assert metrics["overture_adapter_between_steps_seconds_total"] == 0.5
    assert metrics['overture_adapter_load_seconds_total{source="disk"}'] == 2.0
    assert metrics['overture_adapter_load_seconds_total{source="cached"}'] == 1.0
    assert metrics["overture_adapter_layout_seconds_total"] == 4.0


def test_what_has_not_happened_yet_is_zero_and_not_missing() -> None:
    metrics = exposed(stats_with())
    for name in (
        'overture_adapter_requests_total{place="cached"}',
        'overture_adapter_loads_total{source="cached"}',
        'overture_adapter_evictions_total{reason="kv",tier="cached"}',
        "overture_adapter_load_failures_total",
        "overture_adapter_step_seconds_total",
    ):
        assert metrics[name] == 0


def test_a_label_that_is_new_gets_a_series_of_its_own() -> None:
    metrics = exposed(stats_with(counts={"loads:peer": 9, "evicted:host:pressure": 2, "unknown": 1}))
    assert metrics['overture_adapter_loads_total{source="peer"}'] == 9
    assert metrics['overture_adapter_evictions_total{reason="pressure",tier="host"}'] == 2
    assert not any("unknown" in name for name in metrics)
