"""Lanes of an `Mlq`, fitted to what came lately as the live engine does it: by policy/{sizes,lanes,quotas}, at set times."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from engine_bridge.core.refits import REFIT_EVERY_S, WINDOW
from engine_bridge.policy.lanes import Lanes, Rule, knee
from engine_bridge.policy.quotas import SeenRequest, fitted
from engine_bridge.policy.sizes import Scale, WeightedSize


class LaneFits:
    """Sizes of requests on one scale, and the lanes that they make.

    Args:
        weights: of input, output and rank in a request's size.
    """

    def __init__(
        self,
        num_tokens: int,
        sizes: WeightedSize | None = None,
        every_s: float = REFIT_EVERY_S,
        rule: Rule = knee,
    ) -> None:
        self.num_refits = 0
        self._num_tokens = num_tokens
        self._sizes = sizes or WeightedSize()
        self._rule = rule
        self._scale = self._sizes.scale
        self._seen: deque[tuple[float, int, float, tuple[float, float, float]]] = deque(maxlen=WINDOW)
        self._every_s = every_s
        self._due_s = every_s
        self._fitted: tuple[Lanes, tuple[int, ...], Scale] | None = None

    def wrs(self, sizes: tuple[float, float, float]) -> float:
        """A request that came; counts it among the maxima."""
        self._sizes.seen(*sizes)
        return self._scale.wrs(*sizes)

    def saw(self, num_tokens: int, duration_s: float, sizes: tuple[float, float, float], now: float) -> None:
        """It ended."""
        self._seen.append((now, num_tokens, duration_s, sizes))

    def fit_if_due(self, now: float) -> None:
        if now >= self._due_s and self._seen:
            self._due_s = now + self._every_s
            self.fit()

    def fit(self) -> None:
        """Fit lanes and quotas to what came lately, for `apply`."""
        self._fitted = (*self._fit(self._sizes.scale), self._sizes.scale)

    def apply(self, policy: Any, known: Mapping[str, tuple[float, float, float]]) -> bool:
        """Have what was fitted used by `policy.refit`, an `Mlq`'s. known: sizes of all that waits or runs. Whether there was anything."""
        if self._fitted is None:
            return False
        lanes, quotas, self._scale = self._fitted
        self._fitted = None
        scale = self._scale
        policy.refit(lanes, quotas, {request_id: scale.wrs(*sizes) for request_id, sizes in known.items()})
        self.num_refits += 1
        return True

    def _fit(self, scale: Scale) -> tuple[Lanes, tuple[int, ...]]:
        requests = [SeenRequest(scale.wrs(*sizes), tokens, took_s) for _, tokens, took_s, sizes in self._seen]
        return fitted(requests, self._seen[-1][0] - self._seen[0][0], self._num_tokens, self._rule)
