"""Chameleon's tables in virtual time, by the live engine's policy objects.

    python -m bench.sim chameleon [--part NAME ...] [--quick] [--seeds N] [--seed N] [--jobs N] [--span-s S] [--trace PATH]

What runs: `engine_bridge.policy` (who starts, lanes, quotas, bypass, squash, eviction, forecasts, preemption) in a simulated node (bench/sim/core).
An arm is a policy of starting and one of eviction:
  base   Fcfs, no cache: S-LoRA. It loads the next requests' adapters ahead, and drops an adapter with its last request
  cache  Fcfs, ChameleonScore
  sched  Mlq, no cache
  full   Mlq, ChameleonScore: what stands for Chameleon

Hardware: an A40 by its data sheet, with one calibration from Chameleon's low-load figures (core/calibration.py); Llama-7B; adapters on q, k, v, o.
The engine is S-LoRA's (`node.SLORA`): prompts in steps of their own, loads hold up everybody. Arms differ in policies alone, and meet the same
requests.

Loads. The paper's 6 to 13 requests/s cannot be had of its hardware with the trace's lengths: at the A40's full 149.7 TFLOP/s (none are reached) the
mean prompt takes 0.1 s, so 9.7/s would fill it without decoding one token. The paper does not say what it cut. So there are two readings:
  the paper's loads  all parts but `published`: lengths are cut to the model's 2,048 tokens, then multiplied by one number, found so that `base`
                     leaves its SLO at 8.7 requests/s, as the paper's does. Loads are requests/s. The top-level keys of the JSON are from here
  published lengths  the part `published`: lengths are cut to 2,048 tokens only, and loads are shares: "9" is 9/8.7 of the load at which `base`
                     leaves its SLO
That number knows of no arm but `base`, and it is the only one taken from a figure that is compared. SLO: P99 TTFT of five times the mean TTFT
of requests that come one at a time (Chameleon §5.1).

Parts: `main` Fig. 10 and 12. `eviction` Fig. 14 and 15. `sched` Fig. 13 and 16. `published` as `main`. `vllm` as `main`, on the step shape of the
live engine: prompts in chunks beside decodes, a load holds up only those whom it is for. `scale` Fig. 17 and 18: an A100.

Predictor: `Classes` with accuracy 0.8, the paper's; a request gets the same guess in all arms. TTFT counts requests that come after a warm-up of two
minutes. The last line is JSON: changes are fractions of `base` on the same seed's requests, -0.8 is 80% less; ratios are of loads within SLO. Of
each figure: median over seeds; `spread` has least and most, `seeds` all. What falls short of the paper is printed first.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.data import AZURE
from bench.measures import quantile
from bench.sim.core.calibration import A40, A100
from bench.sim.core.clock import Clock
from bench.sim.core.guesses import Classes, Online
from bench.sim.core.hardware import GB, Gpu
from bench.sim.core.lane_fits import LaneFits
from bench.sim.core.metrics import counted
from bench.sim.core.models import LLAMA_7B, LLAMA_13B, LLAMA_30B, Model
from bench.sim.core.node import Node
from bench.sim.core.requests import Guesser, Request
from bench.sim.core.shapes import BLOCK_TOKENS, SLORA, VLLM, Shape, pool_blocks
from bench.sim.core.steps import StepCost
from bench.sim.core.tables import (
    Figure,
    Part,
    Workers,
    changes,
    crossing,
    parser_for,
    report_parts,
    seeds_of,
)
from bench.sim.core.traffic import Lengths, Pool, azure, play, poisson
from engine_bridge.policy.adapter_cache import POLICIES as EVICTIONS
from engine_bridge.policy.arrivals import Arrivals
from engine_bridge.policy.lanes import RULES
from engine_bridge.policy.mlq import Mlq
from engine_bridge.policy.mlq_decision import MlqSettings
from engine_bridge.policy.queue import QueuePolicy
from engine_bridge.policy.registry import POLICIES as QUEUES
from engine_bridge.policy.sizes import WeightedSize

SPAN_S, WARM_UP_S = 1800.0, 120.0
SLO_TIMES = 5.0
PAPER_KNEE = 8.7
# The paper's, and one at which memory is full and requests queue: 1.7 times the load at which `base` leaves its SLO.
SATURATED = 15
LOADS = (6, 8, 9, 10, 11, 12, 13, SATURATED)
ACCURACY = 0.8


# -- arms --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """One system. queue, eviction: names in the policies' tables, "" for no cache. accuracy: of the predictor, None for the live one.

    rule: for the number of lanes. is_paper: without what Mlq adds to the paper (aging, a bound on waiting). is_output_only: sizes are the predicted
    output alone.
    """

    queue: str = "fcfs"
    eviction: str = ""
    accuracy: float | None = ACCURACY
    rule: str = "knee"
    is_paper: bool = False
    is_output_only: bool = False
    has_forecast: bool = False

    @property
    def made_by(self) -> str:
        """The policy objects, by class."""
        queue = type(QUEUES[self.queue](1)).__name__
        eviction = type(EVICTIONS[self.eviction]()).__name__ if self.eviction else "no cache"
        more = " + Arrivals" * self.has_forecast + ", sizes by output" * self.is_output_only
        more += ", no aging, no bound" * self.is_paper + f", lanes by {self.rule}" * (self.rule != "knee")
        if self.accuracy is None:
            more += ", OnlineLengths"
        elif self.accuracy != ACCURACY:
            more += f", accuracy {self.accuracy:.0%}"
        return f"{queue} + {eviction}{more}"


BASE, CACHE = Arm(), Arm(eviction="chameleon")
SCHED, FULL = Arm("mlq"), Arm("mlq", "chameleon")
MAIN = {"base": BASE, "cache": CACHE, "sched": SCHED, "full": FULL}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all arms share. length_share: that lengths are multiplied by."""

    gpu: Gpu = A40
    model: Model = LLAMA_7B
    shape: Shape = SLORA
    num_adapters: int = 100
    length_share: float = 1.0
    trace: Path = AZURE
    span_s: float = SPAN_S
    warm_up_s: float = WARM_UP_S

    @property
    def lengths(self) -> Lengths:
        return _lengths(self.trace, self.model.max_tokens, self.length_share)

    @property
    def pool(self) -> Pool:
        return Pool(self.num_adapters)

    @property
    def made_by(self) -> str:
        return f"StepCost({self.gpu.name}, {self.model.name}), engine {self.shape.name}, lengths {self.lengths.name}"


@cache
def _lengths(trace: Path, max_tokens: int, share: float) -> Lengths:
    fitted = azure(trace).fitted(max_tokens)
    return fitted if share == 1.0 else fitted.scaled(share)


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """One run: an arm in a setting, at so many requests a second, with a seed."""

    arm: Arm
    setting: Setting
    per_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """TTFT quantiles in seconds, of all and of those of the largest rank and of the longest tenth; what was loaded; what happened."""

    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    ttft_p99_by_rank_s: dict[int, float]
    ttft_p99_long_s: float
    tpot_p99_s: float
    num_requests: int
    hit_share: float
    loaded_bytes: int
    busy_share: float
    stalled_share: float
    counts: dict[str, int]
    took_s: float


def node_of(arm: Arm, setting: Setting, clock: Clock, seed: int) -> Node:
    cost = StepCost(setting.gpu, setting.model)
    num_tokens = pool_blocks(cost) * BLOCK_TOKENS
    weights = (0.0, 1.0, 0.0) if arm.is_output_only else ()
    lanes = LaneFits(num_tokens, WeightedSize(*weights), rule=RULES[arm.rule])
    queue = _queue(arm, num_tokens)
    return Node(
        clock,
        cost,
        setting.shape,
        queue,
        _guesser(arm, setting, seed),
        lanes=lanes if queue.has_lanes else None,
        eviction=EVICTIONS[arm.eviction]() if arm.eviction else None,
        adapter_ranks=setting.pool.rank_of,
        forecast=Arrivals() if arm.has_forecast else None,
    )


def _queue(arm: Arm, num_tokens: int) -> QueuePolicy:
    if arm.is_paper:
        return Mlq(num_tokens, MlqSettings(max_wait_s=math.inf, aging_s=math.inf))
    return QUEUES[arm.queue](num_tokens)


def _guesser(arm: Arm, setting: Setting, seed: int) -> Guesser:
    if arm.accuracy is None:
        return Online(seed)
    return Classes([answer for _, answer in setting.lengths.pairs], arm.accuracy, seed)


def run(point: Point) -> Outcome:
    setting = point.setting
    clock = Clock()
    node = node_of(point.arm, setting, clock, point.seed)
    arrivals = poisson(setting.lengths, setting.pool, point.per_s, setting.span_s, point.seed)
    began = time.perf_counter()
    play(clock, arrivals, node.submit)
    node.check_invariants()
    if len(node.ended) != len(arrivals):
        raise RuntimeError(f"{len(arrivals) - len(node.ended)} requests were never served")
    requests = counted(node.ended, setting.warm_up_s, setting.span_s)
    return _outcome(node, requests, clock.now, time.perf_counter() - began)


def _outcome(node: Node, requests: Sequence[Request], ran_s: float, took_s: float) -> Outcome:
    ttfts = [request.ttft_s for request in requests]
    long = quantile([float(request.arrival.num_answer_tokens) for request in requests], 0.9)
    ranks = sorted({request.rank for request in requests})
    return Outcome(
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p99_s=quantile(ttfts, 0.99),
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p99_by_rank_s={
            rank: quantile([request.ttft_s for request in requests if request.rank == rank], 0.99)
            for rank in ranks
        },
        ttft_p99_long_s=quantile([r.ttft_s for r in requests if r.arrival.num_answer_tokens >= long], 0.99),
        tpot_p99_s=quantile([r.tpot_s for r in requests if not math.isnan(r.tpot_s)], 0.99),
        num_requests=len(requests),
        hit_share=statistics.fmean(request.found_adapter == "here" for request in requests),
        loaded_bytes=node.link.bytes_moved,
        busy_share=node.tally.busy_s / ran_s,
        stalled_share=node.tally.stalled_s / ran_s,
        counts=dict(node.tally.counts),
        took_s=took_s,
    )


# -- loads within SLO --------------------------------------------------------------------------------------------------


def slo_s(setting: Setting, num: int = 2000) -> float:
    """Five times the mean TTFT of requests that come one at a time: an adapter's load and the prompt. Of `base`, whatever the arm."""
    cost, ranks = StepCost(setting.gpu, setting.model), setting.pool.rank_of
    link_bytes_per_s = setting.gpu.achieved_link_bytes_per_s
    pairs = random.Random("slo").choices(setting.lengths.pairs, k=num)
    adapters = setting.pool.dealt(num, random.Random("slo adapters"))
    ttfts = [
        cost.prefill_s(prompt, ranks[a]) + setting.model.lora_bytes(ranks[a]) / link_bytes_per_s
        for (prompt, _), a in zip(pairs, adapters, strict=True)
    ]
    return SLO_TIMES * statistics.fmean(ttfts)


def knee(point: Point, limit_s: float, low: float, high: float, tolerance: float = 0.01) -> float:
    """The load at which P99 TTFT leaves the SLO, by halving between two loads; `point`'s own load is not used."""

    def is_within(per_s: float) -> bool:
        return run(replace(point, per_s=per_s)).ttft_p99_s <= limit_s

    while not is_within(low):
        low /= 2
    while is_within(high):
        high *= 1.5
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return math.sqrt(low * high)


def first_guess(setting: Setting) -> float:
    """About the load that fills the device: mean seconds of a request's prompt, and of its share in the steps of a full batch."""
    cost, lengths = StepCost(setting.gpu, setting.model), setting.lengths
    prompt = round(statistics.fmean(p for p, _ in lengths.pairs))
    answer = round(statistics.fmean(a for _, a in lengths.pairs))
    batch = max(pool_blocks(cost) * BLOCK_TOKENS // (prompt + answer), 1)
    decode_s = answer * cost.step_s((), batch, batch * (prompt + answer // 2), batch * 30) / batch
    return 1 / (cost.prefill_s(prompt, 30) + decode_s)


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """What all parts share. unit_per_s: requests a second that the paper's "1" stands for, by setting."""

    workers: Workers
    seeds: tuple[int, ...]
    outcomes: dict[tuple[Arm, Setting, float, int], Outcome]

    def run(self, arms: Iterable[Arm], setting: Setting, loads: Sequence[float], unit_per_s: float) -> None:
        """Have the outcomes of all these."""
        wanted = [
            (arm, setting, load, seed) for arm, load, seed in itertools.product(arms, loads, self.seeds)
        ]
        missing = [key for key in wanted if key not in self.outcomes]
        points = [Point(arm, setting, load * unit_per_s, seed) for arm, setting, load, seed in missing]
        self.outcomes.update(zip(missing, self.workers.map(run, points), strict=True))

    def of(self, arm: Arm, setting: Setting, load: float) -> list[Outcome]:
        return [self.outcomes[arm, setting, load, seed] for seed in self.seeds]

    def knees_between(
        self, arm: Arm, setting: Setting, loads: Sequence[int], unit_per_s: float
    ) -> tuple[float, ...]:
        """The same, from outcomes at these loads where the SLO is left between two of them; else by search."""
        limit_s, found = slo_s(setting), []
        for seed in self.seeds:
            p99s = [self.outcomes[arm, setting, load, seed].ttft_p99_s for load in loads]
            load = crossing(loads, p99s, limit_s)
            if load is None:
                edge = (loads[0] if p99s[0] > limit_s else loads[-1]) * unit_per_s
                found.append(knee(Point(arm, setting, 0.0, seed), limit_s, 0.8 * edge, 1.25 * edge))
            else:
                found.append(load * unit_per_s)
        return tuple(found)

    def knees(self, arm: Arm, setting: Setting, about: float) -> tuple[float, ...]:
        """Loads within SLO, in requests a second, by seed."""
        points = [Point(arm, setting, 0.0, seed) for seed in self.seeds]
        limit_s = slo_s(setting)
        num = len(points)
        return tuple(
            self.workers.map(knee, points, [limit_s] * num, [0.8 * about] * num, [1.25 * about] * num)
        )


# -- parts -------------------------------------------------------------------------------------------------------------

PAPER_P99 = {6: -0.147, 8: -0.246, 9: -0.807}
PAPER_P50 = {6: -0.139, 8: -0.209, 9: -0.481}


def main_part(
    bench: Bench, setting: Setting, unit_per_s: float, loads: Sequence[int]
) -> tuple[list[Figure], dict[str, Any]]:
    """Fig. 10 and 12: P99 and P50 TTFT over loads, and loads within SLO, of the four systems."""
    bench.run(MAIN.values(), setting, loads, unit_per_s)
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for quantile_name, paper in (("ttft_p99", PAPER_P99), ("ttft_p50", PAPER_P50)):
        found = {}
        for load in (load for load in loads if load in paper):
            values = changes(
                bench.of(FULL, setting, load), bench.of(BASE, setting, load), f"{quantile_name}_s"
            )
            what = f"{quantile_name[-3:].upper()} TTFT at {load} ({load * unit_per_s:.2f}/s)"
            figures.append(Figure(what, values, paper[load], True, FULL.made_by))
            found[str(load)] = round(figures[-1].median, 4)
        result[f"{quantile_name}_change"] = found
    result["saturated"] = {}
    if SATURATED in loads:
        base = bench.of(BASE, setting, SATURATED)
        for name, arm in list(MAIN.items())[1:]:
            values = changes(bench.of(arm, setting, SATURATED), base, "ttft_p99_s")
            figures.append(Figure(f"P99 TTFT at {SATURATED}, {name}", values, None, True, arm.made_by))
            result["saturated"][name] = round(figures[-1].median, 4)
    knees = {name: bench.knees_between(arm, setting, loads, unit_per_s) for name, arm in MAIN.items()}
    for key, name, paper_ratio in (
        ("slo_load_ratio", "full", 12.9 / 8.7),
        ("cache_only_ratio", "cache", 1.2),
        ("sched_only_ratio", "sched", 1.1),
    ):
        ratios = tuple(a / b for a, b in zip(knees[name], knees["base"], strict=True))
        figures.append(
            Figure(f"load within SLO, {name}", ratios, paper_ratio, False, MAIN[name].made_by, "ratio")
        )
        result[key] = round(figures[-1].median, 4)
    result["curve"] = {name: _curve(bench, arm, setting, loads) for name, arm in MAIN.items()}
    result["knees_per_s"] = {name: [round(value, 3) for value in values] for name, values in knees.items()}
    return figures, result


def _curve(bench: Bench, arm: Arm, setting: Setting, loads: Sequence[float]) -> dict[str, Any]:
    found = {}
    for load in loads:
        outcomes = bench.of(arm, setting, load)
        found[str(load)] = {
            "ttft_p99_s": [round(outcome.ttft_p99_s, 4) for outcome in outcomes],
            "ttft_p50_s": [round(outcome.ttft_p50_s, 4) for outcome in outcomes],
            "tpot_p99_s": [round(outcome.tpot_p99_s, 4) for outcome in outcomes],
            "stalled_share": round(statistics.median(outcome.stalled_share for outcome in outcomes), 4),
            "hit_share": round(statistics.median(outcome.hit_share for outcome in outcomes), 4),
            "num_squashed": sum(outcome.counts.get("squashed", 0) for outcome in outcomes),
            "num_preempted": sum(outcome.counts.get("preempted", 0) for outcome in outcomes),
        }
    return found


EVICTION_ARMS = {
    "lru": Arm(eviction="lru"),
    "equal": Arm(eviction="equal_weights"),
    "paper": CACHE,
    "expected_gain": Arm(eviction="expected_gain"),
}
PAPER_EVICTION = {"lru": -0.18, "equal": -0.22, "paper": -0.26}


def eviction_part(
    bench: Bench, setting: Setting, unit_per_s: float, loads: Sequence[int]
) -> tuple[list[Figure], dict[str, Any]]:
    """Fig. 14 and 15: eviction policies and forecasts with Fcfs, at 8; and, since memory is idle there, at saturation."""
    arms = EVICTION_ARMS | {"prefetch": Arm(eviction="chameleon", has_forecast=True)}
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for load in loads:
        bench.run([BASE, *arms.values()], setting, [load], unit_per_s)
        base = bench.of(BASE, setting, load)
        for name, arm in arms.items():
            values = changes(bench.of(arm, setting, load), base, "ttft_p99_s")
            paper = PAPER_EVICTION.get(name) if load == 8 else None
            if name == "prefetch":
                values = changes(bench.of(arm, setting, load), bench.of(CACHE, setting, load), "ttft_p99_s")
                paper = -0.088 if load == 8 else None
            against = "cache" if name == "prefetch" else "base"
            figures.append(
                Figure(f"P99 TTFT at {load}, {name}, against {against}", values, paper, True, arm.made_by)
            )
            result.setdefault(f"at_{load}", {})[name] = round(figures[-1].median, 4)
            result.setdefault(f"by_rank_at_{load}", {})[name] = _by_rank(bench.of(arm, setting, load), base)
    result["eviction"] = {name: result["at_8"][name] for name in ("lru", "equal", "paper")}
    return figures, result


def _by_rank(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, float]:
    """Change of P99 TTFT of the requests of each rank, the median over seeds."""
    found: dict[int, list[float]] = {}
    for a, b in zip(ours, theirs, strict=True):
        for rank, own_s in a.ttft_p99_by_rank_s.items():
            found.setdefault(rank, []).append(own_s / b.ttft_p99_by_rank_s[rank] - 1)
    return {str(rank): round(statistics.median(values), 4) for rank, values in found.items()}


QUANTILES = (("ttft_p50_s", "P50"), ("ttft_p99_s", "P99"), ("ttft_p99_long_s", "P99 of long"))


def sched_part(
    bench: Bench, setting: Setting, unit_per_s: float, loads: Sequence[int]
) -> tuple[list[Figure], dict[str, Any]]:
    """Fig. 13 and 16: orders of starting and accuracies of the predictor without a cache."""
    arms = {
        "sjf": Arm("sjf"),
        "fair": Arm("fair"),
        "mlq": SCHED,
        "mlq, as in the paper": Arm("mlq", rule="least_squares", is_paper=True),
        **{f"mlq, {share:.0%}": Arm("mlq", accuracy=share) for share in (1.0, 0.6)},
        "mlq, live predictor": Arm("mlq", accuracy=None),
        **{
            f"output only, {share:.0%}": Arm("mlq", accuracy=share, is_output_only=True)
            for share in (1.0, 0.8, 0.6)
        },
    }
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for load in loads:
        bench.run([BASE, *arms.values()], setting, [load], unit_per_s)
        base = bench.of(BASE, setting, load)
        for name, arm in arms.items():
            for key, what in QUANTILES:
                values = changes(bench.of(arm, setting, load), base, key)
                figures.append(Figure(f"{what} TTFT at {load}, {name}", values, None, True, arm.made_by))
                result.setdefault(f"at_{load}", {}).setdefault(name, {})[f"{key[:-2]}_change"] = round(
                    figures[-1].median, 4
                )
    return figures, result


SCALES = (
    ("7B, 80 GB", LLAMA_7B, 80, 500, 1.86),
    ("13B, 80 GB", LLAMA_13B, 80, 100, 1.41),
    ("30B, 80 GB", LLAMA_30B, 80, 10, 1.67),
    ("7B, 48 GB", LLAMA_7B, 48, 500, 1.6),
    ("7B, 24 GB", LLAMA_7B, 24, 500, 1.4),
    ("13B, 48 GB", LLAMA_13B, 48, 100, None),
)


def scale_part(bench: Bench, setting: Setting) -> tuple[list[Figure], dict[str, Any]]:
    """Fig. 17 and 18: models and sizes of memory on an A100; loads within SLO, full against base. 7 minutes each."""
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for name, model, memory, num_adapters, paper in SCALES:
        own = replace(
            setting,
            gpu=A100.with_memory(memory * GB),
            model=model,
            num_adapters=num_adapters,
            span_s=min(420.0, setting.span_s),
        )
        about = first_guess(own)
        base = bench.knees(BASE, own, about)
        full = bench.knees(FULL, own, statistics.median(base))
        ratios = tuple(a / b for a, b in zip(full, base, strict=True))
        what = f"load within SLO, A100, {name}, {num_adapters} adapters"
        figures.append(Figure(what, ratios, paper, False, FULL.made_by, "ratio"))
        result[name] = {"ratio": round(figures[-1].median, 4), "base_per_s": [round(b, 3) for b in base]}
    return figures, result


# -- settings ----------------------------------------------------------------------------------------------------------


def unit_of(bench: Bench, setting: Setting) -> float:
    """Requests a second that the paper's "1" stands for: its base leaves its SLO at 8.7 of them."""
    return statistics.median(bench.knees(BASE, setting, first_guess(setting))) / PAPER_KNEE


def short_setting(bench: Bench, setting: Setting) -> Setting:
    """Lengths times the number at which `base` leaves its SLO at 8.7 requests/s, to 1%."""
    low, high = 0.05, 1.0
    while high / low > 1.01:
        share = math.sqrt(low * high)
        own = replace(setting, length_share=share)
        points = [Point(BASE, own, PAPER_KNEE, seed) for seed in bench.seeds]
        p99_s = statistics.median(outcome.ttft_p99_s for outcome in bench.workers.map(run, points))
        low, high = (share, high) if p99_s <= slo_s(own) else (low, share)
    return replace(setting, length_share=round(math.sqrt(low * high), 3))


PARTS = ("main", "eviction", "sched", "published", "vllm", "scale")


# Each part's figures and JSON, from its setting and the loads.
def run_parts(
    parts: Sequence[str], bench: Bench, published: Setting, loads: Sequence[int]
) -> Iterator[tuple[str, Part]]:
    if set(parts) - {"published"}:
        yield from _short_parts(parts, bench, short_setting(bench, published), loads)
    if "published" in parts:
        unit = unit_of(bench, published)
        yield "published", _described(published, unit, main_part(bench, published, unit, loads))


def _short_parts(
    parts: Sequence[str], bench: Bench, setting: Setting, loads: Sequence[int]
) -> Iterator[tuple[str, Part]]:
    if "main" in parts:
        yield "main", _described(setting, 1.0, main_part(bench, setting, 1.0, loads))
    if "eviction" in parts:
        yield "eviction", _described(setting, 1.0, eviction_part(bench, setting, 1.0, (8, SATURATED)))
    if "sched" in parts:
        yield "sched", _described(setting, 1.0, sched_part(bench, setting, 1.0, (9, SATURATED)))
    if "vllm" in parts:
        own = replace(setting, shape=VLLM)
        yield "vllm", _described(own, 1.0, main_part(bench, own, 1.0, loads))
    if "scale" in parts:
        yield "scale", _described(setting, 1.0, scale_part(bench, setting))


def _described(setting: Setting, unit: float, part: Part) -> Part:
    figures, result = part
    made_by = f'{setting.made_by}; "1" is {unit:.3f}/s; SLO {slo_s(setting):.3f} s'
    return figures, result | {"made_by": made_by, "slo_s": round(slo_s(setting), 4)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for("chameleon", __doc__, PARTS, "the part main, at 6, 8 and 9, 10 simulated minutes")
    parser.add_argument("--trace", type=Path, default=AZURE)
    parser.add_argument("--span-s", type=float, default=SPAN_S, help="simulated, each run")
    args = parser.parse_args(arguments)
    bench = Bench(Workers(args.jobs), seeds_of(args), {})
    setting = Setting(trace=args.trace, span_s=600.0 if args.quick else args.span_s)
    names = args.part or (PARTS[:1] if args.quick else PARTS)
    loads = (6, 8, 9) if args.quick else LOADS
    try:
        report_parts("Chameleon", "chameleon", bench.seeds, run_parts(names, bench, setting, loads), _top)
    finally:
        bench.workers.close()


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("main", "eviction"):
        found |= {
            key: value
            for key, value in parts.get(name, {}).items()
            if key.endswith(("_change", "_ratio")) or key == "eviction"
        }
    return found
