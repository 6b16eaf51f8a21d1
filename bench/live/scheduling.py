"""Who starts next: our default order against first-come-first-served, at low, medium and high load; and what tight memory costs.

    python -m bench.live.scheduling [--quick] [--only loads|low|memory|queue|predictors]

Engines, each in a process of its own, all alive at once and taking turns, one busy at a time: our node, whose policy is exchanged between plays; the
peer, vLLM's scheduler (first come, first served; or its priority policy) with its LRU of adapters and loading inside steps, on our LoRA wrapper. Same
model (`bench.live.models`), KV blocks, sequences and requests; greedy, float32.

`loads`: lengths of Azure's conversation trace (2023) divided by LENGTH_SCALE, prompt and answer of one request together; Poisson arrivals at shares
(LOADS) of the load at which the peer's P99 TTFT leaves the SLO: the paper's 6, 8 and 9 of 8.7 requests/s. 100 adapters of ranks 8 to 128, drawn by
Chameleon's law; a fifth of their bytes fits in host memory. Adapters that run take the memory of ten slots of rank 128, which in the peer are ten
adapters and in ours more, as most are smaller (`many fcfs`: the peer with 26 slots and their memory). Arrivals are the same for all arms, whose order
is random in each repeat; before each play short requests of the same law fill the caches. Predictor and lanes, where the order has any, were
fitted to HISTORY other requests of the trace; the predictor is not told the bound of an answer. `priority`: vLLM's, where the client gives each
request its quartile of prompt lengths. Changes are fractions against the peer's FCFS: -0.8 is 80% less. TTFT counts from when a request was due.
`worst_class_change`: requests by quartile of prompt and answer tokens; mean TTFT of the class that fares worst, at high load, against the peer.
`slo_load_ratio`: the highest load at which P99 TTFT is within the SLO, ours over the peer's; of the loads of the sweep, each arm's until it is
beyond, by a straight line between the highest one within and the next one. The SLO is Chameleon's (§5.1): SLO_TIMES the mean time of a request,
arrival to end, in the peer at IDLE of its capacity. Capacity (`capacity_per_s`): requests per second of the peer when all are there at once.
At low load each arm is played LOW_ROUNDS times, in turn: a machine that grows slower meets all of them. `intervals`: of the changes there, at 95%,
by rounds. `low` is that load alone, at LOW_SHARE of capacity.
`accuracy`: P99 TTFT at high load with an oracle that is right so often, over that with a perfect one.

`tight_memory_*`: 128 device blocks, no adapters, prompts of 32 to 128 tokens and answers of 256 to 512, faster than they can be answered; ours
(the default order, cost-aware) against stock vLLM, which recomputes, and against our node made to do as vLLM does but to swap always; beside them
our order without a copy of KV, and AdaptiveLLM's order of starting (`fair`). `weighted_turnaround`: (end - arrival) / (end - start), mean over
requests; it falls also when all start at once and are then kept waiting, so mean turnaround stands beside it.

`decision_share_10k`: with 10,000 requests queued, our time for deciding in a step over that step's time.
`step_error`, `swap_error`: of predictions in service, see `bench.live.predictors`; `profile_step_error`, `profile_swap_error`: mean relative errors
on held-out points of `overture profile`'s tables, which learn no more. `length_accuracy`: `bench.sim.length`.

The last line is JSON.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.intervals import quantile_ratio_interval
from bench.live import predictors
from bench.live.adapter_law import Adapters
from bench.live.models import ModelShape, model_folder
from bench.live.peers.adapters import AdapterSettings, Ask
from bench.live.peers.client import QUIET_OPENMP, Worker
from bench.live.report import Progress, figures, last_line, options, report
from bench.live.scheduling_traffic import (
    HISTORY,
    LENGTH_SCALE,
    TIGHT_RATE_PER_S,
    Traffic,
    lengths_of_trace,
    tight_asks,
)
from bench.measures import quantile
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY

MAX_MODEL_LEN, NUM_KV_BLOCKS, MAX_NUM_SEQS = 2048, 256, 32
NUM_SLOTS = 10
# Adapters that the peer may hold in host memory, by count: as many as have our bytes on average under this law (bench.live.adapters works it out).
PEER_HOST_ADAPTERS = 27
# Shares of the peer's load within SLO. Source: Chameleon §5.2, which calls 6, 8 and 9 requests/s low, medium and high; S-LoRA's is 8.7.
LOADS = {"low": 6 / 8.7, "medium": 8 / 8.7, "high": 9 / 8.7}
# Of arrivals at low load, where no queue grows. In all as long as two plays at high load.
LOW_ROUNDS, LOW_SECONDS = 5, 24.0
# Of capacity, where the load within SLO is not measured first: it was 1.10 (bench/RESULTS.md).
LOW_SHARE = 1.1 * LOADS["low"]
IDLE = 0.3
SLO_TIMES = 5.0
NUM_CLASSES = 4
PARTS = ("loads", "low", "memory", "queue", "predictors")
AIMS = {
    "high ttft_p99_change": "aim ≤ -80.7%",
    "high ttft_p50_change": "aim ≤ -48.1%",
    "slo_load_ratio": "aim ≥ 1.5",
    "worst_class_change": "aim ≤ 0.1",
    "tight_memory_throughput_vs_recompute": "aim ≥ 1.4",
    "weighted_turnaround_change": "aim ≤ -0.4",
    "step_error": "aim < 0.08 live, 0.02 emulated",
    "swap_error": "aim < 0.08 live, 0.04 emulated",
    "decision_share_10k": "aim ≤ 0.01",
}

OURS, PEER = DEFAULT_POLICY, "peer fcfs"
"""The arms that claims are made of; the others are shown beside them."""
MANY_SLOTS = "many fcfs"
"""The peer with a slot for each sequence, in 2.6 times the memory for slots."""

# Tight memory: answers that grow far beyond what the prompts let expect.
TIGHT_BLOCKS, TIGHT_KV_HOST_BYTES = 128, 1 << 30
TIGHT_OURS, TIGHT_PEER, TIGHT_SWAP, TIGHT_FAIR = f"{OURS} cheaper", "stock", "fcfs swap", "fair cheaper"
TIGHT_ARMS = (TIGHT_OURS, f"{OURS} recompute", TIGHT_FAIR, TIGHT_SWAP, TIGHT_PEER)

QUEUED, QUEUED_SECONDS = 10_000, 8.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; as it is, by the whole bench.

    high_repeats: of the plays at high load, from which most claims come. seconds: of arrivals in each play: long enough for a queue that grows to
    show; low_seconds: at low load. sweep: shares of capacity, ascending.
    """

    high_repeats: int = 2
    low_rounds: int = LOW_ROUNDS
    low_seconds: float = LOW_SECONDS
    seconds: float = 60
    arms: tuple[str, ...] = (OURS, PEER, "peer priority", MANY_SLOTS)
    sweep: tuple[float, ...] = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    accuracies: tuple[float, ...] = (1.0, 0.8, 0.6)
    accuracy_repeats: int = 1
    tight_arms: tuple[str, ...] = TIGHT_ARMS
    tight_requests: int = 64
    tight_repeats: int = 1
    profile_seconds: int = 120
    predicted_seconds: float = 45
    predicted_tight: int = 48


QUICK = Plan(
    high_repeats=1,
    low_rounds=1,
    low_seconds=6,
    seconds=6,
    arms=(OURS, PEER),
    sweep=(0.8, 1.6),
    accuracies=(),
    accuracy_repeats=0,
    tight_arms=(TIGHT_OURS, TIGHT_SWAP, TIGHT_PEER),
    tight_requests=6,
    profile_seconds=30,
    predicted_seconds=10,
    predicted_tight=8,
)


# -- what comes of it --------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What became of all requests of one arm at one load."""

    ttft_s: list[float] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)
    """The same by play."""
    tpot_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    num_tokens: int = 0
    play_s: float = 0.0

    def add(self, asks: Sequence[Ask], answers: Sequence[dict[str, Any]]) -> None:
        self.play_s += max(answer["token_s"][-1] for answer in answers)
        self.rounds.append([answer["ttft_s"] for answer in answers])
        for ask, answer in zip(asks, answers, strict=True):
            assert len(answer["token_ids"]) == ask.max_tokens, "an answer is not whole"
            self.num_tokens += ask.max_tokens
            self.ttft_s.append(answer["ttft_s"])
            self.sizes.append(len(ask.prompt) + ask.max_tokens)
            times = answer["token_s"]
            self.e2e_s.append(times[-1] - ask.at_s)
            if len(times) > 1:
                self.tpot_s.append((times[-1] - times[0]) / (len(times) - 1))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.play_s

    def as_dict(self) -> dict[str, Any]:
        return {
            "ttft_p50_ms": ms(quantile(self.ttft_s, 0.5)),
            "ttft_p99_ms": ms(quantile(self.ttft_s, 0.99)),
            "ttft_mean_ms": ms(statistics.mean(self.ttft_s)),
            "tpot_p50_ms": ms(quantile(self.tpot_s, 0.5)),
            "tpot_p99_ms": ms(quantile(self.tpot_s, 0.99)),
            "e2e_mean_ms": ms(statistics.mean(self.e2e_s)),
            "num_requests": len(self.ttft_s),
            "tokens_per_s": round(self.tokens_per_s, 1),
        }

    def class_means_s(self) -> list[float]:
        """Mean TTFT by quartile of size. Arms have the same requests, so the quartiles are the same."""
        limits = [quantile(self.sizes, place / NUM_CLASSES) for place in range(1, NUM_CLASSES)]
        classes: list[list[float]] = [[] for _ in range(NUM_CLASSES)]
        for size, ttft_s in zip(self.sizes, self.ttft_s, strict=True):
            classes[sum(size > limit for limit in limits)].append(ttft_s)
        return [statistics.mean(found) for found in classes]


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def change(ours: float, other: float) -> float:
    return round(ours / other - 1, 3)


# -- the bench ---------------------------------------------------------------------------------------------------------


class Bench(Progress):
    """One run over live workers."""

    def __init__(self, plan: Plan, traffic: Traffic) -> None:
        super().__init__()
        self.plan, self.traffic = plan, traffic
        self.workers: dict[str, Worker] = {}
        self.capacity_per_s = self.slo_s = 0.0
        self.seen: dict[tuple[str, str], Seen] = defaultdict(Seen)
        self.swept: dict[tuple[float, str], Seen] = defaultdict(Seen)
        self.accuracy: dict[float, Seen] = defaultdict(Seen)
        self.tight: dict[str, Tight] = defaultdict(Tight)
        self.counts: dict[str, Any] = {}

    def play(
        self, arm: str, asks: Sequence[Ask], rate_per_s: float, accuracy: float | None = None
    ) -> list[dict[str, Any]]:
        """The same requests for any arm, from the same start: caches of adapters that other requests have filled."""
        kind, _, policy = arm.rpartition(" ")
        worker = self.workers[kind or "ours"]
        worker.call("empty")
        worker.call(
            "play", requests=[asdict(ask) for ask in self.traffic.warm_up(len(asks))], one_by_one=True
        )
        if kind:
            worker.call("use", policy=policy)
        else:
            worker.call(
                "use",
                policy=policy,
                history=self.traffic.history,
                rate_per_s=rate_per_s,
                accuracy=accuracy,
            )
        answers: list[dict[str, Any]] = worker.call("play", requests=[asdict(ask) for ask in asks])
        if not kind:
            self.counts[arm] = worker.call("counts")["counts"]
        return answers

    def find_capacity(self, num_requests: int) -> None:
        """Requests per second of the peer when all are there at once."""
        asks = self.traffic.burst(num_requests, "capacity")
        answers = self.play(PEER, asks, 1.0)
        self.capacity_per_s = num_requests / max(answer["token_s"][-1] for answer in answers)
        self.say(f"the peer answers {self.capacity_per_s:.2f} requests/s when all are there at once")

    def find_slo(self) -> None:
        rate_per_s = IDLE * self.capacity_per_s
        asks = self.traffic.asks(rate_per_s, self.plan.seconds, "idle")
        self.seen["idle", PEER].add(asks, self.play(PEER, asks, rate_per_s))
        self.slo_s = SLO_TIMES * statistics.mean(self.seen["idle", PEER].e2e_s)
        self.say(f"idle, {PEER}: {self.seen['idle', PEER].as_dict()}; SLO {self.slo_s:.1f} s")

    def measure_loads(self, loads_per_s: dict[str, float]) -> None:
        repeats = {"low": self.plan.low_rounds, "high": self.plan.high_repeats}
        for load, rate_per_s in loads_per_s.items():
            seconds = self.plan.low_seconds if load == "low" else self.plan.seconds
            for repeat in range(repeats.get(load, 1)):
                asks = self.traffic.asks(rate_per_s, seconds, load, repeat)
                for arm in random.Random(f"{load} {repeat}").sample(self.plan.arms, len(self.plan.arms)):
                    self.seen[load, arm].add(asks, self.play(arm, asks, rate_per_s))
                    self.say(
                        f"{load} ({rate_per_s:.1f}/s), {arm}: {self.seen[load, arm].as_dict()} {self.counts.get(arm, '')}"
                    )

    def measure_sweep(self) -> None:
        """More and more load for each, until it is beyond the SLO."""
        arms = [OURS, PEER]
        for share in self.plan.sweep:
            rate_per_s = share * self.capacity_per_s
            asks = self.traffic.asks(rate_per_s, self.plan.seconds, "sweep", share)
            for arm in random.Random(f"sweep {share}").sample(arms, len(arms)):
                self.swept[share, arm].add(asks, self.play(arm, asks, rate_per_s))
                self.say(f"{share} of capacity, {arm}: {self.swept[share, arm].as_dict()}")
                if not self.is_within_slo(share, arm):
                    arms.remove(arm)

    def measure_accuracies(self, rate_per_s: float) -> None:
        for repeat in range(self.plan.accuracy_repeats):
            asks = self.traffic.asks(rate_per_s, self.plan.seconds, "accuracy", repeat)
            for accuracy in random.Random(repeat).sample(self.plan.accuracies, len(self.plan.accuracies)):
                self.accuracy[accuracy].add(asks, self.play(OURS, asks, rate_per_s, accuracy))
                self.say(f"right in {accuracy:.0%}: {self.accuracy[accuracy].as_dict()}")

    def measure_tight(self) -> None:
        for repeat in range(self.plan.tight_repeats):
            asks = tight_asks(self.plan.tight_requests, repeat)
            for arm in random.Random(f"tight {repeat}").sample(
                self.plan.tight_arms, len(self.plan.tight_arms)
            ):
                self.tight[arm].add_tight(asks, *self.play_tight(arm, asks))
                self.say(f"tight memory, {arm}: {self.tight[arm].as_dict()}")

    def play_tight(self, arm: str, asks: Sequence[Ask]) -> tuple[list[dict[str, Any]], Counter[str]]:
        """(answers, preemptions: all, and by the way in which requests came back)"""
        worker = self.workers["tight stock" if arm == TIGHT_PEER else "tight ours"]
        worker.call("empty")
        if arm == TIGHT_PEER:
            worker.call("use", policy="fcfs")
        else:
            policy, way = arm.split()
            history = [[len(ask.prompt), ask.max_tokens, None] for ask in tight_asks(HISTORY, "history")]
            worker.call("use", policy=policy, history=history, rate_per_s=TIGHT_RATE_PER_S, way=way)
        before = worker.call("preemptions")
        answers = worker.call("play", requests=[asdict(ask) for ask in asks])
        return answers, Counter(worker.call("preemptions")) - Counter(before)

    # -- claims ------------------------------------------------------------------------------------------------------

    def load_intervals(self, load: str) -> dict[str, tuple[float, float] | None]:
        """Of changes, at 95%; None where each arm was played once."""
        ours, peer = self.seen[load, OURS].rounds, self.seen[load, PEER].rounds
        found = {}
        for name, share in (("ttft_p50_change", 0.5), ("ttft_p99_change", 0.99)):
            ratios = quantile_ratio_interval(ours, peer, share)
            found[name] = None if ratios is None else (round(ratios[0] - 1, 3), round(ratios[1] - 1, 3))
        return found

    def load_result(self, load: str) -> dict[str, float]:
        ours, peer = self.seen[load, OURS], self.seen[load, PEER]
        return {
            "ttft_p99_change": change(quantile(ours.ttft_s, 0.99), quantile(peer.ttft_s, 0.99)),
            "ttft_p50_change": change(quantile(ours.ttft_s, 0.5), quantile(peer.ttft_s, 0.5)),
            "ttft_mean_change": change(statistics.mean(ours.ttft_s), statistics.mean(peer.ttft_s)),
            "tpot_p50_change": change(quantile(ours.tpot_s, 0.5), quantile(peer.tpot_s, 0.5)),
            "tokens_per_s_change": change(ours.tokens_per_s, peer.tokens_per_s),
        }

    def worst_class_change(self, load: str) -> float:
        pairs = zip(self.seen[load, OURS].class_means_s(), self.seen[load, PEER].class_means_s(), strict=True)
        return max(change(ours, peer) for ours, peer in pairs)

    def p99_s(self, share: float, arm: str) -> float:
        return quantile(self.swept[share, arm].ttft_s, 0.99)

    def is_within_slo(self, share: float, arm: str) -> bool:
        return self.p99_s(share, arm) <= self.slo_s

    def load_within_slo(self, arm: str) -> float | None:
        """As a share of capacity, between the last load within and the first beyond. None: none is within; the highest if all are."""
        shares = sorted(share for share, its_arm in self.swept if its_arm == arm)
        within = [share for share in shares if self.is_within_slo(share, arm)]
        if len(within) == len(shares):
            return shares[-1]
        if not within:
            return None
        last, beyond = within[-1], shares[-1]
        last_s, beyond_s = self.p99_s(last, arm), self.p99_s(beyond, arm)
        return last + (beyond - last) * (self.slo_s - last_s) / (beyond_s - last_s)

    def slo_load_ratio(self) -> float | None:
        ours, peer = self.load_within_slo(OURS), self.load_within_slo(PEER)
        return round(ours / peer, 3) if ours and peer else None

    def tight_result(self) -> dict[str, float]:
        ours, peer, swap = (self.tight[arm] for arm in (TIGHT_OURS, TIGHT_PEER, TIGHT_SWAP))
        found = {
            "tight_memory_throughput_vs_recompute": round(ours.tokens_per_s / peer.tokens_per_s, 3),
            "tight_memory_throughput_vs_swap": round(ours.tokens_per_s / swap.tokens_per_s, 3),
            "weighted_turnaround_change": change(ours.weighted_turnaround, peer.weighted_turnaround),
            "turnaround_mean_change": change(ours.turnaround_mean_s, peer.turnaround_mean_s),
        }
        if TIGHT_FAIR in self.plan.tight_arms:
            fair = self.tight[TIGHT_FAIR]
            found |= {
                "fair_weighted_turnaround_change": change(fair.weighted_turnaround, peer.weighted_turnaround),
                "fair_turnaround_mean_change": change(fair.turnaround_mean_s, peer.turnaround_mean_s),
            }
        return found

    def accuracy_result(self) -> dict[str, float]:
        if not self.accuracy:
            return {}
        best = quantile(self.accuracy[1.0].ttft_s, 0.99)
        return {
            f"{share:.0%}": round(quantile(seen.ttft_s, 0.99) / best, 3)
            for share, seen in self.accuracy.items()
        }


@dataclass
class Tight(Seen):
    """What became of one arm's requests with tight memory."""

    preemptions: Counter[str] = field(default_factory=Counter)
    weighted: list[float] = field(default_factory=list)

    def add_tight(
        self, asks: Sequence[Ask], answers: Sequence[dict[str, Any]], preemptions: Counter[str]
    ) -> None:
        self.add(asks, answers)
        self.preemptions += preemptions
        for ask, answer in zip(asks, answers, strict=True):
            end_s = answer["token_s"][-1]
            # A request that starts in the step that was under way when it came has not waited.
            self.weighted.append((end_s - ask.at_s) / (end_s - max(answer["started_s"], ask.at_s)))

    @property
    def weighted_turnaround(self) -> float:
        return statistics.mean(self.weighted)

    @property
    def turnaround_mean_s(self) -> float:
        return statistics.mean(self.e2e_s)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "weighted_turnaround": round(self.weighted_turnaround, 3),
            "turnaround_mean_s": round(self.turnaround_mean_s, 2),
            "preemptions": dict(self.preemptions),
        }


def profile_errors(shape: ModelShape, seconds: int, folder: Path) -> dict[str, Any]:
    return last_line(
        *(str(Path(sys.executable).parent / "overture"), "profile", "--json", "--seconds", str(seconds)),
        *("--model", str(model_folder(shape)), "--dtype", shape.dtype, "--device", "cpu"),
        *("--data-dir", str(folder / "profile"), "--max-model-len", str(MAX_MODEL_LEN)),
        timeout_s=seconds + 180,
        env=QUIET_OPENMP,
    )


# -- engines and the report --------------------------------------------------------------------------------------------


def start_all(
    kinds: Sequence[str], settings: AdapterSettings, folder: Path, stack: ExitStack
) -> dict[str, Worker]:
    tight = replace(settings, adapters=[], num_blocks=TIGHT_BLOCKS)
    starts = {
        "ours": ("scheduling_ours", settings),
        "peer": ("adapters_peer", settings),
        "many": ("adapters_peer", replace(settings, max_loras=PEER_HOST_ADAPTERS - 1)),
        "tight ours": ("scheduling_ours", replace(tight, kv_host_bytes=TIGHT_KV_HOST_BYTES)),
        "tight stock": ("adapters_stock", tight),
    }
    workers = {name: stack.enter_context(Worker(*starts[name], folder, name)) for name in kinds}
    print({name: worker.wait_ready() for name, worker in workers.items()}, flush=True)
    return workers


def run(plan: Plan, parts: Sequence[str], is_quick: bool) -> None:
    shape = ModelShape()
    adapters = Adapters(shape)
    bench = Bench(plan, Traffic(lengths_of_trace(), adapters))
    result: dict[str, Any] = {}
    extra: dict[str, Any] = {"quick": is_quick, "length_scale": LENGTH_SCALE}
    with tempfile.TemporaryDirectory(prefix="overture-bench-") as name:
        folder = Path(name)
        settings = adapters.settings(
            folder,
            num_blocks=NUM_KV_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_loras=NUM_SLOTS,
            max_cpu_loras=PEER_HOST_ADAPTERS,
        )
        if {"loads", "low"}.intersection(parts):
            with ExitStack() as stack:
                kinds = ["ours", "peer", *(["many"] if MANY_SLOTS in plan.arms else [])]
                bench.workers = start_all(kinds, settings, folder, stack)
                bench.find_capacity(64)
                measure = measure_loads if "loads" in parts else measure_low
                measure(bench, result, extra)
        if "memory" in parts:
            with ExitStack() as stack:
                bench.workers = start_all(["tight ours", "tight stock"], settings, folder, stack)
                bench.measure_tight()
                result |= bench.tight_result()
                extra["tight_memory"] = {arm: seen.as_dict() for arm, seen in bench.tight.items()}
        if "queue" in parts:
            with ExitStack() as stack:
                bench.workers = start_all(["ours"], settings, folder, stack)
                found = bench.workers["ours"].call("decision_share", num=QUEUED, seconds=QUEUED_SECONDS)
                bench.say(f"{QUEUED} queued: {found}")
                result["decision_share_10k"] = found.pop("share")
                extra["queue"] = found
        if "predictors" in parts:
            bench.say("overture profile")
            profile = profile_errors(shape, plan.profile_seconds, folder)
            served = predictors.measure(
                folder / "profile/profiles",
                folder,
                plan.predicted_seconds,
                plan.predicted_tight,
                bench.say,
            )
            result |= {name: served.pop(name) for name in ("step_error", "swap_error")} | {
                "profile_step_error": round(profile["steps"]["candidates"][0]["table_error"], 4),
                "profile_swap_error": round(profile["copies"]["swap_error"], 4),
            }
            extra |= served | {"profile": profile}
            bench.say("bench.sim.length")
            quick = ["--quick"] if is_quick else []
            lengths = last_line(
                sys.executable, "-m", "bench.sim.length", "--data", "turns", *quick, timeout_s=300
            )
            extra["length"] = lengths
            (live,) = (run for run in lengths["runs"] if run["arm"] == "ours + hints")
            result["length_accuracy"] = live["accuracy"]
    report("Scheduling", rows_of(bench, result), result | extra | {"elapsed_s": round(bench.elapsed_s)})


def measure_low(bench: Bench, result: dict[str, Any], extra: dict[str, Any]) -> None:
    rate_per_s = LOW_SHARE * bench.capacity_per_s
    bench.measure_loads({"low": rate_per_s})
    result["loads"] = {"low": bench.load_result("low")}
    extra |= {
        "intervals": {"low": bench.load_intervals("low")},
        "capacity_per_s": round(bench.capacity_per_s, 3),
        "loads_per_s": {"low": round(rate_per_s, 3)},
        "arms": {f"low, {arm}": bench.seen["low", arm].as_dict() for arm in bench.plan.arms},
    }


def measure_loads(bench: Bench, result: dict[str, Any], extra: dict[str, Any]) -> None:
    bench.find_slo()
    bench.measure_sweep()
    within = bench.load_within_slo(PEER)
    if within is None:
        bench.say("the peer is within its SLO at none of the loads: capacity stands for its load within SLO")
    loads_per_s = {load: share * (within or 1.0) * bench.capacity_per_s for load, share in LOADS.items()}
    bench.measure_loads(loads_per_s)
    bench.measure_accuracies(loads_per_s["high"])
    result |= {
        "loads": {load: bench.load_result(load) for load in LOADS},
        "slo_load_ratio": bench.slo_load_ratio(),
        "worst_class_change": bench.worst_class_change("high"),
    }
    extra |= {
        "intervals": {"low": bench.load_intervals("low")},
        "capacity_per_s": round(bench.capacity_per_s, 3),
        "slo_ms": ms(bench.slo_s),
        "load_within_slo": {arm: bench.load_within_slo(arm) for arm in (OURS, PEER)},
        "loads_per_s": {load: round(per_s, 3) for load, per_s in loads_per_s.items()},
        "arms": {
            f"{load}, {arm}": seen.as_dict()
            for (load, arm), seen in bench.seen.items()
            if load in ("idle", *LOADS)
        },
        "sweep": {f"{share}, {arm}": seen.as_dict() for (share, arm), seen in bench.swept.items()},
        "accuracy": bench.accuracy_result(),
        "class_means_ms": {
            arm: [ms(mean) for mean in bench.seen["high", arm].class_means_s()] for arm in bench.plan.arms
        },
    }


def rows_of(bench: Bench, result: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for (load, arm), seen in bench.seen.items():
        found = seen.as_dict()
        rows.append(
            (
                f"{load}, {arm}",
                f"TTFT p50 {found['ttft_p50_ms']:.0f}, p99 {found['ttft_p99_ms']:.0f} ms, TPOT p50 {found['tpot_p50_ms']:.0f} ms",
                f"{found['num_requests']} requests",
            )
        )
    rows += [(f"tight memory, {arm}", str(seen.as_dict()), "") for arm, seen in bench.tight.items()]
    for name, value in result.items():
        if name == "loads":
            rows += [
                (f"{load}: {key}", f"{change:+.1%}", AIMS.get(f"{load} {key}", ""))
                for load, changes in value.items()
                for key, change in changes.items()
            ]
        else:
            rows += figures({name: value}, AIMS)
    return rows


def main() -> None:
    parser = options(__doc__, quick="within eight minutes")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts alone")
    args = parser.parse_args()
    run(QUICK if args.quick else Plan(), args.only or PARTS, args.quick)


if __name__ == "__main__":
    main()
