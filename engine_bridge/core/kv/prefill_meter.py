"""How fast prompts are computed, by the steps of an engine."""

from __future__ import annotations

# A step with fewer tokens says little about the speed of prefill.
MIN_PREFILL_TOKENS = 128


class PrefillMeter:
    """Measures prefill by the time between steps: while requests run they follow one another without a pause."""

    def __init__(self) -> None:
        self._last_s, self._num_tokens = 0.0, 0

    def stepped(self, num_tokens: int, *, has_running: bool, now: float) -> tuple[int, float] | None:
        """Note a step of `num_tokens`. has_running: whether it continues requests.

        Returns:
            The tokens and the seconds of the step before it; None if they say little.
        """
        last_s, num_last = self._last_s, self._num_tokens
        self._last_s, self._num_tokens = now, num_tokens
        return (num_last, now - last_s) if num_last >= MIN_PREFILL_TOKENS and has_running else None
