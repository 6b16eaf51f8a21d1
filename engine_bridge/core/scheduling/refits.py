"""When lanes and the predictor of lengths are fitted to recent requests. The caller says what runs the work: a thread, or the call itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine_bridge.policy.scheduling.lanes import MIN_SIZES, Lanes, Rule, knee
from engine_bridge.policy.scheduling.quotas import SeenRequest, fitted
from engine_bridge.policy.scheduling.sizes import Scale

# Seconds between two fits of the lanes, and the number of recent requests that a fit uses. Chosen; the paper takes five minutes, on a busier
# server.
REFIT_EVERY_S, WINDOW = 60.0, 2048

Work = Callable[[], None]
Run = Callable[[Work], None]
"""Does some work, now or later. The caller logs the errors that it raises."""
Sizes = tuple[float, float, float]
"""Prompt tokens, predicted tokens of the answer, rank of the adapter."""


def at_once(work: Work) -> None:
    """Run the work within the call. For simulators and tests, so that runs repeat exactly."""
    work()


@dataclass(frozen=True, slots=True)
class Fitted:
    """Lanes, a quota for each, and the scale that they were fitted on."""

    lanes: Lanes
    quotas: tuple[int, ...]
    scale: Scale


@dataclass(slots=True)
class _Seen:
    """One request that came. tokens, duration_s: as predicted until it has ended, then as they were."""

    arrived_s: float
    sizes: Sizes
    tokens: int
    duration_s: float


class Refits:
    """Fits lanes to recent requests, and the predictor to their answers. Neither waits for the other, and if one fails, the other still runs.

    Lanes are fitted for the first time as soon as enough requests have come to form clusters, and again whenever their number has doubled, up to a
    whole window.

    Args:
        refit_predictor: fits the predictor; may take seconds, and may raise.
    """

    def __init__(
        self,
        run: Run,
        refit_predictor: Work,
        *,
        now: float,
        every_s: float = REFIT_EVERY_S,
        rule: Rule = knee,
    ) -> None:
        self._run, self._refit_predictor, self._rule = run, refit_predictor, rule
        self._every_s = every_s
        self.due_s = now + self._every_s
        """The latest time at which both begin next."""
        self._seen: deque[_Seen] = deque(maxlen=WINDOW)
        self._open: dict[str, _Seen] = {}
        self._num_seen = 0
        self._next_num: float = MIN_SIZES
        self._fitted: Fitted | None = None
        self._is_fitting = self._is_learning = False

    def arrived(self, request_id: str, sizes: Sizes, tokens: int, duration_s: float, now: float) -> None:
        """Note a request that came. tokens, duration_s: the tokens that it will hold and the seconds that it will run, as predicted."""
        seen = self._open[request_id] = _Seen(now, sizes, tokens, duration_s)
        self._seen.append(seen)
        self._num_seen += 1

    def ended(self, request_id: str, tokens: int, duration_s: float) -> None:
        """Note a request's real tokens and duration. An unknown one is ignored."""
        seen = self._open.pop(request_id, None)
        if seen is not None:
            seen.tokens, seen.duration_s = tokens, duration_s

    def left(self, request_id: str) -> None:
        """Note that a request was given up, so that its real length is unknown. An unknown one is ignored."""
        self._open.pop(request_id, None)

    def start_if_due(self, now: float, scale: Scale, num_tokens: int, has_lanes: bool) -> None:
        """Begin to fit lanes, if the policy has any, and the predictor, if it is time, on the requests seen so far.

        scale: the maxima of the weighted size. num_tokens: the device's room for KV, in tokens.
        """
        is_due = now >= self.due_s
        if not self._seen or not (is_due or (has_lanes and self._num_seen >= self._next_num)):
            return
        if has_lanes and not self._is_fitting:
            self._next_num = 2 * self._num_seen if self._num_seen < WINDOW else math.inf
            self._is_fitting = True
            seen = list(self._seen)
            self._run(lambda: self._fit(seen, now, scale, num_tokens))
        if not is_due:
            return
        self.due_s = now + self._every_s
        if not self._is_learning:
            self._is_learning = True
            self._run(self._learn)

    def take(self) -> Fitted | None:
        """Return the lanes fitted since the last call; None if there are no new ones."""
        found = self._fitted
        if found is not None:  # else a thread may be about to put one there
            self._fitted = None
        return found

    # -- the work, on a thread perhaps -------------------------------------------------------------------------------

    def _fit(self, seen: list[_Seen], now: float, scale: Scale, num_tokens: int) -> None:
        try:
            requests = [
                SeenRequest(scale.weighted_size(*each.sizes), each.tokens, each.duration_s) for each in seen
            ]
            lanes, quotas = fitted(requests, now - seen[0].arrived_s, num_tokens, self._rule)
            self._fitted = Fitted(lanes, quotas, scale)
        finally:
            self._is_fitting = False

    def _learn(self) -> None:
        try:
            self._refit_predictor()
        finally:
            self._is_learning = False
