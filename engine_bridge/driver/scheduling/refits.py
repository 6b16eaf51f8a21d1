"""Lanes and the length predictor are fitted to what came lately, on a thread of their own."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from engine_bridge.policy.lanes import Lanes
from engine_bridge.policy.quotas import SeenRequest, fitted
from engine_bridge.policy.sizes import Scale
from engine_bridge.predict.length import LengthPredictor

log = logging.getLogger(__name__)

# Lanes are fitted anew so often, on so many of the last requests. Chosen; the paper takes five minutes, of a busier server.
REFIT_EVERY_S, WINDOW = 60.0, 2048


class Refits:
    """Fits lanes to what came lately, and the predictor to what it became, on a thread of its own."""

    def __init__(self, now: float) -> None:
        self._seen: deque[tuple[float, SeenRequest, tuple[float, float, float]]] = deque(maxlen=WINDOW)
        self._executor = ThreadPoolExecutor(1, "refit")
        self._future: Future[tuple[Lanes, tuple[int, ...], Scale]] | None = None
        self._due_s = now + REFIT_EVERY_S

    def saw(self, request: SeenRequest, sizes: tuple[float, float, float], now: float) -> None:
        self._seen.append((now, request, sizes))

    def start_if_due(self, now: float, scale: Scale, num_tokens: int, predictor: LengthPredictor) -> None:
        if now < self._due_s or self._future is not None or not self._seen:
            return
        self._due_s = now + REFIT_EVERY_S
        self._future = self._executor.submit(_refit, list(self._seen), scale, num_tokens, predictor)

    def take(self) -> tuple[Lanes, tuple[int, ...], Scale] | None:
        """What was fitted since the last call."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        try:
            return future.result()
        except Exception:
            log.exception("lanes could not be fitted; they stay as they are")
            return None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _refit(
    seen: list[tuple[float, SeenRequest, tuple[float, float, float]]],
    scale: Scale,
    num_tokens: int,
    predictor: LengthPredictor,
) -> tuple[Lanes, tuple[int, ...], Scale]:
    predictor.refit()
    requests = [
        SeenRequest(scale.wrs(*sizes), request.tokens, request.duration_s) for _, request, sizes in seen
    ]
    return *fitted(requests, seen[-1][0] - seen[0][0], num_tokens), scale
