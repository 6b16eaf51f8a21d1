"""How long the engine's thread may prepare for requests that may come, while others' run. Pure: times in, seconds out.

Where copies take the engine's own time (on a CPU), each of them holds up all who wait for tokens. They get a small share of the time, saved up
until it is worth a turn: looking what there is to do takes as long as copying some blocks.
"""

from __future__ import annotations

# Of the time in which requests run. Chosen: too little to be noticed, and on a memory of 5 GB/s 100 MB of KV each second.
SHARE = 0.02
# A turn takes this part of a step, within these bounds in seconds. Chosen: no token comes much later than it would.
TURN_STEPS = 0.5
SHORTEST_TURN_S, LONGEST_TURN_S = 0.002, 0.01
# Of how long steps take, the last one's weight. Chosen.
SMOOTHING = 0.1


class WorkShare:
    """A bucket of seconds that fills with `SHARE` of the time, and holds no more than one turn."""

    def __init__(self) -> None:
        self._level_s = 0.0
        self._filled_s: float | None = None
        self._step_s = 0.0

    @property
    def turn_s(self) -> float:
        """As long as a turn may take."""
        return min(max(TURN_STEPS * self._step_s, SHORTEST_TURN_S), LONGEST_TURN_S)

    def allowed_s(self, now: float) -> float:
        """A step has ended: how long a turn may take before the next one. 0 until there is enough for a whole turn."""
        if self._filled_s is not None:
            passed_s = max(now - self._filled_s, 0.0)
            # A pause between two steps is no long step.
            self._step_s += SMOOTHING * (min(passed_s, LONGEST_TURN_S / TURN_STEPS) - self._step_s)
            self._level_s = min(self._level_s + SHARE * passed_s, self.turn_s)
        self._filled_s = now
        return self.turn_s if self._level_s >= self.turn_s else 0.0

    def took(self, seconds: float, now: float) -> None:
        """A turn has ended, which took so long. More than was allowed is paid back before the next one."""
        self._level_s -= seconds
        self._filled_s = now
