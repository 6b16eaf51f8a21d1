"""Pausing for urgent requests: what those that are urgent gain and what others lose by it, on one node of vLLM's scheduler with our classes.

    python -m bench.emulated urgent [--quick] [--seeds N] [--seed N] [--jobs N]

Device, model and tiers are those of `python -m bench.emulated symphony`; requests are of log-normal lengths and come by a Poisson process in lanes, a
tenth of them urgent. Steps are kept short as by default (`--max-step-ms 500`). Arms, the same requests to each:
  never    nobody is paused
  paused   a step that decodes for an urgent request may take 25 ms (a step for one alone takes 15)
The last line is JSON. Of each figure: median over seeds. `urgent_tpot_p99_ms`, `urgent_tpot_p99_ms_never`: of urgent requests, with pauses and
without. `others_e2e_change`, `others_ttft_p99_change`: what the others' mean latency and P99 of TTFT then change by.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace

from bench.emulated.core.plays import Played, arrivals, lognormal, play_on_node
from bench.emulated.core.steps import with_table
from bench.emulated.symphony import ARMS, SETTING, engine_of
from bench.emulated.table import Bench, Table
from bench.measures import quantile
from engine_bridge.protocol.urgency import is_urgent

PER_S, URGENT_SHARE, TPOT_S, MAX_STEP_S = 16.0, 0.1, 0.025, 0.5
NUM_REQUESTS, QUICK_REQUESTS = 800, 300
# Of each run, while the node fills. Chosen.
NUM_WARM = 50


@dataclass(frozen=True, slots=True)
class Point:
    """One run. tpot_s: the time per token that urgent requests are promised; 0: no request is paused for them."""

    tpot_s: float
    num_requests: int
    urgent_share: float = URGENT_SHARE
    policy: str = "mlq"
    per_s: float = PER_S
    seed: int = 0


def play(point: Point) -> Played:
    """Play one point."""
    chance = random.Random(f"urgent {point.seed}")
    lengths = lognormal(point.num_requests, point.seed)
    requests = [
        replace(arrival, priority=-1 if chance.random() < point.urgent_share else 0)
        for arrival in arrivals(lengths, point.per_s, point.num_requests, point.seed)
    ]
    engine = replace(engine_of(ARMS["advised"]), max_step_s=MAX_STEP_S)
    return play_on_node(
        point.policy,
        requests,
        with_table(SETTING.cost),
        engine,
        tiers=SETTING.tiers,
        urgent_tpot_s=point.tpot_s,
    )


def serve(point: Point) -> dict[str, float]:
    """Play one point; return P99s of urgent and other requests, and the mean latency of the others."""
    jobs = play(point).jobs[NUM_WARM:]
    urgent = [job for job in jobs if is_urgent(job.arrival.priority)]
    others = [job for job in jobs if not is_urgent(job.arrival.priority)]
    tpots_s = [job.tpot_s for job in urgent if job.arrival.num_answer_tokens > 1]
    return {
        "urgent_tpot_s": quantile(tpots_s, 0.99),
        "others_ttft_s": quantile([job.ttft_s for job in others], 0.99),
        "others_e2e_s": statistics.fmean(job.e2e_s for job in others),
    }


def pausing_part(bench: Bench) -> None:
    """Find the times of urgent requests and of the others with pauses, beside those without."""
    never, paused = points = [Point(tpot_s, int(bench.size)) for tpot_s in (0.0, TPOT_S)]
    bench.play(points)
    for key, point in (("urgent_tpot_p99_ms", paused), ("urgent_tpot_p99_ms_never", never)):
        ms = [round(seconds * 1e3, 1) for seconds in bench.values(point, "urgent_tpot_s")]
        bench.figure((key,), ms, unit="ms")
    bench.figure(("others_ttft_p99_change",), bench.changes(paused, never, "others_ttft_s"))
    bench.figure(("others_e2e_change",), bench.changes(paused, never, "others_e2e_s"))


TABLE = Table(
    "emulated-urgent",
    "Pausing for urgent requests",
    serve,
    {"pausing": pausing_part},
    (NUM_REQUESTS, QUICK_REQUESTS),
    f"{QUICK_REQUESTS} requests a run",
    seeds=3,
)
