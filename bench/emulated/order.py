"""Is an order of starting ever worse than vLLM's own queue, and what does it gain?

    python -m bench.emulated order [--quick] [--seeds N] [--seed N] [--jobs N]

Loads are shares of what vLLM's own queue answers of the same requests. Traces: Azure's conversations with their arrivals, Mooncake's conversations
with theirs and prompts a tenth as long, and a synthetic one whose lengths have a heavy tail; each without adapters and with 50 adapters on 16 slots.
Where the recorded ones are missing (`is_recorded`), lengths are drawn between Azure's quantiles. Device: an A40 with Llama-2-7B. Four predictions of
five are right. TTFT counts from arrival to first token, in virtual seconds.

Orders: `vllm`, its own queue; `mlq`; `bounded` with shares of the longest wait (0.8, 0.9 and 1), which gives the frontier.
A class is a third of the requests by size, or those of adapters of one rank; its change is that of its mean TTFT.
Each change is the geometric mean over the seeds, with the least and the most P99 beside it: the P99 of a few hundred requests is that of three or
four of them, and moves by 10% or more with any change of their order. `worst` and `mean` are over traces, adapters and loads, `p50_change_at_1_2` is
the median over traces, with and without adapters. A scene besides, the worse of `mlq` and `bounded`: one request for a third adapter while two that
fill the memory are asked for without a pause (`starved_wait_s`).

The last line is JSON.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.data import AZURE, MOONCAKE, are_recorded, lines_of
from bench.emulated.core.adapters import AdapterMemory
from bench.emulated.core.arrivals import Arrival, Classes
from bench.emulated.core.calibration import A40
from bench.emulated.core.models import LLAMA2_7B
from bench.emulated.core.node import Engine, Job
from bench.emulated.core.plays import play_on_node
from bench.emulated.core.steps import StepCost, pool_blocks
from bench.emulated.core.traffic import Pool, generated
from bench.emulated.table import Bench, Table
from bench.measures import quantile
from engine_bridge.policy.scheduling.bounded import Bounded, BoundedSettings
from engine_bridge.policy.scheduling.policies import MakePolicy

LOADS, NUM_REQUESTS = (0.5, 0.9, 1.2, 1.3), 300
# Shares of the longest wait, for `bounded`: its frontier.
ORDERS = ("mlq", "bounded 0.8", "bounded 0.9", "bounded 1")
DEFAULT = f"bounded {BoundedSettings().peak_share:g}"
# A class with fewer requests has no mean to speak of. Chosen.
LEAST_OF_CLASS = 30
COST = StepCost(A40, LLAMA2_7B)
AIMS = {"p99_vs_vllm_worst": 1.0, "p50_change_at_1_2": -0.4, "worst_class_change": 0.1}
MAX_TOKENS = 4096
ACCURACY = 0.8
# Mooncake's prompts are ten times as long as Azure's.
MOONCAKE_SHARE = 0.1
NUM_ADAPTERS, NUM_SLOTS = 50, 16

Row = tuple[float, int, int]
"""Seconds since the one before, prompt tokens, answer tokens."""


def _azure(path: Path) -> list[Row]:
    rows = list(csv.DictReader(lines_of(path)))
    at = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    gaps = [0.0, *(after - before for before, after in itertools.pairwise(at))]
    return [
        (gap, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for gap, row in zip(gaps, rows, strict=True)
    ]


def _mooncake(path: Path) -> list[Row]:
    rng = random.Random("jitter")
    rows = [json.loads(line) for line in lines_of(path)]
    ordered = sorted(
        (row["timestamp"] / 1e3 + rng.uniform(0, 3), row["input_length"], row["output_length"])
        for row in rows
    )
    gaps = [0.0, *(after[0] - before[0] for before, after in itertools.pairwise(ordered))]
    return [
        (gap, max(int(prompt * MOONCAKE_SHARE), 1), answer)
        for gap, (_, prompt, answer) in zip(gaps, ordered, strict=True)
    ]


def _heavy_tail(path: Path) -> list[Row]:
    """Poisson arrivals; prompts and answers by Pareto's law, each for itself."""
    rng = random.Random("heavy tail 0")
    return [
        (rng.expovariate(1.0), int(100 * rng.paretovariate(1.1)), int(40 * rng.paretovariate(1.2)))
        for _ in range(20_000)
    ]


TRACES: dict[str, tuple[Callable[[Path], list[Row]], Path]] = {
    "azure": (_azure, AZURE),
    "mooncake": (_mooncake, MOONCAKE),
    "heavy tail": (_heavy_tail, Path("/")),
}
"""What reads a trace, and its file."""


@cache
def rows_of(trace: str) -> list[Row]:
    """Return a trace's requests, recorded or drawn, cut to what the model takes."""
    read, path = TRACES[trace]
    if path.exists():
        found = read(path)
    else:
        rng = random.Random(trace)
        found = [(rng.expovariate(1.0), prompt, answer) for prompt, answer in generated(rng).pairs]
    return [
        (gap, min(prompt, MAX_TOKENS * 3 // 4), min(answer, MAX_TOKENS // 4)) for gap, prompt, answer in found
    ]


@dataclass(frozen=True, slots=True)
class Point:
    """One play of successive requests of a trace.

    Attributes:
        load: share of the capacity; 0: all requests come at once.
        capacity_per_s: requests that vLLM's own queue answers a second, by seed.
    """

    order: str
    trace: str
    has_adapters: bool
    num: int
    load: float = 0.0
    capacity_per_s: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def requests(self) -> list[Arrival]:
        """Successive requests of the trace, with its gaps stretched to the load."""
        rows = rows_of(self.trace)
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


def _policy(order: str) -> str | MakePolicy:
    name, _, share = order.partition(" ")
    if not share:
        return name
    return lambda num_tokens: Bounded(num_tokens, BoundedSettings(peak_share=float(share)))


def play(point: Point) -> list[Job]:
    """Play a point."""
    guesser = Classes([row[2] for row in rows_of(point.trace)], ACCURACY, point.seed)
    engine = Engine(pool_blocks(COST), max_tokens=MAX_TOKENS, has_prefix_cache=False)
    ranks = Pool(NUM_ADAPTERS).rank_of if point.has_adapters else ()
    memory = AdapterMemory(NUM_SLOTS)
    policy = _policy(point.order)
    return play_on_node(policy, point.requests, COST, engine, guesser, ranks=ranks, memory=memory).jobs


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
    """Play a point and return TTFT and the classes' mean TTFT, in seconds.

    Of requests that come at once: what is answered a second while there is always enough, from the first fifth of answers to the fourth.
    """
    jobs = play(point)
    if not point.load:
        ended_s = sorted(job.ended_s for job in jobs)
        first, last = len(ended_s) // 5, 4 * len(ended_s) // 5
        return {"capacity_per_s": (last - first) / (ended_s[last] - ended_s[first])}
    ttft_s = [job.ttft_s for job in jobs]
    found = {f"ttft_p{share}": quantile(ttft_s, share / 100) for share in (50, 99)}
    for name, own in _classes(jobs).items():
        found[f"class {name}"] = statistics.fmean(job.ttft_s for job in own)
    return found


def changes(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Return the change of each figure against vLLM's own queue, seed by seed: -0.8 is 80% less. Of classes, the worst that every seed has."""
    names = set.intersection(*(set(stock) for _, stock in pairs))
    ratios = {name: [own[name] / stock[name] for own, stock in pairs] for name in names}
    found = {name: statistics.geometric_mean(values) - 1 for name, values in ratios.items()}
    shown = {name: found[name] for name in ("ttft_p50", "ttft_p99")}
    shown |= {"ttft_p99_least": min(ratios["ttft_p99"]) - 1, "ttft_p99_most": max(ratios["ttft_p99"]) - 1}
    shown["worst_class"] = max(value for name, value in found.items() if name.startswith("class "))
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


def summary(own: Sequence[Mapping[str, float]], at_12: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return an order's figures over all its changes. at_12: those at a load of 1.2."""

    def mean(name: str) -> float:
        """Return the geometric mean of this change over all settings and loads, as a ratio."""
        return statistics.geometric_mean(1 + each[name] for each in own)

    return {
        "p99_vs_vllm_worst": 1 + max(each["ttft_p99"] for each in own),
        "p99_vs_vllm_mean": mean("ttft_p99"),
        "p50_change_at_1_2": statistics.median(each["ttft_p50"] for each in at_12),
        "p50_vs_vllm_mean": mean("ttft_p50"),
        "worst_class_change": max(each["worst_class"] for each in own),
    }


def orders_part(bench: Bench) -> None:
    """Compare the orders with vLLM's own queue in each setting at each load."""
    bench.note(("is_recorded",), are_recorded(AZURE, MOONCAKE))
    rows: list[dict[str, Any]] = []
    for trace, has_adapters in itertools.product(TRACES, (False, True)):
        at_once = Point("vllm", trace, has_adapters, int(bench.size))
        capacities = zip(bench.seeds, bench.values(at_once, itemgetter("capacity_per_s")), strict=True)
        stock = replace(at_once, capacity_per_s=tuple(capacities))
        loads = [replace(stock, load=load) for load in LOADS]
        bench.play(replace(point, order=order) for point in loads for order in ("vllm", *ORDERS))
        for point in loads:
            theirs = bench.of(point)
            own = {
                order: changes(list(zip(bench.of(replace(point, order=order)), theirs, strict=True)))
                for order in ORDERS
            }
            setting = trace + ", adapters" * has_adapters
            rows.append({"setting": setting, "load": point.load} | own)
    bench.note(("at",), rows)
    for order in ORDERS:
        found = summary([row[order] for row in rows], [row[order] for row in rows if row["load"] == 1.2])
        for name, value in found.items():
            place = ("default" if order == DEFAULT else order, name)
            bench.figure(place, [value], AIMS.get(name), unit="number")


def starved_part(bench: Bench) -> None:
    """Play the scene of a third adapter."""
    bench.figure(("starved_wait_s",), [max(map(starved_wait_s, ("mlq", "bounded")))], unit="s")


TABLE = Table(
    "emulated-order",
    "Orders of starting against vLLM's own queue",
    serve,
    {"orders": orders_part, "starved": starved_part},
    (NUM_REQUESTS, NUM_REQUESTS),
    "two seeds",
    seeds=3,
)
