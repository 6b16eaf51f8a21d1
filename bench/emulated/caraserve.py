"""CaraServe's CPU-assist on vLLM's scheduler with our classes: what cold adapters cost beside adapters that all are there.

    python -m bench.emulated caraserve [--part cold|production|lengths ...] [--quick] [--seeds N] [--seed N] [--jobs N]

Who starts, where adapters are and when their copies begin is decided by what serves (`engine_bridge/core`); how long a step takes is an A10's by its
data sheet, calibrated with figures of CaraServe §2.3 that are not compared here (bench/sim/core/calibration.py); Llama2-7B, adapters on q, k and v.
First come, first served; prompts in chunks beside those that decode.

Arms, each by what it adds to the means of `cached`:
  cached         all adapters lie in memory of their own
  on_demand      a step waits for the copies of its adapters, with everybody in it: a GPU without a host's help, and the paper's OnDmd
  gated          a request waits for its own adapter's copy alone, the others go on (as Punica loads)
  cpu_assist     as it serves: the host computes the adapter's part of a step, layer by layer, until one begins with the copy whole; cores by
                 the live engine's rule (driver/assist/shares.py): so many that they are as quick as the device
  cpu_assist_16  as in the paper: a core for 16 tokens (Fig. 17), and the device goes on in the midst of a prompt once the copy is whole
  a10_memory     on_demand, with as many slots for adapters as the A10's own memory has beside the KV of as many requests. The others have slots for
                 all that run, beside the KV, as `cached` has no bound by definition
Adapters leave with their last request, as in the paper.

Parts
  cold           Fig. 10 and 13: each request with an adapter of its own
  production     Fig. 14: adapters of skewed popularity, a power law over places with exponent 1, which the calibration with Fig. 3 agrees with; and
                 512 by the published quantiles of Azure's functions, whose skew is greater
  lengths        one cold request of rank 64 alone: up to which prompt is it answered sooner with the help of a host's twelve cores?

Lengths: Alpaca's, drawn about its published means (bench/sim/core/traffic.py). Time per token is (end - first token) / (tokens - 1). Changes are
fractions of the other arm on the same seed's requests. Of each figure: median over seeds; `spread` has least and most. What falls short of the paper
is printed first; of a baseline's overhead, falling short is being smaller. Beside each arm's overheads: `cold_ttft_s`, of requests whose adapter was
not there. `assist_ttft_change`: CPU-assist against the arms without. The last line is JSON.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.emulated.adapters import AdapterMemory
from bench.emulated.assist import ColdStart, as_quick_as
from bench.emulated.node import Engine, Job
from bench.emulated.trace import play_on_node
from bench.sim.caraserve import MODEL, lengths, usual_answer, usual_prompt
from bench.sim.core.calibration import A10_ON_DEMAND
from bench.sim.core.guesses import Usual
from bench.sim.core.hardware import EPYC_7R32, AssistingHost
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import BLOCK_TOKENS, pool_blocks
from bench.sim.core.steps import KERNELS, StepCost
from bench.sim.core.tables import (
    Figure,
    Part,
    Workers,
    add_table_arguments,
    changes,
    report_parts,
    seeds_of,
)
from bench.sim.core.traffic import Dealer, Fresh, functions, poisson, power_law

SPAN_S, QUICK_SPAN_S = 300.0, 40.0  # Source of the first: CaraServe §7.1. The second: chosen.


# -- arms --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """num_slots: for adapters, 0 where all of them are there. assistant: the host that helps with adapters on their way."""

    num_slots: int
    num_blocks: int
    cold_start: ColdStart = "step waits"
    assistant: AssistingHost | None = None

    @property
    def cost(self) -> StepCost:
        return StepCost(A10_ON_DEMAND, MODEL, KERNELS["bgmv"], self.assistant)

    @property
    def made_by(self) -> str:
        adapters = f"{self.num_slots} slots, {self.cold_start}" if self.num_slots else "all adapters"
        if self.assistant is not None:
            adapters += f", {self.assistant.name}, {self.assistant.tokens_per_core} tokens a core"
        return f"vLLM's scheduler, fcfs, {adapters}, StepCost({A10_ON_DEMAND.name}, {MODEL.name}, bgmv); lengths {lengths().name}"


def arms(rank: int) -> dict[str, Arm]:
    num_blocks = pool_blocks(StepCost(A10_ON_DEMAND, MODEL))
    unbounded = Arm(Engine(num_blocks).max_running, num_blocks)
    slot_blocks = -(-MODEL.lora_bytes(rank) // (BLOCK_TOKENS * MODEL.kv_bytes_per_token))
    request_blocks = -(-round(usual_prompt() + usual_answer()) // BLOCK_TOKENS)
    num_slots = num_blocks // (slot_blocks + request_blocks)
    return {
        "cached": replace(unbounded, num_slots=0),
        "on_demand": unbounded,
        "gated": replace(unbounded, cold_start="request waits"),
        "cpu_assist": replace(
            unbounded,
            cold_start="host helps",
            assistant=as_quick_as(A10_ON_DEMAND, EPYC_7R32, MODEL, rank, usual_prompt()),
        ),
        "cpu_assist_16": replace(unbounded, cold_start="device takes over", assistant=EPYC_7R32),
        "a10_memory": Arm(num_slots, num_blocks - num_slots * slot_blocks),
    }


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests a second for adapters of one rank. num_adapters: 0 for one of its own each. law: of their popularity."""

    per_s: float
    rank: int = 64
    num_adapters: int = 0
    law: str = "power law"

    @property
    def name(self) -> str:
        adapters = f"{self.num_adapters} adapters, {self.law}" if self.num_adapters else "each its own"
        return f"{self.per_s}/s, rank {self.rank}, {adapters}"

    def dealer(self, seed: int) -> Dealer:
        if not self.num_adapters:
            return Fresh()
        if self.law == "power law":
            return power_law(self.num_adapters)
        return functions(self.num_adapters, random.Random(f"functions {seed}"))


@dataclass(frozen=True, slots=True)
class Means:
    """Over the requests of a run, in seconds. cold_ttft_s: of those whose adapter was not there, nan without any. cold_share: how many they are."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    cold_ttft_s: float
    cold_share: float


def serve(traffic: Traffic, arm_name: str, span_s: float, seed: int) -> Means:
    """One run of one node."""
    arrivals = poisson(lengths(), traffic.dealer(seed), traffic.per_s, span_s, seed)
    ranks = (traffic.rank,) * (traffic.num_adapters or len(arrivals))
    return means_of(play(arms(traffic.rank)[arm_name], arrivals, ranks))


def play(arm: Arm, arrivals: Sequence[Arrival], ranks: Sequence[int]) -> list[Job]:
    played = play_on_node(
        "fcfs",
        arrivals,
        arm.cost,
        Engine(arm.num_blocks, has_prefix_cache=False),
        Usual([answer for _, answer in lengths().pairs]),
        ranks=ranks,
        memory=AdapterMemory(arm.num_slots, policy=None, cold_start=arm.cold_start),
    )
    return played.jobs


def means_of(jobs: Sequence[Job]) -> Means:
    cold = [job.ttft_s for job in jobs if job.found_adapter == "host"]
    return Means(
        ttft_s=statistics.fmean(job.ttft_s for job in jobs),
        tpot_s=statistics.fmean(job.tpot_s for job in jobs if not math.isnan(job.tpot_s)),
        e2e_s=statistics.fmean(job.e2e_s for job in jobs),
        cold_ttft_s=statistics.fmean(cold) if cold else math.nan,
        cold_share=len(cold) / len(jobs),
    )


# -- figures -----------------------------------------------------------------------------------------------------------

METRICS = {"ttft": "TTFT", "tpot": "time per token", "e2e": "latency"}
Overheads = tuple[float | None, float | None, float | None]
NONE: Overheads = (None, None, None)
# The paper's Fig. 10 and 13, of on_demand and cpu_assist: TTFT, time per token, latency.
COLD: dict[Traffic, tuple[Overheads, Overheads]] = {
    Traffic(9.0, 64): ((4.12, 0.71, 0.50), (0.22, 0.11, 0.09)),
    Traffic(9.0, 32): ((0.88, 0.28, 0.25), (0.36, 0.05, 0.06)),
    Traffic(6.0, 64): ((0.42, 0.25, 0.24), (0.01, 0.10, 0.09)),
}
# Fig. 14. The rank is §2.3's; this section does not name one.
PRODUCTION: dict[Traffic, tuple[Overheads, Overheads]] = {
    Traffic(1.5, 64, 128): ((0.31, 0.08, 0.06), (0.09, 0.03, 0.02)),
    Traffic(7.7, 64, 512): ((0.39, 0.34, 0.31), (0.07, 0.07, 0.08)),
    Traffic(7.7, 64, 512, "Azure's functions"): (NONE, NONE),
}
ARMS = ("on_demand", "gated", "cpu_assist", "cpu_assist_16")
RANK, PROMPT_TOKENS = 64, (16, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts share."""

    workers: Workers
    seeds: tuple[int, ...]
    span_s: float = SPAN_S

    def means(self, keys: Sequence[tuple[Traffic, str]]) -> dict[tuple[Traffic, str], list[Means]]:
        runs = [(traffic, arm, self.span_s, seed) for traffic, arm in keys for seed in self.seeds]
        found = iter(self.workers.map(serve, *zip(*runs, strict=True)))
        return {key: [next(found) for _ in self.seeds] for key in keys}


def overheads(
    bench: Bench, papers: dict[Traffic, tuple[Overheads, Overheads]], more: Sequence[tuple[Traffic, str]] = ()
) -> Part:
    """What each arm adds to `cached`, by traffic and arm. The paper's CPU-assist stands beside both of ours."""
    means = bench.means([*((traffic, arm) for traffic in papers for arm in ("cached", *ARMS)), *more])
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for (traffic, arm), found in means.items():
        cached = means[traffic, "cached"]
        own = result.setdefault(traffic.name, {"cached_ttft_s": [round(mean.ttft_s, 4) for mean in cached]})
        if arm == "cached":
            continue
        on_demand, assist = papers[traffic]
        paper = {"on_demand": on_demand, "cpu_assist": assist, "cpu_assist_16": assist}.get(arm, NONE)
        added = _added(traffic, arm, found, cached, paper)
        figures += added.values()
        own[arm] = {f"{metric}_change": round(figure.median, 4) for metric, figure in added.items()} | {
            "cold_ttft_s": round(statistics.median(mean.cold_ttft_s for mean in found), 4),
            "cold_share": round(statistics.fmean(mean.cold_share for mean in found), 3),
        }
    for traffic in papers:
        result[traffic.name]["assist_ttft_change"] = {
            other: _assists(means[traffic, "cpu_assist"], means[traffic, other])
            for other in ("on_demand", "gated")
        }
    return figures, result


def _added(
    traffic: Traffic, arm: str, means: Sequence[Means], cached: Sequence[Means], paper: Overheads
) -> dict[str, Figure]:
    """By metric."""
    made_by = arms(traffic.rank)[arm].made_by
    return {
        metric: Figure(
            f"{what}, {arm}, {traffic.name}",
            changes(means, cached, f"{metric}_s"),
            number,
            arm.startswith("cpu_assist"),
            made_by,
        )
        for (metric, what), number in zip(METRICS.items(), paper, strict=True)
    }


def _assists(ours: Sequence[Means], others: Sequence[Means]) -> dict[str, float]:
    """Of CPU-assist against an arm without: TTFT of all requests, and of cold ones."""
    return {
        "all": round(statistics.median(changes(ours, others, "ttft_s")), 4),
        "cold": round(statistics.median(changes(ours, others, "cold_ttft_s")), 4),
    }


def lengths_part(bench: Bench) -> Part:
    """One cold request alone: TTFT against waiting for the copy."""
    waiting = _alone_s(arms(RANK)["on_demand"])
    helped = {name: _alone_s(arms(RANK)[name]) for name in ("cpu_assist", "cpu_assist_16")}
    figures = [
        Figure(
            f"TTFT alone, {name} against on_demand, rank {RANK}, {num} tokens",
            (own_s / waiting[num] - 1,),
            None,
            True,
            arms(RANK)[name].made_by,
        )
        for name, own in helped.items()
        for num, own_s in own.items()
    ]
    wins = {name: max(num for num in own if own[num] < waiting[num]) for name, own in helped.items()}
    return figures, {"ttft_s": {"on_demand": waiting} | helped, "assist_wins_until_tokens": wins}


def _alone_s(arm: Arm) -> dict[int, float]:
    """TTFT by prompt tokens."""
    asked = {num: [Arrival("alone", 0.0, num, 1, adapter_id=0)] for num in PROMPT_TOKENS}
    return {num: round(play(arm, arrivals, (RANK,))[0].ttft_s, 4) for num, arrivals in asked.items()}


PARTS: dict[str, Callable[[Bench], Part]] = {
    "cold": lambda bench: overheads(bench, COLD, [(next(iter(COLD)), "a10_memory")]),
    "production": lambda bench: overheads(bench, PRODUCTION),
    "lengths": lengths_part,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_table_arguments(parser, PARTS, f"{QUICK_SPAN_S:.0f} s of requests")
    parser.set_defaults(seeds=3)


def run(args: argparse.Namespace) -> None:
    with Workers(args.jobs) as workers:
        bench = Bench(workers, seeds_of(args), QUICK_SPAN_S if args.quick else SPAN_S)
        show(args.part or tuple(PARTS), bench)


def show(names: Sequence[str], bench: Bench) -> None:
    parts = ((name, PARTS[name](bench)) for name in names)
    report_parts("CaraServe on vLLM's scheduler", "emulated-caraserve", bench.seeds, parts, _top)


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    """The figures that the paper is known for: at 9 requests/s and rank 64, and with 512 adapters."""
    tops = {
        "cold": ("ttft_overhead", Traffic(9.0)),
        "production": ("production_ttft_overhead", Traffic(7.7, 64, 512)),
    }
    return {
        key: {arm: parts[part][traffic.name][arm]["ttft_change"] for arm in ("on_demand", "cpu_assist")}
        for part, (key, traffic) in tops.items()
        if part in parts
    }
