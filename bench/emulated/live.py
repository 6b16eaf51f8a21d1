"""The emulated node, given what `overture profile` says of this machine, against the engine itself on this machine: the same requests for both.

Our node answers requests with Azure's conversation lengths (as in bench.live.scheduling, without adapters), Poisson arrivals at shares (LOADS) of
what it answers per second when all are there at once, under each of POLICIES. The emulated node runs the same scheduler and the same glue, taught
the same history; its steps take what the profile's table says, and between two steps it adds the median of what the node took there while it
answered other requests.

    profile     the table as it was measured
    up to date  the table as a server has it when the play begins: each step of a burst and of the plays before has corrected it, by the method that
                corrects the table of an engine that serves (`StepTable.observe`). The prediction that counts
    own speed   times what the play's own steps took over what the profile says of them, two seconds at a time. No prediction: the part of the error
                that is not the machine's speed, which on a shared machine is another one each time, and near capacity decides who waits

`errors`: |emulated / measured - 1| of each of METRICS, the median over plays (each policy, load and repeat is one), with the profile up to date;
`errors_of_profile` with it as it was, `errors_at_own_speed`. `worst_error`, `worst_error_at_own_speed`: the largest of each. `slowness`: what steps
took over what the profile says, play by play. `pooled_errors`: P50 and P99 of TTFT, P50 of TPOT and tokens/s over all plays of a policy at once, up
to date; `pooled_errors_at_own_speed`. `pooled_intervals`: emulated over measured of the same, up to date, by policy, where nine of ten bootstraps
over plays lie. `undecided`: figures whose interval spans the aim. Live times are ends of steps, as in emulation; what a socket adds is in neither.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.emulated.node import EmulatedNode, Engine
from bench.live.models import ModelShape, model_folder
from bench.live.peers.adapters import AdapterSettings, Ask
from bench.live.peers.client import QUIET_OPENMP, Worker
from bench.live.peers.scheduling_ours import apply_refit, learn
from bench.live.report import spread
from bench.live.scheduling_traffic import BaseModelOnly, Traffic, lengths_of_trace
from bench.measures import quantile
from bench.sim.core.clock import Clock
from bench.sim.core.measured import MeasuredCost
from bench.sim.core.models import Model
from bench.sim.core.requests import Arrival
from bench.sim.core.traffic import play as play_on
from engine_bridge.policy.costs.costs import StepGrid, StepTable
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY
from engine_bridge.settings.profile import MachineProfile

POLICIES = (DEFAULT_POLICY, "fcfs")
LOADS = (0.3, 0.5, 0.8, 1.0)
METRICS = ("tokens_per_s", "e2e_mean_s", "ttft_mean_s", "tpot_mean_s")
AIM = 0.15
PROFILE, UP_TO_DATE, OWN_SPEED = "profile", "up to date", "own speed"
WINDOW_S = 2.0
NUM_BOOTSTRAPS = 500
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_STEP_S = 512, 32, 2048, 32, 0.5
BURST = 48
ENGINE = Engine(
    num_blocks=NUM_BLOCKS - 1,
    block_tokens=BLOCK_SIZE,
    max_running=MAX_NUM_SEQS,
    max_tokens=MAX_MODEL_LEN,
    max_step_s=MAX_STEP_S,
)


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in seconds after the play's start."""

    at_s: float
    first_s: float
    end_s: float
    num_tokens: int


def metrics_of(times: Sequence[Times]) -> dict[str, float]:
    """What became of the requests of one play."""
    gaps = [(each.end_s - each.first_s) / (each.num_tokens - 1) for each in times if each.num_tokens > 1]
    ttft_s = sorted(each.first_s - each.at_s for each in times)
    found = {
        "tokens_per_s": sum(each.num_tokens for each in times) / max(each.end_s for each in times),
        "e2e_mean_s": statistics.fmean(each.end_s - each.at_s for each in times),
        "ttft_mean_s": statistics.fmean(ttft_s),
        "tpot_mean_s": statistics.fmean(gaps),
        "ttft_p50_s": ttft_s[len(ttft_s) // 2],
        "ttft_max_s": ttft_s[-1],
    }
    return {name: round(value, 4) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Play:
    """Metrics of one play, live and emulated in each way. slowness: what its steps took over what the profile says of them."""

    policy: str
    load: float
    live: dict[str, float]
    emulated: dict[str, dict[str, float]]
    slowness: float
    live_times: tuple[Times, ...] = ()
    emulated_times: Mapping[str, tuple[Times, ...]] = field(default_factory=dict)

    def error(self, way: str, metric: str) -> float:
        return self.emulated[way][metric] / self.live[metric] - 1


class Slowness:
    """What steps took over what a table says of them, in windows of WINDOW_S since `zero_s`. steps: (work…, began, ended)."""

    def __init__(self, steps: Sequence[Sequence[float]], grid: StepGrid, zero_s: float) -> None:
        table = StepTable(grid)
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for *work, began_s, ended_s in steps:
            if not any(work[:2]):  # nothing was computed: a table says nothing of it
                continue
            window = sums[int((began_s - zero_s) / WINDOW_S)]
            window[0] += table.step_s(*work)  # type: ignore[arg-type]
            window[1] += ended_s - began_s
        self._by_window = {number: took / said for number, (said, took) in sums.items()}
        self.mean = sum(took for _, took in sums.values()) / sum(said for said, _ in sums.values())

    def at(self, seconds: float) -> float:
        """That of the nearest window with steps."""
        window = int(seconds / WINDOW_S)
        return self._by_window[min(self._by_window, key=lambda number: abs(number - window))]


# -- in virtual time ---------------------------------------------------------------------------------------------------


def emulate(
    policy: str,
    asks: Sequence[Ask],
    history: Sequence[Sequence[Any]],
    rate_per_s: float,
    grid: StepGrid,
    between_s: float,
    slowness: Callable[[float], float],
) -> list[Times]:
    """The same requests by the classes that serve. slowness: the machine's, by the time of the play."""
    clock = Clock()
    cost = MeasuredCost(
        StepTable(grid), sim_model(ModelShape()), between_s, slowness=lambda: slowness(clock.now)
    )
    node = EmulatedNode(clock, cost, ENGINE, policy)
    assert node.scheduling is not None
    learn(node.scheduling, [list(each) for each in history], {}, rate_per_s)
    while not apply_refit(node.scheduling):
        node.run_fits()
    requests = [
        Arrival(f"{number:04d}", ask.at_s, len(ask.prompt), ask.max_tokens) for number, ask in enumerate(asks)
    ]
    play_on(clock, requests, node.submit)
    node.close()
    return [
        Times(job.arrival.at_s, job.first_token_s, job.ended_s, job.arrival.num_answer_tokens)
        for job in sorted(node.ended, key=lambda job: job.arrival.request_id)
    ]


def sim_model(shape: ModelShape) -> Model:
    """As costs of steps describe models."""
    return Model(
        shape.name,
        shape.num_layers,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.vocab_size,
        MAX_MODEL_LEN,
        dtype_bytes=4,
    )


# -- live --------------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, repeats: int, seconds: float) -> None:
        self.repeats, self.seconds = repeats, seconds
        self.traffic = Traffic(lengths_of_trace(), BaseModelOnly())  # type: ignore[arg-type]
        self.plays: list[Play] = []

    def measure(self, worker: Worker, profile: StepGrid) -> None:
        burst = self.traffic.burst(BURST, "simulator")
        self.answer(worker, DEFAULT_POLICY, burst, 1.0)  # the engine's own first time
        answers = self.answer(worker, DEFAULT_POLICY, burst, 1.0)
        self.capacity_per_s = BURST / max(answer["token_s"][-1] for answer in answers)
        ran = worker.call("steps")
        self.between_s = gap_s(ran["steps"])
        self.table = StepTable(profile)
        self.learn_steps(ran["steps"])
        print(
            f"{self.capacity_per_s:.2f} requests/s when all are there at once; {self.between_s * 1e3:.1f} ms between steps",
            flush=True,
        )
        plays = [(load, policy) for load in LOADS for policy in POLICIES]
        for repeat in range(self.repeats):
            for load, policy in random.Random(repeat).sample(plays, len(plays)):
                self.play(worker, policy, load, repeat, profile)

    def play(self, worker: Worker, policy: str, load: float, repeat: int, profile: StepGrid) -> None:
        rate_per_s = load * self.capacity_per_s
        asks = self.traffic.asks(rate_per_s, self.seconds, "simulator", load, repeat)
        answers = self.answer(worker, policy, asks, rate_per_s)
        live = [
            Times(ask.at_s, answer["token_s"][0], answer["token_s"][-1], ask.max_tokens)
            for ask, answer in zip(asks, answers, strict=True)
        ]
        ran = worker.call("steps")
        slowness = Slowness(ran["steps"], profile, ran["zero_s"])
        ways: dict[str, tuple[StepGrid, Callable[[float], float]]] = {
            PROFILE: (profile, lambda at_s: 1.0),
            UP_TO_DATE: (self.table.grid(), lambda at_s: 1.0),
            OWN_SPEED: (profile, slowness.at),
        }
        times = {
            name: emulate(policy, asks, self.traffic.history, rate_per_s, grid, self.between_s, way)
            for name, (grid, way) in ways.items()
        }
        self.learn_steps(ran["steps"])
        emulated = {name: metrics_of(each) for name, each in times.items()}
        mean = round(slowness.mean, 4)
        self.plays.append(
            Play(
                policy,
                load,
                metrics_of(live),
                emulated,
                mean,
                tuple(live),
                {name: tuple(each) for name, each in times.items()},
            )
        )
        self.say(self.plays[-1])

    def learn_steps(self, steps: Sequence[Sequence[float]]) -> None:
        """steps: (work…, began, ended)."""
        for *work, began_s, ended_s in steps:
            self.table.observe(*work, ended_s - began_s)  # type: ignore[arg-type]

    def answer(
        self, worker: Worker, policy: str, asks: Sequence[Ask], rate_per_s: float
    ) -> list[dict[str, Any]]:
        worker.call("empty")
        worker.call("use", policy=policy, history=self.traffic.history, rate_per_s=rate_per_s)
        worker.call("note_work")
        answers: list[dict[str, Any]] = worker.call("play", requests=[asdict(ask) for ask in asks])
        return answers

    def say(self, play: Play) -> None:
        print(
            f"[{len(self.plays)} of {self.repeats * len(LOADS) * len(POLICIES)}] {play.load} of capacity, {play.policy}; "
            f"steps took {play.slowness:.2f} of the profile's:"
        )
        for name, emulated in play.emulated.items():
            found = ", ".join(f"{key} {emulated[key]:.3g} ({play.live[key]:.3g} live)" for key in METRICS)
            print(f"    {name}: {found}", flush=True)

    # -- what comes of it --------------------------------------------------------------------------------------------

    def errors(self, way: str) -> dict[str, float]:
        """Median over plays, without their signs."""
        return {
            metric: round(statistics.median(abs(play.error(way, metric)) for play in self.plays), 4)
            for metric in METRICS
        }

    def result(self) -> dict[str, Any]:
        intervals = pooled_intervals(self.plays)
        errors, own = self.errors(UP_TO_DATE), self.errors(OWN_SPEED)
        return {
            "errors": errors,
            "errors_of_profile": self.errors(PROFILE),
            "errors_at_own_speed": own,
            "worst_error": max(errors.values()),
            "worst_error_at_own_speed": max(own.values()),
            "slowness": [play.slowness for play in self.plays],
            "num_plays": len(self.plays),
            "between_steps_ms": round(self.between_s * 1e3, 2),
            "capacity_per_s": round(self.capacity_per_s, 3),
            "pooled_errors": pooled_errors(self.plays),
            "pooled_errors_at_own_speed": pooled_errors(self.plays, OWN_SPEED),
            "pooled_intervals": intervals,
            "undecided": undecided(intervals),
            "plays": [_kept(play) for play in self.plays],
        }


def pooled_errors(plays: Sequence[Play], way: str = UP_TO_DATE) -> dict[str, float]:
    """|emulated / measured - 1| of each of `figures_of` over a policy's plays together, the larger of the policies'."""
    found: dict[str, float] = {}
    for policy in {play.policy for play in plays}:
        own = [play for play in plays if play.policy == policy]
        live = figures_of([play.live_times for play in own])
        emulated = figures_of([play.emulated_times[way] for play in own])
        for name, value in live.items():
            found[name] = max(found.get(name, 0.0), round(abs(emulated[name] / value - 1), 4))
    return found


def pooled_intervals(plays: Sequence[Play]) -> dict[str, dict[str, tuple[float, float]]]:
    """Emulated over measured of each of `figures_of`, by policy: from the 5th to the 95th percentile when plays are drawn again."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for policy in sorted({play.policy for play in plays}):
        own, rng = [play for play in plays if play.policy == policy], random.Random(0)
        ratios = defaultdict[str, list[float]](list)
        for _ in range(NUM_BOOTSTRAPS):
            drawn = rng.choices(own, k=len(own))
            live = figures_of([play.live_times for play in drawn])
            emulated = figures_of([play.emulated_times[UP_TO_DATE] for play in drawn])
            for name, value in live.items():
                ratios[name].append(emulated[name] / value)
        found[policy] = {
            name: (round(quantile(each, 0.05), 4), round(quantile(each, 0.95), 4))
            for name, each in ratios.items()
        }
    return found


def undecided(intervals: Mapping[str, Mapping[str, tuple[float, float]]]) -> list[str]:
    """The figures of which an interval reaches from within the aim to beyond it: another run may fall on the other side."""
    found = set()
    for by_figure in intervals.values():
        for name, (low, high) in by_figure.items():
            nearest = min(max(1.0, low), high)
            if abs(nearest - 1) <= AIM < max(abs(low - 1), abs(high - 1)):
                found.add(name)
    return sorted(found)


def figures_of(plays: Sequence[Sequence[Times]]) -> dict[str, float]:
    """Over all requests of some plays."""
    times = [each for play in plays for each in play]
    ttft_s = [each.first_s - each.at_s for each in times]
    gaps = [(each.end_s - each.first_s) / (each.num_tokens - 1) for each in times if each.num_tokens > 1]
    took_s = sum(max(each.end_s for each in play) for play in plays)
    return {
        "ttft_p50": quantile(ttft_s, 0.5),
        "ttft_p99": quantile(ttft_s, 0.99),
        "tpot_p50": quantile(gaps, 0.5),
        "tokens_per_s": sum(each.num_tokens for each in times) / took_s,
    }


def _kept(play: Play) -> dict[str, Any]:
    """Without the times of each request."""
    found = asdict(play)
    del found["live_times"], found["emulated_times"]
    return found


def gap_s(steps: Sequence[Sequence[float]]) -> float:
    """Median from the end of one step to the begin of the next. steps: (work…, began, ended)."""
    return statistics.median(
        max(later[-2] - earlier[-1], 0.0) for earlier, later in itertools.pairwise(steps)
    )


def profile_steps(folder: Path, seconds: int) -> StepGrid:
    """`overture profile` of the bench's model on this machine."""
    shape = ModelShape()
    print(f"overture profile, {seconds} s", flush=True)
    subprocess.run(
        [
            *(str(Path(sys.executable).parent / "overture"), "profile", "--seconds", str(seconds), "--json"),
            *("--model", str(model_folder(shape)), "--dtype", shape.dtype, "--device", "cpu"),
            *("--data-dir", str(folder), "--max-model-len", str(MAX_MODEL_LEN)),
        ],
        check=True,
        capture_output=True,
        timeout=seconds + 180,
        env=os.environ | QUIET_OPENMP,  # as the worker: threads that sleep between two operations take longer
    )
    (path,) = (folder / "profiles").glob("*.json")
    return msgspec.json.decode(path.read_bytes(), type=MachineProfile).steps.grid


def measure_live(is_quick: bool) -> dict[str, Any]:
    bench = Bench(repeats=1 if is_quick else 3, seconds=10 if is_quick else 20)
    shape = ModelShape()
    with tempfile.TemporaryDirectory(prefix="overture-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        profile = profile_steps(folder, 30 if is_quick else 120)
        settings = AdapterSettings(
            model=str(model_folder(shape)),
            dtype=shape.dtype,
            folder=name,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
        )
        worker = stack.enter_context(Worker("scheduling_ours", settings, folder))
        print(json.dumps(worker.wait_ready()), flush=True)
        bench.measure(worker, profile)
    return bench.result() | {"quick": is_quick}


def table_of(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [
        (
            f"live: {metric}",
            f"off by {error:.1%}; at the plays' own speed {result['errors_at_own_speed'][metric]:.1%}",
            f"aim ≤ {AIM:.0%}",
        )
        for metric, error in result["errors"].items()
    ]
    rows += [
        (
            f"live, all plays: {name}",
            f"off by {error:.1%}"
            + (", undecided" if name in result["undecided"] else "")
            + f"; at the plays' own speed {result['pooled_errors_at_own_speed'][name]:.1%}",
            f"aim ≤ {AIM:.0%}",
        )
        for name, error in result["pooled_errors"].items()
    ]
    rows.append(("steps ÷ the profile's", spread(result["slowness"]), ""))
    return rows
