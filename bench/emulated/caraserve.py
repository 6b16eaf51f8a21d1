"""CaraServe's CPU-assist on vLLM's scheduler with our classes: what cold adapters cost beside adapters that all are there.

    python -m bench.emulated caraserve [--part cold|production ...] [--quick] [--seeds N] [--seed N] [--jobs N]

Which request starts, where adapters are and when their copies begin is decided by what serves (`engine_bridge/core`). Steps take what an A10 takes by
its data sheet, calibrated with figures of CaraServe §2.3 that are not compared here (core/calibration.py). The model is Llama2-7B, with adapters on
q, k and v. Requests are served first come, first served; prompts are computed in chunks beside the requests that decode.

Arms, each by what it adds to the mean TTFT of `cached`:
  cached         all adapters lie in memory of their own
  on_demand      a step waits for the copies of its adapters, with everybody in it: a GPU without a host's help, and the paper's OnDmd
  cpu_assist     as it serves: the host computes the adapter's part of a step, layer by layer, until one begins with the copy whole; cores by
                 the live engine's rule (driver/assist/shares.py): so many that they are as quick as the device
There are slots for all that run, beside the KV, as `cached` has no bound by definition. Adapters leave with their last request, as in the paper.

Parts
  cold           Fig. 10: nine requests a second, each request with an adapter of its own
  production     Fig. 14: 512 adapters of skewed popularity, a power law over places with exponent 1, which the calibration with Fig. 3 agrees with

Lengths: Alpaca's, drawn about its published means (bench/emulated/core/traffic.py). Changes are
fractions of `cached` on the same seed's requests. Of each figure: median over seeds; `spread` has least and most. What falls short of the paper is
printed first; of a baseline's overhead, falling short is being smaller. The last line is JSON.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

from bench.emulated.core.adapters import AdapterMemory
from bench.emulated.core.assist import ColdStart, as_quick_as
from bench.emulated.core.calibration import A10_ON_DEMAND
from bench.emulated.core.hardware import EPYC_7R32
from bench.emulated.core.node import Engine
from bench.emulated.core.plays import play_on_node
from bench.emulated.core.steps import KERNELS, StepCost, pool_blocks
from bench.emulated.core.traffic import fresh, poisson, power_law, weighted
from bench.emulated.routing import MODEL, lengths, usual_prompt
from bench.emulated.table import Bench, Table

SPAN_S, QUICK_SPAN_S = 300.0, 40.0  # Source of the first: CaraServe §7.1. The second: chosen.
ARMS: dict[str, ColdStart | None] = {
    "cached": None,
    "on_demand": "step waits",
    "cpu_assist": "host helps",
}


# Of all adapters. Source: CaraServe §2.3; the section of Fig. 14 names none.
RANK = 64


@dataclass(frozen=True, slots=True)
class Point:
    """One run of one node. arm: a key of `ARMS`. per_s: requests a second. num_adapters: 0 for a different adapter with each request."""

    arm: str
    per_s: float
    num_adapters: int
    span_s: float
    seed: int = 0


def serve(point: Point) -> dict[str, float]:
    """Play one point; return the mean TTFT."""
    cold_start, num_adapters, assistant = ARMS[point.arm], point.num_adapters, None
    deal = weighted(power_law(num_adapters)) if num_adapters else fresh
    arrivals = poisson(lengths(), deal, point.per_s, point.span_s, point.seed)
    if cold_start == "host helps":
        assistant = as_quick_as(A10_ON_DEMAND, EPYC_7R32, MODEL, RANK, usual_prompt())
    cost = StepCost(A10_ON_DEMAND, MODEL, KERNELS["bgmv"], assistant)
    engine = Engine(pool_blocks(cost), has_prefix_cache=False)
    memory = AdapterMemory(policy=None, num_slots=0)
    if cold_start is not None:
        memory = AdapterMemory(engine.max_running, policy=None, cold_start=cold_start)
    ranks = (RANK,) * (num_adapters or len(arrivals))
    jobs = play_on_node("fcfs", arrivals, cost, engine, ranks=ranks, memory=memory).jobs
    return {"ttft_s": statistics.fmean(job.ttft_s for job in jobs)}


def overheads(bench: Bench, key: str, per_s: float, num_adapters: int, **papers: float) -> None:
    """Find what each arm adds to the mean TTFT of `cached`. papers: what it adds in the paper, by arm."""
    points = {arm: Point(arm, per_s, num_adapters, bench.size) for arm in ARMS}
    bench.play(points.values())
    for arm, paper in papers.items():
        changes = bench.changes(points[arm], points["cached"], "ttft_s")
        bench.figure((key, arm), changes, paper, is_less_better=arm == "cpu_assist")


cold_part = partial(
    overheads, key="ttft_overhead", per_s=9.0, num_adapters=0, on_demand=4.12, cpu_assist=0.22
)
production_part = partial(
    overheads, key="production_ttft_overhead", per_s=7.7, num_adapters=512, on_demand=0.39, cpu_assist=0.07
)


TABLE = Table(
    "emulated-caraserve",
    "CaraServe on vLLM's scheduler",
    serve,
    {"cold": cold_part, "production": production_part},
    (SPAN_S, QUICK_SPAN_S),
    f"{QUICK_SPAN_S:.0f} s of requests",
    seeds=3,
)
