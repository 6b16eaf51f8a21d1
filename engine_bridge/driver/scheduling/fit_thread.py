"""A thread on which lanes and the predictor are fitted, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)


class FitThread:
    """Runs functions that it is called with (`core.refits.Run`); their failures are logged."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "refit")

    def __call__(self, work: Callable[[], None]) -> None:
        """Run a function on the thread, after the functions that came before it."""
        self._executor.submit(_safely, work)

    def close(self) -> None:
        """Drop functions that have not begun, without waiting for the running one."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _safely(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        log.exception("lanes or the predictor could not be fitted; they stay as they are")
