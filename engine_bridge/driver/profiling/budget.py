"""How the time of a profile is shared between its parts, and how its progress is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ProgressReport = Callable[[str, float, float], None]
"""Is told what is being measured, the share of the whole profile that is done, and the seconds of it that are left."""


@dataclass(eq=False, slots=True)
class Budget:
    """The time of one part. Its work asks `is_over` between two measurements, each of which is short.

    Args:
        end_s, whole_end_s: when this part and the whole profile are to be done, by `clock`.
    """

    _started_s: float
    _end_s: float
    _whole_end_s: float
    _report: ProgressReport
    _clock: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        """Return the seconds that are left of this part."""
        return max(self._end_s - self._clock(), 0.0)

    def is_over(self) -> bool:
        """Return whether this part's time is over."""
        return self._clock() >= self._end_s

    def say(self, what: str) -> None:
        """Report which measurement is running."""
        now = self._clock()
        whole_s = max(self._whole_end_s - self._started_s, 1e-9)
        self._report(what, min((now - self._started_s) / whole_s, 1.0), max(self._whole_end_s - now, 0.0))

    def part(self, share: float) -> Budget:
        """Return a budget of this share of the time that is left of this one."""
        now = self._clock()
        end_s = now + share * max(self._end_s - now, 0.0)
        return Budget(self._started_s, end_s, self._whole_end_s, self._report, self._clock)


def start(seconds: float, report: ProgressReport) -> Budget:
    """Begin a budget of this many seconds."""
    now = time.monotonic()
    return Budget(now, now + seconds, now + seconds, report)
