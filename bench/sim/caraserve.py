"""CaraServe's router in virtual time (Fig. 19 and 9): 60 nodes, 40,000 adapters, by the live engine's policy objects.

    python -m bench.sim caraserve [--part NAME ...] [--quick] [--seeds N] [--seed N] [--jobs N]

What runs: `engine_bridge.policy.nodes.routing` (which node serves a request, performance models and their fits) over simulated nodes
(bench/sim/core) that have all adapters. What one node does with adapters that it has not is measured by `python -m bench.emulated caraserve`.

Hardware: A10 by its data sheet, calibrated with figures of CaraServe §2.3 that are not compared here (core/calibration.py); Llama2-7B, adapters on
q, k and v. Adapters are asked for as Azure's functions are, 340 requests/s. Ranks 8, 16, 32 and 64, as many of each: S-LoRA's, the paper does not
give its own. SLO: 1.5 times the time per token of one request alone without an adapter, which is what a merged model (HF-PEFT) takes. Performance
models are fitted to 400 random batches of up to 32.

Parts
  router  prompts have steps of their own, as in the engines of the paper's time, and hold up those that decode
  mixed   vLLM's steps: prompts beside those that decode. At these loads and lengths there is hardly anything left to win by routing; MBGMV alone

`free adapters` is a bound: adapters cost no step anything, and requests go where they add the fewest seconds.

Lengths: Alpaca's, drawn about its published means (core/traffic.py): the data is not beside the project. Answers are not predicted: routers reckon
with the mean. Time per token is (end - first token) / (tokens - 1); of answers of one token there is none. The last line is JSON: changes are
fractions of the other arm on the same seed's requests, -0.3 is 30% less. Of each figure: median over seeds; `spread` has least and most, `seeds` all.
What falls short of the paper is printed first.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from bench.measures import quantile
from bench.sim.core.calibration import A10_ON_DEMAND, LLAMA2_7B_QKV
from bench.sim.core.clock import Clock
from bench.sim.core.cluster import Cluster
from bench.sim.core.guesses import Usual
from bench.sim.core.lean_node import Node
from bench.sim.core.metrics import counted
from bench.sim.core.shapes import VLLM, Shape
from bench.sim.core.steps import KERNELS, Chunk, StepCost
from bench.sim.core.tables import Figure, Part, Workers, changes, parser_for, report_parts, seeds_of
from bench.sim.core.traffic import Lengths, alpaca, functions, play, poisson
from engine_bridge.policy.nodes.routing import POLICIES, Fit, Measured, RoutingPolicy, Settings, fit
from engine_bridge.policy.scheduling.baselines import Fcfs
from engine_bridge.protocol.node_facts import KernelName, Ranks

SPAN_S, WARM_UP_S, QUICK_SPAN_S = 60.0, 10.0, 15.0
SLO_TIMES = 1.5
RANKS = (8, 16, 32, 64)
KERNEL_NAMES: tuple[KernelName, ...] = ("bgmv", "mbgmv")
MODEL = LLAMA2_7B_QKV
FREE_ADAPTERS = "free adapters"
WHOLE_PROMPTS = replace(VLLM, name="whole prompts", is_mixed=False)


@cache
def lengths() -> Lengths:
    return alpaca()


@cache
def usual_prompt() -> int:
    return round(statistics.fmean(prompt for prompt, _ in lengths().pairs))


@cache
def usual_answer() -> float:
    return statistics.fmean(answer for _, answer in lengths().pairs)


# -- many nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster and its traffic; every node has every adapter, and they are asked for as Azure's functions are."""

    kernel: KernelName = "bgmv"
    shape: Shape = WHOLE_PROMPTS
    num_nodes: int = 60
    num_adapters: int = 40_000
    per_s: float = 340.0
    span_s: float = SPAN_S
    warm_up_s: float = WARM_UP_S

    @property
    def cost(self) -> StepCost:
        return cost_of(self.kernel)

    @property
    def made_by(self) -> str:
        node = f"Fcfs, {self.shape.name}, StepCost({A10_ON_DEMAND.name}, {MODEL.name}, {self.kernel})"
        return f"{self.num_nodes} nodes: {node}; lengths {lengths().name}; functions({self.num_adapters})"

    def node(self, clock: Clock, ranks: Sequence[int]) -> Node:
        guesser = Usual([answer for _, answer in lengths().pairs])
        return Node(clock, self.cost, self.shape, Fcfs(), guesser, adapter_ranks=ranks)


def cost_of(kernel: KernelName) -> StepCost:
    return StepCost(A10_ON_DEMAND, MODEL, KERNELS[kernel])


@dataclass(frozen=True, slots=True)
class Point:
    """One run. policy: a name in routing.POLICIES, or FREE_ADAPTERS."""

    policy: str
    site: Site
    seed: int

    @property
    def made_by(self) -> str:
        return f"{type(self.router).__name__}; {self.site.made_by}"

    @property
    def router(self) -> RoutingPolicy:
        name = "overture" if self.policy == FREE_ADAPTERS else self.policy
        return POLICIES[name](settings_of(name, self.site))


@dataclass(frozen=True, slots=True)
class Means:
    """Over requests after the warm-up. attainment: share within the SLO. most_load: requests of the busiest node over the mean."""

    ttft_s: float
    tpot_s: float
    tpot_p99_s: float
    attainment: float
    most_load: float


@cache
def profiled(kernel: KernelName, num: int = 400) -> tuple[Fit, Fit, Fit]:
    """Models of decoding and of prompts by ranks alone, as the paper has them, and of decoding by ranks and tokens. Of random batches."""
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
    """RankAware has the paper's models; Overture's counts tokens, too, and knows whether prompts have steps of their own."""
    cost, prompt = site.cost, usual_prompt()
    decode, prefill, decode_with_tokens = profiled(site.kernel)
    return Settings(
        decode=(decode_with_tokens if policy == "overture" else decode).model,
        prefill=prefill.model,
        slo_s=SLO_TIMES * cost.step_s((), 1, prompt + round(usual_answer() / 2)),
        answer_tokens=usual_answer(),
        prompt_token_s=(cost.prefill_s(512) - cost.prefill_s(prompt)) / (512 - prompt),
        prefill_step_s=0.0 if site.shape.is_mixed else cost.prefill_s(prompt),
    )


def serve(point: Point) -> Means:
    site, clock = point.site, Clock()
    rng = random.Random(f"adapters of the cluster {point.seed}")
    ranks = tuple(rng.choices(RANKS, k=site.num_adapters))
    arrivals = poisson(lengths(), functions(site.num_adapters, rng), site.per_s, site.span_s, point.seed)
    if point.policy == FREE_ADAPTERS:
        ranks = len(ranks) * (0,)
    nodes = [site.node(clock, ranks) for _ in range(site.num_nodes)]
    cluster = Cluster(clock, nodes, point.router, ranks, round(usual_answer()))
    play(clock, arrivals, cluster.submit)
    ended = [request for node in nodes for request in node.ended]
    if len(ended) != len(arrivals):
        raise RuntimeError(f"{len(arrivals) - len(ended)} requests were never served")
    requests = counted(ended, site.warm_up_s, site.span_s)
    tpots = [request.tpot_s for request in requests if not math.isnan(request.tpot_s)]
    slo_s = settings_of(point.policy, site).slo_s
    return Means(
        ttft_s=statistics.fmean(request.ttft_s for request in requests),
        tpot_s=statistics.fmean(tpots),
        tpot_p99_s=quantile(tpots, 0.99),
        attainment=statistics.fmean(seconds <= slo_s for seconds in tpots),
        most_load=max(cluster.num_by_node.values()) * site.num_nodes / len(arrivals),
    )


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bench:
    """What both parts share."""

    workers: Workers
    seeds: tuple[int, ...]
    span_s: float = SPAN_S

    def means(self, site: Site, policies: Sequence[str]) -> dict[str, list[Means]]:
        points = [Point(policy, site, seed) for policy in policies for seed in self.seeds]
        found = iter(self.workers.map(serve, points))
        return {policy: [next(found) for _ in self.seeds] for policy in policies}


BASELINES = ("most_idle", "random", "first_fit")
PAPER_CHANGE: dict[KernelName, dict[str, float]] = {
    "mbgmv": {"most_idle": -0.161, "random": -0.188, "first_fit": -0.364},
    "bgmv": {"first_fit": -0.360},
}
PAPER_ATTAINMENT, PAPER_R2 = 0.99, 0.96


def router_part(bench: Bench) -> Part:
    """Both kernels."""
    figures: list[Figure] = []
    changed_by = {
        "rank_aware": "tpt_change",
        "overture": "overture_tpt_change",
        FREE_ADAPTERS: "bound_tpt_change",
    }
    result: dict[str, Any] = {key: {} for key in ("slo_attainment", *changed_by.values())}
    result |= {"r2": {}, "policies": {}}
    for kernel in KERNEL_NAMES:
        site = Site(kernel, span_s=bench.span_s)
        own = bench.means(site, ("rank_aware", "overture", FREE_ADAPTERS, *BASELINES))
        figures += _attainments(own, site, {"rank_aware": PAPER_ATTAINMENT})
        result["slo_attainment"][kernel] = round(figures[-len(own)].median, 4)
        for ours, key in changed_by.items():
            papers = PAPER_CHANGE[kernel] if ours == "rank_aware" else {}
            found = _tpt_changes(own, ours, site, papers)
            figures += found.values()
            result[key][kernel] = {name: round(figure.median, 4) for name, figure in found.items()}
        r2 = profiled(kernel)[0].r2
        made_by = f"PerfModel, {site.made_by}"
        figures.append(Figure(f"R² of decoding by ranks, {kernel}", (r2,), PAPER_R2, False, made_by, "share"))
        result["r2"][kernel] = round(r2, 4)
        result["policies"][kernel] = {policy: _summary(means) for policy, means in own.items()}
    return figures, result


def mixed_part(bench: Bench) -> Part:
    """The paper has no such figure."""
    site = Site("mbgmv", VLLM, span_s=bench.span_s)
    own = bench.means(site, ("rank_aware", *BASELINES))
    changed = _tpt_changes(own, "rank_aware", site, {})
    return [*_attainments(own, site, {}), *changed.values()], {
        "tpt_change": {name: round(figure.median, 4) for name, figure in changed.items()},
        "policies": {policy: _summary(means) for policy, means in own.items()},
    }


def _attainments(means: dict[str, list[Means]], site: Site, papers: dict[str, float]) -> list[Figure]:
    """By policy."""
    return [
        Figure(
            f"SLO attainment, {policy}, {site.kernel}, {site.num_nodes} nodes",
            tuple(mean.attainment for mean in found),
            papers.get(policy),
            False,
            Point(policy, site, 0).made_by,
            "share",
        )
        for policy, found in means.items()
    ]


def _tpt_changes(
    means: dict[str, list[Means]], ours: str, site: Site, papers: dict[str, float]
) -> dict[str, Figure]:
    """Time per token of one of ours against each baseline."""
    return {
        other: Figure(
            f"time per token, {ours} against {other}, {site.kernel}",
            changes(means[ours], means[other], "tpot_s"),
            papers.get(other),
            True,
            Point(ours, site, 0).made_by,
        )
        for other in BASELINES
    }


def _summary(means: Sequence[Means]) -> dict[str, list[float]]:
    """All seeds of what the figures do not show."""
    names = ("ttft_s", "tpot_s", "tpot_p99_s", "attainment", "most_load")
    return {name: [round(getattr(mean, name), 4) for mean in means] for name in names}


PARTS: dict[str, Callable[[Bench], Part]] = {"router": router_part, "mixed": mixed_part}


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser_for("caraserve", __doc__, PARTS, f"{QUICK_SPAN_S:.0f} s of requests").parse_args(arguments)
    with Workers(args.jobs) as workers:
        bench = Bench(workers, seeds_of(args), QUICK_SPAN_S if args.quick else SPAN_S)
        show(args.part or tuple(PARTS), bench)


def show(names: Sequence[str], bench: Bench) -> None:
    report_parts("CaraServe", "caraserve", bench.seeds, ((name, PARTS[name](bench)) for name in names), _top)


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    """The figures that the paper is known for."""
    return (
        {key: parts["router"][key] for key in ("slo_attainment", "tpt_change")} if "router" in parts else {}
    )
