"""Is an order of starting ever worse than vLLM's own queue, and what does it gain?

    python -m bench.emulated order [--quick] [--share X ...] [--load SHARE ...] [--seed N] [--seeds N] [--requests N] [--jobs N] [--data FOLDER]

Loads are shares of what vLLM's own queue answers of the same requests. Traces: Azure's conversations with their arrivals, Mooncake's conversations
with theirs and prompts a tenth as long, and a synthetic one whose lengths have a heavy tail; each without adapters and with 50 adapters on 16 slots.
Where the recorded ones are missing (`is_recorded`), lengths are drawn between Azure's quantiles. Device: an A40 with Llama-2-7B. Four predictions of
five are right. TTFT counts from arrival to first token, latency to the last one, in virtual seconds.

Orders: `vllm`, its own queue; `mlq`; `bounded` with each `--share` of the longest wait (0.8, 0.9 and 1 unless told), which gives the frontier.
A class is a third of the requests by size, or those of adapters of one rank; its change is that of its mean TTFT, its P99's stands beside it.
Each change is the geometric mean over the seeds, with the least and the most P99 beside it: the P99 of a few hundred requests is that of three or
four of them, and moves by 10% or more with any change of their order. `worst` and `mean` are over traces, adapters and loads, `p50_change_at_1_2` is
the median over traces, with and without adapters. Two scenes besides, the worse of `mlq` and `bounded`: one request for a third adapter while two
that fill the memory are asked for without a pause (`starved_wait_s`), and 50 requests with one prefix of 1,536 tokens (`shared_prefix_running`).

The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from bench.data import AZURE, FOLDER, MOONCAKE, are_recorded, lines_of
from bench.emulated.adapters import AdapterMemory
from bench.emulated.node import EmulatedNode, Engine, Job
from bench.emulated.trace import play_on_node
from bench.live.report import Progress, report
from bench.measures import quantile
from bench.sim.core.calibration import A40
from bench.sim.core.clock import Clock
from bench.sim.core.guesses import Classes
from bench.sim.core.models import LLAMA2_7B
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import pool_blocks
from bench.sim.core.steps import StepCost
from bench.sim.core.tables import Workers
from bench.sim.core.traffic import Pool, generated
from bench.sim.core.traffic import play as replay
from engine_bridge.policy.scheduling.bounded import Bounded, BoundedSettings
from engine_bridge.policy.scheduling.policies import MakePolicy

LOADS = (0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 1.3)
QUICK_LOADS = (0.5, 0.9, 1.2, 1.3)
REQUESTS, QUICK_REQUESTS = 600, 300
SEEDS, QUICK_SEEDS = 5, 3
# Of the longest wait, for `bounded`: its frontier.
SHARES = (0.8, 0.9, 1.0)
# A class with fewer requests has no mean to speak of. Chosen.
LEAST_OF_CLASS = 30
COST = StepCost(A40, LLAMA2_7B)
AIMS = {
    "p99_vs_vllm_worst": "aim ≤ 1.0",
    "p50_change_at_1_2": "aim ≤ -0.4",
    "worst_class_change": "aim ≤ 0.1",
}
TRACES = ("azure", "mooncake", "heavy tail")
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


def _heavy_tail(seed: int, num: int = 20_000) -> list[Row]:
    """Poisson arrivals; prompts and answers by Pareto's law, each for itself."""
    rng = random.Random(f"heavy tail {seed}")
    return [
        (rng.expovariate(1.0), int(100 * rng.paretovariate(1.1)), int(40 * rng.paretovariate(1.2)))
        for _ in range(num)
    ]


def files(folder: Path) -> dict[str, Path]:
    """Where the recorded traces would be."""
    return {
        "azure": folder / AZURE.relative_to(FOLDER),
        "mooncake": folder / MOONCAKE.relative_to(FOLDER),
    }


@cache
def rows_of(trace: str, folder: Path) -> list[Row]:
    path = files(folder).get(trace)
    if path is not None and path.exists():
        found = (_azure if trace == "azure" else _mooncake)(path)
    elif trace == "heavy tail":
        found = _heavy_tail(0)
    else:
        rng = random.Random(trace)
        found = [(rng.expovariate(1.0), prompt, answer) for prompt, answer in generated(rng).pairs]
    return [
        (gap, min(prompt, MAX_TOKENS * 3 // 4), min(answer, MAX_TOKENS // 4)) for gap, prompt, answer in found
    ]


@dataclass(frozen=True, slots=True)
class Setting:
    """Requests as they come in one play. load: a share of `capacity_per_s`; 0: all at once."""

    trace: str
    has_adapters: bool
    seed: int
    num: int
    folder: Path
    load: float = 0.0
    capacity_per_s: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.trace}{', adapters' if self.has_adapters else ''}"

    @property
    def requests(self) -> list[Arrival]:
        """Successive ones of the trace, with its gaps stretched to the load."""
        rows = rows_of(self.trace, self.folder)
        start = random.Random(f"start {self.trace} {self.seed}").randrange(len(rows) - self.num)
        rows = rows[start : start + self.num]
        span_s = sum(row[0] for row in rows[1:])
        stretch = self.num / (self.capacity_per_s * self.load * span_s) if self.load else 0.0
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


def play(order: str, setting: Setting) -> list[Job]:
    guesser = Classes([row[2] for row in rows_of(setting.trace, setting.folder)], ACCURACY, setting.seed)
    engine = Engine(pool_blocks(COST), max_tokens=MAX_TOKENS, has_prefix_cache=False)
    ranks = Pool(NUM_ADAPTERS).rank_of if setting.has_adapters else ()
    memory = AdapterMemory(NUM_SLOTS)
    return play_on_node(
        _policy(order), setting.requests, COST, engine, guesser, ranks=ranks, memory=memory
    ).jobs


def capacity_per_s(setting: Setting) -> float:
    """That vLLM's own queue answers while it always has enough of them: from the fifth of them on to four fifths."""
    ended_s = sorted(job.ended_s for job in play("vllm", setting))
    first, last = len(ended_s) // 5, 4 * len(ended_s) // 5
    return (last - first) / (ended_s[last] - ended_s[first])


# -- what an order comes to --------------------------------------------------------------------------------------------


def _classes(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Jobs by class; the same requests are in it whatever the order."""
    ordered = sorted(
        jobs,
        key=lambda job: (
            job.arrival.num_prompt_tokens + job.arrival.num_answer_tokens,
            job.arrival.request_id,
        ),
    )
    third = len(ordered) // 3
    found = {"short": ordered[:third], "middle": ordered[third : 2 * third], "long": ordered[2 * third :]}
    for job in jobs:
        if job.rank:
            found.setdefault(f"rank {job.rank}", []).append(job)
    return {name: own for name, own in found.items() if len(own) >= LEAST_OF_CLASS}


def figures(jobs: Sequence[Job]) -> dict[str, float]:
    """In seconds."""
    found = {}
    for name, values in (("ttft", [job.ttft_s for job in jobs]), ("latency", [job.e2e_s for job in jobs])):
        for share in (50, 99):
            found[f"{name}_p{share}"] = quantile(values, share / 100)
    for name, own in _classes(jobs).items():
        ttft_s = [job.ttft_s for job in own]
        found[f"class {name}"] = sum(ttft_s) / len(own)
        found[f"class_p99 {name}"] = quantile(ttft_s, 0.99)
    return found


def changes(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Of figures against those of vLLM's own queue, seed by seed: -0.8 is 80% less. Classes: the worst of those that each seed has."""
    names = set.intersection(*(set(stock) for _, stock in pairs))
    ratios = {name: [own[name] / stock[name] for own, stock in pairs] for name in names}
    found = {name: statistics.geometric_mean(values) - 1 for name, values in ratios.items()}
    shown = {name: found[name] for name in ("ttft_p50", "ttft_p99", "latency_p50", "latency_p99")}
    shown |= {"ttft_p99_least": min(ratios["ttft_p99"]) - 1, "ttft_p99_most": max(ratios["ttft_p99"]) - 1}
    for kind in ("class", "class_p99"):
        shown[f"worst_{kind}"] = max(value for name, value in found.items() if name.startswith(f"{kind} "))
    return {name: round(value, 4) for name, value in shown.items()}


def one(order: str, setting: Setting) -> dict[str, float]:
    """For a process of its own."""
    return figures(play(order, setting))


def starved_wait_s(policy: str) -> float:
    """TTFT of the one request for a third adapter, beside two that never pause, in memory for two. An answer takes 1.3 s alone."""
    asked = [Arrival(f"{at:04d}", 0.25 * at, 200, 40, at % 2) for at in range(120)]
    asked.append(Arrival("late", 10.1, 200, 40, 2))
    asked.sort(key=lambda arrival: arrival.at_s)
    jobs = play_on_node(
        policy, asked, COST, Engine(3000, has_prefix_cache=False), ranks=(16, 16, 16), memory=AdapterMemory(2)
    ).jobs
    return round(next(job.ttft_s for job in jobs if job.arrival.request_id == "late"), 3)


def shared_prefix_running(policy: str) -> int:
    """Of 50 requests with one prefix of 1,536 tokens, in memory for 30 that share nothing: the most that run at once."""
    clock, most = Clock(), 0
    node = EmulatedNode(clock, COST, Engine(3000), policy)

    def look() -> None:
        nonlocal most
        most = max(most, len(node.scheduler.running))

    node.on_step = look
    replay(clock, [Arrival(f"{at:02d}", 0.0, 1552, 16, session="the same") for at in range(50)], node.submit)
    node.close()
    return most


# -- the command -------------------------------------------------------------------------------------------------------


def summary(order: str, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over all settings and loads."""
    own = [row[order] for row in rows]
    at_12 = [row[order]["ttft_p50"] for row in rows if row["load"] == 1.2]
    return {
        "p99_vs_vllm_worst": round(1 + max(each["ttft_p99"] for each in own), 4),
        "p99_vs_vllm_mean": round(statistics.geometric_mean(1 + each["ttft_p99"] for each in own), 4),
        "latency_p99_vs_vllm_worst": round(1 + max(each["latency_p99"] for each in own), 4),
        "p50_change_at_1_2": round(statistics.median(at_12), 4) if at_12 else math.nan,
        "p50_vs_vllm_mean": round(statistics.geometric_mean(1 + each["ttft_p50"] for each in own), 4),
        "worst_class_change": max(each["worst_class"] for each in own),
        "worst_class_p99_change": max(each["worst_class_p99"] for each in own),
    }


def _rows(
    args: argparse.Namespace, orders: Sequence[str], workers: Workers, began: Progress
) -> list[dict[str, Any]]:
    """Of each trace, with and without adapters, and each load."""
    loads = args.load or (QUICK_LOADS if args.quick else LOADS)
    num = args.requests or (QUICK_REQUESTS if args.quick else REQUESTS)
    seeds = range(args.seed, args.seed + (args.seeds or (QUICK_SEEDS if args.quick else SEEDS)))
    rows = []
    for trace, has in itertools.product(TRACES, (False, True)):
        bare = [Setting(trace, has, seed, num, args.data) for seed in seeds]
        capacities = workers.map(capacity_per_s, bare)
        began.say(f"{bare[0].name}: capacity, requests/s: {[round(value, 2) for value in capacities]}")
        for load in loads:
            at = [
                replace(setting, load=load, capacity_per_s=per_s)
                for setting, per_s in zip(bare, capacities, strict=True)
            ]
            points = list(itertools.product(("vllm", *orders), at))
            found = dict(zip(points, workers.map(one, *zip(*points, strict=True)), strict=True))
            stock = [found["vllm", each] for each in at]
            seconds = {
                name: round(statistics.median(each[name] for each in stock), 4)
                for name in ("ttft_p50", "ttft_p99")
            }
            own = {
                order: changes([(found[order, each], found["vllm", each]) for each in at]) for order in orders
            }
            rows.append({"setting": bare[0].name, "load": load, "vllm_s": seconds} | own)
            for order in orders:
                told = ", ".join(f"{name} {value:+.1%}" for name, value in own[order].items())
                began.say(f"{bare[0].name} at {load:g}, {order}: {told}")
    return rows


def run(args: argparse.Namespace) -> None:
    began, is_recorded = Progress(), are_recorded(*files(args.data).values())
    orders = ["mlq", *(f"bounded {share:g}" for share in args.share or SHARES)]
    with Workers(args.jobs) as workers:
        rows = _rows(args, orders, workers, began)
        again = Setting(TRACES[0], True, args.seed, QUICK_REQUESTS, args.data)
        first, second = workers.map(one, ["mlq"] * 2, [again] * 2)
    summaries = {order: summary(order, rows) for order in orders}
    mlq = summaries["mlq"]
    result = {
        "bench": "emulated-order",
        "seed": args.seed,
        "is_recorded": is_recorded,
        "mlq_p99_vs_vllm_worst": mlq["p99_vs_vllm_worst"],
        "mlq_p50_change_at_1.2": mlq["p50_change_at_1_2"],
        "worst_class_change": mlq["worst_class_change"],
        "starved_wait_s": max(map(starved_wait_s, ("mlq", "bounded"))),
        "shared_prefix_running": min(map(shared_prefix_running, ("mlq", "bounded"))),
        "mlq_repeats": first == second,
        "default": summaries.get(f"bounded {BoundedSettings().peak_share:g}"),
        "orders": summaries,
        "at": rows,
        "took_s": round(began.elapsed_s, 1),
    }
    table = [
        (f"{order}, {name}", f"{value:.3g}", AIMS.get(name, ""))
        for order in orders
        for name, value in summaries[order].items()
    ]
    report("Orders of starting against vLLM's own queue", table, result)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"loads {QUICK_LOADS}, {QUICK_REQUESTS} requests, {QUICK_SEEDS} seeds",
    )
    parser.add_argument("--share", type=float, action="append", help="of the longest wait, for `bounded`")
    parser.add_argument("--load", type=float, action="append", help="share of the capacity")
    parser.add_argument("--requests", type=int, help="in each play")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument(
        "--seeds", type=int, help=f"plays of each setting; {SEEDS}, with --quick {QUICK_SEEDS}"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--data", type=Path, default=FOLDER, help="where the recorded traces are")
