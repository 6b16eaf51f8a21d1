"""How many rows one worker can take, and so how many workers a prefill gets.

Source: CaraServe §4.2, "profiling-guided LoRA parallelization": one core is profiled under growing numbers of tokens; where it can handle
c within the time, L tokens get ceil(L / c) cores. Departs in that no worker gets fewer than MIN_ROWS rows, which would change the bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, NamedTuple

from engine_bridge.driver.gemm import MIN_ROWS

if TYPE_CHECKING:
    from engine_bridge.driver.assist.pool import AssistPool

# Best of as many: other jobs share the machine's cores, and only ever add to the time (chosen).
REPEATS: Final = 7

# The id under which a profile's own weights lie in a pool; vLLM's adapter ids are positive.
PROFILE_ID: Final = -1


class Shape(NamedTuple):
    """A module's width in and out, and the adapter's rank in it."""

    num_in: int
    rank: int
    num_out: int


def num_workers_for(rows: int, rows_per_core: int, num_workers: int) -> int:
    """Return how many of `num_workers` workers compute `rows` rows: ceil(rows / rows_per_core), each with MIN_ROWS rows or more, one at least."""
    if rows < 1 or rows_per_core < 1 or num_workers < 1:
        raise ValueError(f"positive numbers expected, not {rows}, {rows_per_core}, {num_workers}")
    return max(1, min(-(-rows // rows_per_core), rows // MIN_ROWS, num_workers))


def split_rows(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut `0:rows` into `parts` stretches `(start, stop)` that differ by at most one row."""
    edges = [rows * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def rows_per_core(
    measure: Callable[[Shape, int], float], shapes: Sequence[Shape], budget_s: float, *, max_rows: int
) -> int:
    """Find c: the most rows that one worker computes within `budget_s` in each of the shapes.

    Args:
        measure: seconds that one worker takes for a module of this shape and so many rows; grows with the rows.
        shapes: the modules of a layer at the rank that counts; the slowest decides.
        budget_s: what a module may cost: about as long as the device computes its base output, which runs beside it.
        max_rows: no more are tried.

    Returns between MIN_ROWS, even where that is too slow (fewer are filled up to as many), and `max_rows`.
    """
    return min(
        _most_rows(lambda rows, shape=shape: measure(shape, rows), budget_s, max_rows) for shape in shapes
    )


def _most_rows(time_s: Callable[[int], float], budget_s: float, max_rows: int) -> int:
    """Double until it is too slow, then halve the interval down to a sixteenth of its lower end: timing is no more exact."""
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


@contextmanager
def one_worker(pool: AssistPool, repeats: int = REPEATS) -> Iterator[Callable[[Shape, int], float]]:
    """Give `rows_per_core` its `measure`: the best of `repeats` round trips through one worker of an idle pool, start to finish.

    Needs room for one module's weights; raises MemoryError without it.
    """
    usual = pool.rows_per_core
    pool.rows_per_core = pool.max_rows

    def measure(shape: Shape, rows: int) -> float:
        _hold(pool, shape)
        return _best_time(pool, shape, rows, repeats)

    try:
        yield measure
    finally:
        pool.rows_per_core = usual
        pool.drop(PROFILE_ID)


def _hold(pool: AssistPool, shape: Shape) -> None:
    """Put weights of this shape into the pool, in place of the last ones."""
    import torch

    module = _module(shape)
    if pool.has_module(PROFILE_ID, module):
        return
    pool.drop(PROFILE_ID)
    b = torch.full((shape.rank, shape.num_out), 0.01)
    expand = SimpleNamespace(low=0, high=shape.rank, left=0, right=shape.num_out, b=b)
    layer = SimpleNamespace(a=torch.full((shape.num_in, shape.rank), 0.01), expands=(expand,))
    if not pool.put(PROFILE_ID, {module: layer}):
        raise MemoryError("no room in the assist pool for a profile's weights")


def _best_time(pool: AssistPool, shape: Shape, rows: int, repeats: int) -> float:
    import torch

    x, y = torch.ones(rows, shape.num_in), torch.zeros(rows, shape.num_out)
    best = float("inf")
    for _ in range(repeats + 1):  # the first is the warm-up: it can only be slower
        start = time.perf_counter()
        pool.add(PROFILE_ID, _module(shape), y, x, 1.0)
        best = min(best, time.perf_counter() - start)
    return best


def _module(shape: Shape) -> str:
    return f"profile-{shape.num_in}-{shape.rank}-{shape.num_out}"
