"""Steps with adapters that are still on their way: who waits for them, and who computes with them meanwhile.

step waits         what a GPU does without help: a request starts at once, and its step waits for the copy, with all that are in it
request waits      it starts when the copy is whole; the others go on
host helps         as the live engine does it (driver/adapters/host_path.py): it starts at once, and the host computes its adapter's part of a step
                   beside the base model, layer by layer (`StepCost.assistant`), from the step's begin to its end
device takes over  the same, but when the copy is whole the device goes on with what is left of the step. Source: CaraServe §4.1. With a core
                   for 16 tokens, as in the paper, that makes +24% of TTFT of +31% (9 requests/s, rank 64, 40 s); with cores that are as
                   quick as the device there is nothing to win by it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from bench.sim.core.clock import Clock
from bench.sim.core.hardware import AssistingHost, Gpu
from bench.sim.core.models import Model
from bench.sim.core.steps import StepCost
from engine_bridge.driver.assist.shares import ModuleShape, rows_per_core

ColdStart = Literal["step waits", "request waits", "host helps", "device takes over"]


def as_quick_as(gpu: Gpu, host: AssistingHost, model: Model, rank: int, prompt_tokens: int) -> AssistingHost:
    """The host with so many tokens a core that it is as quick as the device, which computes the base model's product of the same module meanwhile."""
    base_s = StepCost(gpu, model).prefill_s(prompt_tokens) - gpu.step_s
    num_modules = (4 if model.adapts_output else 3) * model.num_layers
    module_s = base_s * model.adapted_share / num_modules

    def measure(shape: ModuleShape, rows: int) -> float:
        flops = 2 * rows * shape.rank * (shape.num_in + shape.num_out)
        return flops / host.achieved_core_flops

    module = ModuleShape(model.hidden, rank, model.hidden)
    return replace(host, tokens_per_core=rows_per_core(measure, [module], module_s, max_rows=256))


class StepUnderWay:
    """A step of the device, whose end is planned anew when what is left of it takes another time.

    Args:
        seconds: that all of it takes.
        end: called at its end.
        seconds_now: that all of it would take as things are by then.
    """

    def __init__(
        self, clock: Clock, seconds: float, end: Callable[[float], None], seconds_now: Callable[[], float]
    ) -> None:
        self._clock, self._action, self._seconds_now = clock, end, seconds_now
        self._left, self._since_s = 1.0, clock.now
        self._end = clock.at(clock.now + seconds, end)

    def plan_anew(self) -> None:
        """An adapter is whole that it may compute with."""
        now = self._clock.now
        if self._end.at_s <= now:
            return
        self._left *= (self._end.at_s - now) / (self._end.at_s - self._since_s)
        self._since_s = now
        self._end.cancel()
        self._end = self._clock.at(now + self._left * self._seconds_now(), self._action)
