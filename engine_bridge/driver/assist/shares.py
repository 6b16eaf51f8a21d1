"""How many rows one worker can take, and so how many workers a prefill gets. Pure: `profile` measures.

Source: CaraServe §4.2, "profiling-guided LoRA parallelization": one core is profiled under growing numbers of tokens; where it can handle c within
the time, L tokens get ceil(L / c) cores. Departs in that no worker gets fewer than MIN_ROWS rows: it would compute MIN_ROWS in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from engine_bridge.driver.lora.gemm import MIN_ROWS


class ModuleShape(NamedTuple):
    """A module's width in and out, and the adapter's rank in it."""

    num_in: int
    rank: int
    num_out: int


def num_workers_for(rows: int, rows_per_core: int, num_workers: int) -> int:
    """Return how many of `num_workers` workers compute `rows` rows: ceil(rows / rows_per_core), at least one, each with at least MIN_ROWS rows."""
    return max(1, min(-(-rows // rows_per_core), rows // MIN_ROWS, num_workers))


def split_rows(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut `0:rows` into `parts` stretches `(start, stop)` that differ by at most one row."""
    edges = [rows * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def rows_per_core(
    measure: Callable[[ModuleShape, int], float],
    shapes: Sequence[ModuleShape],
    budget_s: float,
    *,
    max_rows: int,
) -> int:
    """Find c: the most rows that one worker computes within `budget_s` in each of the shapes.

    Args:
        measure: seconds that one worker takes for a module of this shape and this number of rows; grows with the rows.
        shapes: the modules of a layer at the rank that counts; the slowest decides.
        budget_s: the time a module may cost: about as long as the device computes its base output, which runs beside it.
        max_rows: no more are tried.

    Returns:
        A number between MIN_ROWS, even where that is too slow (fewer rows are filled up to MIN_ROWS), and `max_rows`.
    """
    return min(
        _most_rows(lambda rows, shape=shape: measure(shape, rows), budget_s, max_rows) for shape in shapes
    )


def _most_rows(time_s: Callable[[int], float], budget_s: float, max_rows: int) -> int:
    """Return the most rows that fit: double until they take too long, then halve the interval.

    The halving ends at a sixteenth of the interval's lower end: timing is no more exact.
    """
    fits, too_slow = MIN_ROWS, max_rows + 1
    while fits < max_rows:
        rows = min(2 * fits, max_rows)
        if time_s(rows) > budget_s:
            too_slow = rows
            break
        fits = rows
    while too_slow - fits > max(1, fits // 16):
        middle = (fits + too_slow) // 2
        if time_s(middle) <= budget_s:
            fits = middle
        else:
            too_slow = middle
    return fits
