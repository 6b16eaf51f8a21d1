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
from typing import Literal

from bench.sim.core.clock import Clock

ColdStart = Literal["step waits", "request waits", "host helps", "device takes over"]


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
