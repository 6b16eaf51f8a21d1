"""Is what serves exactly what we say it is, and what does it cost?

    python -m bench.emulated exact [--part order|overhead|deciding ...] [--quick] [--seeds N] [--seed N]

Device: an A40 with Llama-2-7B (core/). Loads under, at and over what it can serve, and one in tight memory, where requests are preempted.

order     with `fcfs`, our scheduler class, queue and glue give every request its first token and its end when vLLM's own queue does, to the last
          digit. Every policy played twice gives the same times twice
overhead  wall time of a step in the scheduler (`add_request`, `schedule`, `update_from_output`), ours over vLLM's own, on the same requests, plays
          in turns: with `fcfs` the very same steps; with `mlq` its own. `overhead_vs_vllm_scheduler` is the larger median
deciding  with 10,000 queued all the time: wall time of all of our scheduling, and of `decide` alone, over the steps' (virtual) time; of `mlq` also
          with 1,000 tenants in place of eight, and with no queue

Since it is wall time that is measured, one play runs at a time. The last line is JSON.
"""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

from bench.emulated.core.calibration import A40
from bench.emulated.core.clock import Clock
from bench.emulated.core.models import LLAMA2_7B
from bench.emulated.core.node import EmulatedNode, Engine
from bench.emulated.core.plays import arrivals, lognormal, play_on_node
from bench.emulated.core.steps import StepCost, StepWork, pool_blocks
from bench.emulated.table import Bench, Table, median
from engine_bridge.policy.scheduling.policies import POLICIES

# Requests a second. The device answers some 2.4 of these lengths.
LOADS = {"under": 1.6, "at": 2.4, "over": 4.0, "tight": 2.0}
# Of the memory, for the load in which it is tight. Chosen: some requests are preempted, all are served.
TIGHT_SHARE = 0.3
OVERHEAD_AIM, SHARE_AIM = 1.5, 0.005
NUM_QUEUED, NUM_TENANTS = 10_000, 8
# Steps that are looked at, after those in which the device fills. Chosen: a second or two of wall time.
NUM_STEPS, NUM_WARM = 400, 100
COST = StepCost(A40, LLAMA2_7B)
ENGINE = Engine(pool_blocks(COST))


@dataclass(frozen=True, slots=True)
class Play:
    """A play of `num_requests` requests. turn: tells plays of the same requests apart."""

    load: str
    policy: str
    num_requests: int
    turn: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Queue:
    """Steps while `num_queued` requests wait all the time."""

    policy: str
    num_queued: int = NUM_QUEUED
    num_tenants: int = NUM_TENANTS
    seed: int = 0


def serve(point: Play | Queue) -> dict[str, Any]:
    """Play one point; return each request's times and what a step's scheduling took, or what `measure` says."""
    if isinstance(point, Queue):
        return measure(point)
    num_blocks = int(ENGINE.num_blocks * TIGHT_SHARE) if point.load == "tight" else ENGINE.num_blocks
    lengths = lognormal(point.num_requests, point.seed)
    requests = arrivals(lengths, LOADS[point.load], point.num_requests, point.seed)
    played = play_on_node(point.policy, requests, COST, replace(ENGINE, num_blocks=num_blocks))
    return {"times": played.times, "us_per_step": played.scheduler_s / played.num_steps * 1e6}


class _Watched(EmulatedNode):
    """Writes down what each step's scheduling took of wall time."""

    def watch(self) -> None:
        """Begin to write down, in seconds for each step: all of our scheduling, deciding alone, and the whole step."""
        self.own_s: list[float] = []
        self.decide_s: list[float] = []
        self.step_s: list[float] = []
        self._seen = self.scheduling.seconds()

    def _end(self, output: Any, work: StepWork, began_s: float, failed: set[int]) -> None:
        seconds = self.scheduling.seconds()
        self.own_s.append(seconds["step"] - self._seen["step"])
        self.decide_s.append(seconds["decide"] - self._seen["decide"])
        self.step_s.append(self.clock.now - began_s)
        self._seen = seconds
        super()._end(output, work, began_s, failed)


def measure(queue: Queue) -> dict[str, float]:
    """Return the parts of the steps' time that `decide` alone and all of our scheduling take while requests wait.

    A new request replaces each ended one.
    """
    clock, num = Clock(), queue.num_queued + 2000
    node = _Watched(clock, COST, ENGINE, queue.policy)
    node.watch()
    rng = random.Random(f"tenants {queue.seed}")
    requests = [
        replace(
            arrival,
            tenant=f"tenant {rng.randrange(queue.num_tenants)}",
            priority=rng.choice((0, 0, 0, 1, -1)),
        )
        for arrival in arrivals(lognormal(num, queue.seed), 1.0, num, queue.seed)
    ]
    # The oldest has waited for half a minute.
    for number, arrival in enumerate(requests[: queue.num_queued]):
        node.submit_ahead(replace(arrival, at_s=30.0 * number / queue.num_queued))
    node.wake()
    later = iter(requests[queue.num_queued :])
    gc.collect()
    gc.freeze()
    try:
        while len(node.own_s) < NUM_WARM + NUM_STEPS:
            num_ended = len(node.ended)
            clock.step()
            # Without a queue a request comes whenever none runs.
            for _ in range(len(node.ended) - num_ended if queue.num_queued else not node.is_serving):
                node.submit(replace(next(later), at_s=clock.now))
    finally:
        gc.unfreeze()
        node.close()
    own_s, decide_s, step_s = (sum(each[NUM_WARM:]) for each in (node.own_s, node.decide_s, node.step_s))
    return {"decide": decide_s / step_s, "own": own_s / step_s}


def order_part(bench: Bench) -> None:
    """Compare fcfs with vLLM's queue, and every policy with itself."""
    num_each = int(bench.size) // len(LOADS)
    repeats, equals = {}, {}
    for load, policy in itertools.product(LOADS, POLICIES):
        first, again = (bench.values(Play(load, policy, num_each, turn), "times") for turn in (0, 1))
        repeats[f"{policy}, {load}"] = first == again
        if policy == "fcfs":
            equals[load] = first == bench.values(Play(load, "vllm", num_each), "times")
    bench.note(("fcfs_equals_vllm",), all(equals.values()))
    bench.note(("policies_repeat",), all(repeats.values()))
    different = [name for name, is_same in (repeats | equals).items() if not is_same]
    bench.figure(("num_different",), [len(different)], 0, unit="number")
    bench.note(("different",), different)


def overhead_part(bench: Bench) -> None:
    """Find the wall time of a step over vLLM's; the first play of each queue, which loads modules, does not count."""
    num_each, policies = int(bench.size) // len(LOADS), ("vllm", "fcfs", "mlq")
    bench.play(Play("under", policy, num_each, turn=2) for policy in policies)
    loads = ("under", "over")
    plays = {(load, policy): Play(load, policy, num_each, turn=3) for load in loads for policy in policies}
    bench.play(plays.values())
    ratios = {}
    for policy in policies:
        us = [us for load in loads for us in bench.values(plays[load, policy], "us_per_step")]
        bench.figure(("us_per_step", policy), us, unit="number")
        pairs = [(plays[load, policy], plays[load, "vllm"]) for load in loads]
        ratios[policy] = median(ratio for pair in pairs for ratio in bench.ratios(*pair, "us_per_step"))
    worst = max(ratios["fcfs"], ratios["mlq"])
    bench.figure(("overhead_vs_vllm_scheduler",), [worst], OVERHEAD_AIM, unit="ratio")


def deciding_part(bench: Bench) -> None:
    """Find the share of the steps' time that deciding takes."""
    queues = {policy: Queue(policy) for policy in POLICIES}
    queues |= {"mlq, 1,000 tenants": Queue("mlq", num_tenants=1000), "mlq, no queue": Queue("mlq", 0)}
    for name, queue in queues.items():
        for what, key, aim in (("decide", "decide", SHARE_AIM), ("own", "scheduling", None)):
            key = f"{key}_share_{NUM_QUEUED}_queued"
            place = (key,) if name == "mlq" else ("deciding", name, key)
            bench.figure(place, bench.values(queue, what), aim, unit="share")


TABLE = Table(
    "emulated-exact",
    "What serves, on a virtual device",
    serve,
    {"order": order_part, "overhead": overhead_part, "deciding": deciding_part},
    (2400, 800),
    "800 requests",
    seeds=3,
    is_timed=True,
)
