"""Runs of AdaptiveLLM's tables: a queue and a way back for those who are preempted, in a setting."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import dataclass

from bench.emulated.node import Engine
from bench.emulated.tiers import TierSizes
from bench.emulated.trace import play_on_node
from bench.sim.core.calibration import A800
from bench.sim.core.hardware import Gpu
from bench.sim.core.models import LLAMA_13B, LLAMA_30B, OPT_13B, OPT_30B, Model
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import BLOCK_TOKENS
from bench.sim.core.steps import StepCost
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts, RestorePolicy

NUM_REQUESTS, QUICK_REQUESTS = 250, 150
DEVICE_BLOCKS, HOST_BLOCKS = 128, 64
MAX_ANSWER_TOKENS = 64
OVER_TIME = 1.3
MEAN_ANSWER_TOKENS = 58.0
# Standard deviation of the logarithm of lengths: of the first messages of oasst's 100 English trees.
SPREAD = 0.95

MODELS = {"OPT-13B": OPT_13B, "OPT-30B": OPT_30B, "Llama-13B": LLAMA_13B, "Llama-32.5B": LLAMA_30B}
# Mean prompt tokens. Source: AdaptiveLLM table 2.
DATASETS = {"chatbot": 17.02, "alpaca": 19.66, "summary": 340.48}
GROUPS = tuple(itertools.product(MODELS, DATASETS))


@dataclass(frozen=True, slots=True)
class AlwaysLoads:
    """The KV of whoever was preempted comes back from host memory, as far as it is there."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        return RestoreDecision(Action.LOAD, facts.num_ready_blocks, "always swapped", 0.0)


@dataclass(frozen=True, slots=True)
class Arm:
    """One system. queue: a name in the registry of policies, "vllm" for vLLM's own. way: of those who are preempted.

    is_host_bound: has on the device no more blocks than host memory. is_free: swaps take no time, and all fits host memory.
    """

    queue: str
    way: str
    is_host_bound: bool = False
    is_free: bool = False

    @property
    def has_host(self) -> bool:
        return self.way != "recompute"

    @property
    def restore(self) -> RestorePolicy | None:
        """None: by cost, as the tiers that serve decide."""
        return AlwaysLoads() if self.way == "swap" else None

    @property
    def made_by(self) -> str:
        way = {"cost": "cheaper by SwapOrRecompute"}.get(self.way, f"always {self.way}")
        return (
            f"vLLM's scheduler, {self.queue}, {way}"
            + ", device as host" * self.is_host_bound
            + ", for nothing" * self.is_free
        )


ARMS = {
    "vllm": Arm("vllm", "recompute"),
    "swap": Arm("vllm", "swap"),
    "swap only": Arm("vllm", "swap", is_host_bound=True),
    "cost": Arm("vllm", "cost"),
    "adaptive": Arm("fair", "cost"),
    "mlq": Arm("mlq", "cost"),
    "default": Arm(DEFAULT_POLICY, "cost"),
}
FREE = tuple(Arm(queue, "cost", is_free=True) for queue in ("fcfs", "fair", "mlq", "bounded"))
# Blocks of host memory that hold all requests at once, and times the link's speed that nothing waits for. Chosen.
AMPLE_BLOCKS, AT_ONCE = 8192, 1e6


@dataclass(frozen=True, slots=True)
class Setting:
    """What all arms share. per_s: None for all at once."""

    model: Model = OPT_13B
    mean_prompt_tokens: float = DATASETS["chatbot"]
    per_s: float | None = None
    is_answer_drawn: bool = False
    host_blocks: int = HOST_BLOCKS
    max_running: int = 128
    gpu: Gpu = A800
    num_requests: int = NUM_REQUESTS

    @property
    def trace(self) -> str:
        when = "at once" if self.per_s is None else f"Poisson {self.per_s:.3g}/s"
        answers = "drawn" if self.is_answer_drawn else f"of {MAX_ANSWER_TOKENS}"
        return f"prompts log-normal, mean {self.mean_prompt_tokens:g}, answers {answers}, {when}"

    def arrivals(self, seed: int) -> list[Arrival]:
        """The same lengths whenever they come."""
        prompts, answers, gaps = (random.Random(f"{what} {seed}") for what in ("prompts", "answers", "gaps"))
        found, at_s = [], 0.0
        for at in range(self.num_requests):
            answer = MAX_ANSWER_TOKENS
            if self.is_answer_drawn:
                answer = min(drawn(MEAN_ANSWER_TOKENS, answers), MAX_ANSWER_TOKENS)
            # The largest that is sure to fit a device with as few blocks as host memory.
            most = HOST_BLOCKS * BLOCK_TOKENS - MAX_ANSWER_TOKENS - 2 * BLOCK_TOKENS
            prompt = min(drawn(self.mean_prompt_tokens, prompts), most)
            if self.per_s is not None:
                at_s += gaps.expovariate(1.0) / self.per_s
            found.append(Arrival(f"{at:04d}", at_s, prompt, answer, None, MAX_ANSWER_TOKENS))
        return found


def drawn(mean: float, rng: random.Random) -> int:
    return max(round(rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)), 1)


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. weighted: mean weighted turnaround. recomputed, swapped: preemptions per request, by how it came back; some of a request's KV may
    be computed after a swap. stalled_share: of all time, that steps waited for copies."""

    per_s: float
    weighted: float
    turnaround_s: float
    recomputed: float
    swapped: float
    stalled_share: float


def engine_of(arm: Arm, setting: Setting) -> Engine:
    num_blocks = setting.host_blocks if arm.is_host_bound else DEVICE_BLOCKS
    return Engine(num_blocks, BLOCK_TOKENS, setting.max_running, max_tokens=num_blocks * BLOCK_TOKENS)


def tiers_of(arm: Arm, setting: Setting) -> TierSizes | None:
    block_bytes = BLOCK_TOKENS * setting.model.kv_bytes_per_token
    if not arm.has_host or not setting.host_blocks:
        return None
    return TierSizes(setting.host_blocks * block_bytes, policy=arm.restore)


def run_once(arm: Arm, setting: Setting, seed: int) -> Outcome:
    requests = setting.arrivals(seed)
    cost = StepCost(setting.gpu, setting.model)
    played = play_on_node(arm.queue, requests, cost, engine_of(arm, setting), tiers=tiers_of(arm, setting))
    ended_s = max(job.ended_s for job in played.jobs)  # copies go on after that
    num_back = played.counts.get("preempted:swap", 0) + played.counts.get("preempted:split", 0)
    return Outcome(
        per_s=len(requests) / ended_s,
        weighted=statistics.fmean(job.e2e_s / (job.ended_s - job.started_s) for job in played.jobs),
        turnaround_s=statistics.fmean(job.e2e_s for job in played.jobs),
        recomputed=(played.num_preempted - num_back) / len(requests),
        swapped=num_back / len(requests),
        stalled_share=played.stalled_s / ended_s,
    )
