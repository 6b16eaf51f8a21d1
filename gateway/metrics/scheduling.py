"""Prometheus figures of what a request waits for before it runs: its grammar's check, the tokenizer, and the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine_bridge.protocol.figures import (
    GrammarStats,
    LaneStats,
    LengthErrors,
    SchedulingStats,
    TokenizerStats,
    WaitReason,
)
from gateway.metrics.snapshots import SnapshotCollector, labelled, rows_of

_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
# Metric, field of `LaneStats`, help.
_LANES = rows_of("""
overture_lane_waiting      | num_waiting  | Requests that wait in a lane; 0 is that of the smallest
overture_lane_quota_tokens | quota_tokens | Tokens that a lane's requests may hold
overture_lane_used_tokens  | used_tokens  | Tokens that a lane's requests hold, with those borrowed from other lanes
overture_lane_cutoff       | boundaries   | Weighted size from which a request belongs to the next lane
""")
# Metric, `counts` or `seconds`, key, help; present from the start, as 0, where a policy of ours decides.
_COUNTERS = rows_of("""
overture_scheduling_admitted       | counts  | admitted  | Requests started, again after a preemption
overture_scheduling_bypassed       | counts  | bypassed  | Requests started before a larger one that did not fit
overture_scheduling_squashed       | counts  | squashed  | Requests stopped so that the one that they bypassed can start
overture_scheduling_paused         | counts  | paused    | Requests preempted so that urgent ones decode in time
overture_scheduling_resumed        | counts  | resumed   | Paused requests that were resumed
overture_scheduling_refits         | counts  | refits    | Times that the lanes were fitted again
overture_scheduling_decisions      | counts  | decisions | Decisions about which request starts
overture_scheduling_decide_seconds | seconds | decide    | Engine thread's time for these decisions
overture_scheduling_step_seconds   | seconds | step      | Engine thread's time for all of Overture's scheduling, decisions included
""")
# Metric, field of `GrammarStats`, help.
_GRAMMARS = rows_of("""
overture_grammars_checked      | num_checked | Grammars that a helper process compiled
overture_grammars_refused      | num_refused | Grammars that the helper process refused
overture_grammar_helper_deaths | num_deaths  | Helper processes that died of a grammar
overture_grammar_check_seconds | seconds     | Time that checking grammars took
""")


class GrammarCollector(SnapshotCollector[GrammarStats]):
    """Figures of the helper process that compiles each grammar before the engine sees it."""

    def metrics_of(self, stats: GrammarStats) -> Iterator[Metric]:
        """Yield one counter a field of the statistics."""
        for name, field, documentation in _GRAMMARS:
            yield CounterMetricFamily(name, documentation, value=getattr(stats, field))


class TokenizerCollector(SnapshotCollector[TokenizerStats]):
    """Figures of rendering and tokenising: sums only, so that they say nothing about one client's text."""

    def metrics_of(self, stats: TokenizerStats) -> Iterator[Metric]:
        """Yield the time spent, the pieces done and the pieces that wait."""
        yield CounterMetricFamily(
            "overture_tokenizer_seconds", "Time spent rendering and tokenising", value=stats.seconds
        )
        yield CounterMetricFamily(
            "overture_tokenizer_jobs", "Pieces of rendering and tokenising done", value=stats.num_jobs
        )
        yield GaugeMetricFamily(
            "overture_tokenizer_waiting", "Pieces that wait for the tokenizer", value=stats.num_waiting
        )


class SchedulingCollector(SnapshotCollector[SchedulingStats]):
    """Figures of the queue: requests that wait and why, preemptions, lanes and predicted lengths.

    Args:
        stats: as `SnapshotCollector` has it.
        name_of: returns the name of a tenant; None: persons are not told apart.
    """

    def __init__(
        self, stats: Callable[[], SchedulingStats | None], name_of: Callable[[str], str] | None = None
    ) -> None:
        super().__init__(stats)
        self._name_of = name_of

    def metrics_of(self, stats: SchedulingStats) -> Iterator[Metric]:
        """Yield the metrics that the policy in use has figures for."""
        yield _waiting(stats)
        yield _preempted(stats)
        yield _chosen_ways(stats)
        if stats.lanes is not None:
            yield from _lanes(stats.lanes)
        if stats.policy != "vllm":
            for name, source, key, documentation in _COUNTERS:
                yield CounterMetricFamily(name, documentation, value=getattr(stats, source).get(key, 0))
        if stats.length_errors is not None:
            yield from _length_errors(stats.length_errors)
        if self._name_of is not None:
            yield from _calibration(stats.length_calibration, self._name_of)


def _waiting(stats: SchedulingStats) -> Metric:
    reasons = {reason: stats.num_by_reason.get(reason, 0) for reason in _REASONS}
    return labelled(
        GaugeMetricFamily, "overture_scheduling_waiting", "Waiting requests, by reason", ["reason"], reasons
    )


def _preempted(stats: SchedulingStats) -> Metric:
    """Count preemptions by restore method. vLLM's own preemptions name none: they drop the KV, which counts as `recompute`."""
    kinds = {"recompute": 0}
    for key, value in stats.counts.items():
        name, _, kind = key.partition(":")
        if name == "preempted" and kind:
            kinds[kind] = value
    kinds["recompute"] += max(stats.counts.get("preempted", 0) - sum(kinds.values()), 0)
    return labelled(
        CounterMetricFamily,
        "overture_scheduling_preempted",
        "Preempted requests, by how they got their KV back",
        ["kind"],
        dict(sorted(kinds.items())),
    )


def _chosen_ways(stats: SchedulingStats) -> Metric:
    return labelled(
        CounterMetricFamily,
        "overture_scheduling_preempted_predicted",
        "Preempted requests, by the restore method that was predicted to be fastest",
        ["kind"],
        {kind: stats.counts.get(f"predicted:{kind}", 0) for kind in ("recompute", "swap")},
    )


def _lanes(lanes: LaneStats) -> Iterator[Metric]:
    for name, field, documentation in _LANES:
        values = {str(lane): value for lane, value in enumerate(getattr(lanes, field))}
        yield labelled(GaugeMetricFamily, name, documentation, ["lane"], values)


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


def _calibration(
    by_tenant: Mapping[str, tuple[int, int, int]], name_of: Callable[[str], str]
) -> Iterator[Metric]:
    """Yield how many answers of each person were as short as predicted: half of them should be within "0.5", and nine of ten within "0.9"."""
    answers, within = Counter[str](), Counter[tuple[str, str]]()
    for tenant, (num_answers, within_p50, within_p90) in by_tenant.items():
        name = name_of(tenant)
        answers[name] += num_answers
        within.update({(name, "0.5"): within_p50, (name, "0.9"): within_p90})
    yield labelled(
        CounterMetricFamily,
        "overture_user_answers",
        "Finished answers whose length was predicted, by person (--metrics-by-user)",
        ["user"],
        answers,
    )
    yield labelled(
        CounterMetricFamily,
        "overture_user_answers_within",
        "Finished answers no longer than the predicted quantile of their length, by person (--metrics-by-user)",
        ["user", "quantile"],
        within,
    )
