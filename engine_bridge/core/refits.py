"""When lanes and the predictor of lengths are fitted to what came lately. Who calls says what runs the work: a thread, or the call itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine_bridge.policy.lanes import Lanes, Rule, knee
from engine_bridge.policy.quotas import SeenRequest, fitted
from engine_bridge.policy.sizes import Scale

# Lanes are fitted anew so often, on so many of the last requests. Chosen; the paper takes five minutes, of a busier server.
REFIT_EVERY_S, WINDOW = 60.0, 2048

Work = Callable[[], None]
Run = Callable[[Work], None]
"""Does some work, now or later. What it raises is the caller's to log."""
Sizes = tuple[float, float, float]
"""Prompt tokens, predicted tokens of the answer, rank of the adapter."""


def at_once(work: Work) -> None:
    """For simulators and tests: runs repeat exactly."""
    work()


@dataclass(frozen=True, slots=True)
class Fitted:
    """Lanes, a quota for each, and the scale that they were fitted on."""

    lanes: Lanes
    quotas: tuple[int, ...]
    scale: Scale


class Refits:
    """Fits lanes to what came lately, and the predictor to what it became. Neither waits for the other, and one that fails stops nothing else.

    Args:
        run: what runs the work.
        refit_predictor: may take seconds, and may raise.
        rule: for the number of lanes.
    """

    def __init__(
        self,
        run: Run,
        refit_predictor: Work,
        *,
        now: float,
        every_s: float | None = None,
        rule: Rule = knee,
    ) -> None:
        self._run, self._refit_predictor, self._rule = run, refit_predictor, rule
        self._every_s = REFIT_EVERY_S if every_s is None else every_s
        self.due_s = now + self._every_s
        """When both begin next."""
        self._seen: deque[tuple[float, SeenRequest, Sizes]] = deque(maxlen=WINDOW)
        self._fitted: Fitted | None = None
        self._is_fitting = self._is_learning = False

    def saw(self, request: SeenRequest, sizes: Sizes, now: float) -> None:
        self._seen.append((now, request, sizes))

    def start_if_due(self, now: float, scale: Scale, num_tokens: int, has_lanes: bool) -> None:
        if now < self.due_s or not self._seen:
            return
        self.due_s = now + self._every_s
        if has_lanes and not self._is_fitting:
            self._is_fitting = True
            seen = list(self._seen)
            self._run(lambda: self._fit(seen, scale, num_tokens))
        if not self._is_learning:
            self._is_learning = True
            self._run(self._learn)

    def take(self) -> Fitted | None:
        """What was fitted since the last call."""
        found = self._fitted
        if found is not None:  # else a thread may be about to put one there
            self._fitted = None
        return found

    # -- the work, on a thread perhaps -------------------------------------------------------------------------------

    def _fit(self, seen: list[tuple[float, SeenRequest, Sizes]], scale: Scale, num_tokens: int) -> None:
        try:
            requests = [
                SeenRequest(scale.wrs(*sizes), request.tokens, request.duration_s)
                for _, request, sizes in seen
            ]
            lanes, quotas = fitted(requests, seen[-1][0] - seen[0][0], num_tokens, self._rule)
            self._fitted = Fitted(lanes, quotas, scale)
        finally:
            self._is_fitting = False

    def _learn(self) -> None:
        try:
            self._refit_predictor()
        finally:
            self._is_learning = False
