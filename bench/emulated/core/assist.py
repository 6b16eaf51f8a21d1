"""Steps with adapters that are still on their way: who waits for them, and who computes with them meanwhile.

step waits         what a GPU does without help: a request starts at once, and its step waits for the copy, with all that are in it
request waits      it starts when the copy is whole; the others go on
host helps         as the live engine does it (driver/adapters/host_path.py): it starts at once, and the host computes its adapter's part of a step
                   beside the base model, layer by layer (`StepCost.assistant`), from the step's begin to its end
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from bench.emulated.core.hardware import AssistingHost, Gpu
from bench.emulated.core.models import Model
from bench.emulated.core.steps import StepCost
from engine_bridge.driver.assist.shares import ModuleShape, rows_per_core

ColdStart = Literal["step waits", "request waits", "host helps"]


def as_quick_as(gpu: Gpu, host: AssistingHost, model: Model, rank: int, prompt_tokens: int) -> AssistingHost:
    """Return the host with the most tokens a core with which it keeps up with the device's base product of the same module."""
    base_s = StepCost(gpu, model).prefill_s(prompt_tokens) - gpu.step_s
    num_modules = (4 if model.adapts_output else 3) * model.num_layers
    module_s = base_s * model.adapted_share / num_modules

    def measure(shape: ModuleShape, rows: int) -> float:
        """Return the seconds that one core takes for this many rows of an adapter's module."""
        flops = 2 * rows * shape.rank * (shape.num_in + shape.num_out)
        return flops / host.achieved_core_flops

    module = ModuleShape(model.hidden, rank, model.hidden)
    return replace(host, tokens_per_core=rows_per_core(measure, [module], module_s, max_rows=256))
