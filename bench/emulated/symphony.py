"""SYMPHONY on one node of vLLM's scheduler with our classes: what advisories give people who type, over tiers without them and over vLLM's own ways.

    python -m bench.emulated symphony [--part users|missing ...] [--quick] [--seeds N] [--seed N] [--jobs N]

People, their sessions, device and model are those of `python -m bench.sim symphony`, of which this is one device of eight with its share of a
machine's memory and disk: a fixed number of users read and type; what a run counts are requests that end after the warm-up. Several nodes, and who
is sent where, stay there. Everything that decides is what serves (bench/emulated/tiers.py says what is modelled); first come, first served.

Arms:
  recompute  nothing outlives a request
  prefix     vLLM's prefix cache: KV stays on the device while nobody needs its room
  on_demand  three tiers without advisories: what the device lacks is loaded, or computed again, when its request comes
  advised    three tiers; typing is announced when it begins
  oracle     prefix, on a device that has room for everything. `of_clairvoyant`: what advised gains over an arm, of what this gains

Parts:
  users      normalised latency (E2E over the answer's tokens) and TTFT over users. Users at equal latency: at 20.5/18 of what `recompute` has with
             8, as the paper has it for 64 on 8 devices
  missing    advised, with 10% of the advisories missing (Fig. 17)
The paper's figures are of 8 devices: beside ours they say how large the effect is there. The last line is JSON. Of each figure: median over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.emulated.node import Engine
from bench.emulated.sessions import talk_on_node
from bench.emulated.tiers import TierSizes
from bench.measures import quantile
from bench.sim.core.session_cluster import Habits
from bench.sim.core.shapes import BLOCK_TOKENS, VLLM, pool_blocks
from bench.sim.core.steps import StepCost
from bench.sim.core.tables import (
    Figure,
    Part,
    Workers,
    add_table_arguments,
    crossing,
    report_parts,
    seeds_of,
)
from bench.sim.symphony_runs import PAPER_LIMIT, PAPER_USERS, Setting, of_clairvoyant

SETTING = Setting()
# The paper's pair of loads is of 8 devices.
LEAST_USERS = PAPER_USERS // 8
USERS = (LEAST_USERS, 64, 128, 192, 256)
# Times the device's memory: nobody's KV has to leave it. Chosen.
ROOM = 6
MISSING_USERS, MISSING_SHARE = 64, 0.1
SPAN_S, WARM_UP_S = 240.0, 60.0
QUICK_SPAN_S = 120.0


@dataclass(frozen=True, slots=True)
class Arm:
    """has_cache: KV stays on the device. has_room: the device's memory holds everything."""

    has_cache: bool = True
    has_room: bool = False
    has_tiers: bool = False
    has_advisories: bool = False


ARMS = {
    "recompute": Arm(has_cache=False),
    "prefix": Arm(),
    "on_demand": Arm(has_tiers=True),
    "advised": Arm(has_tiers=True, has_advisories=True),
    "oracle": Arm(has_room=True),
}
PAPER = {"recompute": 4.0}


@dataclass(frozen=True, slots=True)
class Point:
    """One run. missing: share of turns without an advisory."""

    arm: str
    num_users: int
    seed: int
    span_s: float
    missing: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds; latency_s is a mean, of E2E over answers' tokens."""

    latency_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    num_requests: int
    num_steps: int
    advised: dict[str, int]


def engine_of(arm: Arm, setting: Setting = SETTING) -> Engine:
    cost = StepCost(setting.gpu, setting.model)
    num_blocks = pool_blocks(cost) * (ROOM if arm.has_room else 1)
    return Engine(
        num_blocks,
        BLOCK_TOKENS,
        VLLM.max_running,
        VLLM.step_tokens or 0,
        max_tokens=setting.habits.chats.max_tokens,
        has_prefix_cache=arm.has_cache,
    )


def tiers_of(setting: Setting = SETTING) -> TierSizes:
    """One device's share of a machine's."""
    count = setting.num_devices
    return TierSizes(setting.host_bytes // count, setting.disk_bytes_per_s / count)


def serve(point: Point) -> Outcome:
    arm = ARMS[point.arm]
    talked = talk_on_node(
        StepCost(SETTING.gpu, SETTING.model),
        engine_of(arm),
        tiers_of() if arm.has_tiers else None,
        Habits(has_advisories=arm.has_advisories, missing=point.missing),
        point.num_users,
        point.seed,
        point.span_s,
        WARM_UP_S,
    )
    jobs = talked.jobs
    ttft_s = [job.ttft_s for job in jobs]
    return Outcome(
        statistics.fmean(job.e2e_s / job.arrival.num_answer_tokens for job in jobs),
        quantile(ttft_s, 0.5),
        quantile(ttft_s, 0.99),
        len(jobs),
        talked.num_steps,
        talked.advised,
    )


@dataclass(slots=True)
class Bench:
    """What both parts share."""

    workers: Workers
    seeds: tuple[int, ...]
    span_s: float
    outcomes: dict[Point, Outcome] = field(default_factory=dict)

    def run(self, arms: Iterable[str], loads: Sequence[int], missing: float = 0.0) -> None:
        """Long ones first, so that no core is left alone with one."""
        wanted = [
            Point(arm, load, seed, self.span_s, missing)
            for load in reversed(loads)
            for arm in arms
            for seed in self.seeds
        ]
        new = [point for point in wanted if point not in self.outcomes]
        self.outcomes.update(zip(new, self.workers.map(serve, new), strict=True))

    def of(self, arm: str, load: int, missing: float = 0.0) -> list[Outcome]:
        return [self.outcomes[Point(arm, load, seed, self.span_s, missing)] for seed in self.seeds]

    def values(self, arm: str, load: int, name: str, missing: float = 0.0) -> list[float]:
        return [getattr(outcome, name) for outcome in self.of(arm, load, missing)]


def users_part(bench: Bench) -> Part:
    """Users at equal latency, latency and TTFT over users."""
    bench.run(ARMS, USERS)
    figures: list[Figure] = []
    within = {arm: users_within(bench, arm) for arm in ARMS}
    result: dict[str, Any] = {"users_within": within, "curve": {arm: _curve(bench, arm) for arm in ARMS}}
    for other in ("recompute", "prefix", "on_demand", "oracle"):
        ratios = tuple(a / b for a, b in zip(within["advised"], within[other], strict=True))
        what = f"users at equal latency, advised over {other}"
        figures.append(Figure(what, ratios, PAPER.get(other), False, "advised", "ratio"))
        for load in USERS[1:]:
            for name, what in (
                ("latency_s", "normalised latency"),
                ("ttft_p50_s", "P50 TTFT"),
                ("ttft_p99_s", "P99 TTFT"),
            ):
                theirs, ours = bench.values(other, load, name), bench.values("advised", load, name)
                values = tuple(a / b for a, b in zip(theirs, ours, strict=True))
                figures.append(
                    Figure(
                        f"{what} of {other} over advised, {load} users",
                        values,
                        None,
                        False,
                        "advised",
                        "ratio",
                    )
                )
    return figures, result


def users_within(bench: Bench, arm: str) -> list[float]:
    """Users at which normalised latency leaves the limit, by seed; the edge of USERS where it does so beyond them."""
    limit_s = PAPER_LIMIT * statistics.median(bench.values("recompute", LEAST_USERS, "latency_s"))
    found = []
    for at in range(len(bench.seeds)):
        latencies = [bench.values(arm, load, "latency_s")[at] for load in USERS]
        edge = USERS[0] if latencies[0] > limit_s else USERS[-1]
        found.append(round(crossing(USERS, latencies, limit_s) or float(edge), 1))
    return found


def _curve(bench: Bench, arm: str) -> dict[str, Any]:
    """Medians over seeds; advisories by how they ended, of all seeds."""
    curve: dict[str, Any] = {}
    for load in USERS:
        names = ("latency_s", "ttft_p50_s", "ttft_p99_s", "num_requests")
        curve[str(load)] = {
            name: round(statistics.median(bench.values(arm, load, name)), 5) for name in names
        }
        if ARMS[arm].has_advisories:
            ends = [outcome.advised for outcome in bench.of(arm, load)]
            curve[str(load)]["advised"] = {
                end: sum(each.get(end, 0) for each in ends) for end in sorted(set().union(*ends))
            }
    return curve


def missing_part(bench: Bench) -> Part:
    """What it costs that nobody said of every tenth request that it would come."""
    bench.run(["advised"], [MISSING_USERS])
    bench.run(["advised"], [MISSING_USERS], MISSING_SHARE)
    figures = []
    for name, what, paper in (
        ("latency_s", "normalised latency", 0.06),
        ("ttft_p50_s", "P50 TTFT", None),
        ("ttft_p99_s", "P99 TTFT", None),
    ):
        some, none = (
            bench.values("advised", MISSING_USERS, name, MISSING_SHARE),
            bench.values("advised", MISSING_USERS, name),
        )
        values = tuple(a / b - 1 for a, b in zip(some, none, strict=True))
        figures.append(
            Figure(
                f"{what}, 10% of advisories missing, {MISSING_USERS} users", values, paper, True, "advised"
            )
        )
    return figures, {"missing_10pct_penalty": round(figures[0].median, 4)}


PARTS = {"users": users_part, "missing": missing_part}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_table_arguments(parser, PARTS, f"{QUICK_SPAN_S:.0f} s of talk")
    parser.set_defaults(seeds=3)


def run(args: argparse.Namespace) -> None:
    with Workers(args.jobs) as workers:
        bench = Bench(workers, seeds_of(args), QUICK_SPAN_S if args.quick else SPAN_S)
        parts = ((name, PARTS[name](bench)) for name in args.part or PARTS)
        title = "SYMPHONY on one node of vLLM's scheduler"
        report_parts(title, "emulated-symphony", bench.seeds, parts, _top)


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    top: dict[str, Any] = {}
    if "users" in parts:
        seeds = parts["users"]["users_within"]
        within = {arm: statistics.median(found) for arm, found in seeds.items()}
        top["users_ratio"] = {
            arm: round(within["advised"] / number, 3) for arm, number in within.items() if arm != "advised"
        }
        top["of_clairvoyant"] = {
            base: of_clairvoyant(
                *(
                    [a / b for a, b in zip(seeds[arm], seeds[base], strict=True)]
                    for arm in ("advised", "oracle")
                )
            )
            for base in ("recompute", "prefix")
        }
    if "missing" in parts:
        top["missing_10pct_penalty"] = parts["missing"]["missing_10pct_penalty"]
    return top
