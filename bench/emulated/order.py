"""Is an order of starting ever worse than vLLM's own queue, and what does it gain?

    python -m bench.emulated order [--quick] [--part orders|steps|starved ...] [--seeds N] [--seed N] [--jobs N]

Loads are shares of what vLLM's own queue answers of the same requests. Traces: those of `core/traces.py`, recorded ones and made ones whose prompts
and answers go apart, each without adapters and with 50 adapters on 16 slots. Where recorded ones are missing (`is_recorded`), lengths are drawn
between Azure's quantiles. Device: an A40 with Llama-2-7B. Four predictions of five are right. TTFT counts from arrival to first token, in virtual
seconds.

Orders: `vllm`, its own queue; the default; `mlq`, the paper's own, with the first seed alone. A class is a third of the requests by size, or those of
adapters of one rank. Each change is the geometric mean over the seeds, with the least and the most P99 beside it.

orders    the default and `mlq`: `default_p99_vs_vllm_worst_mean` is the worst trace and load, by the mean over seeds; `worst_play` the worst seed of
          all; `p50_change_median` the median over traces and loads; `worst_class_p99` the worst class of any trace and load, by the mean over seeds.
          Beside each stands the same `without_adapters` and `with_adapters` alone, and for `mlq`
steps     the first seed without adapters at 1.1: the default order with steps as long as the table says (`--max-step-ms` as it is by default), mean
          time from arrival to end. Over that of the default order with vLLM's own 2,048 tokens a step, of vLLM's queue with them, and of vLLM's queue
          with the best of `FIXED_STEPS` for each trace: geometric means over the traces, and the worst of them
starved   one request for a third adapter while two that fill the memory are asked for without a pause (`starved_wait_s`), the worse of both orders

The last line is JSON.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.data import are_recorded
from bench.emulated.core.adapters import AdapterMemory
from bench.emulated.core.arrivals import Arrival, Classes
from bench.emulated.core.calibration import A40
from bench.emulated.core.models import LLAMA2_7B
from bench.emulated.core.node import Engine, Job
from bench.emulated.core.plays import play_on_node
from bench.emulated.core.steps import StepCost, pool_blocks, with_table
from bench.emulated.core.traces import MAX_TOKENS, RECORDED, TRACES, trace_rows
from bench.emulated.core.traffic import Pool
from bench.emulated.table import Bench, Place, Table
from bench.measures import quantile
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY, MakePolicy

LOADS, NUM_REQUESTS = (0.9, 1.1, 1.3), 600
# A class with fewer requests has no P99 to speak of: its longest would be one of them. Chosen.
LEAST_OF_CLASS = 100
COST = with_table(StepCost(A40, LLAMA2_7B))
AIMS = {
    "default_p99_vs_vllm_worst_mean": 1.05,
    "worst_play": 1.15,
    "p50_change_median": -0.2,
    "worst_class_p99": 1.15,
}
ACCURACY = 0.8
NUM_ADAPTERS, NUM_SLOTS = 50, 16
# Tokens of a step: vLLM's default first. And the longest step of the default settings.
FIXED_STEPS, MAX_STEP_S = (2048, 512, 256), 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """One play of successive requests of a trace.

    Attributes:
        order: as `EmulatedNode` takes its policy.
        load: share of the capacity; 0: all requests come at once.
        capacity_per_s: requests that vLLM's own queue answers a second, by seed.
        step_tokens: most tokens of a step.
        max_step_s: as `--max-step-ms`; 0: steps are as long as vLLM makes them.
    """

    order: str | MakePolicy
    trace: str
    has_adapters: bool
    num: int
    load: float = 0.0
    capacity_per_s: tuple[tuple[int, float], ...] = ()
    step_tokens: int = FIXED_STEPS[0]
    max_step_s: float = 0.0
    seed: int = 0

    @property
    def requests(self) -> list[Arrival]:
        """Successive requests of the trace, with its gaps stretched to the load."""
        rows = trace_rows(self.trace)
        start = random.Random(f"start {self.trace} {self.seed}").randrange(len(rows) - self.num)
        rows = rows[start : start + self.num]
        stretch = 0.0
        if self.load:
            per_s = dict(self.capacity_per_s)[self.seed] * self.load
            stretch = self.num / (per_s * sum(row[0] for row in rows[1:]))
        adapters: Sequence[int | None] = [None] * self.num
        if self.has_adapters:
            adapters = Pool(NUM_ADAPTERS).dealt(self.num, random.Random(f"adapters {self.seed}"))
        found, at_s = [], 0.0
        for number, (gap_s, prompt, answer) in enumerate(rows):
            at_s += gap_s * stretch if number else 0.0
            found.append(Arrival(f"{number:06d}", at_s, prompt, answer, adapters[number]))
        return found


def play(point: Point) -> list[Job]:
    """Play a point."""
    guesser = Classes([row[2] for row in trace_rows(point.trace)], ACCURACY, point.seed)
    engine = Engine(
        pool_blocks(COST),
        step_tokens=point.step_tokens,
        max_tokens=MAX_TOKENS,
        max_step_s=point.max_step_s,
        has_prefix_cache=False,
    )
    ranks = Pool(NUM_ADAPTERS).rank_of if point.has_adapters else ()
    memory = AdapterMemory(NUM_SLOTS)
    return play_on_node(point.order, point.requests, COST, engine, guesser, ranks=ranks, memory=memory).jobs


# -- what an order comes to --------------------------------------------------------------------------------------------


def _classes(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Return jobs by class; a class has the same requests whatever the order."""
    ordered = sorted(jobs, key=lambda job: (job.arrival.num_tokens, job.arrival.request_id))
    third = len(ordered) // 3
    found = {"short": ordered[:third], "middle": ordered[third : 2 * third], "long": ordered[2 * third :]}
    for job in jobs:
        if job.rank:
            found.setdefault(f"rank {job.rank}", []).append(job)
    return {name: own for name, own in found.items() if len(own) >= LEAST_OF_CLASS}


def serve(point: Point) -> dict[str, float]:
    """Play a point and return P50 and P99 of TTFT, P99 of each class, and the mean time from arrival to end, in seconds.

    For requests that come all at once, return the answers a second from the first fifth of answers to the fourth, while some always wait.
    """
    jobs = play(point)
    if not point.load:
        ended_s = sorted(job.ended_s for job in jobs)
        first, last = len(ended_s) // 5, 4 * len(ended_s) // 5
        return {"capacity_per_s": (last - first) / (ended_s[last] - ended_s[first])}
    ttft_s = [job.ttft_s for job in jobs]
    found = {f"ttft_p{share}": quantile(ttft_s, share / 100) for share in (50, 99)}
    found["latency"] = statistics.fmean(job.ended_s - job.arrival.at_s for job in jobs)
    for name, own in _classes(jobs).items():
        found[f"class {name}"] = quantile([job.ttft_s for job in own], 0.99)
    return found


def changes(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Return the change of each figure against vLLM's own queue, seed by seed: -0.8 is 80% less. Of classes, the worst that every seed has."""
    names = set.intersection(*(set(stock) for _, stock in pairs))
    ratios = {name: [own[name] / stock[name] for own, stock in pairs] for name in names}
    found = {name: statistics.geometric_mean(values) - 1 for name, values in ratios.items()}
    shown = {name: found[name] for name in ("ttft_p50", "ttft_p99")}
    shown |= {"ttft_p99_least": min(ratios["ttft_p99"]) - 1, "ttft_p99_most": max(ratios["ttft_p99"]) - 1}
    shown["worst_class_p99"] = max(value for name, value in found.items() if name.startswith("class "))
    return {name: round(value, 4) for name, value in shown.items()}


def starved_wait_s(policy: str) -> float:
    """Return the TTFT of the one request for a third adapter, beside two that never pause, in memory for two. An answer takes 1.3 s alone."""
    asked = [Arrival(f"{at:04d}", 0.25 * at, 200, 40, at % 2) for at in range(120)]
    asked.append(Arrival("late", 10.1, 200, 40, 2))
    asked.sort(key=lambda arrival: arrival.at_s)
    jobs = play_on_node(
        policy, asked, COST, Engine(3000, has_prefix_cache=False), ranks=(16, 16, 16), memory=AdapterMemory(2)
    ).jobs
    return round(next(job.ttft_s for job in jobs if job.arrival.request_id == "late"), 3)


# -- parts -------------------------------------------------------------------------------------------------------------


def summary(own: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return an order's figures over all its changes."""
    return {
        "default_p99_vs_vllm_worst_mean": 1 + max(each["ttft_p99"] for each in own),
        "worst_play": 1 + max(each["ttft_p99_most"] for each in own),
        "p50_change_median": statistics.median(each["ttft_p50"] for each in own),
        "worst_class_p99": 1 + max(each["worst_class_p99"] for each in own),
    }


def _stock(bench: Bench, trace: str, has_adapters: bool) -> Point:
    """Return a point of vLLM's own queue that knows its capacity."""
    at_once = Point("vllm", trace, has_adapters, int(bench.size))
    capacities = zip(bench.seeds, bench.values(at_once, "capacity_per_s"), strict=True)
    return replace(at_once, capacity_per_s=tuple(capacities))


def _rows(bench: Bench, orders: Sequence[str]) -> list[dict[str, Any]]:
    """Return the changes by each of these orders in each setting at each load."""
    rows: list[dict[str, Any]] = []
    for trace, has_adapters in itertools.product(TRACES, (False, True)):
        stock = _stock(bench, trace, has_adapters)
        loads = [replace(stock, load=load) for load in LOADS]
        bench.play(replace(point, order=order) for point in loads for order in ("vllm", *orders))
        for point in loads:
            theirs = bench.of(point)
            own = {
                order: changes(list(zip(bench.of(replace(point, order=order)), theirs, strict=True)))
                for order in orders
            }
            setting = trace + ", adapters" * has_adapters
            rows.append({"setting": setting, "load": point.load} | own)
    return rows


def orders_part(bench: Bench) -> None:
    """Compare the orders with vLLM's own queue in each setting at each load."""
    bench.note(("is_recorded",), are_recorded(*RECORDED))
    rows = _rows(bench, (DEFAULT_POLICY,))
    papers = _rows(replace(bench, seeds=bench.seeds[:1]), ("mlq",))
    rows = [own | paper for own, paper in zip(rows, papers, strict=True)]
    bench.note(("at",), rows)
    has_adapters = lambda row: row["setting"].endswith("adapters")  # noqa: E731
    kinds: dict[Place, list[dict[str, Any]]] = {
        (): rows,
        ("without_adapters",): [row for row in rows if not has_adapters(row)],
        ("with_adapters",): [row for row in rows if has_adapters(row)],
    }
    for place, own in kinds.items():
        for name, value in summary([row[DEFAULT_POLICY] for row in own]).items():
            bench.figure((*place, name), [value], AIMS[name], unit="number")
        for name, value in summary([row["mlq"] for row in own]).items():
            bench.figure(("mlq", *place, name.removeprefix("default_")), [value], unit="number")


def steps_part(bench: Bench) -> None:
    """Compare steps as long as the table says with steps of a fixed number of tokens."""
    bench = replace(bench, seeds=bench.seeds[:1])
    rows: dict[str, dict[str, float]] = {}
    for trace in TRACES:
        stock = replace(_stock(bench, trace, False), load=1.1)
        fixed = [replace(stock, step_tokens=num) for num in FIXED_STEPS]
        ours = replace(stock, order=DEFAULT_POLICY)
        own = replace(ours, max_step_s=MAX_STEP_S)
        bench.play((*fixed, ours, own))
        latency_s = {point: bench.values(point, "latency")[0] for point in (*fixed, ours, own)}
        best = min(fixed, key=latency_s.__getitem__)
        peers = {"default": stock, "best": best, "unpaced": ours}
        rows[trace] = {name: latency_s[own] / latency_s[peer] for name, peer in peers.items()}
        bench.note(("steps", "at", trace), rows[trace] | {"best_step_tokens": best.step_tokens})
    for name in ("default", "best", "unpaced"):
        ratios = [row[name] for row in rows.values()]
        aim = 1.0 if name == "best" else None
        bench.figure(("steps", f"latency_vs_{name}"), [statistics.geometric_mean(ratios)], aim, unit="ratio")
        bench.figure(("steps", f"latency_vs_{name}_worst"), [max(ratios)], unit="ratio")


def starved_part(bench: Bench) -> None:
    """Play the scene of a third adapter."""
    bench.figure(("starved_wait_s",), [max(map(starved_wait_s, (DEFAULT_POLICY, "mlq")))], unit="s")


TABLE = Table(
    "emulated-order",
    "Orders of starting against vLLM's own queue",
    serve,
    {"orders": orders_part, "steps": steps_part, "starved": starved_part},
    (NUM_REQUESTS, NUM_REQUESTS),
    "the same",
    seeds=3,
    quick_seeds=3,
)
