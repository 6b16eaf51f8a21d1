"""Do the three agree: the lean model of a node, the emulated node, and the engine on this machine?

    python -m bench.emulated agree [--part lean|live ...] [--requests N] [--rate R ...] [--quick]

lean   the simulators' node (bench/sim/core/lean_node.py) against vLLM's scheduler with our classes, on one trace with the same step costs,
       an A40's with Llama-2-7B: P50 and P99 of TTFT and TPOT, and tokens/s, by each of POLICIES
live   the emulated node with this machine's profile against a live run (bench/emulated/live.py): twelve minutes, --quick six

`lean_vs_emulated`, `emulated_vs_live`: the worst relative error of those figures. The last line is JSON.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.emulated import live
from bench.emulated.node import Engine, Job
from bench.emulated.trace import arrivals, lognormal, play_on_node
from bench.live.report import report
from bench.measures import quantile
from bench.sim.core.batch import Request
from bench.sim.core.calibration import A40
from bench.sim.core.clock import Clock
from bench.sim.core.guesses import Classes
from bench.sim.core.lean_node import Node
from bench.sim.core.models import LLAMA2_7B
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import VLLM, pool_blocks
from bench.sim.core.steps import StepCost
from bench.sim.core.traffic import Lengths, play
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY
from engine_bridge.policy.scheduling.policies import POLICIES as QUEUES

POLICIES = ("fcfs", "mlq", DEFAULT_POLICY)
# Requests a second. Chosen: nearly as many as the device answers of these lengths.
RATES = (2.4,)
ACCURACY = 0.8
LEAN_AIM = 0.03


def figures_of(jobs: Sequence[Job] | Sequence[Request]) -> dict[str, float]:
    ttft_s = [job.ttft_s for job in jobs]
    tpot_s = [job.tpot_s for job in jobs if not math.isnan(job.tpot_s)]
    return {
        "ttft_p50_s": quantile(ttft_s, 0.5),
        "ttft_p99_s": quantile(ttft_s, 0.99),
        "tpot_p50_s": quantile(tpot_s, 0.5),
        "tpot_p99_s": quantile(tpot_s, 0.99),
        "tokens_per_s": sum(job.arrival.num_answer_tokens for job in jobs) / max(job.ended_s for job in jobs),
    }


def lean_play(
    policy: str, requests: Sequence[Arrival], cost: StepCost, num_blocks: int, guesser: Classes
) -> Node:
    """In the lean model."""
    clock = Clock()
    node = Node(clock, cost, VLLM, QUEUES[policy](num_blocks * 16), guesser, num_blocks=num_blocks)
    play(clock, requests, node.submit)
    return node


def compare(policy: str, lengths: Lengths, rate_per_s: float, num: int, seed: int) -> dict[str, Any]:
    cost = StepCost(A40, LLAMA2_7B)
    num_blocks = pool_blocks(cost)
    requests = arrivals(lengths, rate_per_s, num, seed)
    guesser = Classes([answer for _, answer in lengths.pairs], ACCURACY, seed)
    began_s = time.perf_counter()
    emulated = play_on_node(policy, requests, cost, Engine(num_blocks), guesser)
    lean_began_s = time.perf_counter()
    lean = lean_play(policy, requests, cost, num_blocks, guesser)
    theirs, ours = figures_of(emulated.jobs), figures_of(lean.ended)
    return {
        "policy": policy,
        "rate_per_s": rate_per_s,
        "errors": {name: round(ours[name] / value - 1, 4) for name, value in theirs.items()},
        "emulated": {name: round(value, 4) for name, value in theirs.items()},
        "num_preempted": [lean.dispatcher.counts["preempted"], emulated.num_preempted],
        "took_s": [round(time.perf_counter() - lean_began_s, 1), round(lean_began_s - began_s, 1)],
    }


def lean_part(args: argparse.Namespace) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    lengths = lognormal(args.requests, args.seed)
    plays = []
    for rate_per_s in args.rate or RATES:
        for policy in POLICIES:
            plays.append(compare(policy, lengths, rate_per_s, args.requests, args.seed))
            print(f"  {plays[-1]}", file=sys.stderr, flush=True)
    worst = max(abs(error) for found in plays for error in found["errors"].values())
    rows = [
        (
            f"lean, {found['policy']} at {found['rate_per_s']:g}/s: {name}",
            f"off by {error:+.2%}",
            f"aim ≤ {LEAN_AIM:.0%}",
        )
        for found in plays
        for name, error in found["errors"].items()
    ]
    return {"lean_vs_emulated": round(worst, 4), "requests": args.requests, "lean": plays}, rows


def run(args: argparse.Namespace) -> None:
    parts = args.part or ("lean", "live")
    result: dict[str, Any] = {"bench": "emulated-agree"}
    rows: list[tuple[str, str, str]] = []
    if "lean" in parts:
        found, rows = lean_part(args)
        result |= found
    if "live" in parts:
        measured = live.measure_live(args.quick)
        result |= {"emulated_vs_live": max(measured["pooled_errors"].values())} | measured
        rows += live.table_of(measured)
    report("Lean model, emulated node, live engine", rows, result)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("lean", "live"), action="append", help="both by default")
    parser.add_argument("--requests", type=int, default=2000, help="of the trace")
    parser.add_argument("--rate", type=float, action="append", help=f"requests a second; {RATES} by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="live: one play of ten seconds each")
