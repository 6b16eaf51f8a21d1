"""How far off what serves is in predicting the steps and copies of an emulated device, where these vary as a real engine's do.

Of a device and model steps are sampled as `overture profile` samples them, each with noise, and a table is fitted to them, a link to copies of
several sizes. Then requests are played, and the tables of the node learn from what it sees. Each prediction is made just before it is seen.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.clock import Clock
from bench.emulated.core.hardware import Gpu
from bench.emulated.core.links import DeviceNoise, Replay
from bench.emulated.core.models import Model
from bench.emulated.core.node import EmulatedNode, Engine
from bench.emulated.core.steps import BLOCK_TOKENS, Chunk, StepCost
from bench.emulated.core.tiers import TierSizes
from bench.emulated.core.traffic import play
from bench.predicting import Seen, note_copies, note_steps, relative_errors
from bench.results.runs import FOLDER
from engine_bridge.driver.profiling.copies import fit_link
from engine_bridge.driver.profiling.steps import CONTEXT_SHARE, Bounds, Point, visits
from engine_bridge.policy.costs.costs import Link, StepGrid, StepTable
from engine_bridge.predict.steps import StepSample, fit_steps

MEASURED = "live-scheduling-predictors"
"""The kept run whose equal steps and copies are this device's noise (bench/live/predictors.py says how they were measured)."""
# The number that `overture profile` takes of the bench's model in two minutes on two cores, where they come from.
NUM_SAMPLES = 360
COPY_ROUNDS, COPY_SIZES = 40, (1, 2, 4, 8, 16, 32, 64)
WAYS = {"step": ("step",), "swap": ("out", "back")}
# Against the times that came, and of a predictor that knows the times without noise.
ERRORS: dict[str, Callable[[Sequence[float]], tuple[float, float]]] = {
    "error": lambda seen: (seen[0], seen[1]),
    "error_floor": lambda seen: (1.0, seen[2]),
}


def noise_of(seed: object) -> DeviceNoise:
    """Return the noise that the kept run measured, from a place that the seed draws."""
    ratios = json.loads((FOLDER / f"{MEASURED}.json").read_text())["result"]["noise"]
    return DeviceNoise(**{name: Replay(ratios[name], f"{name} {seed}") for name in ("step", "out", "back")})


@cache
def profile(gpu: Gpu, model: Model, engine: Engine, seed: int) -> tuple[StepGrid, Link]:
    """Return the table and the link, fitted to noisy samples as `overture profile` takes them of this engine."""
    cost, noise = StepCost(gpu, model), noise_of(f"profile {seed}")
    num_kv_tokens = int(engine.num_tokens * CONTEXT_SHARE)
    bounds = Bounds(
        engine.max_running, engine.step_tokens, num_kv_tokens, engine.max_tokens, engine.step_tokens
    )
    points = itertools.islice(visits(bounds, seed), NUM_SAMPLES)
    fit = fit_steps([sample for point in points for sample in _sampled(cost, point, noise)])
    noise = noise_of(f"profile {seed}")
    block_bytes = BLOCK_TOKENS * model.kv_bytes_per_token
    alone_s = {
        size: size * block_bytes / gpu.achieved_link_bytes_per_s + gpu.load_setup_s for size in COPY_SIZES
    }
    times = {
        (size, way == "out"): [alone_s[size] * getattr(noise, way)() for _ in range(COPY_ROUNDS)]
        for size in COPY_SIZES
        for way in WAYS["swap"]
    }
    return fit.table.grid(), fit_link(times, block_bytes)


def _sampled(cost: StepCost, point: Point, noise: DeviceNoise) -> Iterable[StepSample]:
    """Yield a point's decodes alone, then with its prefill beside them, as `driver.profiling.steps.visit` runs them."""
    num_prefill, num_decodes, _ = point
    context = point.num_context_tokens // (num_decodes + (num_prefill > 0))
    of_decodes = context * num_decodes
    if num_decodes:
        yield StepSample(0, num_decodes, of_decodes, cost.step_s((), num_decodes, of_decodes) * noise.step())
    if num_prefill:
        seconds = cost.step_s([Chunk(num_prefill, context, 0, True)], num_decodes, of_decodes)
        yield StepSample(num_prefill, num_decodes, of_decodes + context, seconds * noise.step())


def errors(
    gpu: Gpu,
    model: Model,
    engine: Engine,
    policy: str,
    tiers: TierSizes,
    requests: Sequence[Arrival],
    seed: int,
) -> dict[str, float]:
    """Play requests with noise, and return the mean relative errors of predictions by `step_` or `swap_` and a key of `ERRORS`.

    Of copies each way, the worse counts.
    """
    grid, link = profile(gpu, model, engine, seed)
    cost, noise, clock = StepCost(gpu, model), noise_of(seed), Clock()
    cost.table = StepTable(grid)
    node = EmulatedNode(clock, cost, engine, policy, tiers=tiers, noise=noise)
    assert node.scheduling is not None and node.scheduling.pace is not None and node.tiers is not None
    node.tiers.use_link(link)
    seen: dict[str, Seen] = {"step": [], "out": [], "back": []}
    note_steps(node.scheduling.pace.table, seen["step"], lambda: [noise.step.last])
    note_copies(node.tiers.copy_times.out, seen["out"], lambda: [noise.out.last])
    note_copies(node.tiers.copy_times.back, seen["back"], lambda: [noise.back.last])
    play(clock, requests, node.submit)
    node.close()
    return {
        f"{what}_{name}": max(
            statistics.fmean(relative_errors([pair(each) for each in seen[way]])) for way in ways if seen[way]
        )
        for what, ways in WAYS.items()
        for name, pair in ERRORS.items()
    }
