"""Is what serves exactly what we say it is, and what does it cost?

    python -m bench.emulated exact [--requests N] [--repeats N] [--seed N] [--policy NAME ...]

Device: an A40 with Llama-2-7B (bench/sim/core). Loads under, at and over what it can serve, and one in tight memory, where requests are preempted.

order     with `fcfs`, our scheduler class, queue and glue give every request its first token and its end when vLLM's own queue does, to the last
          digit. Every policy played twice gives the same times twice
overhead  wall time of a step in the scheduler (`add_request`, `schedule`, `update_from_output`), ours over vLLM's own, on the same requests, plays
          in turns: with `fcfs` the very same steps; with `mlq` its own. `overhead_vs_vllm_scheduler` is the larger median
deciding  with 10,000 queued all the time: wall time of all of our scheduling, and of `decide` alone, over the steps' (virtual) time

The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.emulated.deciding import measure, rows
from bench.emulated.node import Engine
from bench.emulated.trace import Played, arrivals, lognormal, play_on_node
from bench.live.report import report, spread
from bench.sim.core.calibration import A40
from bench.sim.core.models import LLAMA2_7B
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import pool_blocks
from bench.sim.core.steps import StepCost
from engine_bridge.policy.scheduling.policies import POLICIES

# Requests a second. The device answers some 2.4 of these lengths.
LOADS = {"under": 1.6, "at": 2.4, "over": 4.0, "tight": 2.0}
# Of the memory, for the load in which it is tight. Chosen: some requests are preempted, all are served.
TIGHT_SHARE = 0.3
OVERHEAD_LOADS = ("under", "over")
OVERHEAD_AIM, SHARE_AIM = 1.5, 0.005
NUM_QUEUED = 10_000


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and what they meet."""

    name: str
    requests: list[Arrival]
    cost: StepCost
    engine: Engine

    def play(self, policy: str) -> Played:
        return play_on_node(policy, self.requests, self.cost, self.engine)


def loads(num_each: int, seed: int) -> list[Load]:
    cost = StepCost(A40, LLAMA2_7B)
    engine = Engine(pool_blocks(cost))
    lengths = lognormal(num_each, seed)
    found = []
    for name, per_s in LOADS.items():
        own = replace(engine, num_blocks=int(engine.num_blocks * TIGHT_SHARE)) if name == "tight" else engine
        found.append(Load(name, arrivals(lengths, per_s, num_each, seed), cost, own))
    return found


def order_of(load: Load, policies: Sequence[str]) -> dict[str, Any]:
    """fcfs against vLLM's queue, and every policy against itself."""
    stock = load.play("vllm")
    repeats, differ = [], []
    for policy in policies:
        first, again = load.play(policy), load.play(policy)
        repeats.append(first.times == again.times)
        if policy == "fcfs":
            differ = [a for a, b in zip(first.times, stock.times, strict=True) if a != b]
        print(f"  {load.name}: {policy} {'repeats' if repeats[-1] else 'DIFFERS'}", file=sys.stderr)
    return {
        "load": load.name,
        "fcfs_equals_vllm": not differ,
        "num_different": len(differ),
        "policies_repeat": all(repeats),
        "not_repeating": [name for name, same in zip(policies, repeats, strict=True) if not same],
        "num_preempted": stock.num_preempted,
    }


def overhead_of(chosen: Sequence[Load], repeats: int) -> dict[str, list[float]]:
    """µs of a step by queue, and ours over vLLM's; plays in turns, the first one of each left out: it loads what is lazy."""
    found: dict[str, list[float]] = {"vllm": [], "fcfs": [], "mlq": [], "fcfs_ratio": [], "mlq_ratio": []}
    for repeat in range(repeats + 1):
        for load in chosen:
            own = {policy: load.play(policy).us_per_step for policy in ("vllm", "fcfs", "mlq")}
            if repeat:
                for policy, us in own.items():
                    found[policy].append(us)
                for policy in ("fcfs", "mlq"):
                    found[f"{policy}_ratio"].append(own[policy] / own["vllm"])
    return found


def run(args: argparse.Namespace) -> None:
    began_s = time.perf_counter()
    policies = args.policy or list(POLICIES)
    chosen = loads(-(-args.requests // len(LOADS)), args.seed)
    orders = [order_of(load, policies) for load in chosen]
    print(f"  overhead, {args.repeats} times", file=sys.stderr)
    overhead = overhead_of([load for load in chosen if load.name in OVERHEAD_LOADS], args.repeats)
    queued = []
    for row in rows(policies, NUM_QUEUED):
        queued.append(measure(row, chosen[0].cost, chosen[0].engine, args.seed))
        print(f"  {queued[-1]}", file=sys.stderr)
    worst = max(statistics.median(overhead[f"{policy}_ratio"]) for policy in ("fcfs", "mlq"))
    mlq = next((row for row in queued if row["policy"] == "mlq"), queued[0])
    result = {
        "bench": "emulated-exact",
        "fcfs_equals_vllm": all(order["fcfs_equals_vllm"] for order in orders),
        "requests": sum(len(load.requests) for load in chosen),
        "us_per_step": round(statistics.median(overhead["mlq"]), 1),
        "overhead_vs_vllm_scheduler": round(worst, 3),
        "policies_repeat": all(order["policies_repeat"] for order in orders),
        "decide_share_10000_queued": mlq["decide_share"],
        "scheduling_share_10000_queued": mlq["own_share"],
        "loads": orders,
        "overhead": {name: [round(value, 3) for value in values] for name, values in overhead.items()},
        "deciding": queued,
        "took_s": round(time.perf_counter() - began_s, 1),
    }
    report("What serves, on a virtual device", _table(result, overhead), result)


def _table(result: dict[str, Any], overhead: dict[str, list[float]]) -> list[tuple[str, str, str]]:
    found = [
        (f"fcfs against vLLM's queue, {order['load']}", f"{order['num_different']} differ", "aim 0")
        for order in result["loads"]
    ]
    found += [
        ("policies played twice", "the same" if result["policies_repeat"] else "DIFFER", "the same"),
        *((f"µs a step, {name}", spread(overhead[name]), "") for name in ("vllm", "fcfs", "mlq")),
        *(
            (f"{name} over vLLM's own", spread(overhead[f"{name}_ratio"]), f"aim ≤ {OVERHEAD_AIM}")
            for name in ("fcfs", "mlq")
        ),
    ]
    for row in result["deciding"]:
        what = f"{row['decide_share']:.2%} decide, {row['own_share']:.2%} all of ours"
        found.append(
            (
                row["row"],
                f"{what}; p99 {row['decide_p99_us']:.0f}, {row['own_p99_us']:.0f} µs",
                f"aim ≤ {SHARE_AIM:.1%}",
            )
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2400, help="over all loads")
    parser.add_argument("--repeats", type=int, default=3, help="of the plays that are timed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", choices=tuple(POLICIES), action="append", help="all by default")
