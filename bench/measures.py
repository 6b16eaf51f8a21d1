"""Figures of many values."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; nan of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)]
