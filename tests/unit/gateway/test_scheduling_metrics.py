"""What Prometheus reads of who starts next."""

from __future__ import annotations

from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest

from engine_bridge.policy.scheduling.queue_policy import DeferReason
from engine_bridge.protocol.node import LaneStats, LengthErrors, SchedulingStats, WaitReason
from gateway.metrics.scheduling import SchedulingCollector

EMPTY: dict[str, Any] = {
    "policy": "mlq",
    "num_running": 0,
    "num_waiting": 0,
    "num_by_reason": {},
    "lanes": None,
    "counts": {},
    "seconds": {},
    "length_errors": None,
}


def exposed(stats: SchedulingStats | None) -> dict[str, float]:
    """What a scrape reads: metric with labels -> value."""
    registry = CollectorRegistry()
    registry.register(SchedulingCollector(lambda: stats))
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def stats_with(**changes: Any) -> SchedulingStats:
    return SchedulingStats(**EMPTY | changes)


def test_a_node_without_an_engine_says_nothing() -> None:
    assert exposed(None) == {}


def test_every_reason_of_a_policy_can_be_told() -> None:
    assert set(get_args(DeferReason)) <= set(get_args(WaitReason))


def test_who_waits_is_told_by_reason() -> None:
    metrics = exposed(stats_with(num_by_reason={"lane_quota": 3, "adapter_on_its_way": 2}))
    assert metrics['overture_scheduling_waiting{reason="lane_quota"}'] == 3
    assert metrics['overture_scheduling_waiting{reason="adapter_on_its_way"}'] == 2
    for reason in get_args(WaitReason):
        assert f'overture_scheduling_waiting{{reason="{reason}"}}' in metrics


def test_lanes_have_a_series_each() -> None:
    lanes = LaneStats(boundaries=(0.25,), num_waiting=(4, 1), quota_tokens=(300, 700), used_tokens=(310, 20))
    metrics = exposed(stats_with(lanes=lanes))
    assert metrics['overture_lane_waiting{lane="0"}'] == 4
    assert metrics['overture_lane_quota_tokens{lane="1"}'] == 700
    assert metrics['overture_lane_used_tokens{lane="0"}'] == 310
    assert metrics['overture_lane_cutoff{lane="0"}'] == 0.25
    assert 'overture_lane_cutoff{lane="1"}' not in metrics
    assert not any(name.startswith("overture_lane") for name in exposed(stats_with()))


def test_counts_and_seconds_become_counters() -> None:
    counts = {"admitted": 9, "bypassed": 2, "squashed": 1, "refits": 3, "decisions": 70}
    metrics = exposed(stats_with(counts=counts, seconds={"decide": 0.5, "step": 1.5}))
    for name, value in counts.items():
        assert metrics[f"overture_scheduling_{name}_total"] == value
    assert metrics["overture_scheduling_decide_seconds_total"] == 0.5
    assert metrics["overture_scheduling_step_seconds_total"] == 1.5
    assert exposed(stats_with())["overture_scheduling_admitted_total"] == 0


def test_preemptions_are_told_by_kind() -> None:
    def kinds(**counts: int) -> dict[str, float]:
        metrics = exposed(stats_with(counts={name.replace("_", ":"): n for name, n in counts.items()}))
        return {
            name.split('"')[1]: value
            for name, value in metrics.items()
            if name.startswith("overture_scheduling_preempted_total")
        }

    assert kinds() == {"recompute": 0}
    assert kinds(preempted=5) == {"recompute": 5}
    assert kinds(preempted=5, preempted_swap=2) == {"recompute": 3, "swap": 2}
    assert kinds(preempted_swap=2, preempted_recompute=4) == {"recompute": 4, "swap": 2}
    assert kinds(preempted=6, preempted_swap=2, preempted_recompute=4) == {"recompute": 4, "swap": 2}


def test_ways_back_are_told_as_they_were_predicted_and_as_they_came_to_be() -> None:
    metrics = exposed(stats_with(counts={"predicted:swap": 3, "preempted:swap": 1, "preempted:recompute": 2}))
    assert metrics['overture_scheduling_preempted_predicted_total{kind="swap"}'] == 3
    assert metrics['overture_scheduling_preempted_predicted_total{kind="recompute"}'] == 0
    assert metrics['overture_scheduling_preempted_total{kind="swap"}'] == 1


def test_errors_of_lengths_are_a_histogram() -> None:
    errors = LengthErrors(num_answers=7, sum_tokens=90, num_within_p90=6, num_within={1: 2, 10: 5})
    metrics = exposed(stats_with(length_errors=errors))
    assert metrics['overture_length_error_tokens_bucket{le="10.0"}'] == 5
    assert metrics['overture_length_error_tokens_bucket{le="+Inf"}'] == 7
    assert metrics["overture_length_error_tokens_count"] == 7
    assert metrics["overture_length_error_tokens_sum"] == 90
    assert metrics["overture_length_within_p90_total"] == 6


def test_with_vllms_own_queue_only_what_it_knows_is_told() -> None:
    metrics = exposed(stats_with(policy="vllm", num_by_reason={"queued": 2}, counts={"preempted": 4}))
    assert metrics['overture_scheduling_waiting{reason="queued"}'] == 2
    assert metrics['overture_scheduling_preempted_total{kind="recompute"}'] == 4
    assert "overture_scheduling_admitted_total" not in metrics


def test_a_recording_that_ended_early_shows() -> None:
    metrics = exposed(stats_with(counts={"log_bytes": 1000, "log_cut:slow": 1}))
    assert metrics["overture_decision_log_bytes_total"] == 1000
    assert metrics['overture_decision_log_cut_total{reason="slow"}'] == 1
    assert metrics['overture_decision_log_cut_total{reason="size"}'] == 0
    assert not any("decision_log" in name for name in exposed(stats_with()))
