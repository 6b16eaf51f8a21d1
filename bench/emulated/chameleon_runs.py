"""Runs of Chameleon's tables: a system in a setting, at so many requests a second, and the load within SLO."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.data import AZURE
from bench.emulated.adapters import AdapterMemory
from bench.emulated.assist import ColdStart, as_quick_as
from bench.emulated.node import Engine, Job
from bench.emulated.trace import play_on_node
from bench.measures import quantile
from bench.sim.core.calibration import A40
from bench.sim.core.guesses import Classes
from bench.sim.core.hardware import EPYC_9454, GB, AssistingHost, Gpu
from bench.sim.core.models import LLAMA_7B, Model
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import BLOCK_TOKENS, pool_blocks
from bench.sim.core.steps import StepCost
from bench.sim.core.tables import Workers, crossing
from bench.sim.core.traffic import Lengths, Pool, azure, poisson
from engine_bridge.policy.scheduling.mlq import Mlq, MlqSettings
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY, MakePolicy
from engine_bridge.policy.scheduling.sizes import WeightedSize

SLO_TIMES = 5.0
PAPER_KNEE = 8.7
ACCURACY = 0.8
# How a lane's order may differ from the one that serves, where who has waited for an eighth of a second goes by waiting time over length: later,
# or never; or never and nobody is ever overdue (Chameleon §4.2).
ORDERS_IN_LANES = {
    "mlq, aging 1 s": MlqSettings(aging_s=1.0),
    "mlq, smallest first": MlqSettings(aging_s=math.inf),
    "mlq, paper": MlqSettings(aging_s=math.inf, max_wait_s=math.inf),
}
# Where the SLO is not left between two of the loads, the next one is so much further. Chosen.
FURTHER = 1.2


@dataclass(frozen=True, slots=True)
class Arm:
    """One system. queue: a name in the registry, or in `ORDERS_IN_LANES`. eviction: which adapter goes first, "" for no cache.

    accuracy: of the predictor of lengths, None for the live one. rule: for the number of lanes. is_output_only: sizes are the predicted output
    alone. has_forecast: adapters are brought to host memory by the histogram of their requests. loads_are_free: an adapter is in its slot as soon as
    the slot is its own. cold_start: what becomes of steps whose adapters are on their way.
    """

    queue: str = "fcfs"
    eviction: str = ""
    accuracy: float | None = ACCURACY
    rule: str = "knee"
    is_output_only: bool = False
    has_forecast: bool = False
    loads_are_free: bool = False
    cold_start: ColdStart = "step waits"

    @property
    def made_by(self) -> str:
        more = " + histogram" * self.has_forecast + ", sizes by output" * self.is_output_only
        more += ", loads at no cost" * self.loads_are_free
        more += f", {self.cold_start}" * (self.cold_start != "step waits")
        more += f", lanes by {self.rule}" * (self.rule != "knee")
        if self.accuracy is None:
            more += ", OnlineLengths"
        elif self.accuracy != ACCURACY:
            more += f", accuracy {self.accuracy:.0%}"
        return f"{self.queue} + {self.eviction or 'no cache'}{more}"


BASE, CACHE = Arm(), Arm(eviction="chameleon")
SCHED, FULL = Arm("mlq"), Arm("mlq", "chameleon")
DEFAULT = Arm(DEFAULT_POLICY, "adaptive", cold_start="host helps")
MAIN = {"base": BASE, "cache": CACHE, "sched": SCHED, "full": FULL, "default": DEFAULT}
# What knows the future: the lengths of answers, and for a cache every next use, so that no request ever waits for a load. The slots are the engine's,
# and as many as ours has. No order is known to be the best, so of these the one counts that is best in hindsight, for each figure apart.
ORDERS = ("fcfs", "sjf", "bounded")
KNOWING = {
    "cache": (Arm(loads_are_free=True),),
    "sched": tuple(Arm(order, accuracy=1.0) for order in ORDERS),
    "full": tuple(Arm(order, accuracy=1.0, loads_are_free=True) for order in ORDERS),
}
KNOWING["default"] = KNOWING["full"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all arms share. num_slots: for adapters that steps compute with. length_share: that lengths are multiplied by.

    host_bytes: of host memory for adapters, None: for all of them. disk_bytes_per_s: on the way there. has_timers: each adapter is asked for by
    a timer of its own.
    """

    gpu: Gpu = A40
    model: Model = LLAMA_7B
    num_adapters: int = 100
    num_slots: int = 32
    length_share: float = 1.0
    trace: Path = AZURE
    span_s: float = 300.0
    warm_up_s: float = 60.0
    host_bytes: int | None = None
    disk_bytes_per_s: float = 0.0
    has_timers: bool = False

    @property
    def lengths(self) -> Lengths:
        return _lengths(self.trace, self.model.max_tokens, self.length_share)

    @property
    def pool(self) -> Pool:
        return Pool(self.num_adapters)

    @property
    def cost(self) -> StepCost:
        return StepCost(self.gpu, self.model, assistant=self.host)

    @property
    def host(self) -> AssistingHost:
        """The paper's, as it helps with the largest adapters."""
        prompt_tokens = round(statistics.fmean(prompt for prompt, _ in self.lengths.pairs))
        return as_quick_as(self.gpu, EPYC_9454, self.model, max(self.pool.ranks), prompt_tokens)

    @property
    def engine(self) -> Engine:
        """What the slots leave of the memory is KV's. No prefix is shared, so none is kept."""
        model = self.model
        slot_blocks = model.lora_bytes(max(self.pool.ranks)) / (BLOCK_TOKENS * model.kv_bytes_per_token)
        num_blocks = pool_blocks(self.cost) - math.ceil(self.num_slots * slot_blocks)
        return Engine(num_blocks, max_tokens=model.max_tokens, has_prefix_cache=False)

    @property
    def made_by(self) -> str:
        memory = f"{self.gpu.memory_bytes // GB} GB, {self.num_slots} slots, {self.engine.num_blocks} blocks for KV"
        return f"StepCost({self.gpu.name}, {self.model.name}), {memory}, lengths {self.lengths.name}"

    def arrivals(self, per_s: float, seed: int) -> list[Arrival]:
        found = poisson(self.lengths, self.pool, per_s, self.span_s, seed)
        return _by_timers(found, self.num_adapters, per_s, seed) if self.has_timers else found


@cache
def _lengths(trace: Path, max_tokens: int, share: float) -> Lengths:
    fitted = azure(trace).fitted(max_tokens)
    return fitted if share == 1.0 else fitted.scaled(share)


def _by_timers(requests: Sequence[Arrival], num_adapters: int, per_s: float, seed: int) -> list[Arrival]:
    """The same lengths, but each adapter comes by its own timer, give or take a tenth: periods differ by up to four times."""
    rng = random.Random(f"timers {seed}")
    weights = [2 ** rng.uniform(-1, 1) for _ in range(num_adapters)]
    periods_s = [sum(weights) / (weight * per_s) for weight in weights]
    span_s = requests[-1].at_s
    times = []
    for adapter_id, period_s in enumerate(periods_s):
        at_s = rng.uniform(0, period_s)
        while at_s < span_s:
            times.append((at_s, adapter_id))
            at_s += period_s * rng.uniform(0.9, 1.1)
    return [
        replace(request, at_s=at_s, adapter_id=adapter_id)
        for request, (at_s, adapter_id) in zip(requests, sorted(times), strict=False)
    ]


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
    """Of requests that came after the warm-up: TTFT in seconds, of all and of those of a rank and of the longest tenth; where adapters were.

    hit_share: found on the device, disk_share: on disk alone. copied_share: of KV's blocks, the most that copies of adapters ever had.
    link_bytes: of adapters, in the whole run. num_taken_back: copies that KV took. num_predicted: forecasts that a request is near.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p99_by_rank_s: dict[int, float]
    ttft_p99_long_s: float
    tpot_p99_s: float
    num_requests: int
    hit_share: float
    slot_share: float
    disk_share: float
    copied_share: float
    link_bytes: int
    num_taken_back: int
    num_predicted: int
    num_squashed: int
    num_preempted: int
    num_steps: int
    wall_s: float


def run(point: Point) -> Outcome:
    """Say what came of it, on stderr, too."""
    arm, setting = point.arm, point.setting
    played = play_on_node(
        _policy(arm.queue),
        setting.arrivals(point.per_s, point.seed),
        setting.cost,
        setting.engine,
        None if arm.accuracy is None else _guesser(setting, arm.accuracy, point.seed),
        sizes=WeightedSize(0.0, 1.0, 0.0) if arm.is_output_only else None,
        ranks=setting.pool.rank_of,
        lane_rule=arm.rule,
        memory=AdapterMemory(
            setting.num_slots,
            arm.eviction or None,
            arm.cold_start,
            in_kv=bool(arm.eviction),
            host_bytes=setting.host_bytes,
            disk_bytes_per_s=setting.disk_bytes_per_s,
            has_forecast=arm.has_forecast,
            loads_are_free=arm.loads_are_free,
        ),
    )
    jobs = [job for job in played.jobs if job.arrival.at_s >= setting.warm_up_s]
    found = _outcome(jobs, played.counts, setting.engine.num_blocks, played.num_preempted)
    found = replace(found, num_steps=played.num_steps, wall_s=played.wall_s)
    print(
        f"  {arm.made_by} at {point.per_s:.3g}/s, seed {point.seed}: P99 TTFT {found.ttft_p99_s:.3f} s, {played.wall_s:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return found


def _policy(queue: str) -> str | MakePolicy:
    settings = ORDERS_IN_LANES.get(queue)
    return queue if settings is None else lambda num_tokens: Mlq(num_tokens, settings)


def _guesser(setting: Setting, accuracy: float, seed: int) -> Classes:
    return Classes([answer for _, answer in setting.lengths.pairs], accuracy, seed)


def _outcome(jobs: Sequence[Job], counts: dict[str, int], num_blocks: int, num_preempted: int) -> Outcome:
    ttft_s = [job.ttft_s for job in jobs]
    long = quantile([float(job.arrival.num_answer_tokens) for job in jobs], 0.9)

    def share(*places: str) -> float:
        return statistics.fmean(job.found_adapter in places for job in jobs)

    return Outcome(
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p99_s=quantile(ttft_s, 0.99),
        ttft_p99_by_rank_s={
            rank: quantile([job.ttft_s for job in jobs if job.rank == rank], 0.99)
            for rank in sorted({job.rank for job in jobs})
        },
        ttft_p99_long_s=quantile([job.ttft_s for job in jobs if job.arrival.num_answer_tokens >= long], 0.99),
        tpot_p99_s=quantile([job.tpot_s for job in jobs if not math.isnan(job.tpot_s)], 0.99),
        num_requests=len(jobs),
        hit_share=share("slot", "cached"),
        slot_share=share("slot"),
        disk_share=share("disk"),
        copied_share=counts.get("most_copied_blocks", 0) / num_blocks,
        link_bytes=counts.get("link_bytes", 0),
        num_taken_back=counts.get("evicted:cached:kv", 0),
        num_predicted=counts.get("prefetched", 0),
        num_squashed=counts.get("squashed", 0),
        num_preempted=num_preempted,
        num_steps=0,
        wall_s=0.0,
    )


# -- loads within SLO --------------------------------------------------------------------------------------------------


def slo_s(setting: Setting, num: int = 2000) -> float:
    """Five times the mean TTFT of requests that come one at a time: an adapter's load and the prompt. Of `base`, whatever the arm."""
    cost, ranks = setting.cost, setting.pool.rank_of
    link_bytes_per_s = setting.gpu.achieved_link_bytes_per_s
    pairs = random.Random("slo").choices(setting.lengths.pairs, k=num)
    adapters = setting.pool.dealt(num, random.Random("slo adapters"))
    ttfts = [
        cost.prefill_s(prompt, ranks[a]) + setting.model.lora_bytes(ranks[a]) / link_bytes_per_s
        for (prompt, _), a in zip(pairs, adapters, strict=True)
    ]
    return SLO_TIMES * statistics.fmean(ttfts)


@dataclass(slots=True)
class Bench:
    """What all parts share: runs that were made are not made again."""

    workers: Workers
    seeds: tuple[int, ...]
    outcomes: dict[tuple[Arm, Setting, float, int], Outcome]

    def run(self, arms: Iterable[Arm], setting: Setting, loads: Sequence[float]) -> None:
        """Have the outcomes of all these."""
        wanted = [
            (arm, setting, load, seed) for arm, load, seed in itertools.product(arms, loads, self.seeds)
        ]
        missing = [key for key in dict.fromkeys(wanted) if key not in self.outcomes]
        points = [Point(*key) for key in missing]
        self.outcomes.update(zip(missing, self.workers.map(run, points), strict=True))

    def of(self, arm: Arm, setting: Setting, load: float) -> list[Outcome]:
        return [self.outcomes[arm, setting, load, seed] for seed in self.seeds]

    def knees(self, arm: Arm, setting: Setting, loads: Sequence[float]) -> tuple[float, ...]:
        """By seed, the load at which P99 TTFT leaves the SLO: between two of these, or further until it does."""
        limit_s, tried = slo_s(setting), list(loads)
        while True:
            self.run([arm], setting, tried)
            curves = list(
                zip(*([o.ttft_p99_s for o in self.of(arm, setting, load)] for load in tried), strict=True)
            )
            found = [crossing(tried, p99s, limit_s) for p99s in curves]
            if all(load is not None for load in found):
                return tuple(load for load in found if load is not None)
            is_too_high = any(p99s[0] > limit_s for p99s in curves)
            tried = [tried[0] / FURTHER, *tried] if is_too_high else [*tried, tried[-1] * FURTHER]

    def length_share(self, setting: Setting) -> float:
        """At which `base` leaves its SLO at the paper's load, to 1%."""
        low, high = 0.1, 0.4
        while high / low > 1.01:
            share = math.sqrt(low * high)
            own = replace(setting, length_share=share)
            points = [Point(BASE, own, PAPER_KNEE, seed) for seed in self.seeds]
            p99_s = statistics.median(outcome.ttft_p99_s for outcome in self.workers.map(run, points))
            low, high = (share, high) if p99_s <= slo_s(own) else (low, share)
        return round(math.sqrt(low * high), 3)
