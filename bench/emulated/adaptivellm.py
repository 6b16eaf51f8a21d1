"""AdaptiveLLM's tables on vLLM's scheduler with our classes: swap or recompute by cost, and who starts, where memory is tight.

    python -m bench.emulated adaptivellm [--part NAME ...] [--quick] [--seeds N] [--seed N] [--jobs N]

What runs is what serves: vLLM's scheduler, our queue, and host memory for KV by the driver's own connector and store (bench/emulated/tiers.py). As in
the paper (§4.2): 128 blocks of 16 tokens on the device and 64 in host memory, answers of at most 64 tokens; at most 128 requests run (one of its two
batches with numbers). An arm is a queue and a way back for those who are preempted:
  vllm       vLLM's queue, always recomputed; no host memory
  swap       vLLM's queue, always loaded, as far as host memory has it
  swap only  as `swap`, but on the device no more blocks than host memory has: our reading of the paper's vLLM_s, which never recomputes and whose
             batch "is limited by host memory"; it does not say how
  cost       vLLM's queue, the cheaper way by SwapOrRecompute: the cost alone
  adaptive   fair, least fair preempted first, the cheaper way: what stands for AdaptiveLLM
  mlq        the cheaper way
  default    bounded, the cheaper way: what serves by default
  free       the best of several queues, seed by seed, where swapping costs nothing and host memory holds everything: no way back is cheaper

Where this is not the paper's engine (vLLM 0.2): a swap copies nothing out when somebody is preempted, as KV is written through after each step, so
host memory has to hold what runs, too, and half of the device's blocks do not fit it. Loads go beside the steps, layer by layer; there, copies and
steps took turns (§6). What is recomputed goes in chunks beside those that decode, whose step reads the weights anyway; there, prompts had steps of
their own. KV that was preempted is found on the device as long as nobody took its blocks (vLLM's cache of prefixes, on by default). All of these make
preemption cheaper, the recomputing one most.

Costs: steps by an A800's data sheet, with one calibration from vLLM's published decode rates on an A100 (bench/sim/core/calibration.py); and its
link. The cost object predicts with the same. OPT-13B and -30B, Llama-13B and -32.5B. The paper's datasets are not beside the project: prompts are
log-normal with the published means (17.02, 19.66, 340.48 tokens) and the spread of oasst's first turns (standard deviation of the logarithm 0.95;
chosen for all three), cut at 928 tokens, so that each request fits host memory.

Two readings, as the paper says neither when requests come nor how long answers are:
  at once    all come at 0 s and answers go on to the bound: what vLLM's own throughput benchmark does. The top-level keys are from here
  over time  answers are log-normal with mean 58 and the same spread, cut at the bound; requests come by a Poisson process at 1.3 times the rate at
             which `vllm` serves them if they come at once (chosen: a queue that grows)
The paper plays 1,000 requests; here it is fewer, as each step is scheduled for real.

Parts: `main` tables 3 and 4, both readings. `turnaround` Fig. 8, batches of at most 64 and 128, and over time.
`limits` where swapping stops paying: link speed, host memory, prompt length (OPT-13B; vLLM's queue), with what the cost object predicts beside.
`predictors` Tables 5 and 6 and Fig. 9: how far off predictions of steps and copies are where these vary as a real engine's equal ones did, in the
same order (bench/emulated/predictors.py): `adaptive`, at once. `step_error`, `swap_error`: mean relative error against what was seen (of copies each
way, the worse), `_of_true` against what it would have been without noise, `_floor` that of who knows this: noise cannot be foretold.

Throughput: requests over the time until the last is answered. Weighted turnaround: mean of (end - arrival) / (end - first start); it falls also when
requests start early and are then kept waiting, so the mean turnaround stands beside it. The last line is JSON: ratios and changes are against the
same seed's requests, -0.3 is 30% less; `throughput_vs_recompute`, `throughput_vs_swap`, `weighted_turnaround_change` are of `adaptive`, the median
over models and datasets of the medians over seeds, and `of_clairvoyant` what they are of those of `free`; `over_time` has the same of the other
reading. Of each figure: median over seeds; `spread` has least and most, `seeds` all. What falls short of the paper is printed first.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.emulated.adaptivellm_runs import (
    AMPLE_BLOCKS,
    ARMS,
    AT_ONCE,
    DATASETS,
    FREE,
    GROUPS,
    HOST_BLOCKS,
    MAX_ANSWER_TOKENS,
    MODELS,
    NUM_REQUESTS,
    OVER_TIME,
    QUICK_REQUESTS,
    Arm,
    Outcome,
    Setting,
    engine_of,
    run_once,
)
from bench.emulated.predictors import predictors
from bench.emulated.tiers import EmulatedTiers, TierSizes
from bench.sim.core.calibration import A800
from bench.sim.core.clock import Clock
from bench.sim.core.links import SharedLink
from bench.sim.core.shapes import BLOCK_TOKENS
from bench.sim.core.steps import StepCost
from bench.sim.core.tables import Figure, Part, Workers, add_table_arguments, report_parts, seeds_of

# -- figures -----------------------------------------------------------------------------------------------------------


class PerRequest(Figure):
    """A number of preemptions, beside the paper's: neither more nor fewer is better."""

    @property
    def is_compared(self) -> bool:
        return False

    @property
    def falls_short(self) -> bool:
        return False

    def text(self, value: float) -> str:
        return f"{value:.2f} a request"


@dataclass(slots=True)
class Bench:
    """What all parts share: runs that were made, by arm, setting and seed."""

    workers: Workers
    seeds: tuple[int, ...]
    groups: tuple[tuple[str, str], ...] = GROUPS
    num_requests: int = NUM_REQUESTS
    outcomes: dict[tuple[Arm, Setting, int], Outcome] = field(default_factory=dict)

    def run(self, arms: Iterable[Arm], settings: Iterable[Setting]) -> None:
        """Have the outcomes of all these."""
        wanted = [(a, _own(a, s), seed) for s, a, seed in itertools.product(settings, arms, self.seeds)]
        missing = [key for key in dict.fromkeys(wanted) if key not in self.outcomes]
        found = self.workers.map(run_once, *zip(*missing, strict=True)) if missing else []
        self.outcomes.update(zip(missing, found, strict=True))

    def of(self, arm: Arm, setting: Setting) -> list[Outcome]:
        return [self.outcomes[arm, _own(arm, setting), seed] for seed in self.seeds]

    def setting(self, group: tuple[str, str], **changed: Any) -> Setting:
        model, dataset = group
        base = Setting(MODELS[model], DATASETS[dataset], num_requests=self.num_requests)
        return replace(base, **changed)


def _own(arm: Arm, setting: Setting) -> Setting:
    """What an arm has to do with: without host memory, neither its size nor the link; for nothing, more of both than it needs."""
    if arm.is_free:
        return replace(setting, host_blocks=AMPLE_BLOCKS, gpu=replace(setting.gpu, link_share=AT_ONCE))
    if arm.has_host:
        return setting
    gpu = replace(setting.gpu, link_share=A800.link_share)
    return replace(setting, host_blocks=HOST_BLOCKS, gpu=gpu)


Value = Callable[[Outcome], float]


def ratios(ours: Sequence[Outcome], theirs: Sequence[Outcome], value: Value) -> tuple[float, ...]:
    """Seed by seed."""
    return tuple(value(a) / value(b) for a, b in zip(ours, theirs, strict=True))


def throughput(outcome: Outcome) -> float:
    return outcome.per_s


def throughput_figure(
    bench: Bench, what: str, arm: Arm, base: Arm, setting: Setting, paper: float | None
) -> Figure:
    values = ratios(bench.of(arm, setting), bench.of(base, setting), throughput)
    made_by = f"{arm.made_by} against {base.made_by}; {setting.trace}"
    return Figure(what, values, paper, False, made_by, "ratio")


def change_figure(
    bench: Bench, what: str, arm: Arm, base: Arm, setting: Setting, value: Value, paper: float | None
) -> Figure:
    values = tuple(each - 1 for each in ratios(bench.of(arm, setting), bench.of(base, setting), value))
    made_by = f"{arm.made_by} against {base.made_by}; {setting.trace}"
    return Figure(what, values, paper, True, made_by)


def middle(figures: Iterable[Figure]) -> float:
    """Median over groups of the medians over seeds."""
    return round(statistics.median(figure.median for figure in figures), 4)


# -- parts -------------------------------------------------------------------------------------------------------------

# Throughput against vLLM and vLLM_s. Source: table 3.
PAPER_SPEEDUP = {
    ("OPT-13B", "chatbot"): (1.38, 2.46),
    ("OPT-13B", "alpaca"): (1.36, 2.55),
    ("OPT-13B", "summary"): (1.15, 2.50),
    ("OPT-30B", "chatbot"): (1.27, 1.98),
    ("OPT-30B", "alpaca"): (1.22, 1.99),
    ("OPT-30B", "summary"): (1.11, 1.64),
    ("Llama-13B", "chatbot"): (1.28, 2.28),
    ("Llama-13B", "alpaca"): (1.40, 2.37),
    ("Llama-13B", "summary"): (1.17, 2.12),
    ("Llama-32.5B", "chatbot"): (1.28, 1.95),
    ("Llama-32.5B", "alpaca"): (1.23, 2.13),
    ("Llama-32.5B", "summary"): (1.09, 2.18),
}
# Thousands, of 1,000 requests: AdaptiveLLM's recomputations and swaps, vLLM's recomputations, vLLM_s's swaps.
# Source: table 4, which lacks Llama-32.5B with summary.
PAPER_PREEMPTIONS = {
    ("OPT-13B", "chatbot"): (0.11, 1.13, 1.77, 0.78),
    ("OPT-13B", "alpaca"): (0.10, 1.17, 1.82, 0.99),
    ("OPT-13B", "summary"): (0.10, 0.56, 0.58, 0.26),
    ("OPT-30B", "chatbot"): (0.08, 1.10, 1.64, 0.68),
    ("OPT-30B", "alpaca"): (0.10, 1.05, 1.61, 0.59),
    ("OPT-30B", "summary"): (0.09, 0.43, 0.47, 0.32),
    ("Llama-13B", "chatbot"): (0.12, 1.02, 1.57, 0.83),
    ("Llama-13B", "alpaca"): (0.08, 1.03, 1.55, 0.87),
    ("Llama-13B", "summary"): (0.15, 0.55, 0.57, 0.36),
    ("Llama-32.5B", "chatbot"): (0.07, 1.04, 1.53, 0.20),
    ("Llama-32.5B", "alpaca"): (0.10, 1.00, 1.57, 0.55),
}
PREEMPTION_COUNTS: tuple[tuple[str, Arm, Value], ...] = (
    ("adaptive recomputes", ARMS["adaptive"], lambda o: o.recomputed),
    ("adaptive swaps", ARMS["adaptive"], lambda o: o.swapped),
    ("vllm recomputes", ARMS["vllm"], lambda o: o.recomputed),
    ("swap swaps", ARMS["swap"], lambda o: o.swapped),
)


def main_part(bench: Bench) -> Part:
    """Tables 3 and 4, in both readings."""
    figures, result = _reading(bench, "at once", {g: bench.setting(g) for g in bench.groups})
    more, over_time = _reading(bench, "over time", over_time_settings(bench))
    return figures + more, result | {"over_time": over_time}


def over_time_settings(bench: Bench) -> dict[tuple[str, str], Setting]:
    settings = {group: bench.setting(group, is_answer_drawn=True) for group in bench.groups}
    bench.run([ARMS["vllm"]], settings.values())
    rates = {g: statistics.median(o.per_s for o in bench.of(ARMS["vllm"], s)) for g, s in settings.items()}
    return {g: replace(s, per_s=round(OVER_TIME * rates[g], 2)) for g, s in settings.items()}


def _reading(bench: Bench, name: str, settings: Mapping[tuple[str, str], Setting]) -> Part:
    bench.run([*ARMS.values(), *FREE], settings.values())
    figures: list[Figure] = []
    by_arm: dict[str, list[Figure]] = {}
    for group, setting in settings.items():
        where = f"{name}, {'-'.join(group)}"
        papers = dict(
            zip(("vllm", "swap", "swap only"), (*PAPER_SPEEDUP[group], PAPER_SPEEDUP[group][1]), strict=True)
        )
        for base, paper in papers.items():
            what = f"throughput, adaptive against {base}, {where}"
            figure = throughput_figure(bench, what, ARMS["adaptive"], ARMS[base], setting, paper)
            by_arm.setdefault(f"adaptive against {base}", []).append(figure)
            figures.append(figure)
        for arm in ("cost", "mlq", "default"):
            what = f"throughput, {arm} against vllm, {where}"
            figure = throughput_figure(bench, what, ARMS[arm], ARMS["vllm"], setting, papers["vllm"])
            by_arm.setdefault(f"{arm} against vllm", []).append(figure)
            figures.append(figure)
        figures += _counts(bench, where, group, setting)
    bound = {base: _bound(bench, ARMS[base], settings.values()) for base in ("vllm", "swap")}
    return figures, {
        "bound": {"throughput_vs_recompute": bound["vllm"], "throughput_vs_swap": bound["swap"]},
        "vllm_recomputes_vs_paper": _recomputes_vs_paper(bench, settings),
        "throughput_vs_recompute": middle(by_arm["adaptive against vllm"]),
        "throughput_vs_swap": middle(by_arm["adaptive against swap"]),
        "throughput_vs_swap_only": middle(by_arm["adaptive against swap only"]),
        "throughput": {what: middle(found) for what, found in by_arm.items()},
        "groups": {"-".join(group): _group(bench, setting) for group, setting in settings.items()},
    }


def _bound(bench: Bench, base: Arm, settings: Iterable[Setting]) -> float:
    """Throughput over a base's where swapping is free: of the best queue for each setting and seed, the median over settings of those over seeds."""
    medians = []
    for setting in settings:
        by_queue = [ratios(bench.of(arm, setting), bench.of(base, setting), throughput) for arm in FREE]
        medians.append(statistics.median(map(max, zip(*by_queue, strict=True))))
    return round(statistics.median(medians), 4)


def _recomputes_vs_paper(bench: Bench, settings: Mapping[tuple[str, str], Setting]) -> float:
    """How many preemptions vLLM has here for one that the paper's has (table 4), the median over settings."""
    found = {
        g: statistics.median(o.recomputed for o in bench.of(ARMS["vllm"], s)) for g, s in settings.items()
    }
    pairs = [(own, PAPER_PREEMPTIONS[group][2]) for group, own in found.items() if group in PAPER_PREEMPTIONS]
    return round(statistics.median(own / paper for own, paper in pairs), 3)


def _counts(bench: Bench, where: str, group: tuple[str, str], setting: Setting) -> list[Figure]:
    papers = PAPER_PREEMPTIONS.get(group, (None,) * len(PREEMPTION_COUNTS))
    return [
        PerRequest(
            f"preemptions, {what}, {where}",
            tuple(value(outcome) for outcome in bench.of(arm, setting)),
            paper,
            True,
            f"{arm.made_by}; {setting.trace}",
        )
        for (what, arm, value), paper in zip(PREEMPTION_COUNTS, papers, strict=True)
    ]


def _group(bench: Bench, setting: Setting) -> dict[str, Any]:
    """All arms' medians in one setting."""
    found = {}
    for name, arm in ARMS.items():
        outcomes = bench.of(arm, setting)
        found[name] = {
            what: round(statistics.median(getattr(outcome, what) for outcome in outcomes), 4)
            for what in (
                "per_s",
                "weighted",
                "turnaround_s",
                "recomputed",
                "swapped",
                "stalled_share",
            )
        }
    return found


# The least improvement that the paper names. Source: §4.4, for batches of 64 and 128.
PAPER_WEIGHTED = -0.20
BATCHES = (64, 128)


def turnaround_part(bench: Bench) -> Part:
    """Fig. 8, of which the text gives ranges only: 20 to 40% less than vLLM, 20 to 60% less than vLLM_s."""
    readings = {
        f"at once, batch {batch}": {group: bench.setting(group, max_running=batch) for group in bench.groups}
        for batch in BATCHES
    }
    readings["over time, batch 128"] = over_time_settings(bench)
    arms = ("adaptive", "mlq", "default")
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for reading, settings in readings.items():
        bench.run([ARMS[name] for name in ("vllm", "swap", *arms)], settings.values())
        for name, base in itertools.product(arms, ("vllm", "swap")):
            found, own = _turnarounds(bench, name, base, reading, settings)
            figures += found
            result.setdefault(reading, {})[f"{name} against {base}"] = own
    changes = (result[f"at once, batch {batch}"]["adaptive against vllm"] for batch in BATCHES)
    result["weighted_turnaround_change"] = round(
        statistics.median(change["weighted_turnaround_change"] for change in changes), 4
    )
    over_time = result["over time, batch 128"]["adaptive against vllm"]
    return figures, result | {"over_time": over_time}


def _turnarounds(
    bench: Bench, name: str, base: str, reading: str, settings: Mapping[tuple[str, str], Setting]
) -> Part:
    """One arm against another: weighted turnaround, and the mean one."""
    weighted, mean = {}, {}
    for group, setting in settings.items():
        where = f"{name} against {base}, {reading}, {'-'.join(group)}"
        pair = (ARMS[name], ARMS[base], setting)
        what = f"weighted turnaround, {where}"
        weighted[group] = change_figure(bench, what, *pair, lambda o: o.weighted, PAPER_WEIGHTED)
        mean[group] = change_figure(bench, f"mean turnaround, {where}", *pair, lambda o: o.turnaround_s, None)
    datasets = dict.fromkeys(dataset for _, dataset in settings)
    return [*weighted.values(), *mean.values()], {
        "weighted_turnaround_change": middle(weighted.values()),
        "mean_turnaround_change": middle(mean.values()),
        "by_dataset": {d: middle(f for group, f in weighted.items() if group[1] == d) for d in datasets},
        "mean_by_dataset": {d: middle(f for group, f in mean.items() if group[1] == d) for d in datasets},
    }


LINKS_GB_PER_S = (0.8, 1.6, 3.1, 6.3, 12.5, 25.13, 50.0)
HOST_SIZES = (0, 8, 16, 32, 64, 128, 256)
PROMPTS = (17.02, 68.0, 136.0, 340.48, 500.0)


def limits_part(bench: Bench) -> Part:
    """Where swapping stops paying: throughput of `swap` and `cost` against `vllm`, one thing changed at a time.

    Beside each speed of the link and each length stands what the cost object predicts for one request: seconds to swap it and to compute it anew.
    """
    sweeps = _sweeps(bench.setting(("OPT-13B", "chatbot")))
    arms = [ARMS["vllm"], ARMS["swap"], ARMS["cost"]]
    bench.run(arms, [setting for sweep in sweeps.values() for setting in sweep.values()])
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for name, sweep in sweeps.items():
        result[name] = {}
        for value, setting in sweep.items():
            own = result[name][str(value)] = _predicted(setting)
            for arm in ("swap", "cost"):
                what = f"throughput, {arm} against vllm, {name} {value:g}"
                figures.append(throughput_figure(bench, what, ARMS[arm], ARMS["vllm"], setting, None))
                own[arm] = round(figures[-1].median, 4)
    result["swapping_pays_from_gb_per_s"] = pays_from(result["link_gb_per_s"])
    return figures, result


def _sweeps(base: Setting) -> dict[str, dict[float, Setting]]:
    """By what is changed, and to which value."""
    return {
        "link_gb_per_s": {
            speed: replace(base, gpu=replace(A800, link_share=speed * 1e9 / A800.link_bytes_per_s))
            for speed in LINKS_GB_PER_S
        },
        "host_blocks": {num: replace(base, host_blocks=num) for num in HOST_SIZES},
        "prompt_tokens": {mean: replace(base, mean_prompt_tokens=mean) for mean in PROMPTS},
        "prompt_tokens_at_3.1_gb_per_s": {
            mean: replace(
                base, mean_prompt_tokens=mean, gpu=replace(A800, link_share=3.1e9 / A800.link_bytes_per_s)
            )
            for mean in PROMPTS
        },
    }


def pays_from(sweep: Mapping[str, Mapping[str, float]]) -> float | None:
    """The least speed of those tried from which on `swap` serves more than `vllm`; None if the fastest does not."""
    found = None
    for value in sorted(sweep, key=float, reverse=True):
        if sweep[value]["swap"] <= 1:
            break
        found = float(value)
    return found


def _predicted(setting: Setting) -> dict[str, float]:
    """Of a request halfway through its answer, for its whole blocks, which were written through."""
    clock, cost = Clock(), StepCost(setting.gpu, setting.model)
    link = SharedLink(clock, setting.gpu.achieved_link_bytes_per_s, setting.gpu.load_setup_s)
    tiers = EmulatedTiers(
        clock, TierSizes(0), cost, BLOCK_TOKENS, engine_of(ARMS["cost"], setting).step_tokens, link
    )
    costs = tiers.swap_or_recompute()
    tiers.close()
    assert costs is not None, "the tiers were given another policy"
    num_tokens = round(setting.mean_prompt_tokens) + MAX_ANSWER_TOKENS // 2
    num_tokens -= num_tokens % BLOCK_TOKENS
    decision = costs.decide(num_tokens)
    return {
        "predicted_swap_s": round(decision.swap_s, 5),
        "predicted_recompute_s": round(decision.recompute_s, 5),
    }


def predictors_part(bench: Bench) -> Part:
    """Tables 5 and 6, Fig. 9."""
    return predictors(bench.workers, [bench.setting(group) for group in bench.groups], bench.seeds)


PARTS: dict[str, Callable[[Bench], Part]] = {
    "main": main_part,
    "turnaround": turnaround_part,
    "limits": limits_part,
    "predictors": predictors_part,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    quick = f"main and turnaround, OPT-13B, chatbot and summary, {QUICK_REQUESTS} requests"
    add_table_arguments(parser, PARTS, quick)
    parser.set_defaults(seeds=3)


def run(args: argparse.Namespace) -> None:
    names = args.part or (["main", "turnaround"] if args.quick else list(PARTS))
    with Workers(args.jobs) as workers:
        bench = Bench(workers, seeds_of(args), num_requests=NUM_REQUESTS)
        if args.quick:
            bench.groups = (("OPT-13B", "chatbot"), ("OPT-13B", "summary"))
            bench.num_requests = QUICK_REQUESTS
        show(names, bench)


def show(names: Sequence[str], bench: Bench) -> None:
    parts = ((name, PARTS[name](bench)) for name in names)
    report_parts("AdaptiveLLM on vLLM's scheduler", "emulated-adaptivellm", bench.seeds, parts, _top)


# The baseline is the paper's if vLLM preempts as often, but for a factor of so much. Chosen: the engines are three years apart.
NEAR = 2.0
TOP_KEYS = (
    ("main", "throughput_vs_recompute"),
    ("main", "throughput_vs_swap"),
    ("main", "throughput_vs_swap_only"),
    ("turnaround", "weighted_turnaround_change"),
)


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in TOP_KEYS:
        if name in parts:
            found[key] = parts[name][key]
            found.setdefault("over_time", {})[key] = parts[name]["over_time"][key]
    if "main" in parts:
        found["baseline_matches_paper"] = 1 / NEAR <= parts["main"]["vllm_recomputes_vs_paper"] <= NEAR
        found["of_clairvoyant"] = {
            key: round(found[key] / most, 3) for key, most in parts["main"]["bound"].items()
        }
    if "predictors" in parts:
        found |= {key: parts["predictors"][key] for key in parts["predictors"] if "error" in key}
    if "limits" in parts:
        found["limits"] = parts.pop("limits")
    return found
