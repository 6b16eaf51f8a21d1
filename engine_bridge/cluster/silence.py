"""How long another process has said nothing, as far as this one can know. Pure."""

from __future__ import annotations

import math

# Beyond the time between two looks: the loop was late, and no more. Chosen: far above what a busy loop is late by.
LATE_S = 1.0


class Silence:
    """Counts only while this process runs itself: after a pause (SIGSTOP, a machine that swapped) what others said meanwhile is yet to be read.

    Args:
        every_s: how often `look` is called at least.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._looked_s: float | None = None
        self._awake_s = -math.inf

    def look(self, now: float) -> None:
        if self._looked_s is not None and now - self._looked_s > self._every_s + LATE_S:
            self._awake_s = now
        self._looked_s = now

    def seconds(self, heard_s: float, now: float) -> float:
        """heard_s: when the other one was heard last."""
        return max(now - max(heard_s, self._awake_s), 0.0)
