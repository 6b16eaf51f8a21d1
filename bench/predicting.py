"""Predictions by the objects that serve, noted just before what they predict is seen, and their errors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine_bridge.policy.costs.costs import CopyTable, StepTable

Seen = list[list[float]]
"""Of each: seconds as predicted, as they came to be, what else is known of it, and last of a step its work, of a copy its bytes."""


def note_steps(table: StepTable, seen: Seen, also: Callable[[], Sequence[float]] = tuple) -> None:
    """Note from now on what the table says of each step before it is told of it. also: asked at the same time."""
    observe = table.observe

    def noted(*work_and_seconds: Any) -> None:
        """Note a step that computes anything, then tell the table."""
        *work, seconds = work_and_seconds
        if any(work[:2]):
            seen.append([table.step_s(*work), seconds, *also(), *work])
        observe(*work_and_seconds)

    table.observe = noted  # type: ignore[method-assign]


def note_copies(table: CopyTable, seen: Seen, also: Callable[[], Sequence[float]] = tuple) -> None:
    """Note predictions of copies one way, as `note_steps` does."""
    observe = table.observe

    def noted(num_bytes: int, seconds: float, now: float) -> None:
        """Note a copy, then tell the table."""
        seen.append([table.copy_s(num_bytes, now), seconds, *also(), num_bytes])
        observe(num_bytes, seconds, now)

    table.observe = noted  # type: ignore[method-assign]


def relative_errors(seen: Sequence[Sequence[float]]) -> list[float]:
    """Return the relative error of each prediction."""
    return [abs(each[0] / each[1] - 1) for each in seen]


def error_of(seen: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the mean relative error (AdaptiveLLM's measure), the median, and the number of predictions."""
    errors = relative_errors(seen)
    return {
        "mean": round(statistics.fmean(errors), 4),
        "median": round(statistics.median(errors), 4),
        "num": len(errors),
    }


def fitted_error(seen: Seen) -> float:
    """Return the mean relative error of one set-up time and one bandwidth for all of these copies, fitted to them afterwards."""
    took_s, num_bytes = (np.array([each[at] for each in seen]) for at in (1, -1))
    parts = np.stack([1 / took_s, num_bytes / took_s], axis=1)
    (setup_s, byte_s), *_ = np.linalg.lstsq(parts, np.ones(len(seen)), rcond=None)
    return round(float(np.abs((setup_s + byte_s * num_bytes) / took_s - 1).mean()), 4)
