"""SYMPHONY's tables in virtual time, by the live engine's policy objects.

    python -m bench.sim symphony [--part NAME ...] [--quick] [--seeds N] [--seed N] [--jobs N] [--span-s S] [--recorded PATH]

What runs in simulated nodes: `engine_bridge.policy.kv.guesses.plan` (which announced session's KV comes to the device, and when),
`engine_bridge.policy.kv.restore_method.FullCost` (load, wait or compute) and `kvtiers.policy.eviction` (who leaves host memory). A session node
(core/session_node.py) is a subclass of the core's `Node`: steps, memory of running requests and starting are inherited, and only KV that outlives
its request is added; a node of its own would have had to repeat continuous batching. Host memory, disk and network (core/tiers.py) belong to
machines, whose devices share them.

Arms. All have vLLM's step shape (chunked prompts beside decodes) and, but for the part `priority`, its first-come order:
  recompute    vLLM as the paper has it: nothing outlives a request. By load
  prefix       vLLM with prefix caching, which the paper leaves out: KV stays on the device while there is room. Sticky
  sticky       InferCept as the paper has it: KV goes to host memory, no disk, and is loaded when its next request starts. Sticky
  by_load      advisories, three tiers, KV stays on the device. An advisory is routed by load, and its request follows it: the paper's own way
  ours         as by_load, but routed by what serves (`policy.homes.doors_of`): an advisory goes where it costs least, and its request elsewhere after
               all where fewer requests are and its KV is near
  first_look   ours, but the request follows its advisory
  clairvoyant  a bound: all KV is on the device that needs it at no cost, and each request goes where the fewest are when it comes

Hardware: 2 machines of 4 A100 80 GB, 256 GB of memory and 100 Gb/s each (SYMPHONY §4), by data sheets; steps as calibrated in core/calibration.py,
from no number of this paper. KV copies get 0.8 of the PCIe link (pinned memory, as in bench.sim.host_tier; the calibration's share is S-LoRA's for
adapters), disks 3 GB/s each way for a machine. Models by their config.json, 131 kB of KV a token; the part `paper` has the 1.1 MB that the paper
counts (symphony_runs.PAPER), and first says which of its baselines' figures that meets.

Traffic: sessions drawn to ShareGPT's published quantiles (core/conversations.py). A fixed number of users read and type; a run begins with sessions
that are under way, and counts requests that end after the warm-up. Normalised latency is E2E over the answer's tokens, as the paper has it.

Parts: `chat8b` Fig. 12 and 14. `paper` the same in the paper's own set-up. `agents` Fig. 15, in both. `missing` Fig. 17 (the paper says 6%, and
21.3 to 24.4 ms, which is 15%). `priority` Fig. 18. `routing`: policies of the live router on few nodes, with adapters, alike and unlike.
`limits`: where advisories stop paying, against the better of two systems without them (KV loaded on demand, routed sticky or by load). `scale`: a
coarser node, see bench/sim/symphony_scale.py; only if asked for.

Users at equal latency: at 20.5/18 of what `recompute` has with 64 users, the paper's own pair. Imbalance: requests at the fullest node over those at
the median one, each averaged over a look a second; peak: the most at any node and look over the median. `of_clairvoyant`: what ours gains over a
baseline (the ratio less 1) over what the clairvoyant gains. The last line is JSON. Of each figure: median over seeds; `spread` has least and most,
`seeds` all. What falls short of the paper is printed first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.data import MT_BENCH
from bench.sim import symphony_scale
from bench.sim.core.conversations import Chats, LogNormal, recorded
from bench.sim.core.hardware import GB
from bench.sim.core.session_cluster import Company
from bench.sim.core.tables import Figure, Part, Workers, crossing, parser_for, report_parts, seeds_of
from bench.sim.symphony_runs import (
    ADAPTER_RANKS,
    BY_LOAD,
    CHAT,
    CLAIRVOYANT,
    DEMAND,
    DEMAND_BALANCED,
    FIRST_LOOK,
    OURS,
    PAPER,
    PAPER_LIMIT,
    PAPER_USERS,
    RECOMPUTE,
    SPAN_S,
    STICKY,
    Arm,
    Point,
    Setting,
    check,
    of_clairvoyant,
    route_of,
    run,
    run_agents,
    still_baselines,
)

# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """What all parts share."""

    workers: Workers
    seeds: tuple[int, ...]
    setting: Setting
    recorded: Path = MT_BENCH
    outcomes: dict[Point, Any] = field(default_factory=dict)

    def run(
        self,
        arms: Iterable[Arm],
        settings: Iterable[Setting],
        loads: Sequence[int],
        how: Callable[[Point], Any] = run,
    ) -> None:
        """Have the outcomes of all these."""
        wanted = [
            Point(arm, setting, load, seed)
            for setting in settings
            for load in reversed(loads)  # long ones first, so that no core is left alone with one
            for arm in arms
            for seed in self.seeds
        ]
        missing = [point for point in wanted if point not in self.outcomes]
        self.outcomes.update(zip(missing, self.workers.map(how, missing), strict=True))

    def of(self, arm: Arm, setting: Setting, load: int) -> list[Any]:
        return [self.outcomes[Point(arm, setting, load, seed)] for seed in self.seeds]

    def values(self, arm: Arm, setting: Setting, load: int, name: str) -> list[float]:
        return [getattr(outcome, name) for outcome in self.of(arm, setting, load)]

    def ratios(self, over: Arm, under: Arm, setting: Setting, load: int, name: str) -> tuple[float, ...]:
        """Of one arm's figure over another's, seed by seed."""
        pairs = zip(
            self.values(over, setting, load, name), self.values(under, setting, load, name), strict=True
        )
        return tuple(a / b for a, b in pairs)


def users_within(bench: Bench, arm: Arm, setting: Setting, loads: Sequence[int]) -> list[float]:
    """Users at which normalised latency leaves the limit, by seed; the edge of `loads` where it does so beyond them."""
    # Few requests end at that load, so its median over seeds is the limit of all.
    limit_s = PAPER_LIMIT * statistics.median(bench.values(RECOMPUTE, setting, PAPER_USERS, "latency_s"))
    found = []
    for at in range(len(bench.seeds)):
        latencies = [bench.values(arm, setting, load, "latency_s")[at] for load in loads]
        edge = loads[0] if latencies[0] > limit_s else loads[-1]
        found.append(crossing(loads, latencies, limit_s) or float(edge))
    return found


def _ratio(
    what: str, values: Sequence[float], paper: float | None, arm: Arm, is_less_better: bool = False
) -> Figure:
    return Figure(what, tuple(values), paper, is_less_better, arm.made_by, "ratio")


# -- chats -------------------------------------------------------------------------------------------------------------

LOADS_8B = (64, 256, 512, 768, 1024, 1536)
PAPER_8B: dict[str, Any] = {
    "users": {"recompute": 4.0, "sticky": 4.2},
    "least": 1.4,
    "most": 1.9,
    "sticky": 2.5,
    "ttft": 2.4,
}
LOADS_PAPER = (64, 96, 128, 192, 256, 384)
BALANCE_LOADS = (256, 1024)


def chat_part(bench: Bench, setting: Setting, loads: Sequence[int], balance_loads: Sequence[int]) -> Part:
    """Fig. 12: users at equal latency, latency and TTFT over users; Fig. 14."""
    bench.run(CHAT.values(), [setting], loads)
    within = {name: users_within(bench, arm, setting, loads) for name, arm in CHAT.items()}
    figures: list[Figure] = []
    result: dict[str, Any] = {
        "made_by": setting.made_by,
        "users_within": within,
        "users_ratio": {},
        "bound_users_ratio": {},
        "of_clairvoyant": {},
    }
    for name in ("recompute", "sticky", "prefix"):
        ratios, bounds = (
            [a / b for a, b in zip(within[arm], within[name], strict=True)] for arm in ("ours", "clairvoyant")
        )
        figures.append(
            _ratio(f"users at equal latency, over {name}", ratios, PAPER_8B["users"].get(name), OURS)
        )
        result["users_ratio"][name] = round(figures[-1].median, 4)
        result["bound_users_ratio"][name] = round(statistics.median(bounds), 4)
        result["of_clairvoyant"][name] = of_clairvoyant(ratios, bounds)
    for name, key, claim in (
        ("recompute", "latency_s", "most"),
        ("sticky", "latency_s", "sticky"),
        ("recompute", "ttft_s", "ttft"),
        ("sticky", "ttft_s", "ttft"),
    ):
        what = "normalised latency" if key == "latency_s" else "TTFT"
        found = [
            _ratio(
                f"{what} of {name} over ours, most at any load (here {load} users)",
                bench.ratios(CHAT[name], OURS, setting, load, key),
                PAPER_8B.get(claim),
                OURS,
            )
            for load in loads
        ]
        figures.append(max(found, key=lambda figure: figure.median))
        result[f"{key[:-2]}_over_ours_{name}"] = {
            str(load): round(figure.median, 3) for load, figure in zip(loads, found, strict=True)
        }
    at_least = bench.ratios(RECOMPUTE, OURS, setting, loads[0], "latency_s")
    figures.append(
        _ratio(
            f"normalised latency of recompute over ours at {loads[0]} users",
            at_least,
            PAPER_8B["least"],
            OURS,
        )
    )
    result["curve"] = {name: _curve(bench, arm, setting, loads) for name, arm in CHAT.items()}
    more, result["imbalance"] = balance_figures(bench, setting, balance_loads)
    return figures + more, result


def _curve(bench: Bench, arm: Arm, setting: Setting, loads: Sequence[int]) -> dict[str, Any]:
    """Medians over seeds."""
    names = (
        "latency_s tpot_s ttft_s ttft_p99_s tpot_p99_s imbalance peak widest most median least "
        "device_share loaded_share stalled_share num_requests"
    )
    return {
        str(load): {
            name: round(statistics.median(bench.values(arm, setting, load, name)), 5)
            for name in names.split()
        }
        for load in loads
    }


def balance_figures(bench: Bench, setting: Setting, loads: Sequence[int]) -> Part:
    """Fig. 14, at 256 users, and at more."""
    arms = CHAT | {"by_load": BY_LOAD, "first_look": FIRST_LOOK}
    bench.run(arms.values(), [setting], loads)
    papers = {"sticky": 3.1, "ours": 1.0, "by_load": 1.0, "recompute": 1.0}
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for load in loads:
        found = result[str(load)] = {"peak": {}}
        for name, arm in arms.items():
            values = bench.values(arm, setting, load, "imbalance")
            paper = papers.get(name) if load == loads[0] else None
            what = f"requests at the fullest node over the median one, {load} users, {name}"
            figures.append(_ratio(what, values, paper, arm, is_less_better=name != "sticky"))
            found[name] = round(figures[-1].median, 4)
            found["peak"][name] = round(statistics.median(bench.values(arm, setting, load, "peak")), 4)
        ours, bound = (bench.ratios(STICKY, arm, setting, load, "imbalance") for arm in (OURS, CLAIRVOYANT))
        found["of_clairvoyant"] = of_clairvoyant(ours, bound)
    return figures, result


def chat8b_part(bench: Bench) -> Part:
    return chat_part(bench, bench.setting, LOADS_8B, BALANCE_LOADS)


def paper_part(bench: Bench) -> Part:
    """The paper's own set-up: its baselines first."""
    setting = PAPER.lasting(bench.setting)
    at, most = BALANCE_LOADS
    figures, result = chat_part(bench, setting, LOADS_PAPER, [at])
    bench.run([STICKY, OURS, CLAIRVOYANT], [setting], [most])
    served, bound = (bench.ratios(arm, STICKY, setting, most, "num_requests") for arm in (OURS, CLAIRVOYANT))
    figures.append(_ratio(f"requests served, over sticky, {most} users", served, 4.2, OURS))
    result["served_ratio"] = {
        "sticky": round(figures[-1].median, 4),
        "bound": round(statistics.median(bound), 4),
    }
    result["baselines"] = checks = baselines(bench, setting)
    result["baseline_matches_paper"] = all(check["matches"] for check in checks.values())
    result["baseline_misses"] = [name for name, check in checks.items() if not check["matches"]]
    # Of the checks that need no run, with the KV of the model's config.json.
    result["config_baselines"] = still_baselines(bench.setting)
    return figures, result


def baselines(bench: Bench, setting: Setting) -> dict[str, Any]:
    """The figures that the paper's text gives of its baselines alone, and how near ours come."""

    def median(arm: Arm, load: int, name: str) -> float:
        return statistics.median(bench.values(arm, setting, load, name))

    slower = [
        statistics.median(bench.ratios(STICKY, RECOMPUTE, setting, load, "latency_s")) for load in LOADS_PAPER
    ]
    load, most = BALANCE_LOADS
    mean, peak = median(STICKY, load, "imbalance"), median(STICKY, load, "peak")
    return still_baselines(setting) | {
        "vLLM's ms a token with 64 users (§4.2)": check(1e3 * median(RECOMPUTE, 64, "latency_s"), 18.5),
        "InferCept's time over vLLM's (Fig. 8), most at any load": check(max(slower), 1.7),
        # It does not say over what time: between the mean over looks and the most at any look.
        "InferCept's fullest node over the median, 256 users (Fig. 14)": {
            "ours": [round(mean, 3), round(peak, 3)],
            "paper": 3.1,
            "matches": mean <= 3.1 <= peak,
        },
        "requests between InferCept's fullest and emptiest node, 1,024 users (Fig. 1)": check(
            median(STICKY, most, "widest"), 300
        ),
    }


# -- agents, missing, priority --------------------------------------------------------------------------------

NUM_WORKFLOWS = (64, 128)


def agents_part(bench: Bench) -> Part:
    """Fig. 15: MetaGPT on 8 devices. The paper does not say how many workflows ran at once; the figure is that of the most."""
    # What it runs are no chats.
    bench = replace(bench, outcomes={})
    figures: list[Figure] = []
    result: dict[str, Any] = {"made_by": f"{bench.setting.engine}, workflows by {Company()}"}
    for key, setting, loads in (
        ("config", bench.setting, NUM_WORKFLOWS),
        ("paper", PAPER.lasting(bench.setting), NUM_WORKFLOWS[:1]),
    ):
        bench.run(CHAT.values(), [setting], loads, run_agents)
        found: dict[str, Any] = {}
        for load in loads:
            for name in ("recompute", "sticky", "prefix"):
                values = bench.ratios(CHAT[name], OURS, setting, load, "workflow_s")
                paper = 2.8 if (name, load) == ("recompute", loads[-1]) else None
                what = f"workflow time of {name} over ours, {load} workflows, {setting.model.name}"
                figures.append(_ratio(what, values, paper, OURS))
                found.setdefault(str(load), {})[name] = round(figures[-1].median, 4)
            ours, bound = (
                bench.ratios(RECOMPUTE, arm, setting, load, "workflow_s") for arm in (OURS, CLAIRVOYANT)
            )
            found[str(load)] |= {
                "lead_s": statistics.median(bench.values(OURS, setting, load, "lead_s")),
                "bound": round(statistics.median(bound), 4),
                "of_clairvoyant": of_clairvoyant(ours, bound),
            }
        result[key] = found
    most = result["config"][str(NUM_WORKFLOWS[-1])]
    return figures, result | {
        "agents_speedup": most["recompute"],
        "agents_of_clairvoyant": most["of_clairvoyant"],
    }


MISSING = (0.0, 0.05, 0.1, 0.2, 0.4)


def missing_part(bench: Bench) -> Part:
    """Fig. 17: shares of requests without an advisory. They go to their KV, or by load and have it fetched."""
    load = 256
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    settings = {
        share: replace(bench.setting, habits=replace(bench.setting.habits, missing=share))
        for share in MISSING
    }
    for name, arm in {"to_kv": OURS, "by_load": replace(OURS, unannounced="load_balance")}.items():
        bench.run([arm], settings.values(), [load])
        for share in MISSING[1:]:
            for key, what in (("latency_s", "normalised latency"), ("ttft_s", "TTFT")):
                some, none = (bench.values(arm, settings[s], load, key) for s in (share, MISSING[0]))
                values = tuple(a / b - 1 for a, b in zip(some, none, strict=True))
                paper = 0.06 if (share, key) == (0.1, "latency_s") else None
                figures.append(
                    Figure(f"{what}, {share:.0%} missing, {name}", values, paper, True, arm.made_by)
                )
                result.setdefault(name, {}).setdefault(f"{share:g}", {})[key[:-2]] = round(
                    figures[-1].median, 5
                )
    return figures, {"missing_10pct_penalty": result["to_kv"]["0.1"]["latency"], "missing": result}


URGENT = (0.1, 0.3, 0.5)


def priority_part(bench: Bench) -> Part:
    """Fig. 18: shares of people of high priority, against vLLM's priority order. The paper says that both kinds gain, and gives no numbers."""
    load = 1024
    theirs = replace(RECOMPUTE, queue="priority")
    ours = replace(OURS, queue="priority", route="priority", second="")
    figures: list[Figure] = []
    for share in URGENT:
        setting = replace(bench.setting, habits=replace(bench.setting.habits, urgent=share))
        bench.run([theirs, ours], [setting], [load])
        for key in ("urgent_latency_s", "other_latency_s"):
            values = bench.ratios(theirs, ours, setting, load, key)
            who = key.partition("_")[0]
            what = f"normalised latency of recompute over ours, {share:.0%} urgent, the {who}"
            figures.append(_ratio(what, values, None, ours))
    return figures, {"priority": {figure.what: round(figure.median, 4) for figure in figures}}


# -- routing -----------------------------------------------------------------------------------------------------------

ROUTES = {"sticky": DEMAND, "load_balance": BY_LOAD, "first_look": FIRST_LOOK, "overture": OURS}
USERS_PER_NODE = 128


def routing_settings(bench: Bench) -> dict[str, Setting]:
    """Nodes of one device and its own host memory, so that most KV lies there or on disk; everybody uses an adapter."""
    habits = replace(bench.setting.habits, num_adapters=len(ADAPTER_RANKS))
    span_s = min(bench.setting.span_s, 200.0)
    four = replace(
        bench.setting,
        num_hosts=4,
        num_devices=1,
        host_bytes=64 * GB,
        habits=habits,
        span_s=span_s,
        warm_up_s=60.0,
    )
    return {
        "2 nodes": replace(four, num_hosts=2),
        "4 nodes": four,
        "8 nodes": replace(four, num_hosts=8),
        "2 nodes, one at half the speed": replace(four, num_hosts=2, slow_share=0.5),
        "4 nodes, one at half the speed": replace(four, slow_share=0.5),
        "4 nodes, no adapters": replace(four, habits=replace(habits, num_adapters=0)),
        "4 nodes, 30% unannounced": replace(four, habits=replace(habits, missing=0.3)),
        "4 nodes, none announced": replace(four, habits=replace(habits, missing=1.0)),
        "4 nodes, three joined": replace(four, habits=replace(habits, missing=1.0, begin_on_first=True)),
        "4 nodes, network 1.25 GB/s": replace(four, network_bytes_per_s=1.25e9),
        "4 nodes, slow disks": replace(four, disk_bytes_per_s=0.5e9, host_bytes=16 * GB),
    }


def routing_part(bench: Bench) -> Part:
    """Which policy is the default: people with adapters on few nodes. No figures of a paper but the balance."""
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for name, setting in routing_settings(bench).items():
        load = USERS_PER_NODE * setting.num_hosts
        bench.run(ROUTES.values(), [setting], [load])
        result[name] = {
            route: _curve(bench, arm, setting, [load])[str(load)] for route, arm in ROUTES.items()
        }
        for under, key, what in (
            (DEMAND, "ttft_p99_s", "TTFT p99 over sticky without advisories"),
            (BY_LOAD, "latency_s", "normalised latency over load_balance"),
        ):
            values = bench.ratios(OURS, under, setting, load, key)
            figures.append(_ratio(f"{what}, {name}", values, None, OURS, is_less_better=True))
    return figures, {"routing": result}


# -- limits ------------------------------------------------------------------------------------------------------------

LIMIT_USERS = 512
# An advisory pays where it takes away so much of the mean TTFT, and no latency is lost. Chosen.
PAYS_SHARE = 0.05


def limit_settings(bench: Bench) -> dict[str, dict[str, Setting]]:
    """One thing varied at a time; the middle is a machine with 64 GB of memory, so that most KV lies on disk."""
    middle = replace(
        bench.setting, host_bytes=64 * GB, span_s=min(bench.setting.span_s, 240.0), warm_up_s=60.0
    )
    habits, gpu = middle.habits, middle.gpu

    def chats(mean: float) -> Setting:
        return replace(middle, habits=replace(habits, chats=Chats(turns=LogNormal(mean, 1.3))))

    found = {
        "lead_share": {
            f"{s:g}": replace(middle, habits=replace(habits, lead_share=s)) for s in (0, 0.01, 0.1, 0.3, 1)
        },
        "link_share": {
            f"{s:g}": replace(middle, gpu=replace(gpu, link_share=s)) for s in (0.01, 0.03, 0.1, 0.8)
        },
        "network_bytes_per_s": {
            f"{v:g}": replace(middle, network_bytes_per_s=v) for v in (0.125e9, 1.25e9, 12.5e9)
        },
        "disk_bytes_per_s": {f"{v:g}": replace(middle, disk_bytes_per_s=v) for v in (0.5e9, 1e9, 3e9, 7e9)},
        "mean_turns": {f"{mean:g}": chats(mean) for mean in (1.0, 2.0, 5.25, 12.0)},
        "host_bytes": {f"{gb}e9": replace(middle, host_bytes=gb * GB) for gb in (16, 64, 256)},
        "device_bytes": {
            f"{gb}e9": replace(middle, gpu=gpu.with_memory(gb * GB)) for gb in (24, 40, 80, 141)
        },
    }
    if bench.recorded.exists():
        trace = recorded(bench.recorded)
        found["mean_turns"][trace.name] = replace(middle, habits=replace(habits, chats=trace))
    return found


def limits_part(bench: Bench) -> Part:
    """Where advisories stop paying."""
    limits: dict[str, Any] = {}
    figures: list[Figure] = []
    for name, settings in limit_settings(bench).items():
        bench.run([OURS, BY_LOAD, DEMAND, DEMAND_BALANCED], settings.values(), [LIMIT_USERS])
        limits[name] = {value: _limit(bench, setting) for value, setting in settings.items()}
        for value, found in limits[name].items():
            what = f"TTFT saved by advisories, {name} {value}"
            figures.append(Figure(what, tuple(found["saved_ttft_seeds"]), None, False, OURS.made_by))
    dead = {name: [v for v, found in values.items() if not found["pays"]] for name, values in limits.items()}
    return figures, {
        "limits": limits,
        "does_not_pay": {name: values for name, values in dead.items() if values},
    }


def _limit(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Ours against the better of the two without advisories, seed by seed."""
    saved: dict[str, list[float]] = {"ttft": [], "latency": []}
    for own, *without in zip(
        *(bench.of(arm, setting, LIMIT_USERS) for arm in (OURS, DEMAND, DEMAND_BALANCED)), strict=True
    ):
        best = min(without, key=lambda outcome: float(outcome.ttft_s))
        saved["ttft"].append(1 - own.ttft_s / best.ttft_s)
        saved["latency"].append(1 - own.latency_s / min(outcome.latency_s for outcome in without))
    medians = {name: statistics.median(values) for name, values in saved.items()}
    return {
        "pays": medians["ttft"] >= PAYS_SHARE and medians["latency"] >= -0.001,
        "saved_ttft": round(medians["ttft"], 4),
        "saved_latency": round(medians["latency"], 4),
        "saved_ttft_seeds": [round(value, 4) for value in saved["ttft"]],
        "ttft_s": {
            name: round(statistics.median(bench.values(arm, setting, LIMIT_USERS, "ttft_s")), 4)
            for name, arm in (
                ("ours", OURS),
                ("by_load", BY_LOAD),
                ("demand", DEMAND),
                ("demand_balanced", DEMAND_BALANCED),
            )
        },
    }


def scale_part(bench: Bench) -> Part:
    """A thousand nodes, a million sessions; no figures of the paper."""
    chats = bench.setting.habits.chats
    found = symphony_scale.measure(bench.workers, bench.seeds[0], chats, route_of("load_balance", ()))
    return [], {"scale": found, "made_by": found["made_by"]}


PARTS: dict[str, Callable[[Bench], Part]] = {
    "paper": paper_part,
    "chat8b": chat8b_part,
    "agents": agents_part,
    "missing": missing_part,
    "priority": priority_part,
    "routing": routing_part,
    "limits": limits_part,
    "scale": scale_part,
}


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    quick = "the parts paper, chat8b, missing and agents, 4 simulated minutes"
    parser = parser_for("symphony", __doc__, PARTS, quick, "all but scale")
    parser.add_argument("--recorded", type=Path, default=MT_BENCH, help="MT-Bench-101, for the part limits")
    parser.add_argument("--span-s", type=float, default=SPAN_S, help="simulated, each run")
    args = parser.parse_args(arguments)
    setting = Setting(span_s=min(args.span_s, 240.0) if args.quick else args.span_s)
    default = (
        ("paper", "chat8b", "missing", "agents")
        if args.quick
        else [name for name in PARTS if name != "scale"]
    )
    with Workers(args.jobs) as workers:
        bench = Bench(workers, seeds_of(args), setting, args.recorded)
        report_parts("SYMPHONY", "symphony", bench.seeds, _made(args.part or default, bench), _top)


def _made(names: Iterable[str], bench: Bench) -> Iterator[tuple[str, Part]]:
    for name in names:
        figures, result = PARTS[name](bench)
        yield name, (figures, {"made_by": bench.setting.made_by} | result)


HEADLINES = (
    "users_ratio",
    "bound_users_ratio",
    "of_clairvoyant",
    "missing_10pct_penalty",
    "agents_speedup",
    "agents_of_clairvoyant",
    "limits",
    "does_not_pay",
    "scale",
)


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    """What the spec names. Of the two set-ups the figures are those of the model as it is; the paper's own stand under `paper`."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if name == "paper":
            keys = (
                "baseline_matches_paper",
                "baseline_misses",
                "users_ratio",
                "bound_users_ratio",
                "of_clairvoyant",
            )
            found["paper"] = {key: part[key] for key in keys}
            found["baseline_matches_paper"] = part["baseline_matches_paper"]
            continue
        found |= {key: part[key] for key in HEADLINES if key in part}
        if "imbalance" in part:
            found["imbalance_max_over_median"] = part["imbalance"]["256"]
    return found
