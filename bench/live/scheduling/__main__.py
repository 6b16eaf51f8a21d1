"""Who starts next: our default order against first-come-first-served, at low, medium and high load; and what tight memory costs.

    python -m bench.live.scheduling [--quick] [--only loads|low|memory|queue|predictors]

Engines, each in a process of its own, both alive at once and taking turns, one busy at a time: our node, whose policy is exchanged between plays; the
peer, vLLM's scheduler (first come, first served) with its LRU of adapters and loading inside steps, on our LoRA wrapper. Same model
(`bench.live.shared.models`), KV blocks, sequences and requests; greedy, float32.

`loads`: lengths of Azure's conversation trace (2023) divided by LENGTH_SCALE, prompt and answer of one request together; Poisson arrivals at shares
(LOADS) of the load at which the peer's P99 TTFT leaves the SLO: the paper's 6, 8 and 9 of 8.7 requests/s. 100 adapters of ranks 8 to 128, drawn by
Chameleon's law; a fifth of their bytes fits in host memory. Adapters that run take the memory of ten slots of rank 128, which in the peer are ten
adapters and in ours more, as most are smaller. Arrivals are the same for both, whose order is random in each repeat; before each play short requests
of the same law fill the caches. Predictor and lanes, where the order has any, were fitted to HISTORY other requests of the trace; the predictor is
not told the bound of an answer. Changes are fractions against the peer: -0.8 is 80% less. TTFT counts from when a request was due.
`worst_class_change`: requests by quartile of prompt and answer tokens; mean TTFT of the class that fares worst, at high load, against the peer.
`slo_load_ratio`: the highest load at which P99 TTFT is within the SLO, ours over the peer's; of the loads of the sweep, each arm's until it is
beyond, by a straight line between the highest one within and the next one. The SLO is Chameleon's (§5.1): SLO_TIMES the mean time of a request,
arrival to end, in the peer at IDLE of its capacity. Capacity (`capacity_per_s`): requests per second of the peer when all are there at once.
At low load each arm is played several times, in turn: a machine that grows slower meets both. `low` is that load alone, at LOW_SHARE of capacity.

`tight_memory_*`: 128 device blocks, no adapters, prompts of 32 to 128 tokens and answers of 256 to 512, faster than they can be answered; ours
(the default order, cost-aware) against stock vLLM, which recomputes, and against our node made to do as vLLM does but to swap always; beside them
AdaptiveLLM's order of starting (`fair`). `weighted_turnaround`: (end - arrival) / (end - start), mean over requests; it falls also when all start at
once and are then kept waiting, so mean turnaround stands beside it.

`decision_share_10k`: with 10,000 requests queued, our time for deciding in a step over that step's time.
`step_error`, `swap_error`: of predictions in service, see `bench.live.scheduling.predictors`. `length_accuracy`: `bench.emulated length`.

The last line is JSON.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.data import MT_BENCH, are_recorded
from bench.live.peers.engine import Settings
from bench.live.peers.play import Ask
from bench.live.peers.worker import Worker, start_workers
from bench.live.scheduling import predictors
from bench.live.scheduling.outcomes import Seen, change, ms
from bench.live.shared.models import ModelShape, model_folder
from bench.live.shared.report import Progress, figures, last_line, options, report
from bench.live.shared.serving import QUIET_OPENMP
from bench.live.shared.traffic import TIGHT_RATE_PER_S, Adapters, Traffic, tight_asks, tight_history
from bench.measures import quantile
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY

MAX_MODEL_LEN, NUM_KV_BLOCKS, MAX_NUM_SEQS = 2048, 256, 32
NUM_SLOTS, LENGTH_SCALE = 10, 8
# Adapters that the peer may hold in host memory: on average over these requests, this number has the bytes of our bound.
PEER_HOST_ADAPTERS = 27
# Shares of the peer's load within SLO. Source: Chameleon §5.2, which calls 6, 8 and 9 requests/s low, medium and high; S-LoRA's is 8.7.
LOADS = {"low": 6 / 8.7, "medium": 8 / 8.7, "high": 9 / 8.7}
# Of capacity, where the load within SLO is not measured first: it was 1.10 (bench/RESULTS.md).
LOW_SHARE = 1.1 * LOADS["low"]
IDLE, CAPACITY_REQUESTS, WARM_UP_REQUESTS = 0.3, 64, 60
SLO_TIMES = 5.0
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


class Arm(NamedTuple):
    """A way to serve the requests: the engine, its policy, and how a preempted request gets its KV back. The peer has its own of both."""

    engine: str
    policy: str = ""
    way: str = "cheaper"


OURS, PEER = DEFAULT_POLICY, "peer fcfs"
TIGHT_OURS, TIGHT_PEER, TIGHT_SWAP, TIGHT_FAIR = f"{OURS} cheaper", "stock", "fcfs swap", "fair cheaper"
ARMS = {
    OURS: Arm("ours", OURS),
    PEER: Arm("peer"),
    TIGHT_OURS: Arm("ours", OURS),
    TIGHT_FAIR: Arm("ours", "fair"),
    TIGHT_SWAP: Arm("ours", "fcfs", "swap"),
    TIGHT_PEER: Arm("peer"),
}
TIGHT_ARMS = (TIGHT_OURS, TIGHT_FAIR, TIGHT_SWAP, TIGHT_PEER)
# Tight memory: answers that grow far beyond what the prompts let expect.
TIGHT_BLOCKS, TIGHT_KV_HOST_GIB = 128, 1.0
QUEUED, QUEUED_SECONDS = 10_000, 8.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; as it is, by the whole bench.

    Attributes:
        repeats: of the plays at each load; from high load come most claims, and at low load no queue grows.
        seconds: of arrivals in each play: long enough for a queue that grows to show; low_seconds: at low load.
        sweep: shares of capacity, ascending.
    """

    repeats: Mapping[str, int]
    low_seconds: float = 24
    seconds: float = 60
    sweep: tuple[float, ...] = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    tight_requests: int = 64
    profile_seconds: int = 120
    predicted_seconds: float = 45
    predicted_tight: int = 48


FULL = Plan(repeats={"low": 5, "medium": 1, "high": 2})
QUICK = Plan(
    repeats=dict.fromkeys(LOADS, 1),
    low_seconds=6,
    seconds=6,
    sweep=(0.8, 1.6),
    tight_requests=6,
    profile_seconds=30,
    predicted_seconds=10,
    predicted_tight=8,
)


# -- the bench ---------------------------------------------------------------------------------------------------------


class Bench(Progress):
    """One run over live workers. seen: what became of the requests by part (a load, a share of capacity, "tight") and arm."""

    def __init__(self, plan: Plan, traffic: Traffic) -> None:
        super().__init__()
        self.plan, self.traffic = plan, traffic
        self.workers: dict[str, Worker] = {}
        self.capacity_per_s = self.slo_s = 0.0
        self.seen: dict[tuple[str, str], Seen] = defaultdict(Seen)

    def play(
        self,
        part: str,
        arm: str,
        asks: Sequence[Ask],
        rate_per_s: float,
        history: list[list[Any]],
        warm_up: Sequence[Ask] = (),
    ) -> Seen:
        """Play the same requests for any arm, from the same start: caches of adapters that the requests of `warm_up` have filled."""
        (engine, policy, way), seen = ARMS[arm], self.seen[part, arm]
        worker = self.workers[engine]
        worker.call("empty")
        worker.play(warm_up, one_by_one=True)
        if policy:
            worker.call("use", policy=policy, history=history, rate_per_s=rate_per_s, way=way)
        before = worker.call("preemptions")
        seen.add(asks, worker.play(asks))
        seen.preemptions += Counter(worker.call("preemptions")) - Counter(before)
        self.say(f"{part}, {arm}: {seen.as_dict()}")
        return seen

    def play_load(self, part: str, arms: Sequence[str], asks: Sequence[Ask], rate_per_s: float) -> None:
        """Play arms at a load, in an order that the requests draw."""
        warm_up = self.traffic.warm_up(WARM_UP_REQUESTS, len(asks))
        for arm in random.Random(f"{part} {asks[0].at_s}").sample(arms, len(arms)):
            self.play(part, arm, asks, rate_per_s, self.traffic.history, warm_up)

    def find_capacity(self) -> None:
        """Requests per second of the peer when all are there at once."""
        self.play_load("capacity", [PEER], self.traffic.burst(CAPACITY_REQUESTS, "capacity"), 1.0)
        self.capacity_per_s = CAPACITY_REQUESTS / self.seen["capacity", PEER].play_s

    def find_slo(self) -> None:
        """Measure the peer at low load and take a multiple of its latency as the SLO."""
        rate_per_s = IDLE * self.capacity_per_s
        self.play_load("idle", [PEER], self.traffic.asks(rate_per_s, self.plan.seconds, "idle"), rate_per_s)
        self.slo_s = SLO_TIMES * self.seen["idle", PEER].turnaround_mean_s

    def measure_loads(self, loads_per_s: Mapping[str, float]) -> None:
        """Play both arms at these loads, in requests per second."""
        for load, rate_per_s in loads_per_s.items():
            seconds = self.plan.low_seconds if load == "low" else self.plan.seconds
            for repeat in range(self.plan.repeats[load]):
                asks = self.traffic.asks(rate_per_s, seconds, load, repeat)
                self.play_load(load, [OURS, PEER], asks, rate_per_s)

    def measure_sweep(self) -> None:
        """More and more load for each, until it is beyond the SLO."""
        arms = [OURS, PEER]
        for share in self.plan.sweep:
            rate_per_s = share * self.capacity_per_s
            asks = self.traffic.asks(rate_per_s, self.plan.seconds, "sweep", share)
            self.play_load(str(share), arms, asks, rate_per_s)
            arms = [arm for arm in arms if self.p99_s(share, arm) <= self.slo_s]

    def measure_tight(self) -> None:
        """Play all arms with tight memory."""
        asks = tight_asks(self.plan.tight_requests, 0)
        history = tight_history()
        for arm in random.Random("tight 0").sample(TIGHT_ARMS, len(TIGHT_ARMS)):
            self.play("tight", arm, asks, TIGHT_RATE_PER_S, history)

    # -- claims ------------------------------------------------------------------------------------------------------

    def load_result(self, load: str) -> dict[str, float]:
        """Return our changes against the peer at one load."""
        ours, peer = self.seen[load, OURS], self.seen[load, PEER]
        return {
            "ttft_p99_change": change(quantile(ours.ttft_s, 0.99), quantile(peer.ttft_s, 0.99)),
            "ttft_p50_change": change(quantile(ours.ttft_s, 0.5), quantile(peer.ttft_s, 0.5)),
        }

    def worst_class_change(self, load: str) -> float:
        """Return the largest change of the mean TTFT over the quartiles of size."""
        pairs = zip(self.seen[load, OURS].class_means_s(), self.seen[load, PEER].class_means_s(), strict=True)
        return max(change(ours, peer) for ours, peer in pairs)

    def p99_s(self, share: float, arm: str) -> float:
        """Return P99 of the TTFT at this share of capacity, in seconds."""
        return quantile(self.seen[str(share), arm].ttft_s, 0.99)

    def load_within_slo(self, arm: str) -> float | None:
        """Return an arm's load within the SLO, as a share of capacity, between the last load within and the first beyond.

        None if none is within, the highest if all are.
        """
        shares = [share for share in self.plan.sweep if (str(share), arm) in self.seen]
        within = [share for share in shares if self.p99_s(share, arm) <= self.slo_s]
        if not within or len(within) == len(shares):
            return within[-1] if within else None
        last, beyond = within[-1], shares[-1]
        last_s, beyond_s = self.p99_s(last, arm), self.p99_s(beyond, arm)
        return last + (beyond - last) * (self.slo_s - last_s) / (beyond_s - last_s)

    def tight_result(self) -> dict[str, float]:
        """Return the figures of tight memory."""
        ours, fair, swap, peer = (self.seen["tight", arm] for arm in TIGHT_ARMS)
        return {
            "tight_memory_throughput_vs_recompute": round(ours.tokens_per_s / peer.tokens_per_s, 3),
            "tight_memory_throughput_vs_swap": round(ours.tokens_per_s / swap.tokens_per_s, 3),
            "weighted_turnaround_change": change(ours.weighted_turnaround, peer.weighted_turnaround),
            "turnaround_mean_change": change(ours.turnaround_mean_s, peer.turnaround_mean_s),
            "fair_weighted_turnaround_change": change(fair.weighted_turnaround, peer.weighted_turnaround),
            "fair_turnaround_mean_change": change(fair.turnaround_mean_s, peer.turnaround_mean_s),
        }


# -- parts: each returns its claims and what else stands in the report -------------------------------------------------

Part = tuple[dict[str, Any], dict[str, Any]]


def measure_low(bench: Bench) -> Part:
    """Measure low load alone, at a fixed share of capacity."""
    loads_per_s = {"low": LOW_SHARE * bench.capacity_per_s}
    bench.measure_loads(loads_per_s)
    return loads_part(bench, loads_per_s)


def measure_loads(bench: Bench) -> Part:
    """Measure the SLO, the sweep and all loads."""
    bench.find_slo()
    bench.measure_sweep()
    within = {arm: bench.load_within_slo(arm) for arm in (OURS, PEER)}
    ours, peer = within[OURS], within[PEER]
    if peer is None:
        bench.say("the peer is within its SLO at none of the loads: capacity stands for its load within SLO")
    loads_per_s = {load: share * (peer or 1.0) * bench.capacity_per_s for load, share in LOADS.items()}
    bench.measure_loads(loads_per_s)
    result, extra = loads_part(bench, loads_per_s)
    result |= {
        "slo_load_ratio": round(ours / peer, 3) if ours and peer else None,
        "worst_class_change": bench.worst_class_change("high"),
    }
    return result, extra | {"slo_ms": ms(bench.slo_s), "load_within_slo": within}


def loads_part(bench: Bench, loads_per_s: Mapping[str, float]) -> Part:
    """Return the figures of these loads."""
    return {"loads": {load: bench.load_result(load) for load in loads_per_s}}, {
        "capacity_per_s": round(bench.capacity_per_s, 3),
        "loads_per_s": {load: round(per_s, 3) for load, per_s in loads_per_s.items()},
        "arms": {f"{part}, {arm}": seen.as_dict() for (part, arm), seen in bench.seen.items()},
    }


def measure_predictors(bench: Bench, folder: Path, is_quick: bool) -> Part:
    """Measure the errors of predictions in service, from `overture profile`'s tables on, and of answers' lengths."""
    plan, shape = bench.plan, ModelShape()
    bench.say("overture profile")
    last_line(
        *(str(Path(sys.executable).parent / "overture"), "profile", "--json"),
        *("--seconds", str(plan.profile_seconds), "--max-model-len", str(MAX_MODEL_LEN)),
        *("--model", str(model_folder(shape)), "--dtype", shape.dtype, "--device", "cpu"),
        *("--data-dir", str(folder / "profile")),
        timeout_s=plan.profile_seconds + 180,
        env=QUIET_OPENMP,
    )
    served = predictors.measure(
        Traffic(None, LENGTH_SCALE),
        folder / "profile/profiles",
        folder,
        plan.predicted_seconds,
        plan.predicted_tight,
        bench.say,
    )
    result = {name: served.pop(name) for name in ("step_error", "swap_error")}
    if not are_recorded(MT_BENCH):
        return result, served
    bench.say("bench.emulated length")
    quick = ["--quick"] if is_quick else []
    lengths = last_line(
        sys.executable, "-m", "bench.emulated", "length", "--part", "turns", *quick, timeout_s=300
    )
    return result | {"length_accuracy": lengths["accuracy"]["turns"]["ours + hints"]}, served


def measure_part(part: str, bench: Bench, settings: Settings, folder: Path, is_quick: bool) -> Part:
    """Start the engines that the part needs, measure it and return its figures."""
    if part == "predictors":
        return measure_predictors(bench, folder, is_quick)
    peer = settings
    if part == "memory":
        peer = replace(settings, adapters=[], num_blocks=TIGHT_BLOCKS)
        settings = replace(peer, has_tiers=True, host_gib=TIGHT_KV_HOST_GIB, disk_gib=0)
    arms = {"ours": ("ours", settings)} | ({"peer": ("stock", peer)} if part != "queue" else {})
    with ExitStack() as stack:
        bench.workers = start_workers(arms, folder, stack)
        if part == "queue":
            found = bench.workers["ours"].call("decision_share", num=QUEUED, seconds=QUEUED_SECONDS)
            return {"decision_share_10k": found.pop("share")}, {"queue": found}
        if part == "memory":
            bench.measure_tight()
            arms_found = {arm: bench.seen["tight", arm].as_dict() for arm in TIGHT_ARMS}
            return bench.tight_result(), {"tight_memory": arms_found}
        bench.find_capacity()
        return measure_loads(bench) if part == "loads" else measure_low(bench)


# -- the report --------------------------------------------------------------------------------------------------------


def run(plan: Plan, parts: Sequence[str], is_quick: bool) -> None:
    """Measure these parts and report. Low load is one of the loads."""
    adapters = Adapters(ModelShape())
    bench = Bench(plan, Traffic(adapters, LENGTH_SCALE))
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
        for part in parts:
            if part == "low" and "loads" in parts:
                continue
            claims, more = measure_part(part, bench, settings, folder, is_quick)
            result, extra = result | claims, extra | more
    rows = [(f"{part}, {arm}", str(seen.as_dict()), "") for (part, arm), seen in bench.seen.items()]
    for load, changes in result.get("loads", {}).items():
        rows += [
            (f"{load}: {key}", f"{by:+.1%}", AIMS.get(f"{load} {key}", "")) for key, by in changes.items()
        ]
    rows += figures({name: value for name, value in result.items() if name != "loads"}, AIMS)
    report("Scheduling", rows, result | extra | {"elapsed_s": round(bench.elapsed_s)})


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__, quick="within eight minutes")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts alone")
    args = parser.parse_args()
    run(QUICK if args.quick else FULL, args.only or PARTS, args.quick)


if __name__ == "__main__":
    main()
