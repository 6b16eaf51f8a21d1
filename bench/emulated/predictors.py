"""How far off what serves is in predicting the steps and copies of an emulated device, where these vary as a real engine's do.

Of a device and model steps are sampled as `overture profile` samples them, each with noise, and a table is fitted to them, a link to copies of
several sizes. Then requests are played, and the tables of the node learn from what it sees. Each prediction is made just before it is seen.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.emulated.adaptivellm_runs import ARMS, Setting, engine_of, tiers_of
from bench.emulated.node import EmulatedNode
from bench.emulated.noise import DeviceNoise, Replay
from bench.predicting import Seen, note_copies, note_steps, relative_errors
from bench.results.runs import FOLDER
from bench.sim.core.clock import Clock
from bench.sim.core.hardware import Gpu
from bench.sim.core.models import Model
from bench.sim.core.shapes import BLOCK_TOKENS
from bench.sim.core.steps import Chunk, StepCost
from bench.sim.core.tables import Figure, Part, Workers
from bench.sim.core.traffic import play
from engine_bridge.driver.profiling.copies import fit_link
from engine_bridge.driver.profiling.steps import CONTEXT_SHARE, Bounds, Point, visits
from engine_bridge.policy.costs.costs import Link, StepGrid, StepTable
from engine_bridge.predict.steps import StepSample, fit_steps

MEASURED = "live-scheduling-predictors"
"""The kept run whose equal steps and copies are this device's noise (bench/live/predictors.py says how they were measured)."""
# As many as `overture profile` takes of the bench's model in two minutes on two cores, where they come from.
NUM_SAMPLES, DEGREES = 360, (1, 2, 3)
COPY_ROUNDS, COPY_SIZES = 40, (1, 2, 4, 8, 16, 32, 64)
AIMS = {"step": 0.02, "swap": 0.04}
WAYS = ("out", "back")


def noise_of(seed: object) -> DeviceNoise:
    ratios = json.loads((FOLDER / f"{MEASURED}.json").read_text())["result"]["noise"]
    return DeviceNoise(**{name: Replay(ratios[name], f"{name} {seed}") for name in ("step", *WAYS)})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one play: mean relative errors. to_seen: of what came; to_true: of what it would have been without noise; floor: of who knows that."""

    to_seen: dict[str, float]
    to_true: dict[str, float]
    floor: dict[str, float]
    num: dict[str, int]
    profile_error: float


# -- the profile -------------------------------------------------------------------------------------------------------


@cache
def profile(gpu: Gpu, model: Model, bounds: Bounds, seed: int) -> tuple[StepGrid, float, Link]:
    """Table and its error on held-out points, and the link, of noisy samples."""
    cost, noise = StepCost(gpu, model), noise_of(f"profile {seed}")
    points = itertools.islice(visits(bounds, seed), NUM_SAMPLES)
    samples = [sample for point in points for sample in _sampled(cost, point, noise)]
    fit = fit_steps(samples, degrees=DEGREES)
    block_bytes = BLOCK_TOKENS * model.kv_bytes_per_token
    alone_s = {
        size: size * block_bytes / gpu.achieved_link_bytes_per_s + gpu.load_setup_s for size in COPY_SIZES
    }
    times = {
        (size, way == "out"): [alone_s[size] * getattr(noise, way)() for _ in range(COPY_ROUNDS)]
        for size in COPY_SIZES
        for way in WAYS
    }
    return fit.table.grid(), fit.winner.table_error, fit_link(times, block_bytes)


def _sampled(cost: StepCost, point: Point, noise: DeviceNoise) -> Iterable[StepSample]:
    """Its decodes alone, then with its prefill beside them, as `driver.profiling.steps.visit` runs them."""
    num_prefill, num_decodes, _ = point
    context = point.num_context_tokens // (num_decodes + (num_prefill > 0))
    of_decodes = context * num_decodes
    if num_decodes:
        yield StepSample(0, num_decodes, of_decodes, cost.step_s((), num_decodes, of_decodes) * noise.step())
    if num_prefill:
        seconds = cost.step_s([Chunk(num_prefill, context, 0, True)], num_decodes, of_decodes)
        yield StepSample(num_prefill, num_decodes, of_decodes + context, seconds * noise.step())


# -- one play ----------------------------------------------------------------------------------------------------------


def run_once(setting: Setting, seed: int) -> Outcome:
    arm = ARMS["adaptive"]
    engine, tokens = engine_of(arm, setting), engine_of(arm, setting).num_tokens
    # As `overture profile` asks for them.
    num_kv_tokens = int(tokens * CONTEXT_SHARE)
    bounds = Bounds(
        engine.max_running, engine.step_tokens, num_kv_tokens, engine.max_tokens, engine.step_tokens
    )
    grid, profile_error, link = profile(setting.gpu, setting.model, bounds, seed)
    cost, noise, clock = StepCost(setting.gpu, setting.model), noise_of(seed), Clock()
    cost.table = StepTable(grid)
    node = EmulatedNode(clock, cost, engine, arm.queue, tiers=tiers_of(arm, setting), noise=noise)
    assert node.scheduling is not None and node.scheduling.pace is not None and node.tiers is not None
    node.tiers.use_link(link)
    seen: dict[str, Seen] = {"step": [], "out": [], "back": []}
    note_steps(node.scheduling.pace.table, seen["step"], lambda: [noise.step.last])
    note_copies(node.tiers.copy_times.out, seen["out"], lambda: [noise.out.last])
    note_copies(node.tiers.copy_times.back, seen["back"], lambda: [noise.back.last])
    play(clock, setting.arrivals(seed), node.submit)
    node.close()
    return _outcome(seen, profile_error)


def run_all(settings: Sequence[Setting], seed: int) -> list[Outcome]:
    """Of one model, in one process, so that its profile is made once."""
    return [run_once(setting, seed) for setting in settings]


def _outcome(seen: dict[str, Seen], profile_error: float) -> Outcome:
    """Of steps, and of copies the worse of both ways."""
    to_seen, to_true, floor = {}, {}, {}
    for name, each in seen.items():
        if not each:  # nobody was swapped
            continue
        true = [[predicted, took / noise] for predicted, took, noise, *_ in each]
        to_seen[name] = statistics.fmean(relative_errors(each))
        to_true[name] = statistics.fmean(relative_errors(true))
        floor[name] = statistics.fmean(relative_errors([[1.0, noise] for _, _, noise, *_ in each]))
    for found in (to_seen, to_true, floor):
        found["swap"] = max(found.pop(way) for way in WAYS if way in found)
    return Outcome(to_seen, to_true, floor, {name: len(each) for name, each in seen.items()}, profile_error)


# -- the part ----------------------------------------------------------------------------------------------------------


def predictors(workers: Workers, settings: Sequence[Setting], seeds: Sequence[int]) -> Part:
    """Each figure: the median over settings of the mean relative errors of a play, by seed."""
    of_model = [
        [s for s in settings if s.model == model] for model in dict.fromkeys(s.model for s in settings)
    ]
    jobs = list(itertools.product(of_model, seeds))
    outcomes = {
        (setting, seed): outcome
        for (own, seed), found in zip(jobs, workers.map(run_all, *zip(*jobs, strict=True)), strict=True)
        for setting, outcome in zip(own, found, strict=True)
    }
    figures: list[Figure] = []
    result: dict[str, Any] = {}
    for what, aim in AIMS.items():
        for of, key in (("to_seen", ""), ("to_true", "_of_true"), ("floor", "_floor")):
            values = tuple(
                statistics.median(getattr(outcomes[setting, seed], of)[what] for setting in settings)
                for seed in seeds
            )
            made_by = f"{ARMS['adaptive'].made_by}, tables that learn; noise of {MEASURED}"
            figures.append(
                Figure(f"{what}_error{key}", values, aim if of != "floor" else None, True, made_by, "share")
            )
            result[f"{what}_error{key}"] = round(figures[-1].median, 4)
    result["profile_step_error"] = round(statistics.median(o.profile_error for o in outcomes.values()), 4)
    result["num"] = {
        name: sum(outcome.num[name] for outcome in outcomes.values()) for name in ("step", *WAYS)
    }
    return figures, result
