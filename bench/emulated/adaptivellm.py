"""AdaptiveLLM's tables on vLLM's scheduler with our classes: swap or recompute by cost, and who starts, where memory is tight.

    python -m bench.emulated adaptivellm [--part NAME ...] [--quick] [--seeds N] [--seed N] [--jobs N]

What runs is what serves: vLLM's scheduler, our queue, and host memory for KV by the driver's own connector and store (core/tiers.py). As in
the paper (§4.2): 128 blocks of 16 tokens on the device and 64 in host memory, answers of at most 64 tokens; at most 128 requests run (one of its two
batches with numbers). An arm is a queue and a way back for those who are preempted:
  vllm       vLLM's queue, always recomputed; no host memory
  swap       vLLM's queue, always loaded, as far as host memory has it
  cost       vLLM's queue, the cheaper way by SwapOrRecompute: the cost alone
  adaptive   fair, least fair preempted first, the cheaper way: what stands for AdaptiveLLM
  default    bounded, the cheaper way: what serves by default
  free       the best of several queues, seed by seed, where swapping costs nothing and host memory holds everything: no way back is cheaper

Where this is not the paper's engine (vLLM 0.2): a swap copies nothing out when somebody is preempted, as KV is written through after each step, so
host memory has to hold what runs, too, and half of the device's blocks do not fit it. Loads go beside the steps, layer by layer; there, copies and
steps took turns (§6). What is recomputed goes in chunks beside those that decode, whose step reads the weights anyway; there, prompts had steps of
their own. KV that was preempted is found on the device as long as nobody took its blocks (vLLM's cache of prefixes, on by default). All of these make
preemption cheaper, the recomputing one most.

Costs: steps by an A800's data sheet, with one calibration from vLLM's published decode rates on an A100 (bench/emulated/core/calibration.py); and its
link. The cost object predicts with the same. OPT-13B and -30B, Llama-13B and -32.5B. The paper's datasets are not beside the project: prompts are
log-normal with the published means (17.02, 19.66, 340.48 tokens) and the spread of oasst's first turns (standard deviation of the logarithm 0.95;
chosen for all three), cut at 928 tokens, so that each request fits host memory. The paper says neither when requests come nor how long answers are:
here all come at once and answers go on to the bound, which is what vLLM's own throughput benchmark does. The paper plays 1,000 requests; here it is
fewer, as each step is scheduled for real.

Parts: `main` table 3. `turnaround` Fig. 8, batches of at most 64 and 128. `limits` where swapping by cost stops paying: link speed, host memory,
prompt length (OPT-13B; vLLM's queue). `predictors` Tables 5 and 6 and Fig. 9: how far off predictions of steps and copies are where these vary as a
real engine's equal ones did, in the same order (bench/emulated/predictors.py): `adaptive`. `step_error`, `swap_error`: mean relative error against
what was seen (of copies each way, the worse), `_floor` that of one who knows what it would have been without noise: noise cannot be foretold.

Throughput: requests over the time until the last is answered. Weighted turnaround: mean of (end - arrival) / (end - first start); it falls also when
requests start early and are then kept waiting, so the mean turnaround stands beside it. The last line is JSON: ratios and changes are against the
same seed's requests, -0.3 is 30% less. A figure of `main` and `turnaround` is the median over models and datasets of the medians over seeds; `spread`
has the least and the most of these. What falls short of the paper is printed first.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.calibration import A800
from bench.emulated.core.hardware import Gpu
from bench.emulated.core.models import LLAMA_13B, LLAMA_30B, OPT_13B, OPT_30B, Model
from bench.emulated.core.node import Engine
from bench.emulated.core.plays import play_on_node
from bench.emulated.core.steps import BLOCK_TOKENS, StepCost
from bench.emulated.core.tiers import TierSizes
from bench.emulated.predictors import ERRORS, errors
from bench.emulated.table import Bench, Table
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts, RestorePolicy

NUM_REQUESTS, QUICK_REQUESTS = 250, 150
DEVICE_BLOCKS, HOST_BLOCKS = 128, 64
MAX_ANSWER_TOKENS = 64
# Standard deviation of the logarithm of lengths: of the first messages of oasst's 100 English trees.
SPREAD = 0.95

MODELS = {"OPT-13B": OPT_13B, "OPT-30B": OPT_30B, "Llama-13B": LLAMA_13B, "Llama-32.5B": LLAMA_30B}
# Mean prompt tokens. Source: AdaptiveLLM table 2.
DATASETS = {"chatbot": 17.02, "alpaca": 19.66, "summary": 340.48}
GROUPS = tuple(itertools.product(MODELS, DATASETS))
QUICK_GROUPS = (("OPT-13B", "chatbot"), ("OPT-13B", "summary"))


# -- arms --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AlwaysLoads:
    """Policy that brings a preempted request's KV back from host memory, as far as it is there."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        """Load all blocks that are ready."""
        return RestoreDecision(Action.LOAD, facts.num_ready_blocks, "always swapped", 0.0)


@dataclass(frozen=True, slots=True)
class Arm:
    """One system.

    Attributes:
        queue: a name in the registry of policies, "vllm" for vLLM's own.
        way: of those who are preempted: "recompute" without host memory, "swap", or "cost" for the live engine's choice.
        is_free: swaps take no time, and all fits host memory.
    """

    queue: str
    way: str
    is_free: bool = False


ARMS = {
    "vllm": Arm("vllm", "recompute"),
    "swap": Arm("vllm", "swap"),
    "cost": Arm("vllm", "cost"),
    "adaptive": Arm("fair", "cost"),
    "default": Arm(DEFAULT_POLICY, "cost"),
}
FREE = tuple(Arm(queue, "cost", is_free=True) for queue in ("fcfs", "fair", "mlq", "bounded"))
# Blocks of host memory that hold all requests at once, and times the link's speed that nothing waits for. Chosen.
AMPLE_BLOCKS, AT_ONCE = 8192, 1e6


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting that all arms share."""

    model: Model = OPT_13B
    mean_prompt_tokens: float = DATASETS["chatbot"]
    host_blocks: int = HOST_BLOCKS
    max_running: int = 128
    gpu: Gpu = A800
    num_requests: int = NUM_REQUESTS

    def arrivals(self, seed: int) -> list[Arrival]:
        """Return the requests of one run."""
        prompts = random.Random(f"prompts {seed}")
        # The largest that is sure to fit a device with as few blocks as host memory.
        most = HOST_BLOCKS * BLOCK_TOKENS - MAX_ANSWER_TOKENS - 2 * BLOCK_TOKENS
        mu = math.log(self.mean_prompt_tokens) - SPREAD**2 / 2
        return [
            Arrival(
                f"{at:04d}",
                0.0,
                min(max(round(prompts.lognormvariate(mu, SPREAD)), 1), most),
                MAX_ANSWER_TOKENS,
                max_answer_tokens=MAX_ANSWER_TOKENS,
            )
            for at in range(self.num_requests)
        ]


def engine_of(setting: Setting) -> Engine:
    """Return the bounds of every arm's engine."""
    return Engine(DEVICE_BLOCKS, BLOCK_TOKENS, setting.max_running, max_tokens=DEVICE_BLOCKS * BLOCK_TOKENS)


def tiers_of(arm: Arm, setting: Setting) -> TierSizes | None:
    """Return the arm's tiers; None without host memory."""
    if arm.way == "recompute" or not setting.host_blocks:
        return None
    block_bytes = BLOCK_TOKENS * setting.model.kv_bytes_per_token
    policy: RestorePolicy | None = AlwaysLoads() if arm.way == "swap" else None
    return TierSizes(setting.host_blocks * block_bytes, policy=policy)


@dataclass(frozen=True, slots=True)
class Point:
    """One run. Only the properties of a setting that matter to its arm are kept, so that equal runs are made once.

    Without host memory neither its size nor the link matters; where swaps are free, there is more of both than the arm needs.

    Attributes:
        is_foretold: steps and copies vary as a real engine's, and the errors of their predictions are found.
    """

    arm: Arm
    setting: Setting
    is_foretold: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        arm, gpu, host_blocks = self.arm, self.setting.gpu, self.setting.host_blocks
        if arm.is_free:
            gpu, host_blocks = replace(gpu, link_share=AT_ONCE), AMPLE_BLOCKS
        elif arm.way == "recompute":
            gpu, host_blocks = replace(gpu, link_share=A800.link_share), HOST_BLOCKS
        object.__setattr__(self, "setting", replace(self.setting, gpu=gpu, host_blocks=host_blocks))


def serve(point: Point) -> dict[str, float]:
    """Play one point; return its throughput, both turnarounds and how many preempted requests a load brought back, or the errors of predictions."""
    arm, setting = point.arm, point.setting
    requests, engine, tiers = setting.arrivals(point.seed), engine_of(setting), tiers_of(arm, setting)
    if point.is_foretold:
        assert tiers is not None, "only copies to host memory and back are foretold"
        return errors(setting.gpu, setting.model, engine, arm.queue, tiers, requests, point.seed)
    played = play_on_node(arm.queue, requests, StepCost(setting.gpu, setting.model), engine, tiers=tiers)
    ended_s = max(job.ended_s for job in played.jobs)  # copies go on after that
    return {
        "per_s": len(requests) / ended_s,
        "weighted": statistics.fmean(job.e2e_s / (job.ended_s - job.started_s) for job in played.jobs),
        "turnaround_s": statistics.fmean(job.e2e_s for job in played.jobs),
        "swapped": played.counts.get("preempted:swap", 0) + played.counts.get("preempted:split", 0),
    }


# -- parts -------------------------------------------------------------------------------------------------------------


def settings_of(bench: Bench, **changed: Any) -> list[Setting]:
    """Return the settings of the models and datasets of this bench, with as many requests as it plays."""
    return [
        replace(Setting(MODELS[model], DATASETS[dataset], num_requests=int(bench.size)), **changed)
        for model, dataset in (QUICK_GROUPS if bench.is_quick else GROUPS)
    ]


def points(arms: Iterable[Arm], settings: Iterable[Setting]) -> list[Point]:
    """Return the points of all arms in all settings."""
    return [Point(arm, setting) for setting, arm in itertools.product(settings, arms)]


def ratios(
    bench: Bench, arms: Sequence[Arm], base: str, settings: Iterable[Setting], measure: str
) -> list[float]:
    """Return by setting the median over seeds of a number of the best of some arms over that of a base."""
    found = []
    for setting in settings:
        by_arm = (bench.ratios(Point(arm, setting), Point(ARMS[base], setting), measure) for arm in arms)
        found.append(statistics.median(map(max, zip(*by_arm, strict=True))))
    return found


# Least throughput of all models and datasets against vLLM and vLLM_s. Source: table 3.
PAPER_SPEEDUP = {"vllm": 1.09, "swap": 1.64}
THROUGHPUT = {"vllm": "throughput_vs_recompute", "swap": "throughput_vs_swap"}


def main_part(bench: Bench) -> None:
    """Find throughput, table 3, and the bound of it: that of the best queue for each setting and seed where swapping is free."""
    settings = settings_of(bench)
    bench.play(points([*ARMS.values(), *FREE], settings))
    for base, key in THROUGHPUT.items():
        own = ratios(bench, [ARMS["adaptive"]], base, settings, "per_s")
        bench.figure((key,), own, PAPER_SPEEDUP[base], False, "ratio")
        bound = ratios(bench, FREE, base, settings, "per_s")
        bench.figure(("parts", "main", "bound", key), bound, None, False, "ratio")
    for arm in ("cost", "default"):
        own = ratios(bench, [ARMS[arm]], "vllm", settings, "per_s")
        bench.figure(("throughput", f"{arm} against vllm"), own, None, False, "ratio")


# The least improvement that the paper names. Source: §4.4, for batches of 64 and 128.
PAPER_WEIGHTED = -0.20
BATCHES = (64, 128)
TURNAROUNDS = {"weighted": "weighted_turnaround_change", "turnaround_s": "mean_turnaround_change"}


def turnaround_part(bench: Bench) -> None:
    """Find turnarounds, Fig. 8, of which the text gives ranges only: 20 to 40% less than vLLM, 20 to 60% less than vLLM_s."""
    arms, bases = ("adaptive", "default"), ("vllm", "swap")
    headline = []
    for batch in BATCHES:
        settings = settings_of(bench, max_running=batch)
        bench.play(points([ARMS[name] for name in (*bases, *arms)], settings))
        for arm, base, (measure, key) in itertools.product(arms, bases, TURNAROUNDS.items()):
            changes = [ratio - 1 for ratio in ratios(bench, [ARMS[arm]], base, settings, measure)]
            place = ("parts", "turnaround", f"at once, batch {batch}", f"{arm} against {base}", key)
            paper = PAPER_WEIGHTED if measure == "weighted" else None
            found = bench.figure(place, changes, paper)
            if (arm, base, measure) == ("adaptive", "vllm", "weighted"):
                headline.append(round(found, 4))
    bench.figure(("weighted_turnaround_change",), headline, PAPER_WEIGHTED)


LINKS_GB_PER_S = (0.8, 1.6, 3.1, 6.3, 12.5, 25.13, 50.0)
HOST_SIZES = (0, 8, 16, 32, 64, 128, 256)
PROMPTS = (17.02, 68.0, 136.0, 340.48, 500.0)


def linked(gb_per_s: float) -> Gpu:
    """Return the device with a link of this speed."""
    return replace(A800, link_share=gb_per_s * 1e9 / A800.link_bytes_per_s)


def sweeps(base: Setting) -> dict[str, dict[float, Setting]]:
    """Return settings by the property that is changed and by its value."""
    return {
        "link_gb_per_s": {speed: replace(base, gpu=linked(speed)) for speed in LINKS_GB_PER_S},
        "host_blocks": {num: replace(base, host_blocks=num) for num in HOST_SIZES},
        "prompt_tokens": {mean: replace(base, mean_prompt_tokens=mean) for mean in PROMPTS},
        "prompt_tokens_at_3.1_gb_per_s": {
            mean: replace(base, mean_prompt_tokens=mean, gpu=linked(3.1)) for mean in PROMPTS
        },
    }


def limits_part(bench: Bench) -> None:
    """Find where swapping by cost stops paying: throughput of `cost` against `vllm`, one thing changed at a time."""
    by_name = sweeps(settings_of(bench)[0])
    bench.play(points([ARMS["vllm"], ARMS["cost"]], [s for own in by_name.values() for s in own.values()]))
    for name, own in by_name.items():
        for value, setting in own.items():
            (ratio,) = ratios(bench, [ARMS["cost"]], "vllm", [setting], "per_s")
            bench.note(("limits", name, str(value), "cost"), round(ratio, 4))


# Source: Tables 5 and 6, Fig. 9.
PAPER_ERRORS = {"step": 0.02, "swap": 0.04}


def predictors_part(bench: Bench) -> None:
    """Find the errors of predictions: the median over models and datasets, by seed."""
    foretold = [Point(ARMS["adaptive"], setting, is_foretold=True) for setting in settings_of(bench)]
    bench.play(foretold)
    for (what, paper), name in itertools.product(PAPER_ERRORS.items(), ERRORS):
        key = f"{what}_{name}"
        by_setting = [bench.values(point, key) for point in foretold]
        of_seeds = map(statistics.median, zip(*by_setting, strict=True))
        bench.figure((key,), of_seeds, None if name == "error_floor" else paper, unit="share")


TABLE = Table(
    "emulated-adaptivellm",
    "AdaptiveLLM on vLLM's scheduler",
    serve,
    {"main": main_part, "turnaround": turnaround_part, "limits": limits_part, "predictors": predictors_part},
    (NUM_REQUESTS, QUICK_REQUESTS),
    f"main and turnaround, OPT-13B, chatbot and summary, {QUICK_REQUESTS} requests",
    seeds=3,
    quick_parts=("main", "turnaround"),
)
