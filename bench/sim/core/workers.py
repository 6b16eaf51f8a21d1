"""Runs of a bench on several cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


class Workers:
    """Runs of a job each, on so many cores; results in the order of asking."""

    def __init__(self, num: int) -> None:
        self._executor = ProcessPoolExecutor(num) if num > 1 else None

    def map(self, function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
        if self._executor is None:
            return [function(*row) for row in zip(*columns, strict=True)]
        return list(self._executor.map(function, *columns))

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
