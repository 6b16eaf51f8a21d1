"""Pausing for urgent requests: what those that are urgent gain and what others lose by it, on one node of vLLM's scheduler with our classes.

    python -m bench.emulated urgent [--quick] [--seeds N] [--seed N] [--jobs N]

Device, model and tiers are those of `python -m bench.emulated symphony`; requests are of log-normal lengths and come by a Poisson process, a tenth of
them urgent. Steps are kept short as by default (`--max-step-ms 500`). Arms, the same requests to each:
  never    nobody is paused
  paused   a step that decodes for an urgent request may take 25 ms (a step for one alone takes 15)
Ratios are paused over never. Where nobody is urgent, both must give the same times to the last bit, or this ends with an error.
The last line is JSON. Of each figure: median over seeds. `urgent_tpot_p99_ms`, `urgent_tpot_p99_ms_never`: of urgent requests at REPORTED_PER_S in
lanes, with pauses and without. `others_e2e_change`, `others_ttft_p99_change`: what the others' mean latency and P99 of TTFT then change by.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.emulated.node import Job
from bench.emulated.symphony import ARMS, SETTING, engine_of, tiers_of
from bench.emulated.trace import Played, arrivals, lognormal, play_on_node
from bench.measures import quantile
from bench.sim.core.steps import Chunk, StepCost
from bench.sim.core.tables import Figure, Part, Workers, add_table_arguments, report_parts, seeds_of
from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.protocol.urgency import is_urgent

PER_S = (8.0, 12.0, 16.0, 20.0)
URGENT_SHARE, TPOT_S, MAX_STEP_S = 0.1, 0.025, 0.5
NUM_REQUESTS, QUICK_REQUESTS = 800, 300
# Of each run, while the node fills. Chosen.
NUM_WARM = 50
POLICIES = ("mlq", "fair", "priority")
REPORTED_PER_S = PER_S[-2]
# What the live engine's table would be of. Chosen: corners of what these requests make.
PREFILL_AXIS = (0, 1, 64, 128, 256, 512, 1024, 2048)
DECODE_AXIS = (0, 1, 8, 32, 64, 128, 256)
CONTEXT_AXIS = (0, 1 << 14, 1 << 16, 1 << 18, 1 << 20)


@dataclass(frozen=True, slots=True)
class Point:
    """One run. tpot_s: 0: nobody is paused."""

    policy: str
    per_s: float
    seed: int
    tpot_s: float
    num_requests: int
    urgent_share: float = URGENT_SHARE


@dataclass(frozen=True, slots=True)
class Served:
    """P99s and a mean, in seconds."""

    tpot_s: float
    ttft_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    urgent: Served | None
    others: Served
    num_paused: int
    times: list[tuple[float, float]]


def cost_with_table() -> StepCost:
    """The data sheet's, with the table that a live engine would go by."""
    cost = StepCost(SETTING.gpu, SETTING.model)

    def seconds(points: Sequence[tuple[int, int, int]]) -> list[float]:
        return [cost.step_s([Chunk(p, 0, 0, True)] if p else [], d, c) for p, d, c in points]

    cost.table = StepTable.of(seconds, PREFILL_AXIS, DECODE_AXIS, CONTEXT_AXIS)
    return cost


def play(point: Point) -> Played:
    chance = random.Random(f"urgent {point.seed}")
    requests = [
        replace(arrival, priority=-1 if chance.random() < point.urgent_share else 0)
        for arrival in arrivals(
            lognormal(point.num_requests, point.seed), point.per_s, point.num_requests, point.seed
        )
    ]
    engine = replace(engine_of(ARMS["advised"]), max_step_s=MAX_STEP_S)
    return play_on_node(
        point.policy, requests, cost_with_table(), engine, tiers=tiers_of(), urgent_tpot_s=point.tpot_s
    )


def serve(point: Point) -> Outcome:
    played = play(point)
    urgent = [job for job in played.jobs[NUM_WARM:] if is_urgent(job.arrival.priority)]
    others = [job for job in played.jobs[NUM_WARM:] if not is_urgent(job.arrival.priority)]
    return Outcome(
        _served(urgent) if urgent else None, _served(others), played.counts.get("paused", 0), played.times
    )


def _served(jobs: Sequence[Job]) -> Served:
    tpot_s = [
        (job.ended_s - job.first_token_s) / (job.arrival.num_answer_tokens - 1)
        for job in jobs
        if job.arrival.num_answer_tokens > 1
    ]
    ttft_s = [job.ttft_s for job in jobs]
    return Served(quantile(tpot_s, 0.99), quantile(ttft_s, 0.99), sum(job.e2e_s for job in jobs) / len(jobs))


def pausing_part(workers: Workers, seeds: Sequence[int], num_requests: int) -> Part:
    points = [
        Point(policy, per_s, seed, tpot_s, num_requests)
        for policy in POLICIES
        for per_s in (PER_S if policy == "mlq" else (REPORTED_PER_S,))
        for tpot_s in (0.0, TPOT_S)
        for seed in seeds
    ]
    outcomes = dict(zip(points, workers.map(serve, points), strict=True))
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for policy, per_s in dict.fromkeys((point.policy, point.per_s) for point in points):
        never, paused = (
            [outcomes[Point(policy, per_s, seed, tpot_s, num_requests)] for seed in seeds]
            for tpot_s in (0.0, TPOT_S)
        )
        result[f"{policy} {per_s:g}/s"] = {
            "never": _ms(never),
            "paused": _ms(paused),
            "num_paused": [each.num_paused for each in paused],
        }
        for who in ("urgent", "others"):
            for name, what in (("tpot_s", "P99 TPOT"), ("ttft_s", "P99 TTFT"), ("e2e_s", "mean E2E")):
                values = tuple(
                    getattr(getattr(ours, who), name) / getattr(getattr(theirs, who), name)
                    for ours, theirs in zip(paused, never, strict=True)
                )
                label = f"{what}, {who}, {policy}, {per_s:g}/s"
                figures.append(Figure(label, values, None, True, "paused", "ratio"))
    return figures, result


def _ms(outcomes: Sequence[Outcome]) -> dict[str, list[list[float]]]:
    """Of each seed: P99 TPOT, P99 TTFT, mean E2E, in milliseconds."""
    found = {}
    for who in ("urgent", "others"):
        served: list[Served] = [getattr(each, who) for each in outcomes]
        found[who] = [
            [round(each.tpot_s * 1e3, 1), round(each.ttft_s * 1e3), round(each.e2e_s * 1e3)]
            for each in served
        ]
    return found


def same_part(workers: Workers, seeds: Sequence[int], num_requests: int) -> Part:
    """Without urgent requests. Raises RuntimeError if anything differs."""
    arms = [
        [Point(policy, PER_S[-1], seed, tpot_s, num_requests, 0.0) for policy in POLICIES for seed in seeds]
        for tpot_s in (0.0, TPOT_S)
    ]
    never, paused = (workers.map(serve, points) for points in arms)
    if any(ours.times != theirs.times for ours, theirs in zip(paused, never, strict=True)):
        raise RuntimeError("where nobody is urgent, pausing changes what becomes of requests")
    return [], {"same_without_urgent_requests": True}


PARTS = {"pausing": pausing_part, "same": same_part}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_table_arguments(parser, PARTS, f"{QUICK_REQUESTS} requests a run")
    parser.set_defaults(seeds=3)


def run(args: argparse.Namespace) -> None:
    num_requests = QUICK_REQUESTS if args.quick else NUM_REQUESTS
    with Workers(args.jobs) as workers:
        seeds = seeds_of(args)
        parts = ((name, PARTS[name](workers, seeds, num_requests)) for name in args.part or PARTS)
        report_parts("Pausing for urgent requests", "emulated-urgent", seeds, parts, _top)


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    """What stands beside the parts: at one load, so that a reader need not choose among the figures."""
    top = (
        {"same_without_urgent_requests": parts["same"]["same_without_urgent_requests"]}
        if "same" in parts
        else {}
    )
    reported = parts.get("pausing", {}).get(f"mlq {REPORTED_PER_S:g}/s")
    if reported is None:
        return top
    never, paused = reported["never"], reported["paused"]

    def change(at: int) -> float:
        pairs = zip(paused["others"], never["others"], strict=True)
        return round(statistics.median(ours[at] / theirs[at] - 1 for ours, theirs in pairs), 4)

    return top | {
        "urgent_tpot_p99_ms": statistics.median(served[0] for served in paused["urgent"]),
        "urgent_tpot_p99_ms_never": statistics.median(served[0] for served in never["urgent"]),
        "others_ttft_p99_change": change(1),
        "others_e2e_change": change(2),
    }
