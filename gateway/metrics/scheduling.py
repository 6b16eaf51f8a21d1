"""Who starts next, in figures for Prometheus, read when Prometheus asks. No scrape waits for a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine_bridge.protocol.node import LaneStats, LengthErrors, SchedulingStats, WaitReason
from gateway.metrics.snapshots import SnapshotCollector

_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
_LANES = (
    ("overture_lane_waiting", "Requests that wait in a lane; 0 is that of the smallest", "num_waiting"),
    ("overture_lane_quota_tokens", "Tokens that a lane's requests may hold", "quota_tokens"),
    (
        "overture_lane_used_tokens",
        "Tokens that a lane's requests hold, with those borrowed from other lanes",
        "used_tokens",
    ),
)
# (metric, help, source, key); told from the start, as 0, where a policy of ours decides.
_COUNTERS = (
    ("overture_scheduling_admitted", "Requests started, again after a preemption", "counts", "admitted"),
    (
        "overture_scheduling_bypassed",
        "Requests started before a larger one that did not fit",
        "counts",
        "bypassed",
    ),
    (
        "overture_scheduling_squashed",
        "Requests stopped so that the one that they bypassed can start",
        "counts",
        "squashed",
    ),
    (
        "overture_scheduling_paused",
        "Requests preempted so that urgent ones decode in time",
        "counts",
        "paused",
    ),
    ("overture_scheduling_resumed", "Paused requests that were resumed", "counts", "resumed"),
    ("overture_scheduling_refits", "Times that the lanes were fitted again", "counts", "refits"),
    ("overture_scheduling_decisions", "Decisions about which request starts", "counts", "decisions"),
    ("overture_scheduling_decide_seconds", "Engine thread's time for these decisions", "seconds", "decide"),
    (
        "overture_scheduling_step_seconds",
        "Engine thread's time for all of Overture's scheduling, decisions included",
        "seconds",
        "step",
    ),
)
_CUTS = ("size", "slow", "error")


class SchedulingCollector(SnapshotCollector[SchedulingStats]):
    def metrics_of(self, stats: SchedulingStats) -> Iterator[Metric]:
        yield _waiting(stats)
        yield _preempted(stats)
        yield _chosen_ways(stats)
        if stats.lanes is not None:
            yield from _lanes(stats.lanes)
        if stats.policy != "vllm":
            for name, documentation, source, key in _COUNTERS:
                yield CounterMetricFamily(name, documentation, value=getattr(stats, source).get(key, 0))
        if stats.length_errors is not None:
            yield from _length_errors(stats.length_errors)
        if "log_bytes" in stats.counts:
            yield from _decision_log(stats)


def _waiting(stats: SchedulingStats) -> Metric:
    metric = GaugeMetricFamily(
        "overture_scheduling_waiting", "Waiting requests, by reason", labels=["reason"]
    )
    for reason in _REASONS:
        metric.add_metric([reason], stats.num_by_reason.get(reason, 0))
    return metric


def _preempted(stats: SchedulingStats) -> Metric:
    """What is counted without a kind is vLLM's own way: their KV is dropped, and computed again unless a tier has it."""
    kinds = {"recompute": 0}
    for key, value in stats.counts.items():
        name, _, kind = key.partition(":")
        if name == "preempted" and kind:
            kinds[kind] = value
    kinds["recompute"] += max(stats.counts.get("preempted", 0) - sum(kinds.values()), 0)
    metric = CounterMetricFamily(
        "overture_scheduling_preempted",
        "Preempted requests, by how they got their KV back",
        labels=["kind"],
    )
    for kind, value in sorted(kinds.items()):
        metric.add_metric([kind], value)
    return metric


def _chosen_ways(stats: SchedulingStats) -> Metric:
    metric = CounterMetricFamily(
        "overture_scheduling_preempted_predicted",
        "Preempted requests, by the restore method that was predicted to be fastest",
        labels=["kind"],
    )
    for kind in ("recompute", "swap"):
        metric.add_metric([kind], stats.counts.get(f"predicted:{kind}", 0))
    return metric


def _lanes(lanes: LaneStats) -> Iterator[Metric]:
    for name, documentation, field in _LANES:
        metric = GaugeMetricFamily(name, documentation, labels=["lane"])
        for lane, value in enumerate(getattr(lanes, field)):
            metric.add_metric([str(lane)], value)
        yield metric
    cutoffs = GaugeMetricFamily(
        "overture_lane_cutoff", "Weighted size from which a request belongs to the next lane", labels=["lane"]
    )
    for lane, boundary in enumerate(lanes.boundaries):
        cutoffs.add_metric([str(lane)], boundary)
    yield cutoffs


def _length_errors(errors: LengthErrors) -> Iterator[Metric]:
    buckets = [(str(float(bound)), count) for bound, count in errors.num_within.items()]
    yield HistogramMetricFamily(
        "overture_length_error_tokens",
        "How far finished answers were from their predicted median length",
        buckets=[*buckets, ("+Inf", errors.num_answers)],
        sum_value=errors.sum_tokens,
    )
    yield CounterMetricFamily(
        "overture_length_within_p90",
        "Finished answers that were no longer than their predicted 90th percentile",
        value=errors.num_within_p90,
    )


def _decision_log(stats: SchedulingStats) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "overture_decision_log_bytes", "Bytes written to the decision log", value=stats.counts["log_bytes"]
    )
    cut = CounterMetricFamily(
        "overture_decision_log_cut",
        "Decision logs that ended before their engine did, by reason",
        labels=["reason"],
    )
    for reason in _CUTS:
        cut.add_metric([reason], stats.counts.get(f"log_cut:{reason}", 0))
    yield cut
