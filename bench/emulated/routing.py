"""CaraServe's router in virtual time (Fig. 19 and 9): 60 nodes, 40,000 adapters, by the live engine's policy objects.

    python -m bench.emulated routing [--quick] [--seeds N] [--seed N] [--jobs N]

What runs: `engine_bridge.policy.nodes.routing` (which node serves a request, performance models and their fits) over nodes of
`bench/emulated/small_node.py` that have all adapters. What one node does with adapters that it lacks is measured by
`python -m bench.emulated caraserve`.

Hardware: A10 by its data sheet, calibrated with figures of CaraServe §2.3 that are not compared here (bench/emulated/core/calibration.py); Llama2-7B,
adapters on q, k and v. Adapters are asked for as Azure's functions are, 340 requests/s. Ranks 8, 16, 32 and 64, as many of each: S-LoRA's, the paper
does not give its own. SLO: 1.5 times the time per token of one request alone without an adapter, which is what a merged model (HF-PEFT) takes.
Performance models are fitted to 400 random batches of up to 32. Prompts have steps of their own, as in the engines of the paper's time, and hold up
those that decode.

`free adapters` is a bound: adapters cost no step anything, and requests go where they add the fewest seconds.

Lengths: Alpaca's, drawn about its published means (bench/emulated/core/traffic.py): the data is not beside the project. Routers reckon with the mean
length of an answer. Time per token is (end - first token) / (tokens - 1); of answers of one token there is none. The last line is JSON: changes are
fractions of the other arm on the same seed's requests, -0.3 is 30% less. Of each figure: median over seeds; `spread` has least and most, `seeds` all.
What falls short of the paper is printed first.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from bench.emulated.core.calibration import A10_ON_DEMAND, LLAMA2_7B_QKV
from bench.emulated.core.clock import Clock
from bench.emulated.core.steps import KERNELS, VLLM, Chunk, StepCost
from bench.emulated.core.traffic import Lengths, alpaca, functions, play, poisson, weighted
from bench.emulated.small_node import SmallCluster, SmallNode
from bench.emulated.table import Bench, Table
from engine_bridge.policy.nodes.routing import POLICIES, Settings
from engine_bridge.protocol.node_facts import KernelName, PerfModel, Ranks

SPAN_S, WARM_UP_S, QUICK_SPAN_S = 60.0, 10.0, 15.0
SLO_TIMES = 1.5
RANKS = (8, 16, 32, 64)
KERNEL_NAMES: tuple[KernelName, ...] = ("bgmv", "mbgmv")
MODEL = LLAMA2_7B_QKV
FREE_ADAPTERS = "free adapters"
WHOLE_PROMPTS = replace(VLLM, is_mixed=False)


@cache
def lengths() -> Lengths:
    """Return Alpaca's lengths."""
    return alpaca()


@cache
def usual_prompt() -> int:
    """Return the mean prompt, in tokens."""
    return round(statistics.fmean(prompt for prompt, _ in lengths().pairs))


@cache
def usual_answer() -> float:
    """Return the mean answer, in tokens."""
    return statistics.fmean(answer for _, answer in lengths().pairs)


# -- many nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster and its traffic; every node has every adapter, and they are asked for as Azure's functions are."""

    kernel: KernelName = "bgmv"
    num_nodes: int = 60
    num_adapters: int = 40_000
    per_s: float = 340.0
    span_s: float = SPAN_S
    warm_up_s: float = WARM_UP_S


def cost_of(kernel: KernelName) -> StepCost:
    """Return the cost of steps with this kernel."""
    return StepCost(A10_ON_DEMAND, MODEL, KERNELS[kernel])


@dataclass(frozen=True, slots=True)
class Point:
    """One run. policy: a name in routing.POLICIES, or FREE_ADAPTERS."""

    policy: str
    site: Site
    seed: int = 0


class Measured(NamedTuple):
    """A step that was timed."""

    ranks: Ranks
    num_tokens: int
    seconds: float


def fit(kernel: KernelName, steps: Sequence[Measured], *, with_tokens: bool = False) -> PerfModel:
    """Return the model with the least squared error over these steps, by ranks alone, as in the paper, or by ranks and tokens of KV."""
    import numpy as np

    probe = PerfModel(kernel, 1.0, 0.0)
    table = np.array(
        [[1.0, probe.seconds(step.ranks)] + [float(step.num_tokens)] * with_tokens for step in steps]
    )
    scales = np.abs(table).max(axis=0)  # so that rounding does not decide
    found = np.linalg.lstsq(table / scales, np.array([step.seconds for step in steps]))[0] / scales
    weights = [float(weight) for weight in found]
    return PerfModel(kernel, weights[1], weights[0], weights[2] if with_tokens else 0.0)


@cache
def profiled(kernel: KernelName, num: int = 400) -> tuple[PerfModel, PerfModel, PerfModel]:
    """Return models of decoding and of prompts by ranks alone, as the paper has them, and of decoding by ranks and tokens, of random batches."""
    cost, rng = cost_of(kernel), random.Random("profile")
    decodes, prefills = [], []
    for _ in range(num):
        ranks = rng.choices(RANKS, k=rng.randrange(1, 33))
        context = sum(prompt + answer // 2 for prompt, answer in rng.choices(lengths().pairs, k=len(ranks)))
        seconds = cost.step_s((), len(ranks), context, cost.kernel(Counter(ranks)))
        decodes.append(Measured(Ranks(len(ranks), sum(ranks), max(ranks)), context, seconds))
        prompts = [Chunk(usual_prompt(), 0, rank, True) for rank in ranks[:8]]
        facts = Ranks(len(prompts), sum(ranks[:8]), max(ranks[:8]))
        prefills.append(Measured(facts, 0, cost.step_s(prompts)))
    return fit(kernel, decodes), fit(kernel, prefills), fit(kernel, decodes, with_tokens=True)


def settings_of(policy: str, site: Site) -> Settings:
    """Return a router's settings. RankAware has the paper's models; Overture counts tokens, too, and knows that prompts have separate steps."""
    cost, prompt = cost_of(site.kernel), usual_prompt()
    decode, prefill, decode_with_tokens = profiled(site.kernel)
    return Settings(
        decode=decode_with_tokens if policy == "overture" else decode,
        prefill=prefill,
        slo_s=SLO_TIMES * cost.step_s((), 1, prompt + round(usual_answer() / 2)),
        answer_tokens=usual_answer(),
        prompt_token_s=(cost.prefill_s(512) - cost.prefill_s(prompt)) / (512 - prompt),
        prefill_step_s=cost.prefill_s(prompt),
    )


def serve(point: Point) -> dict[str, float]:
    """Play one point; return the mean time per token after the warm-up, and the share within the SLO.

    Raises:
        RuntimeError: if a request is never served.
    """
    site, clock = point.site, Clock()
    rng = random.Random(f"adapters of the cluster {point.seed}")
    ranks = tuple(rng.choices(RANKS, k=site.num_adapters))
    deal = weighted(functions(site.num_adapters, rng))
    arrivals = poisson(lengths(), deal, site.per_s, site.span_s, point.seed)
    if point.policy == FREE_ADAPTERS:
        ranks = len(ranks) * (0,)
    cost = cost_of(site.kernel)
    nodes = [SmallNode(clock, cost, WHOLE_PROMPTS, ranks) for _ in range(site.num_nodes)]
    name = "overture" if point.policy == FREE_ADAPTERS else point.policy
    router = POLICIES[name](settings_of(name, site))
    cluster = SmallCluster(nodes, router, ranks, round(usual_answer()))
    play(clock, arrivals, cluster.submit)
    ended = [request for node in nodes for request in node.ended]
    if len(ended) != len(arrivals):
        raise RuntimeError(f"{len(arrivals) - len(ended)} requests were never served")
    requests = [each for each in ended if site.warm_up_s <= each.arrival.at_s < site.span_s]
    tpots = [request.tpot_s for request in requests if not math.isnan(request.tpot_s)]
    slo_s = settings_of(point.policy, site).slo_s
    attainment = statistics.fmean(seconds <= slo_s for seconds in tpots)
    return {"tpot_s": statistics.fmean(tpots), "attainment": attainment}


# -- figures -----------------------------------------------------------------------------------------------------------


BASELINES = ("most_idle", "random", "first_fit")
PAPER_CHANGE: dict[KernelName, dict[str, float]] = {
    "mbgmv": {"most_idle": -0.161, "random": -0.188, "first_fit": -0.364},
    "bgmv": {"first_fit": -0.360},
}
PAPER_ATTAINMENT = 0.99
# Routers that are compared with the baselines, and where their time per token stands.
COMPARED = {
    "rank_aware": ("tpt_change",),
    "overture": ("parts", "router", "overture_tpt_change"),
    FREE_ADAPTERS: ("parts", "router", "bound_tpt_change"),
}


def router_part(bench: Bench) -> None:
    """Find attainment of the SLO and time per token of all routers, with both kernels."""
    policies = (*COMPARED, *BASELINES)
    points = {
        (kernel, policy): Point(policy, Site(kernel, span_s=bench.size))
        for kernel in KERNEL_NAMES
        for policy in policies
    }
    bench.play(points.values())
    for (kernel, policy), point in points.items():
        is_papers = policy == "rank_aware"
        place = ("slo_attainment", kernel) if is_papers else ("attainment_by_policy", policy, kernel)
        paper = PAPER_ATTAINMENT if is_papers else None
        bench.figure(place, bench.values(point, "attainment"), paper, False, "share")
        for other in BASELINES if policy in COMPARED else ():
            paper = PAPER_CHANGE[kernel].get(other) if is_papers else None
            changes = bench.changes(point, points[kernel, other], "tpot_s")
            bench.figure((*COMPARED[policy], kernel, other), changes, paper)


TABLE = Table(
    "emulated-routing",
    "CaraServe's router",
    serve,
    {"router": router_part},
    (SPAN_S, QUICK_SPAN_S),
    f"{QUICK_SPAN_S:.0f} s of requests",
    seeds=2,
)
