"""Is what serves exactly what we say it is?

    python -m bench.emulated exact [--quick] [--seeds N] [--seed N] [--jobs N]

Device: an A40 with Llama-2-7B (core/). Loads under, at and over what it can serve, and one in tight memory, where requests are preempted.

With `fcfs`, our scheduler class, queue and glue give every request its first token and its end when vLLM's own queue does, to the last digit. Every
policy that is played twice gives the same times twice. The last line is JSON.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from bench.emulated.core.calibration import A40
from bench.emulated.core.models import LLAMA2_7B
from bench.emulated.core.node import Engine
from bench.emulated.core.plays import Played, arrivals, lognormal, play_on_node
from bench.emulated.core.steps import StepCost, pool_blocks
from bench.emulated.table import Bench, Table
from engine_bridge.policy.scheduling.policies import POLICIES

# Requests a second. The device answers some 2.4 of these lengths.
LOADS = {"under": 1.6, "at": 2.4, "over": 4.0, "tight": 2.0}
# Of the memory, for the load in which it is tight. Chosen: some requests are preempted, all are served.
TIGHT_SHARE = 0.3
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


def serve(point: Play) -> Played:
    """Play one point."""
    num_blocks = int(ENGINE.num_blocks * TIGHT_SHARE) if point.load == "tight" else ENGINE.num_blocks
    lengths = lognormal(point.num_requests, point.seed)
    requests = arrivals(lengths, LOADS[point.load], point.num_requests, point.seed)
    return play_on_node(point.policy, requests, COST, replace(ENGINE, num_blocks=num_blocks))


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


TABLE = Table(
    "emulated-exact",
    "What serves, on a virtual device",
    serve,
    {"order": order_part},
    (2400, 800),
    "800 requests",
    seeds=3,
)
