"""What deciding who starts costs while thousands wait: wall time of our scheduling in a step, over what the step takes on the device."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.emulated.node import EmulatedNode, Engine
from bench.emulated.trace import arrivals, lognormal
from bench.sim.core.clock import Clock
from bench.sim.core.steps import StepCost

# Steps that are looked at, after those in which the device fills. Chosen: a second or two of wall time.
NUM_STEPS, NUM_WARM = 400, 100
NUM_TENANTS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """policy: a name. num_queued: requests that wait all the time. waited_s: for how long the oldest of them has."""

    policy: str
    num_queued: int = 10_000
    num_tenants: int = NUM_TENANTS
    waited_s: float = 30.0

    @property
    def name(self) -> str:
        tenants = "" if self.num_tenants == NUM_TENANTS else f", {self.num_tenants:,} tenants"
        waited = "" if self.waited_s == 30.0 else f", waiting for up to {self.waited_s:.0f} s"
        return f"{self.policy}, {self.num_queued:,} queued{tenants}{waited}"


def rows(policies: Sequence[str], num_queued: int) -> list[Row]:
    found = [Row(policy, num_queued) for policy in policies]
    if "mlq" in policies:
        own = Row("mlq", num_queued)
        found += [replace(own, num_tenants=1000), replace(own, waited_s=600.0), replace(own, num_queued=0)]
    return found


class _Watched(EmulatedNode):
    """Writes down what each step's scheduling took of wall time, and stops taking requests in once enough steps have been."""

    def watch(self) -> None:
        self.own_s: list[float] = []
        self.decide_s: list[float] = []
        self.step_s: list[float] = []
        self._seen = self.scheduling.seconds()

    def _end(self, output: Any, giving: list[str], began_s: float, failed: set[int]) -> None:
        seconds = self.scheduling.seconds()
        self.own_s.append(seconds["step"] - self._seen["step"])
        self.decide_s.append(seconds["decide"] - self._seen["decide"])
        self.step_s.append(self.clock.now - began_s)
        self._seen = seconds
        super()._end(output, giving, began_s, failed)


def measure(
    row: Row, cost: StepCost, engine: Engine, seed: int, stopwatch: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """As many wait all the time: one comes for each that has ended. stopwatch: tells what our scheduling takes."""
    clock = Clock()
    node = _Watched(clock, cost, engine, row.policy, stopwatch=stopwatch)
    node.watch()
    rng = random.Random(f"tenants {seed}")
    gaps = arrivals(lognormal(row.num_queued + 2000, seed), 1.0, row.num_queued + 2000, seed)
    requests = [
        replace(
            arrival, tenant=f"tenant {rng.randrange(row.num_tenants)}", priority=rng.choice((0, 0, 0, 1, -1))
        )
        for arrival in gaps
    ]
    for number, arrival in enumerate(requests[: row.num_queued]):
        node.submit_ahead(replace(arrival, at_s=row.waited_s * number / row.num_queued))
    node.wake()
    later = iter(requests[row.num_queued :])
    gc.collect()
    gc.freeze()
    try:
        while len(node.own_s) < NUM_WARM + NUM_STEPS:
            num_ended = len(node.ended)
            clock.step()
            # Without a queue one comes whenever nobody runs.
            for _ in range(len(node.ended) - num_ended if row.num_queued else not node.is_serving):
                node.submit(replace(next(later), at_s=clock.now))
    finally:
        gc.unfreeze()
        node.close()
    own_s, decide_s, step_s = (each[NUM_WARM:] for each in (node.own_s, node.decide_s, node.step_s))
    return {
        "row": row.name,
        "policy": row.policy,
        "decide_share": round(sum(decide_s) / sum(step_s), 5),
        "own_share": round(sum(own_s) / sum(step_s), 5),
        "step_ms": round(statistics.fmean(step_s) * 1e3, 2),
        "own_p50_us": _us(statistics.median(own_s)),
        "own_p99_us": _us(statistics.quantiles(own_s, n=100)[98]),
        "decide_p50_us": _us(statistics.median(decide_s)),
        "decide_p99_us": _us(statistics.quantiles(decide_s, n=100)[98]),
        "num_running": len(node.scheduler.running),
        "num_waiting": len(node.scheduler.waiting),
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
