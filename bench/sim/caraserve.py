"""CaraServe's tables in virtual time, by the live engine's policy objects.

    python -m bench.sim caraserve [--part NAME ...] [--quick] [--seeds N] [--seed N] [--jobs N]

What runs: `engine_bridge.policy.routing` (which node serves a request, performance models and their fits), `engine_bridge.policy.baselines` (who
starts on a node: Fcfs, as in LightLLM) and the rule for host cores of `engine_bridge.driver.assist.shares`, on simulated nodes (bench/sim/core).

Hardware: A10 by its data sheet, calibrated with figures of CaraServe §2.3 that are not compared here (core/calibration.py); Llama2-7B, adapters on
q, k and v. The engine is LightLLM's as S-LoRA has it (`shapes.SLORA`): prompts in steps of their own; the router's nodes are vLLM's but for these.

Parts
  cold        Fig. 10 and 13. One node, Poisson arrivals, each request with an adapter of its own. What each server adds to the means of `cached`:
                cached       all adapters lie in memory of their own
                on_demand    a load holds up everybody. The paper's S-LoRA differs in the kernel alone, which costs the same where ranks are alike
                cpu_assist   the host computes the adapter's part of the prompt meanwhile, layer by layer; when the load is there the device goes on,
                             also in the midst of a prompt. Cores by the live engine's rule: so many that they are as quick as the device
                cpu_assist_16  the same, with a core for 16 tokens, as in the paper's Fig. 17
              Memory bounds none of them, as `cached` has no bound by definition; `a10_memory` is on_demand with the A10's own, which is full at
              9 requests/s: the queue grows until the end. The paper's +42% of TTFT at 6 and +412% at 9 requests/s, with 25% and 71% of time per
              token, do not come of one time per load without such an edge.
  production  Fig. 14. Adapters of skewed popularity, which go with their last request: a power law over places, exponent 1, which the calibration
              with Fig. 3 agrees with; and 512 by the published quantiles of Azure's functions, whose skew is greater.
  router      Fig. 19. 60 nodes as `cached`, 40,000 adapters as Azure's functions are asked for, 340 requests/s. Ranks 8, 16, 32 and 64, as many of
              each: S-LoRA's, the paper does not give its own. SLO: 1.5 times the time per token of one request alone without an adapter, which is
              what a merged model (HF-PEFT) takes. Performance models are fitted to 400 random batches of up to 32.

Lengths: Alpaca's, drawn about its published means (core/traffic.py): the data is not beside the project. Answers are not foretold: routers reckon
with the mean. Time per token is (end - first token) / (tokens - 1); of answers of one token there is none. The last line is JSON: changes are
fractions of the other arm on the same seed's requests, -0.3 is 30% less. Of each figure: median over seeds; `spread` has least and most, `seeds` all.
What falls short of the paper is printed first; of a baseline's overhead, falling short is being smaller.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from bench.measures import quantile
from bench.sim.core.calibration import A10_ON_DEMAND, LLAMA2_7B_QKV
from bench.sim.core.clock import Clock
from bench.sim.core.cluster import Cluster
from bench.sim.core.guesses import Usual
from bench.sim.core.hardware import EPYC_7R32, GB, AssistingHost, Gpu
from bench.sim.core.metrics import counted
from bench.sim.core.node import Node
from bench.sim.core.requests import Request
from bench.sim.core.shapes import SLORA, VLLM, Shape
from bench.sim.core.steps import KERNELS, Chunk, StepCost
from bench.sim.core.tables import Figure, Part, Workers, changes, parser_for, report_parts, seeds_of
from bench.sim.core.traffic import Dealer, Fresh, Lengths, alpaca, functions, play, poisson, power_law
from engine_bridge.driver.assist.shares import Shape as ModuleShape
from engine_bridge.driver.assist.shares import rows_per_core
from engine_bridge.policy.baselines import Fcfs
from engine_bridge.policy.routing import POLICIES, Fit, KernelName, Measured, Ranks, Settings, fit

SPAN_S = 300.0  # Source: CaraServe §7.1.
CLUSTER_SPAN_S, CLUSTER_WARM_UP_S = 60.0, 10.0
SLO_TIMES = 1.5
RANKS = (8, 16, 32, 64)
KERNEL_NAMES: tuple[KernelName, ...] = ("bgmv", "mbgmv")
MODEL = LLAMA2_7B_QKV
UNBOUNDED = A10_ON_DEMAND.with_memory(1000 * GB)
WHOLE_PROMPTS = replace(VLLM, name="whole prompts", is_mixed=False)
"""The router's nodes: prompts hold up those that decode, as in the engines of the paper's time. With vLLM's mixed steps there is hardly anything left
to win by routing at these loads."""


@cache
def lengths() -> Lengths:
    return alpaca()


@cache
def usual_prompt() -> int:
    return round(statistics.fmean(prompt for prompt, _ in lengths().pairs))


@cache
def usual_answer() -> float:
    return statistics.fmean(answer for _, answer in lengths().pairs)


# -- servers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """How a node has its adapters. assistant: the host that computes with adapters on their way, None where requests wait for them."""

    has_all: bool = False
    assistant: AssistingHost | None = None
    kernel: KernelName = "bgmv"
    gpu: Gpu = UNBOUNDED
    shape: Shape = SLORA

    @property
    def cost(self) -> StepCost:
        return StepCost(self.gpu, MODEL, KERNELS[self.kernel], self.assistant)

    @property
    def made_by(self) -> str:
        adapters = "all adapters" if self.has_all else "loads on demand"
        if self.assistant is not None:
            adapters = f"{self.assistant.name} assists, {self.assistant.tokens_per_core} tokens a core"
        return f"Fcfs, {adapters}, StepCost({self.gpu.name}, {MODEL.name}, {self.kernel})"

    def node(self, clock: Clock, ranks: Sequence[int]) -> Node:
        shape = self.shape
        if self.assistant is not None:
            shape = replace(shape, name="caraserve", loads_block=False, assists=True)
        guesser = Usual([answer for _, answer in lengths().pairs])
        return Node(
            clock, self.cost, shape, Fcfs(), guesser, adapter_ranks=ranks, has_all_adapters=self.has_all
        )


def assistant_for(rank: int) -> AssistingHost:
    """With so many tokens a core that it is as quick as the device, which computes the base model's product of the same module meanwhile."""
    base_s = StepCost(A10_ON_DEMAND, MODEL).prefill_s(usual_prompt()) - A10_ON_DEMAND.step_s
    module_s = base_s * MODEL.adapted_share / (3 * MODEL.num_layers)

    def measure(shape: ModuleShape, rows: int) -> float:
        flops = 2 * rows * shape.rank * (shape.num_in + shape.num_out)
        return flops / EPYC_7R32.achieved_core_flops

    module = ModuleShape(MODEL.hidden, rank, MODEL.hidden)
    return replace(EPYC_7R32, tokens_per_core=rows_per_core(measure, [module], module_s, max_rows=256))


def servers(rank: int) -> dict[str, Server]:
    return {
        "cached": Server(has_all=True),
        "on_demand": Server(),
        "cpu_assist": Server(assistant=assistant_for(rank)),
        "cpu_assist_16": Server(assistant=EPYC_7R32),
        "a10_memory": Server(gpu=A10_ON_DEMAND),
    }


# -- one node ----------------------------------------------------------------------------------------------------------


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
class Point:
    """One run of one node."""

    server: Server
    traffic: Traffic
    span_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Means:
    """Over the requests of a run, in seconds. cold_share: of them, whose adapter was not there. stalled_share: of the time."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    cold_share: float
    stalled_share: float


def serve(point: Point) -> Means:
    clock, traffic = Clock(), point.traffic
    arrivals = poisson(lengths(), traffic.dealer(point.seed), traffic.per_s, point.span_s, point.seed)
    node = point.server.node(clock, (traffic.rank,) * (traffic.num_adapters or len(arrivals)))
    play(clock, arrivals, node.submit)
    node.check_invariants()
    ttft_s, tpot_s, e2e_s = map(statistics.fmean, _times(node.ended))
    return Means(
        ttft_s,
        tpot_s,
        e2e_s,
        cold_share=statistics.fmean(request.found_adapter != "here" for request in node.ended),
        stalled_share=node.tally.stalled_s / clock.now,
    )


def _times(requests: Iterable[Request]) -> tuple[list[float], list[float], list[float]]:
    """TTFT, time per token, end to end."""
    requests = list(requests)
    tpots = [request.tpot_s for request in requests if not math.isnan(request.tpot_s)]
    return [request.ttft_s for request in requests], tpots, [request.e2e_s for request in requests]


# -- many nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster and its traffic; adapters are asked for as Azure's functions are."""

    num_nodes: int = 60
    num_adapters: int = 40_000
    per_s: float = 340.0
    span_s: float = CLUSTER_SPAN_S
    warm_up_s: float = CLUSTER_WARM_UP_S
    server: Server = Server(has_all=True, gpu=A10_ON_DEMAND, shape=WHOLE_PROMPTS)

    @property
    def made_by(self) -> str:
        return f"{self.num_nodes} nodes: {self.server.made_by}; lengths {lengths().name}; functions({self.num_adapters})"


@dataclass(frozen=True, slots=True)
class ClusterPoint:
    """One run of many nodes. policy: a name in routing.POLICIES."""

    policy: str
    site: Site
    seed: int

    @property
    def made_by(self) -> str:
        return f"{type(POLICIES[self.policy](settings_of(self.policy, self.site))).__name__}; {self.site.made_by}"


@dataclass(frozen=True, slots=True)
class ClusterMeans:
    """Over requests after the warm-up. attainment: share within the SLO. most_load: requests of the busiest node over the mean."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    tpot_p99_s: float
    attainment: float
    cold_share: float
    most_load: float


@cache
def profiled(kernel: KernelName, num: int = 400) -> tuple[Fit, Fit, Fit]:
    """Models of decoding and of prompts by ranks alone, as the paper has them, and of decoding by ranks and tokens. Of random batches."""
    cost, rng = Server(kernel=kernel, has_all=True, gpu=A10_ON_DEMAND).cost, random.Random("profile")
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
    """RankAware has the paper's models; Overture's counts tokens, too, and knows whether loads hold up a node."""
    server, prompt = site.server, usual_prompt()
    cost = server.cost
    decode, prefill, decode_with_tokens = profiled(server.kernel)
    return Settings(
        decode=(decode_with_tokens if policy == "overture" else decode).model,
        prefill=prefill.model,
        slo_s=SLO_TIMES * cost.step_s((), 1, prompt + round(usual_answer() / 2)),
        answer_tokens=usual_answer(),
        prompt_token_s=(cost.prefill_s(512) - cost.prefill_s(prompt)) / (512 - prompt),
        prefill_step_s=cost.prefill_s(prompt),
        loads_block=server.assistant is None,
    )


def serve_many(point: ClusterPoint) -> ClusterMeans:
    site, clock = point.site, Clock()
    rng = random.Random(f"adapters of the cluster {point.seed}")
    ranks = tuple(rng.choices(RANKS, k=site.num_adapters))
    arrivals = poisson(lengths(), functions(site.num_adapters, rng), site.per_s, site.span_s, point.seed)
    nodes = [site.server.node(clock, ranks) for _ in range(site.num_nodes)]
    settings = settings_of(point.policy, site)
    load_s = (
        {} if site.server.has_all else {rank: nodes[0].link.alone_s(MODEL.lora_bytes(rank)) for rank in RANKS}
    )
    cluster = Cluster(clock, nodes, POLICIES[point.policy](settings), ranks, round(usual_answer()), load_s)
    play(clock, arrivals, cluster.submit)
    ended = [request for node in nodes for request in node.ended]
    if len(ended) != len(arrivals):
        raise RuntimeError(f"{len(arrivals) - len(ended)} requests were never served")
    requests = counted(ended, site.warm_up_s, site.span_s)
    ttfts, tpots, e2es = _times(requests)
    return ClusterMeans(
        ttft_s=statistics.fmean(ttfts),
        tpot_s=statistics.fmean(tpots),
        e2e_s=statistics.fmean(e2es),
        tpot_p99_s=quantile(tpots, 0.99),
        attainment=statistics.fmean(seconds <= settings.slo_s for seconds in tpots),
        cold_share=statistics.fmean(request.found_adapter != "here" for request in requests),
        most_load=max(cluster.num_by_node.values()) * site.num_nodes / len(arrivals),
    )


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """What all parts share."""

    workers: Workers
    seeds: tuple[int, ...]
    span_s: float = SPAN_S
    cluster_span_s: float = CLUSTER_SPAN_S

    def means(
        self, traffics: Sequence[Traffic], arms: Sequence[str]
    ) -> dict[tuple[Traffic, str], list[Means]]:
        keys = [(traffic, arm) for traffic in traffics for arm in arms]
        points = [
            Point(servers(traffic.rank)[arm], traffic, self.span_s, seed)
            for traffic, arm in keys
            for seed in self.seeds
        ]
        return self._by(keys, self.workers.map(serve, points))

    def cluster_means(
        self, sites: Sequence[Site], policies: Sequence[str]
    ) -> dict[tuple[Site, str], list[ClusterMeans]]:
        keys = [(site, policy) for site in sites for policy in policies]
        points = [ClusterPoint(policy, site, seed) for site, policy in keys for seed in self.seeds]
        return self._by(keys, self.workers.map(serve_many, points))

    def _by(self, keys: Sequence[Any], found: Sequence[Any]) -> dict[Any, list[Any]]:
        num = len(self.seeds)
        return {key: list(found[at * num : (at + 1) * num]) for at, key in enumerate(keys)}


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
    Traffic(3.6, 64, 256): (NONE, NONE),
    Traffic(7.7, 64, 512): ((0.39, 0.34, 0.31), (0.07, 0.07, 0.08)),
    Traffic(7.7, 64, 512, "Azure's functions"): (NONE, NONE),
}
ARMS = ("on_demand", "cpu_assist", "cpu_assist_16")


def overheads(bench: Bench, papers: dict[Traffic, tuple[Overheads, Overheads]], arms: Sequence[str]) -> Part:
    """What each arm adds to `cached`, by traffic and arm. The paper's CPU-assist stands beside both of ours."""
    means = bench.means(list(papers), ("cached", *arms))
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for traffic, (on_demand, assist) in papers.items():
        paper = {"on_demand": on_demand, "cpu_assist": assist, "cpu_assist_16": assist}
        cached = means[traffic, "cached"]
        result[traffic.name] = {"cached_ttft_s": [round(mean.ttft_s, 4) for mean in cached]}
        for arm in arms:
            own = _overhead(traffic, arm, means[traffic, arm], cached, paper.get(arm, NONE))
            figures += own.values()
            changed = {f"{metric}_change": round(figure.median, 4) for metric, figure in own.items()}
            cold = statistics.fmean(mean.cold_share for mean in means[traffic, arm])
            result[traffic.name][arm] = changed | {"cold_share": round(cold, 3)}
    return figures, result


def _overhead(
    traffic: Traffic, arm: str, means: Sequence[Means], cached: Sequence[Means], paper: Overheads
) -> dict[str, Figure]:
    """By metric."""
    made_by = f"{servers(traffic.rank)[arm].made_by}; lengths {lengths().name}"
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


def cold_part(bench: Bench) -> Part:
    """Fig. 10 and 13; and on_demand with the A10's own memory at the first point."""
    figures, result = overheads(bench, COLD, ARMS)
    first = next(iter(COLD))
    bounded, more = overheads(bench, {first: (NONE, NONE)}, ("a10_memory",))
    result[first.name]["a10_memory"] = more[first.name]["a10_memory"]
    return figures + bounded, result


def production_part(bench: Bench) -> Part:
    """Fig. 14."""
    return overheads(bench, PRODUCTION, ARMS)


ROUTED = ("rank_aware", "overture", "most_idle", "random", "first_fit")
PAPER_CHANGE: dict[KernelName, dict[str, float]] = {
    "mbgmv": {"most_idle": -0.161, "random": -0.188, "first_fit": -0.364},
    "bgmv": {"first_fit": -0.360},
}
PAPER_R2 = 0.96


def router_part(bench: Bench) -> Part:
    """Fig. 19 and 9: both kernels."""
    base = Site(span_s=bench.cluster_span_s)
    sites: dict[KernelName, Site] = {
        kernel: replace(base, server=replace(base.server, kernel=kernel)) for kernel in KERNEL_NAMES
    }
    means = bench.cluster_means(list(sites.values()), ROUTED)
    figures: list[Figure] = []
    result: dict[str, Any] = {
        "slo_attainment": {},
        "tpt_change": {},
        "overture_tpt_change": {},
        "r2": {},
        "policies": {},
    }
    for kernel, site in sites.items():
        own = {policy: means[site, policy] for policy in ROUTED}
        figures += _attainments(own, site, kernel, 0.99)
        result["slo_attainment"][kernel] = round(figures[-len(ROUTED)].median, 4)
        for ours, key in (("rank_aware", "tpt_change"), ("overture", "overture_tpt_change")):
            found = _tpt_changes(own, ours, site, kernel)
            figures += found.values()
            result[key][kernel] = {name: round(figure.median, 4) for name, figure in found.items()}
        r2 = profiled(kernel)[0].r2
        made_by = f"PerfModel, {site.server.made_by}"
        figures.append(Figure(f"R² of decoding by ranks, {kernel}", (r2,), PAPER_R2, False, made_by, "share"))
        result["r2"][kernel] = round(r2, 4)
        result["policies"][kernel] = {policy: _summary(found) for policy, found in own.items()}
    return figures, result


def _attainments(
    means: dict[str, list[ClusterMeans]], site: Site, kernel: KernelName, paper: float
) -> list[Figure]:
    """By policy; the paper has a number for its own."""
    return [
        Figure(
            f"SLO attainment, {policy}, {kernel}, {site.num_nodes} nodes",
            tuple(mean.attainment for mean in found),
            paper if policy == "rank_aware" else None,
            False,
            ClusterPoint(policy, site, 0).made_by,
            "share",
        )
        for policy, found in means.items()
    ]


def _tpt_changes(
    means: dict[str, list[ClusterMeans]], ours: str, site: Site, kernel: KernelName
) -> dict[str, Figure]:
    """Time per token of one of ours against each baseline."""
    return {
        other: Figure(
            f"time per token, {ours} against {other}, {kernel}",
            changes(means[ours], means[other], "tpot_s"),
            PAPER_CHANGE[kernel].get(other) if ours == "rank_aware" else None,
            True,
            ClusterPoint(ours, site, 0).made_by,
        )
        for other in ("most_idle", "random", "first_fit")
    }


def _summary(means: Sequence[ClusterMeans]) -> dict[str, list[float]]:
    """All seeds of what the figures do not show."""
    names = ("ttft_s", "tpot_s", "tpot_p99_s", "attainment", "cold_share", "most_load")
    return {name: [round(getattr(mean, name), 4) for mean in means] for name in names}


PARTS: dict[str, Callable[[Bench], Part]] = {
    "cold": cold_part,
    "production": production_part,
    "router": router_part,
}
QUICK = ("cold", "router")


def main(arguments: Sequence[str] | None = None) -> None:
    quick = "the parts cold and router, a minute of one node and 15 s of 60"
    args = parser_for("caraserve", __doc__, PARTS, quick).parse_args(arguments)
    bench = Bench(Workers(args.jobs), seeds_of(args))
    if args.quick:
        bench.span_s, bench.cluster_span_s = 60.0, 15.0
    try:
        show(args.part or (QUICK if args.quick else tuple(PARTS)), bench)
    finally:
        bench.workers.close()


def show(names: Sequence[str], bench: Bench) -> None:
    report_parts("CaraServe", "caraserve", bench.seeds, ((name, PARTS[name](bench)) for name in names), _top)


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    """The figures that the paper is known for: at 9 requests/s and rank 64, under the production trace, and of the router."""
    found: dict[str, Any] = {}
    for part, key, papers in (
        ("cold", "ttft_overhead", COLD),
        ("production", "production_ttft_overhead", PRODUCTION),
    ):
        if part in parts:
            traffic = next(iter(papers)) if part == "cold" else Traffic(7.7, 64, 512)
            own = parts[part][traffic.name]
            found[key] = {arm: own[arm]["ttft_change"] for arm in ("on_demand", "cpu_assist")}
    if "router" in parts:
        found |= {key: parts["router"][key] for key in ("slo_attainment", "tpt_change")}
    return found
