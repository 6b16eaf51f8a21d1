"""Chameleon's tables on vLLM's scheduler with our classes: queues and caches for adapters over loads.

    python -m bench.emulated chameleon [--part main|eviction ...] [--quick] [--seeds N] [--seed N] [--jobs N]

An arm is a policy of starting and one of eviction:
  base   fcfs, no cache: S-LoRA's. Adapters of requests that wait are copied ahead, and leave with their last request
  cache  fcfs, Chameleon's score
  sched  mlq, no cache
  default  bounded, adaptive, and the host computes for adapters that are on their way over the link: what serves by default, and what the keys on
         top are of. The others' steps wait for their adapters
Beside them stands what one that knows the future gains on the same requests with the same slots (`KNOWING`, `bound`).

The device is an A40 by its data sheet, with one calibration from Chameleon's low-load figures (core/calibration.py); Llama-7B; 100 adapters
on q, k, v, o, all in host memory. The engine is ours, in virtual time: prompts in chunks beside those that decode; steps compute with adapters in
slots, each as large as the largest adapter, as many as are in use at the paper's highest load; what leaves a slot is copied into KV blocks that
nobody needs and goes when KV needs them, by the policy's order. The paper's cache has no such slots.

Loads. The paper's 6 to 13 requests/s cannot be had of its hardware with the trace's lengths: at the A40's full 149.7 TFLOP/s (none are reached) the
mean prompt takes 0.1 s, so 9.7/s would fill it without decoding one token. The paper does not say what it cut. Here lengths are cut to the model's
2,048 tokens, then multiplied by one number, found so that `base` leaves its SLO at 8.7 requests/s, as the paper's does (`knees_per_s`). That number
knows of no other arm, and it is the only one taken from a figure that is compared. SLO: P99 TTFT of five times the mean TTFT of requests that come
one at a time (Chameleon §5.1).

Memory. With 48 GB, the paper's, adapters never fill what KV leaves, and up to the paper's loads no request waits for memory: `main` says nothing of
which adapter leaves or which request starts first, and `sched` is `base` there. So `eviction` has 24 GB, the least that the paper serves this model
with (§5.5, Fig. 18), half the slots, and a number for its lengths found by the same rule; there KV takes copies back.

Parts: `main` Fig. 10 and 12. `eviction` Fig. 14. Orders within lanes (Fig. 13, 16) and forecasts (Fig. 15) gained nothing: bench/LOG.md.

Predictor: `Classes` with accuracy 0.8, the paper's; a request gets the same guess in all arms. TTFT counts requests that come after a warm-up. The
last line is JSON: changes are fractions of `base` on the same seed's requests, -0.8 is 80% less; ratios are of loads within SLO. Of each figure:
median over seeds; `spread` has least and most, `seeds` all. What falls short of the paper is printed first.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.data import AZURE
from bench.emulated.core.adapters import AdapterMemory
from bench.emulated.core.arrivals import Classes
from bench.emulated.core.assist import ColdStart, as_quick_as
from bench.emulated.core.calibration import A40
from bench.emulated.core.hardware import EPYC_9454, GB, Gpu
from bench.emulated.core.models import LLAMA_7B
from bench.emulated.core.node import Engine
from bench.emulated.core.plays import Played, play_on_node
from bench.emulated.core.steps import BLOCK_TOKENS, StepCost, pool_blocks
from bench.emulated.core.traffic import Lengths, Pool, azure, poisson
from bench.emulated.table import Bench, Table, crossing, median
from bench.measures import quantile
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY

SPAN_S, WARM_UP_S = 300.0, 60.0
LOADS, QUICK_LOADS, EVICTION_LOAD = (6, 8, 9, 11, 13), (6, 8, 9, 13), 8
SLO_TIMES, NUM_ALONE, ACCURACY = 5.0, 2000, 0.8
# Factor to the next load, where P99 TTFT does not leave the SLO between the loads so far. Chosen.
FURTHER = 1.2
MODEL, POOL = LLAMA_7B, Pool()


# -- arms --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """One system.

    Attributes:
        queue: a name in the registry of policies.
        eviction: which adapter leaves first, "" for no cache.
        accuracy: of the predictor of lengths.
        loads_are_free: an adapter is in its slot as soon as the slot is given to it.
        cold_start: what happens to steps whose adapters are on their way.
    """

    queue: str = "fcfs"
    eviction: str = ""
    accuracy: float = ACCURACY
    loads_are_free: bool = False
    cold_start: ColdStart = "step waits"


BASE, CACHE = Arm(), Arm(eviction="chameleon")
DEFAULT = Arm(DEFAULT_POLICY, "adaptive", cold_start="host helps")
MAIN = {"base": BASE, "cache": CACHE, "sched": Arm("mlq"), "default": DEFAULT}
# What knows the future: the lengths of answers, and for a cache every next use, so that no request ever waits for a load. The slots are the engine's,
# with the same number as ours. No order is known to be the best, so the best in hindsight counts, for each figure apart.
ORDERS = ("fcfs", "sjf", "bounded")
KNOWING = {
    "cache": (Arm(loads_are_free=True),),
    "sched": tuple(Arm(order, accuracy=1.0) for order in ORDERS),
    "default": tuple(Arm(order, accuracy=1.0, loads_are_free=True) for order in ORDERS),
}
# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting that all arms share. num_slots: for adapters that steps compute with. length_share: the factor of all lengths."""

    gpu: Gpu = A40
    num_slots: int = 32
    length_share: float = 0.186
    trace: Path = AZURE

    @property
    def lengths(self) -> Lengths:
        """The trace's lengths, cut to the model and scaled."""
        return _lengths(self.trace, self.length_share)

    @property
    def cost(self) -> StepCost:
        """The device's cost of steps, with the paper's host as it helps with the largest adapters."""
        prompt_tokens = round(statistics.fmean(prompt for prompt, _ in self.lengths.pairs))
        host = as_quick_as(self.gpu, EPYC_9454, MODEL, max(POOL.ranks), prompt_tokens)
        return StepCost(self.gpu, MODEL, assistant=host)

    @property
    def engine(self) -> Engine:
        """The engine, whose KV has the memory that the slots leave. No prefix is shared, so none is kept."""
        slot_blocks = MODEL.lora_bytes(max(POOL.ranks)) / (BLOCK_TOKENS * MODEL.kv_bytes_per_token)
        num_blocks = pool_blocks(self.cost) - math.ceil(self.num_slots * slot_blocks)
        return Engine(num_blocks, max_tokens=MODEL.max_tokens, has_prefix_cache=False)


AMPLE = Setting()
SCARCE = Setting(A40.with_memory(24 * GB), num_slots=16, length_share=0.138)


@cache
def _lengths(trace: Path, share: float) -> Lengths:
    return azure(trace).fitted(MODEL.max_tokens).scaled(share)


@dataclass(frozen=True, slots=True)
class Point:
    """One run: an arm in a setting, at a load in requests a second."""

    arm: Arm
    setting: Setting
    per_s: float
    span_s: float = SPAN_S
    seed: int = 0


def play(point: Point) -> Played:
    """Play one point."""
    arm, setting = point.arm, point.setting
    return play_on_node(
        arm.queue,
        poisson(setting.lengths, POOL.dealt, point.per_s, point.span_s, point.seed),
        setting.cost,
        setting.engine,
        Classes([answer for _, answer in setting.lengths.pairs], arm.accuracy, point.seed),
        ranks=POOL.rank_of,
        memory=AdapterMemory(
            setting.num_slots,
            arm.eviction or None,
            arm.cold_start,
            in_kv=bool(arm.eviction),
            loads_are_free=arm.loads_are_free,
        ),
    )


def serve(point: Point) -> dict[str, float]:
    """Play one point and return the compared figures of requests that came after the warm-up."""
    warm_up_s = min(WARM_UP_S, point.span_s / 2)
    ttft_s = [job.ttft_s for job in play(point).jobs if job.arrival.at_s >= warm_up_s]
    return {"ttft_p50_s": quantile(ttft_s, 0.5), "ttft_p99_s": quantile(ttft_s, 0.99)}


# -- loads within SLO --------------------------------------------------------------------------------------------------


@cache
def slo_s(setting: Setting) -> float:
    """Return five times the mean TTFT of requests that come one at a time: an adapter's load and the prompt. It is `base`'s, whatever the arm."""
    cost, ranks = setting.cost, POOL.rank_of
    link_bytes_per_s = setting.gpu.achieved_link_bytes_per_s
    pairs = random.Random("slo").choices(setting.lengths.pairs, k=NUM_ALONE)
    adapters = POOL.dealt(NUM_ALONE, random.Random("slo adapters"))
    ttfts = [
        cost.prefill_s(prompt, ranks[a]) + MODEL.lora_bytes(ranks[a]) / link_bytes_per_s
        for (prompt, _), a in zip(pairs, adapters, strict=True)
    ]
    return SLO_TIMES * statistics.fmean(ttfts)


def points(bench: Bench, arms: Iterable[Arm], setting: Setting, loads: Iterable[float]) -> list[Point]:
    """Return the points of all arms at all loads."""
    return [Point(arm, setting, load, bench.size) for arm, load in itertools.product(arms, loads)]


def knees(bench: Bench, arm: Arm, loads: Sequence[float]) -> tuple[float, ...]:
    """Return by seed the load at which P99 TTFT leaves the SLO: between two of the loads, or beyond them where it does so there."""
    limit_s, tried = slo_s(AMPLE), list(loads)
    while True:
        own = points(bench, [arm], AMPLE, tried)
        bench.play(own)
        curves = list(zip(*(bench.values(point, "ttft_p99_s") for point in own), strict=True))
        found = [crossing(tried, p99s, limit_s) for p99s in curves]
        if all(load is not None for load in found):
            return tuple(load for load in found if load is not None)
        is_too_high = any(p99s[0] > limit_s for p99s in curves)
        tried = [tried[0] / FURTHER, *tried] if is_too_high else [*tried, tried[-1] * FURTHER]


# -- parts -------------------------------------------------------------------------------------------------------------

PAPER = {
    "ttft_p99": {6: -0.147, 8: -0.246, 9: -0.807},
    "ttft_p50": {6: -0.139, 8: -0.209, 9: -0.481},
}
PAPER_EVICTION = -0.26
# Loads within SLO over the base's, by arm. Source: Chameleon Fig. 10.
RATIOS = {
    "default": ("slo_load_ratio", 12.9 / 8.7),
    "cache": ("cache_only_ratio", 1.2),
    "sched": ("sched_only_ratio", 1.1),
}
BOUND = ("parts", "main", "bound")


def against_base(bench: Bench, arm: Arm, setting: Setting, load: float, measure: str) -> tuple[float, ...]:
    """Return the change of a number against `base`, seed by seed."""
    ours, base = points(bench, [arm, BASE], setting, [load])
    return bench.changes(ours, base, measure)


def best(bench: Bench, knowing: str, setting: Setting, load: float, measure: str) -> float:
    """Return the change of the best that knows the future: one order for all seeds, as the best seed by seed would mostly be luck."""
    return min(median(against_base(bench, arm, setting, load, measure)) for arm in KNOWING[knowing])


def main_part(bench: Bench) -> None:
    """Fig. 10 and 12: P99 and P50 TTFT over loads, and loads within SLO, of the four systems."""
    loads = QUICK_LOADS if bench.is_quick else LOADS
    bench.play(points(bench, [*MAIN.values(), *itertools.chain(*KNOWING.values())], AMPLE, loads))
    for key, papers in PAPER.items():
        for load, paper in papers.items():
            place, measure = (f"{key}_change", str(load)), f"{key}_s"
            bench.figure(place, against_base(bench, DEFAULT, AMPLE, load, measure), paper)
            bench.note((*BOUND, *place), best(bench, "default", AMPLE, load, measure))
    within = {name: knees(bench, arm, loads) for name, arm in MAIN.items()}
    for name, (key, paper) in RATIOS.items():
        ratios = [
            [own / base for own, base in zip(found, within["base"], strict=True)]
            for found in (within[name], *(knees(bench, arm, loads) for arm in KNOWING[name]))
        ]
        bench.figure((key,), ratios[0], paper, False, "ratio")
        bench.note((*BOUND, key), max(map(median, ratios[1:])))
    bench.note(("parts", "main", "slo_s"), round(slo_s(AMPLE), 4))
    bench.note(("knees_per_s",), {name: [round(load, 3) for load in found] for name, found in within.items()})
    for (name, arm), load, key in itertools.product(MAIN.items(), loads, ("ttft_p99_s", "ttft_p50_s")):
        (point,) = points(bench, [arm], AMPLE, [load])
        values = [round(value, 4) for value in bench.values(point, key)]
        bench.note(("parts", "main", "curve", name, str(load), key), values)


def eviction_part(bench: Bench) -> None:
    """Fig. 14: all that serves by default, where memory is scarce."""
    bench.play(points(bench, [BASE, DEFAULT, *KNOWING["default"]], SCARCE, [EVICTION_LOAD]))
    bound = best(bench, "default", SCARCE, EVICTION_LOAD, "ttft_p99_s")
    bench.note(("parts", "eviction", "bound", f"default_at_{EVICTION_LOAD}"), bound)
    changes = against_base(bench, DEFAULT, SCARCE, EVICTION_LOAD, "ttft_p99_s")
    bench.figure(("parts", "eviction", f"at_{EVICTION_LOAD}", "default"), changes, PAPER_EVICTION)


TABLE = Table(
    "emulated-chameleon",
    "Chameleon on vLLM's scheduler",
    serve,
    {"main": main_part, "eviction": eviction_part},
    (SPAN_S, SPAN_S),
    "the part main, at 6, 8, 9 and 13 requests/s",
    seeds=3,
    quick_parts=("main",),
)
