"""Measured speeds for predictions: recent samples count, old ones fade back to what is assumed of any machine."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.3  # chosen: three or four samples replace the past
HALF_LIFE_S = 60.0  # chosen: a disk that was slow a minute ago deserves another try


@dataclass(slots=True)
class Rate:
    """A speed in units per second, from samples of (amount, seconds).

    Args:
        prior: assumed before the first sample, and again long after the last one.
        half_life_s: after this time a sample below the prior counts half.
    """

    prior: float
    value: float | None = None
    updated_s: float = 0.0
    half_life_s: float = HALF_LIFE_S

    def note(self, amount: float, seconds: float, now: float) -> None:
        """Take a sample; one without amount or time is ignored."""
        if amount <= 0 or seconds <= 0:
            return
        sample = amount / seconds
        self.value = sample if self.value is None else self.value + SMOOTHING * (sample - self.value)
        self.updated_s = now

    def at(self, now: float) -> float:
        """Return the rate to predict with."""
        if self.value is None:
            return self.prior
        if self.value >= self.prior:
            return self.value
        # Only a slow rate fades: a source that seems slow is avoided, and so not measured again.
        trust: float = 0.5 ** (max(now - self.updated_s, 0.0) / self.half_life_s)
        return self.prior + (self.value - self.prior) * trust
