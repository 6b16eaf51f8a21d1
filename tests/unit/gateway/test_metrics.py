"""What Prometheus reads of a node's adapters, its KV tiers and of who starts next."""

from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine_bridge.protocol.figures import AdapterStats, LaneStats, LengthErrors, SchedulingStats, WaitReason
from gateway.metrics.adapters import AdapterCollector
from gateway.metrics.kv import KvCollector
from gateway.metrics.scheduling import SchedulingCollector
from kvtiers.stats import DiskTierStats, HostStats, PeerStats, TierStats


def exposed(collector: Any) -> dict[str, float]:
    """What a scrape reads: metric with labels -> value."""
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("overture_"): float(value) for name, value in pairs}


def adapters(**changes: Any) -> dict[str, float]:
    figures: dict[str, Any] = {"num_adapters": 0, "num_by_place": {}, "host_bytes": 0, "cached_bytes": 0}
    figures |= {"host_capacity_bytes": 1 << 30, "num_waiting": 0, "counts": {}, "seconds": {}}
    return exposed(AdapterCollector(lambda: AdapterStats(**figures | changes)))


def scheduling(**changes: Any) -> dict[str, float]:
    figures: dict[str, Any] = {"policy": "mlq", "num_running": 0, "num_waiting": 0, "num_by_reason": {}}
    figures |= {"lanes": None, "counts": {}, "seconds": {}, "length_errors": None}
    return exposed(SchedulingCollector(lambda: SchedulingStats(**figures | changes)))


@pytest.mark.parametrize("collector", [AdapterCollector, KvCollector, SchedulingCollector])
def test_a_node_without_an_engine_says_nothing(collector: Any) -> None:
    assert exposed(collector(lambda: None)) == {}


def test_adapters_are_counted_by_place_source_and_reason() -> None:
    counts = {"found:slot": 5, "loads:disk": 2, "load_bytes:disk": 4096, "evicted:slot": 3}
    counts |= {"evicted:cached:kv": 1, "slot_fills": 6, "failed": 7, "loads:peer": 9, "unknown": 1}
    figures = {"num_by_place": {"slot": 2, "disk": 7}, "host_bytes": 300, "num_waiting": 3}
    metrics = adapters(counts=counts, seconds={"load:disk": 2.0}, **figures)
    for name, value in {
        'adapters{place="slot"}': 2,
        'adapters{place="host"}': 0,
        "adapter_host_bytes": 300,
        "adapters_waited_for": 3,
        'adapter_requests_total{place="slot"}': 5,
        'adapter_requests_total{place="cached"}': 0,
        'adapter_loads_total{source="disk"}': 2,
        'adapter_loads_total{source="peer"}': 9,
        'adapter_load_bytes_total{source="disk"}': 4096,
        'adapter_evictions_total{reason="",tier="slot"}': 3,
        'adapter_evictions_total{reason="kv",tier="cached"}': 1,
        "adapter_slot_fills_total": 6,
        "adapter_load_failures_total": 7,
        'adapter_load_seconds_total{source="disk"}': 2.0,
        "adapter_step_seconds_total": 0,
    }.items():
        assert metrics[name] == value, name
    assert not any("unknown" in name for name in metrics)


def test_what_came_from_other_nodes_is_told_where_there_are_others() -> None:
    def tiers(peers: PeerStats) -> dict[str, float]:
        stats = TierStats(host=HostStats(num_hits=3), disk=DiskTierStats(num_hits=4), peers=peers)
        return exposed(KvCollector(lambda: stats))

    sums = {"bytes_fetched": 5, "bytes_lent": 6, "num_fetched": 7, "num_lent": 8}
    told = tiers(PeerStats(is_on=True, misses={"dead": 2}, refusals={}, **sums))
    assert told['kv_hits_total{tier="disk"}'] == 4 and told['kv_peer_misses_total{reason="dead"}'] == 2
    assert [told[f'kv_peer_bytes_total{{direction="{way}"}}'] for way in ("in", "out")] == [5, 6]
    assert [told[f'kv_peer_blocks_total{{direction="{way}"}}'] for way in ("in", "out")] == [7, 8]
    assert not any("peer_bytes" in name for name in tiers(PeerStats()))


def test_who_waits_is_told_by_reason_and_lane() -> None:
    lanes = LaneStats(boundaries=(0.25,), num_waiting=(4, 1), quota_tokens=(300, 700), used_tokens=(310, 20))
    metrics = scheduling(num_by_reason={"lane_quota": 3}, lanes=lanes)
    for reason in get_args(WaitReason):
        assert metrics[f'scheduling_waiting{{reason="{reason}"}}'] == (3 if reason == "lane_quota" else 0)
    assert (metrics['lane_waiting{lane="0"}'], metrics['lane_quota_tokens{lane="1"}']) == (4, 700)
    assert (metrics['lane_used_tokens{lane="0"}'], metrics['lane_cutoff{lane="0"}']) == (310, 0.25)
    assert 'lane_cutoff{lane="1"}' not in metrics
    assert not any(name.startswith("lane") for name in scheduling())


def test_counts_seconds_and_errors_of_lengths_become_counters() -> None:
    errors = LengthErrors(num_answers=7, sum_tokens=90, num_within_p90=6, num_within={1: 2, 10: 5})
    counts = {"bypassed": 2, "predicted:swap": 3}
    metrics = scheduling(counts=counts, seconds={"decide": 0.5}, length_errors=errors)
    assert (metrics["scheduling_bypassed_total"], metrics["scheduling_admitted_total"]) == (2, 0)
    assert metrics["scheduling_decide_seconds_total"] == 0.5
    assert metrics['scheduling_preempted_predicted_total{kind="swap"}'] == 3
    buckets = [metrics[f'length_error_tokens_bucket{{le="{le}"}}'] for le in ("1.0", "10.0", "+Inf")]
    assert buckets == [2, 5, 7] and metrics["length_within_p90_total"] == 6


@pytest.mark.parametrize(
    ("counts", "kinds"),
    [
        ({}, {"recompute": 0}),
        ({"preempted": 5}, {"recompute": 5}),
        ({"preempted": 5, "preempted:swap": 2}, {"recompute": 3, "swap": 2}),
        ({"preempted:swap": 2, "preempted:recompute": 4}, {"recompute": 4, "swap": 2}),
    ],
)
def test_preemptions_are_told_by_kind(counts: dict[str, int], kinds: dict[str, int]) -> None:
    head = "scheduling_preempted_total"
    metrics = scheduling(counts=counts)
    assert {name.split('"')[1]: value for name, value in metrics.items() if name.startswith(head)} == kinds
