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


def scheduling(*name_of: Any, **changes: Any) -> dict[str, float]:
    figures: dict[str, Any] = {"policy": "mlq", "num_running": 0, "num_waiting": 0, "num_by_reason": {}}
    figures |= {"lanes": None, "counts": {}, "seconds": {}, "length_errors": None}
    return exposed(SchedulingCollector(lambda: SchedulingStats(**figures | changes), *name_of))


@pytest.mark.parametrize("collector", [AdapterCollector, KvCollector, SchedulingCollector])
def test_a_node_without_an_engine_says_nothing(collector: Any) -> None:
    assert exposed(collector(lambda: None)) == {}


def test_adapters_are_counted_by_place_source_and_reason() -> None:
    counts = {"found:slot": 5, "loads:disk": 2, "load_bytes:disk": 4096, "evicted:slot": 3}
    counts |= {"evicted:cached:kv": 1, "slot_fills": 6, "failed": 7, "loads:peer": 9, "unknown": 1}
    figures: dict[str, Any] = {"num_adapters": 9, "num_by_place": {"slot": 2, "disk": 7}, "host_bytes": 300}
    figures |= {"cached_bytes": 0, "host_capacity_bytes": 1 << 30, "num_waiting": 3}
    stats = AdapterStats(**figures, counts=counts, seconds={"load:disk": 2.0})
    metrics = exposed(AdapterCollector(lambda: stats))
    for name, value in {
        'adapters{place="slot"}': 2,
        'adapters{place="host"}': 0,
        "adapter_host_bytes": 300,
        "adapters_waited_for": 3,
        'adapter_requests_total{place="slot"}': 5,
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
    sums = {"bytes_fetched": 5, "bytes_lent": 6, "num_fetched": 7, "num_lent": 8}
    peers = PeerStats(is_on=True, misses={"dead": 2}, refusals={}, **sums)
    stats = TierStats(host=HostStats(num_hits=3), disk=DiskTierStats(num_hits=4), peers=peers)
    told = exposed(KvCollector(lambda: stats))
    assert told['kv_hits_total{tier="disk"}'] == 4 and told['kv_peer_misses_total{reason="dead"}'] == 2
    names = [
        f'kv_peer_{what}_total{{direction="{way}"}}' for what in ("bytes", "blocks") for way in ("in", "out")
    ]
    assert [told[name] for name in names] == [5, 6, 7, 8]
    alone = TierStats(host=HostStats(), disk=DiskTierStats(), peers=PeerStats())
    assert not any("peer_bytes" in name for name in exposed(KvCollector(lambda: alone)))


def test_who_waits_what_was_done_and_how_long_answers_were_is_told() -> None:
    lanes = LaneStats(boundaries=(0.25,), num_waiting=(4, 1), quota_tokens=(300, 700), used_tokens=(310, 20))
    errors = LengthErrors(num_answers=7, sum_tokens=90, num_within_p90=6, num_within={1: 2, 10: 5})
    figures = {"num_by_reason": {"lane_quota": 3}, "lanes": lanes, "length_errors": errors}
    counts = {"bypassed": 2, "predicted:swap": 3}
    metrics = scheduling(**figures, counts=counts, seconds={"decide": 0.5})
    for reason in get_args(WaitReason):
        assert metrics[f'scheduling_waiting{{reason="{reason}"}}'] == (3 if reason == "lane_quota" else 0)
    assert (metrics['lane_waiting{lane="0"}'], metrics['lane_quota_tokens{lane="1"}']) == (4, 700)
    assert (metrics['lane_used_tokens{lane="0"}'], metrics['lane_cutoff{lane="0"}']) == (310, 0.25)
    assert 'lane_cutoff{lane="1"}' not in metrics
    assert not any(name.startswith("lane") for name in scheduling())
    assert (metrics["scheduling_bypassed_total"], metrics["scheduling_admitted_total"]) == (2, 0)
    assert metrics["scheduling_decide_seconds_total"] == 0.5
    assert metrics['scheduling_preempted_predicted_total{kind="swap"}'] == 3
    buckets = [metrics[f'length_error_tokens_bucket{{le="{le}"}}'] for le in ("1.0", "10.0", "+Inf")]
    assert buckets == [2, 5, 7] and metrics["length_within_p90_total"] == 6


def test_people_are_told_apart_only_where_their_names_are_given() -> None:
    calibration = {"owner-1": (9, 4, 8), "owner-2": (1, 1, 1)}
    assert not any("user" in name for name in scheduling(length_calibration=calibration))
    told = scheduling(lambda owner: "ada", length_calibration=calibration)
    assert told['user_answers_total{user="ada"}'] == 10, "two people of one name are one"
    within = [
        told[f'user_answers_within_total{{quantile="{quantile}",user="ada"}}'] for quantile in (0.5, 0.9)
    ]
    assert within == [5, 9]


@pytest.mark.parametrize(
    ("num", "num_by_kind", "told"),
    [
        (0, {}, {"recompute": 0}),
        (5, {}, {"recompute": 5}),
        (5, {"swap": 2}, {"recompute": 3, "swap": 2}),
        (0, {"swap": 2, "recompute": 4}, {"recompute": 4, "swap": 2}),
    ],
)
def test_preemptions_are_told_by_kind(num: int, num_by_kind: dict[str, int], told: dict[str, int]) -> None:
    metrics = scheduling(counts={"preempted": num} | {f"preempted:{k}": v for k, v in num_by_kind.items()})
    head = "scheduling_preempted_total"
    assert {name.split('"')[1]: value for name, value in metrics.items() if name.startswith(head)} == told
