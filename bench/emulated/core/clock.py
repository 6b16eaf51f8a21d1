"""Virtual time: what happens next, in order of time, then of having been asked for."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[float], None]
"""Called with the time at which it happens."""


@dataclass(slots=True, eq=False)
class Event:
    """An action that will happen unless it is cancelled."""

    at_s: float
    action: Action | None

    def cancel(self) -> None:
        """Let the action not happen."""
        self.action = None


class Clock:
    """Runs actions in order of time; actions of one time run in the order in which they were asked for. Source of the idea: simpy's event queue."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Event]] = []
        self._ids = itertools.count()

    def at(self, at_s: float, action: Action) -> Event:
        """Call the action at this time. Raises ValueError for a time that has passed."""
        if at_s < self.now:
            raise ValueError(f"{at_s} s has passed, it is {self.now} s")
        event = Event(at_s, action)
        heapq.heappush(self._heap, (at_s, next(self._ids), event))
        return event

    def run(self, until_s: float = math.inf) -> None:
        """Run all actions, or those due until `until_s`, itself included."""
        while self._heap and self._heap[0][0] <= until_s:
            self.step()
        if until_s < math.inf:
            self.now = max(self.now, until_s)

    def step(self) -> None:
        """Run the next action. Raises IndexError if there is none."""
        at_s, _, event = heapq.heappop(self._heap)
        if event.action is not None:
            self.now = at_s
            event.action(at_s)
