"""Chameleon's Fig. 10 on vLLM's scheduler with our classes: P99 and P50 of TTFT over loads, of queues and caches for adapters.

    python -m bench.emulated chameleon [--quick] [--seeds N] [--slots N] [--length-share S]

Arms, requests and step costs are those of `python -m bench.sim chameleon --part main`: base, cache, sched and full; an A40 with Llama-7B; Azure's
lengths cut to 2,048 tokens and multiplied by one number (found there, so that its `base` leaves its SLO at the paper's 8.7 requests/s); 100 adapters.
The engine is ours: prompts in chunks beside those that decode, and adapters in slots as large as the largest, which KV never gets. So `cache` is
which unused adapter leaves its slot first, and without it one leaves with its last request; that the cache grows into idle KV blocks is not here yet.

The last line is JSON: changes are fractions of `base` on the same seed's requests, the median over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from typing import Any

from bench.emulated.adapters import AdapterMemory
from bench.emulated.node import Engine
from bench.emulated.trace import Played, play_on_node
from bench.live.report import report
from bench.measures import quantile
from bench.sim.chameleon import MAIN, PAPER_P50, PAPER_P99, Arm, Setting
from bench.sim.core.guesses import Classes
from bench.sim.core.shapes import BLOCK_TOKENS, pool_blocks
from bench.sim.core.steps import StepCost
from bench.sim.core.traffic import poisson

LOADS = (6.0, 8.0, 9.0)
# As bench.sim.chameleon finds it for its engine.
LENGTH_SHARE = 0.222
# Adapters that steps may compute with. Chosen: as many as are in use at the paper's highest load.
NUM_SLOTS = 32
SPAN_S, WARM_UP_S = 600.0, 60.0
QUICK_SPAN_S = 200.0


def engine_of(setting: Setting, num_slots: int) -> Engine:
    """What the slots leave of the memory."""
    model = setting.model
    slot_blocks = model.lora_bytes(max(setting.pool.ranks)) / (BLOCK_TOKENS * model.kv_bytes_per_token)
    num_blocks = pool_blocks(StepCost(setting.gpu, model)) - round(num_slots * slot_blocks)
    return Engine(num_blocks, max_tokens=model.max_tokens, has_prefix_cache=False)


def play_arm(arm: Arm, setting: Setting, per_s: float, num_slots: int, seed: int) -> Played:
    requests = poisson(setting.lengths, setting.pool, per_s, setting.span_s, seed)
    return play_on_node(
        arm.queue,
        requests,
        StepCost(setting.gpu, setting.model),
        engine_of(setting, num_slots),
        Classes([answer for _, answer in setting.lengths.pairs], arm.accuracy or 1.0, seed),
        ranks=setting.pool.rank_of,
        memory=AdapterMemory(num_slots, arm.eviction or None, in_kv=bool(arm.eviction)),
    )


def figures_of(played: Played, setting: Setting) -> dict[str, float]:
    """Of those that came after the warm-up."""
    jobs = [job for job in played.jobs if job.arrival.at_s >= setting.warm_up_s]
    ttft_s = [job.ttft_s for job in jobs]
    return {
        "ttft_p50_s": quantile(ttft_s, 0.5),
        "ttft_p99_s": quantile(ttft_s, 0.99),
        "hit_share": statistics.fmean(job.found_adapter == "slot" for job in jobs),
    }


def run(args: argparse.Namespace) -> None:
    span_s = QUICK_SPAN_S if args.quick else SPAN_S
    setting = replace(Setting(), length_share=args.length_share, span_s=span_s, warm_up_s=WARM_UP_S)
    seeds = range(1, 1 + (1 if args.quick else args.seeds))
    curve: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in MAIN}
    for load in LOADS:
        for name, arm in MAIN.items():
            found = [figures_of(play_arm(arm, setting, load, args.slots, seed), setting) for seed in seeds]
            curve[name][f"{load:g}"] = found
            print(f"  {name} at {load:g}: {found}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {"bench": "emulated-chameleon", "seeds": list(seeds), "num_slots": args.slots}
    rows = []
    for key, paper in (("ttft_p99", PAPER_P99), ("ttft_p50", PAPER_P50)):
        by_arm = {name: _changes(curve[name], curve["base"], f"{key}_s") for name in MAIN if name != "base"}
        result[f"{key}_change"] = by_arm["full"]
        result[f"{key}_change_by_arm"] = by_arm
        rows += [
            (
                f"{key[-3:].upper()} TTFT at {load}, {name}",
                f"{change:+.1%}",
                f"paper, full {paper[int(load)]:+.1%}",
            )
            for name, changes in by_arm.items()
            for load, change in changes.items()
        ]
    report("Chameleon on vLLM's scheduler", rows, result | {"curve": curve, "span_s": span_s})


def _changes(
    ours: dict[str, list[dict[str, float]]], base: dict[str, list[dict[str, float]]], key: str
) -> dict[str, float]:
    return {
        load: round(statistics.median(a[key] / b[key] - 1 for a, b in zip(found, base[load], strict=True)), 4)
        for load, found in ours.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="one seed, 200 virtual seconds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=NUM_SLOTS, help="adapters that steps may compute with")
    parser.add_argument("--length-share", type=float, default=LENGTH_SHARE)
