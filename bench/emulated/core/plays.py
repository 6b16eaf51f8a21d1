"""Requests to play: lengths as recorded or generated, arrivals by a seeded Poisson process, and a play of them against one node."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.emulated.core.arrivals import Arrival, Guesser
from bench.emulated.core.clock import Clock
from bench.emulated.core.node import EmulatedNode, Engine, Job
from bench.emulated.core.steps import StepCost
from bench.emulated.core.traffic import Lengths, play
from engine_bridge.policy.scheduling.policies import MakePolicy

# Of the generated lengths. Chosen: a chat's, wide enough that prompts and answers of all sizes meet.
PROMPT, ANSWER = (6.0, 1.1), (4.9, 0.9)
MOST_PROMPT_TOKENS, MOST_ANSWER_TOKENS = 3000, 900
# A play that takes longer says how far it is. Chosen.
SAY_AFTER_S = 2.0


def lognormal(num: int, seed: int) -> Lengths:
    """Return `num` pairs of prompt (median 403 tokens) and answer (median 134), each length drawn by itself."""
    rng = random.Random(f"lengths {seed}")

    def length(law: tuple[float, float], least: int, most: int) -> int:
        """Return a random length in tokens by a log-normal law (mu, sigma), between two bounds."""
        return min(max(int(rng.lognormvariate(*law)), least), most)

    pairs = tuple(
        (length(PROMPT, 8, MOST_PROMPT_TOKENS), length(ANSWER, 4, MOST_ANSWER_TOKENS)) for _ in range(num)
    )
    return Lengths(pairs)


def arrivals(lengths: Lengths, per_s: float, num: int, seed: int) -> list[Arrival]:
    """Return `num` requests for the base model in the order of these lengths; at a higher rate the same requests come closer together."""
    gaps = random.Random(f"gaps {seed}")
    found, at_s = [], 0.0
    for number in range(num):
        at_s += gaps.expovariate(1.0) / per_s
        prompt, answer = lengths.pairs[number % len(lengths.pairs)]
        found.append(Arrival(f"{number:06d}", at_s, prompt, answer))
    return found


@dataclass(frozen=True, slots=True)
class Played:
    """Results of a play. scheduler_s: wall time in the scheduler alone."""

    jobs: list[Job]
    num_steps: int
    ended_s: float
    scheduler_s: float
    num_preempted: int
    counts: dict[str, int]
    """What the dispatcher, the tiers and the adapters' core counted."""

    @property
    def times(self) -> list[tuple[float, float]]:
        """Times of the first token and of the end of each request."""
        return [(job.first_token_s, job.ended_s) for job in self.jobs]


def play_on_node(
    policy: str | MakePolicy,
    requests: Sequence[Arrival],
    cost: StepCost,
    engine: Engine,
    guesser: Guesser | None = None,
    **options: Any,
) -> Played:
    """Play all requests on one node until the last one has ended. Raises RuntimeError if some are never served.

    options: as `EmulatedNode` takes them.
    """
    clock = Clock()
    node = EmulatedNode(clock, cost, engine, policy, guesser=guesser, **options)
    name = node.scheduling.dispatcher.policy.name if node.scheduling is not None else "vllm"
    said_s = time.perf_counter()

    def submit(arrival: Arrival) -> None:
        """Send a request, and now and then print how far the play is."""
        nonlocal said_s
        node.submit(arrival)
        if time.perf_counter() - said_s > SAY_AFTER_S:
            said_s = time.perf_counter()
            print(f"    {name}: {len(node.ended)} of {len(requests)} at {clock.now:.0f} s", file=sys.stderr)

    try:
        play(clock, requests, submit)
    finally:
        node.close()
    if len(node.ended) != len(requests):
        raise RuntimeError(f"{len(requests) - len(node.ended)} requests were never served")
    jobs = sorted(node.ended, key=lambda job: job.arrival.request_id)
    counts = {} if node.scheduling is None else dict(node.scheduling.dispatcher.counts)
    if node.adapters is not None:
        counts |= node.adapters.counts()
    if node.tiers is not None:
        counts |= node.tiers.way_counts()
    num_preempted = node.scheduler.num_preempted
    return Played(jobs, node.num_steps, clock.now, node.scheduler_s, num_preempted, counts)
