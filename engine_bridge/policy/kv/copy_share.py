"""How long the engine's thread may copy KV for requests that may come, while other requests run. Pure: times in, seconds out.

Where copies take the engine's own time (on a CPU), each of them delays all requests that wait for tokens. But a request whose KV was not copied
before it came has it copied in a step of its own turn, for the same time. So only copies in vain cost anything, and those are bounded: turns are
paid from a small share of the time, and paid back as their blocks come to use.
"""

from __future__ import annotations

# The share of the time in which requests run that may be spent on copies in vain. Chosen: too little to be noticed.
SHARE = 0.02
# Seconds of turns that may be under way or lost before any has paid off. Chosen: on a memory of 5 GB/s, 5 GB of KV.
CREDIT_S = 1.0
# A turn takes this part of a step, within these bounds in seconds. Chosen: no token comes much later than it would.
TURN_STEPS = 0.5
SHORTEST_TURN_S, LONGEST_TURN_S = 0.002, 0.01
# The weight of the last measurement in the usual time of a step and of a block. Chosen.
SMOOTHING = 0.1


class WorkShare:
    """A bucket of seconds, full at first with `CREDIT_S`: time fills it with `SHARE` of itself, and useful blocks with their copying time."""

    def __init__(self) -> None:
        self._level_s = CREDIT_S
        self._filled_s: float | None = None
        self._step_s = 0.0
        self._block_s: float | None = None

    @property
    def turn_s(self) -> float:
        """The longest time that a turn may take, in seconds."""
        return min(max(TURN_STEPS * self._step_s, SHORTEST_TURN_S), LONGEST_TURN_S)

    def allowed_s(self, now: float) -> float:
        """Return the seconds that a turn may take before the next step. 0 until the bucket holds a whole turn. Call it when a step has ended."""
        if self._filled_s is not None:
            passed_s = max(now - self._filled_s, 0.0)
            # A pause between two steps is no long step.
            self._step_s += SMOOTHING * (min(passed_s, LONGEST_TURN_S / TURN_STEPS) - self._step_s)
            self._level_s = min(self._level_s + SHARE * passed_s, CREDIT_S)
        self._filled_s = now
        return self.turn_s if self._level_s >= self.turn_s else 0.0

    def took(self, seconds: float, num_blocks: int, now: float) -> None:
        """Note that a turn took this time and copied these blocks. Time beyond the allowed is paid back before the next turn."""
        self._level_s -= seconds
        self._filled_s = now
        if num_blocks:
            block_s = seconds / num_blocks
            before_s = self._block_s if self._block_s is not None else block_s
            self._block_s = before_s + SMOOTHING * (block_s - before_s)

    def used(self, num_blocks: int) -> None:
        """Note that a request came for this many of the blocks that turns copied, so that it need not have them copied."""
        self._level_s = min(self._level_s + num_blocks * (self._block_s or 0.0), CREDIT_S)
