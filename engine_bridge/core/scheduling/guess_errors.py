"""The difference between the lengths of answers and the lengths predicted when they were asked for."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from engine_bridge.protocol.engine_request import LengthGuess

# Tokens. Chosen: the typical errors of a short answer, a long one and the longest.
ERROR_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
# The most tenants told apart; beyond it the tenant counted first is forgotten. Chosen.
MAX_TENANTS = 1024


class GuessErrors:
    """Counts the errors of predictions. Figures may be read from any thread."""

    def __init__(self) -> None:
        self._num_by_bound = [0] * (len(ERROR_BOUNDS) + 1)
        self.sum_tokens = 0
        self.num_within_p90 = 0
        self.calibration: dict[str, tuple[int, int, int]] = {}
        """For each tenant: answers, those no longer than their predicted median, and than their predicted 90th percentile."""

    def saw(self, tenant: str, guess: LengthGuess, num_tokens: int) -> None:
        """Count one answer of `num_tokens` against its prediction."""
        answers, within_p50, within_p90 = self.calibration.get(tenant, (0, 0, 0))
        within_p50 += num_tokens <= guess.p50
        within_p90 += num_tokens <= guess.p90
        # A new dictionary would cost more; readers on other threads copy it in one step of the interpreter.
        self.calibration[tenant] = (answers + 1, within_p50, within_p90)
        if len(self.calibration) > MAX_TENANTS:
            del self.calibration[next(iter(self.calibration))]
        error = abs(guess.p50 - num_tokens)
        self._num_by_bound[bisect_left(ERROR_BOUNDS, error)] += 1
        self.sum_tokens += error
        self.num_within_p90 += num_tokens <= guess.p90

    @property
    def num_answers(self) -> int:
        """The number of answers that were counted."""
        return sum(self._num_by_bound)

    @property
    def num_within(self) -> dict[int, int]:
        """The number of answers whose error is no larger, for each of `ERROR_BOUNDS`."""
        return dict(zip(ERROR_BOUNDS, accumulate(self._num_by_bound), strict=False))
