"""Step times as a profile would measure them on a simulated device, and the fit of them."""

from __future__ import annotations

import math
import random
from functools import cache

from bench.sim.core.hardware import Gpu
from bench.sim.core.models import Model
from bench.sim.core.steps import Chunk, StepCost
from engine_bridge.predict.steps import StepFit, StepSample, fit_steps

# Of sampled steps: relative, log-normal. Chosen: a measured step repeats within a per cent or two.
NOISE = 0.01
NUM_SAMPLES = 2000


def samples(cost: StepCost, num: int, seed: int) -> list[StepSample]:
    """Steps as a profile would measure them: prompts alone, decodes alone, and both; sizes drawn evenly on a logarithmic scale."""
    rng = random.Random(f"samples {seed}")

    def size(least: int, most: int) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))

    found = []
    for at in range(num):
        prefill = size(1, 2048) if at % 3 != 1 else 0
        decodes = size(1, 256) if at % 3 else 0
        context = decodes * size(16, 1024)
        chunks = (Chunk(prefill, 0, 0, True),) if prefill else ()
        seconds = cost.step_s(chunks, decodes, context) * rng.lognormvariate(0.0, NOISE)
        found.append(StepSample(prefill, decodes, context, seconds))
    return found


@cache
def fit(gpu: Gpu, model: Model) -> StepFit:
    """D1, by a regressor that comes out well in all comparisons of the paper's eight on degrees 1 to 5. Measured."""
    found = samples(StepCost(gpu, model), NUM_SAMPLES, 0)
    return fit_steps(found, regressors=("gradient_boosting",), degrees=(2,))
