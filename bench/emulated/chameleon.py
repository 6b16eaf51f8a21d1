"""Chameleon's tables on vLLM's scheduler with our classes: queues and caches for adapters over loads.

    python -m bench.emulated chameleon [--part NAME ...] [--quick] [--seeds N] [--seed N] [--jobs N] [--span-s S] [--trace PATH] [--find-shares]

An arm is a policy of starting and one of eviction:
  base   fcfs, no cache: S-LoRA's. Adapters of requests that wait are copied ahead, and leave with their last request
  cache  fcfs, Chameleon's score
  sched  mlq, no cache
  full   mlq, Chameleon's score: the paper's policies
  default  bounded, adaptive, and the host computes for adapters that are on their way over the link: what serves by default, and what the keys on
         top are of. The others' steps wait for their adapters
Beside each stands what one that knows the future gains on the same requests with the same slots (`KNOWING`), and how much of that the arm gains
(`of_clairvoyant`).

The device is an A40 by its data sheet, with one calibration from Chameleon's low-load figures (bench/sim/core/calibration.py); Llama-7B; 100 adapters
on q, k, v, o, all in host memory. The engine is ours, in virtual time: prompts in chunks beside those that decode; steps compute with adapters in
slots, each as large as the largest adapter, as many as are in use at the paper's highest load; what leaves a slot is copied into KV blocks that
nobody needs and goes when KV needs them, by the policy's order. The paper's cache has no such slots.

Loads. The paper's 6 to 13 requests/s cannot be had of its hardware with the trace's lengths: at the A40's full 149.7 TFLOP/s (none are reached) the
mean prompt takes 0.1 s, so 9.7/s would fill it without decoding one token. The paper does not say what it cut. Here lengths are cut to the model's
2,048 tokens, then multiplied by one number, found so that `base` leaves its SLO at 8.7 requests/s, as the paper's does (`--find-shares`). That number
knows of no other arm, and it is the only one taken from a figure that is compared. SLO: P99 TTFT of five times the mean TTFT of requests that come
one at a time (Chameleon §5.1).

Memory. With 48 GB, the paper's, adapters never fill what KV leaves, and up to the paper's loads nobody waits for memory: `main` says nothing of which
adapter goes or who starts first, and `sched` is `base` there. So `eviction` and `sched` have 24 GB, the least that the paper serves this model with
(§5.5, Fig. 18), half the slots, and a number for their lengths found by the same rule; there KV takes copies back (`num_taken_back`).

Parts: `main` Fig. 10 and 12. `eviction` Fig. 14. `sched` Fig. 13 and 16. `forecast` Fig. 15, where it can matter: live, a forecast brings an adapter
from disk to host memory, so that has room for a fifth of them; asked for at any time, as in the paper, or by timers.

Predictor: `Classes` with accuracy 0.8, the paper's; a request gets the same guess in all arms. TTFT counts requests that come after a warm-up. The
last line is JSON: changes are fractions of `base` on the same seed's requests, -0.8 is 80% less; ratios are of loads within SLO. Of each figure:
median over seeds; `spread` has least and most, `seeds` all. What falls short of the paper is printed first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.data import AZURE
from bench.emulated.chameleon_runs import (
    BASE,
    CACHE,
    DEFAULT,
    KNOWING,
    MAIN,
    PAPER_KNEE,
    SCHED,
    Arm,
    Bench,
    Outcome,
    Setting,
    slo_s,
)
from bench.sim.core.calibration import A40
from bench.sim.core.hardware import GB
from bench.sim.core.tables import Figure, Part, Workers, add_table_arguments, changes, report_parts, seeds_of

PARTS = ("main", "eviction", "sched", "forecast")
SPAN_S, WARM_UP_S = 300.0, 60.0
LOADS = (6, 8, 9, 11, 13)
QUICK_LOADS = (6, 8, 9, 13)
# As `--find-shares` finds them with three seeds.
SHARE, SCARCE_SHARE = 0.186, 0.138
SCARCE_GB, SCARCE_SLOTS = 24, 16
# A plain disk of today reads some 2 GB/s. Chosen.
DISK_BYTES_PER_S = 2e9
HOST_SHARE = 0.2
PAPER_P99 = {6: -0.147, 8: -0.246, 9: -0.807}
PAPER_TPOT_S = 0.150
# The tail grows so slowly there that seeds differ by more. Chosen.
NEAR = 0.1
# Keys, arms, and loads within SLO over the base's. Source: Chameleon Fig. 10.
RATIOS = (
    ("slo_load_ratio", "default", 12.9 / 8.7),
    ("cache_only_ratio", "cache", 1.2),
    ("sched_only_ratio", "sched", 1.1),
)
PAPER_P50 = {6: -0.139, 8: -0.209, 9: -0.481}


def main_part(bench: Bench, setting: Setting, loads: Sequence[int]) -> Part:
    """Fig. 10 and 12: P99 and P50 TTFT over loads, and loads within SLO, of the four systems."""
    bench.run(MAIN.values(), setting, loads)
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for key, paper in (("ttft_p99", PAPER_P99), ("ttft_p50", PAPER_P50)):
        for name, arm in list(MAIN.items())[1:]:
            found = {}
            for load in loads:
                values = changes(bench.of(arm, setting, load), bench.of(BASE, setting, load), f"{key}_s")
                paper_change = paper.get(load) if arm is DEFAULT else None
                what = f"{key[-3:].upper()} TTFT at {load}, {name}"
                figures.append(Figure(what, values, paper_change, True, arm.made_by))
                found[str(load)] = round(figures[-1].median, 4)
            result.setdefault(f"{key}_change_by_arm", {})[name] = found
        own = result[f"{key}_change_by_arm"]["default"]
        result[f"{key}_change"] = {str(load): own[str(load)] for load in loads if load in paper}
    knees = {name: bench.knees(arm, setting, loads) for name, arm in MAIN.items()}
    for key, name, paper_ratio in RATIOS:
        ratios = tuple(a / b for a, b in zip(knees[name], knees["base"], strict=True))
        figures.append(
            Figure(f"load within SLO, {name}", ratios, paper_ratio, False, MAIN[name].made_by, "ratio")
        )
        result[key] = round(figures[-1].median, 4)
    result |= clairvoyant(bench, setting, loads, result, knees["base"])
    result["baseline_matches_paper"] = matches_paper(bench, setting, loads, knees["base"])
    result["curve"] = {name: _curve(bench, arm, setting, loads) for name, arm in MAIN.items()}
    result["knees_per_s"] = {name: [round(value, 3) for value in values] for name, values in knees.items()}
    return figures, result


def clairvoyant(
    bench: Bench, setting: Setting, loads: Sequence[int], found: dict[str, Any], base_knees: Sequence[float]
) -> dict[str, Any]:
    """`bound`: the changes and ratios in `found`, of arms that know the future. `of_clairvoyant`: the part of what they gain that ours gain."""
    bench.run([arm for arms in KNOWING.values() for arm in arms], setting, loads)
    bound: dict[str, Any] = {}
    shares: dict[str, Any] = {}
    for key in ("ttft_p99", "ttft_p50"):
        for name, arms in KNOWING.items():
            own = found[f"{key}_change_by_arm"][name]
            best = {str(load): _best(bench, arms, setting, load, f"{key}_s") for load in loads}
            bound.setdefault(f"{key}_change_by_arm", {})[name] = best
            shares.setdefault(key, {})[name] = {load: _part(own[load], best[load]) for load in best}
        bound[f"{key}_change"] = bound[f"{key}_change_by_arm"]["default"]
    for key, name, _ in RATIOS:
        knees = [bench.knees(arm, setting, loads) for arm in KNOWING[name]]
        ratio = max(
            statistics.median(own / base for own, base in zip(of_arm, base_knees, strict=True))
            for of_arm in knees
        )
        bound[key] = round(ratio, 4)
        shares[key] = _part(found[key] - 1, ratio - 1)
    return {"bound": bound, "of_clairvoyant": shares}


def _best(bench: Bench, arms: Sequence[Arm], setting: Setting, load: float, name: str) -> float:
    """The change of the arm that does best: one order for all seeds, as the best seed by seed would mostly be luck."""
    base = bench.of(BASE, setting, load)
    return round(min(statistics.median(changes(bench.of(arm, setting, load), base, name)) for arm in arms), 4)


def _part(own: float, most: float) -> float | None:
    """What ours gains of what can be gained; None where that is less than 1%."""
    return round(own / most, 3) if abs(most) >= 0.01 else None


def matches_paper(
    bench: Bench, setting: Setting, loads: Sequence[int], base_knees: Sequence[float]
) -> dict[str, bool]:
    """Whether `base` does what the paper's text says of S-LoRA (§5.2). Its load within SLO is what lengths were scaled by."""
    tpot_s = [o.tpot_p99_s for load in loads if load in PAPER_P99 for o in bench.of(BASE, setting, load)]
    return {
        "load_within_slo": abs(statistics.median(base_knees) / PAPER_KNEE - 1) <= NEAR,
        "tpot_p99_within_slo": statistics.median(tpot_s) <= PAPER_TPOT_S,
    }


def _curve(bench: Bench, arm: Arm, setting: Setting, loads: Sequence[float]) -> dict[str, Any]:
    return {str(load): _told(bench.of(arm, setting, load)) for load in loads}


def _told(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    def values(name: str, digits: int = 4) -> list[float]:
        return [round(getattr(outcome, name), digits) for outcome in outcomes]

    shares = ("hit_share", "slot_share", "disk_share", "copied_share")
    return {
        **{name: values(name) for name in ("ttft_p99_s", "ttft_p50_s", "tpot_p99_s")},
        **{name: round(statistics.median(values(name)), 4) for name in shares},
        "link_gb": round(sum(outcome.link_bytes for outcome in outcomes) / GB, 1),
        **{
            name: sum(getattr(outcome, name) for outcome in outcomes)
            for name in ("num_taken_back", "num_predicted", "num_squashed", "num_preempted")
        },
    }


EVICTION_ARMS = {
    "lru": Arm(eviction="lru"),
    "equal": Arm(eviction="equal_weights"),
    "paper": CACHE,
    "adaptive": Arm(eviction="adaptive"),
    "default": DEFAULT,
}
PAPER_EVICTION = {"lru": -0.18, "equal": -0.22, "paper": -0.26}
PAPER_OF = PAPER_EVICTION | {"default": PAPER_EVICTION["paper"]}


def eviction_part(bench: Bench, setting: Setting, loads: Sequence[int] = (8, 9)) -> Part:
    """Fig. 14: which adapter goes, with fcfs; and beside them all that serves by default."""
    bench.run([BASE, *EVICTION_ARMS.values(), *KNOWING["cache"], *KNOWING["default"]], setting, loads)
    figures: list[Figure] = []
    result: dict[str, Any] = {"bound": {}}
    for load in loads:
        base = bench.of(BASE, setting, load)
        for name, arms in (("at", KNOWING["cache"]), ("default_at", KNOWING["default"])):
            result["bound"][f"{name}_{load}"] = _best(bench, arms, setting, load, "ttft_p99_s")
        for name, arm in EVICTION_ARMS.items():
            outcomes = bench.of(arm, setting, load)
            paper = PAPER_OF.get(name) if load == 8 else None
            figures.append(
                Figure(
                    f"P99 TTFT at {load}, {name}",
                    changes(outcomes, base, "ttft_p99_s"),
                    paper,
                    True,
                    arm.made_by,
                )
            )
            result.setdefault(f"at_{load}", {})[name] = round(figures[-1].median, 4)
            result.setdefault(f"by_rank_at_{load}", {})[name] = _by_rank(outcomes, base)
            result.setdefault(f"runs_at_{load}", {})[name] = _told(outcomes)
    result["eviction"] = {name: result[f"at_{loads[0]}"][name] for name in PAPER_EVICTION}
    return figures, result


def _by_rank(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, float]:
    """Change of P99 TTFT of the requests of each rank, the median over seeds."""
    found: dict[int, list[float]] = {}
    for a, b in zip(ours, theirs, strict=True):
        for rank, own_s in a.ttft_p99_by_rank_s.items():
            found.setdefault(rank, []).append(own_s / b.ttft_p99_by_rank_s[rank] - 1)
    return {str(rank): round(statistics.median(values), 4) for rank, values in found.items()}


QUANTILES = (("ttft_p50_s", "P50"), ("ttft_p99_s", "P99"), ("ttft_p99_long_s", "P99 of long"))
SCHED_ARMS = {
    "sjf": Arm("sjf"),
    "mlq": SCHED,
    "mlq, paper": Arm("mlq, paper", rule="least_squares"),
    "mlq, smallest first": Arm("mlq, smallest first"),
    "mlq, aging 1 s": Arm("mlq, aging 1 s"),
    "mlq, 100%": Arm("mlq", accuracy=1.0),
    "mlq, 60%": Arm("mlq", accuracy=0.6),
    "mlq, live predictor": Arm("mlq", accuracy=None),
    "output only, 80%": Arm("mlq", is_output_only=True),
    "output only, 60%": Arm("mlq", accuracy=0.6, is_output_only=True),
}


def sched_part(bench: Bench, setting: Setting, loads: Sequence[int] = (13,)) -> Part:
    """Fig. 13 and 16: orders of starting and accuracies of the predictor without a cache, where requests queue."""
    bench.run([BASE, *SCHED_ARMS.values()], setting, loads)
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for load in loads:
        base = bench.of(BASE, setting, load)
        for name, arm in SCHED_ARMS.items():
            for key, what in QUANTILES:
                values = changes(bench.of(arm, setting, load), base, key)
                figures.append(Figure(f"{what} TTFT at {load}, {name}", values, None, True, arm.made_by))
                result.setdefault(f"at_{load}", {}).setdefault(name, {})[f"{key[:-2]}_change"] = round(
                    figures[-1].median, 4
                )
    return figures, result


def forecast_part(bench: Bench, setting: Setting, load: int = 8) -> Part:
    """Fig. 15: the histogram's forecasts against none, the cache and its policy the same. `bound`: none ever has to be read from disk."""
    plain = Arm(eviction="adaptive")
    arm = replace(plain, has_forecast=True)
    figures: list[Figure] = []
    result: dict[str, Any] = {"bound": {}}
    for name, own in (("any_time", setting), ("timers", replace(setting, has_timers=True))):
        foreseen = replace(own, host_bytes=None)
        bench.run([plain, arm], own, [load])
        bench.run([plain], foreseen, [load])
        ours, theirs = bench.of(arm, own, load), bench.of(plain, own, load)
        most = changes(bench.of(plain, foreseen, load), theirs, "ttft_p99_s")
        result["bound"][name] = {"ttft_p99_change": round(statistics.median(most), 4)}
        for key, what in QUANTILES[:2]:
            paper = -0.088 if (name, what) == ("any_time", "P99") else None
            values = changes(ours, theirs, key)
            figures.append(
                Figure(f"{what} TTFT at {load}, histogram, {name}", values, paper, True, arm.made_by)
            )
            result.setdefault(name, {})[f"{key[:-2]}_change"] = round(figures[-1].median, 4)
        result[name] |= {"with": _told(ours), "without": _told(theirs)}
    result["wins_anywhere"] = any(
        result[name][f"{key[:-2]}_change"] < -0.01
        for name in ("any_time", "timers")
        for key, _ in QUANTILES[:2]
    )
    return figures, result


# -- the command -------------------------------------------------------------------------------------------------------


def settings_of(args: argparse.Namespace) -> dict[str, Setting]:
    """Of each part."""
    warm_up_s = min(WARM_UP_S, args.span_s / 2)
    ample = Setting(trace=args.trace, length_share=SHARE, span_s=args.span_s, warm_up_s=warm_up_s)
    scarce = replace(
        ample, gpu=A40.with_memory(SCARCE_GB * GB), num_slots=SCARCE_SLOTS, length_share=SCARCE_SHARE
    )
    all_bytes = sum(ample.model.lora_bytes(rank) for rank in ample.pool.rank_of)
    on_disk = replace(ample, host_bytes=int(HOST_SHARE * all_bytes), disk_bytes_per_s=DISK_BYTES_PER_S)
    return {"main": ample, "eviction": scarce, "sched": scarce, "forecast": on_disk}


def run_parts(
    names: Sequence[str], bench: Bench, settings: dict[str, Setting], loads: Sequence[int]
) -> Iterator[tuple[str, Part]]:
    for name in PARTS:
        if name not in names:
            continue
        setting = settings[name]
        if name == "main":
            figures, result = main_part(bench, setting, loads)
        else:
            figures, result = {"eviction": eviction_part, "sched": sched_part, "forecast": forecast_part}[
                name
            ](bench, setting)
        described = {
            "made_by": f"{setting.made_by}; SLO {slo_s(setting):.3f} s",
            "slo_s": round(slo_s(setting), 4),
        }
        yield name, (figures, result | described)


def run(args: argparse.Namespace) -> None:
    settings = settings_of(args)
    names = args.part or (PARTS[:1] if args.quick else PARTS)
    with Workers(args.jobs) as workers:
        bench = Bench(workers, seeds_of(args), {})
        if args.find_shares:
            for name in ("main", "eviction"):
                print(name, bench.length_share(settings[name]))
            return
        loads = QUICK_LOADS if args.quick else LOADS
        parts = run_parts(names, bench, settings, loads)
        report_parts("Chameleon on vLLM's scheduler", "emulated-chameleon", bench.seeds, parts, _top)
        print_costs(bench)


def print_costs(bench: Bench) -> None:
    outcomes = bench.outcomes.values()
    num_steps, wall_s = sum(o.num_steps for o in outcomes), sum(o.wall_s for o in outcomes)
    print(f"{len(outcomes)} runs, {num_steps} steps, {wall_s:.0f} s of processes", file=sys.stderr)


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "main" in parts:
        shares = parts["main"]["of_clairvoyant"]
        found["baseline_matches_paper"] = all(parts["main"]["baseline_matches_paper"].values())
        found["of_clairvoyant"] = min(
            share
            for key in ("ttft_p99", "ttft_p50")
            for load, share in shares[key]["default"].items()
            if int(load) in PAPER_P99 and share is not None
        )
    for name in ("main", "eviction"):
        found |= {
            key: value
            for key, value in parts.get(name, {}).items()
            if key.endswith(("_change", "_ratio")) or key == "eviction"
        }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_table_arguments(parser, PARTS, "the part main, at 6, 8, 9 and 13 requests/s")
    parser.set_defaults(seeds=3)
    parser.add_argument("--trace", type=Path, default=AZURE)
    parser.add_argument("--span-s", type=float, default=SPAN_S, help="simulated, each run")
    parser.add_argument(
        "--find-shares", action="store_true", help="print the numbers that lengths are multiplied by"
    )
