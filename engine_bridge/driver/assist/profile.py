"""The time that one worker takes for a module, measured for `shares.rows_per_core`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from engine_bridge.driver.assist.pool import AssistPool
from engine_bridge.driver.assist.shares import ModuleShape
from engine_bridge.driver.lora.lora_weights import Expand, SlotWeights

# A measurement is the best of this many runs: other jobs share the machine's cores, and only ever add to the time (chosen).
REPEATS: Final = 7

# The id under which a profile's own weights lie in a pool; vLLM's adapter ids are positive.
PROFILE_ID: Final = -1


@contextmanager
def one_worker(pool: AssistPool) -> Iterator[Callable[[ModuleShape, int], float]]:
    """Give `rows_per_core` its `measure`: the best of REPEATS round trips through one worker of an idle pool, start to finish.

    Needs room for one module's weights; raises MemoryError without it.
    """
    usual = pool.rows_per_core
    pool.rows_per_core = pool.max_rows

    def measure(shape: ModuleShape, rows: int) -> float:
        """Return the best time in seconds for `rows` rows of a module of this shape."""
        module = f"profile-{shape.num_in}-{shape.rank}-{shape.num_out}"
        if not pool.has_module(PROFILE_ID, module):
            _hold(pool, module, shape)
        x, y = torch.ones(rows, shape.num_in), torch.zeros(rows, shape.num_out)
        best = float("inf")
        for _ in range(REPEATS + 1):  # the first is the warm-up: it can only be slower
            start = time.perf_counter()
            pool.add(PROFILE_ID, module, y, x, 1.0)
            best = min(best, time.perf_counter() - start)
        return best

    try:
        yield measure
    finally:
        pool.rows_per_core = usual
        pool.drop(PROFILE_ID)


def _hold(pool: AssistPool, module: str, shape: ModuleShape) -> None:
    """Put weights of this shape into the pool, in place of the last ones."""
    pool.drop(PROFILE_ID)
    b = torch.full((shape.rank, shape.num_out), 0.01)
    a = torch.full((shape.num_in, shape.rank), 0.01)
    layer = SlotWeights(a, (Expand(0, shape.rank, 0, shape.num_out, b),), storage=b)
    if not pool.put(PROFILE_ID, {module: layer}):
        raise MemoryError("no room in the assist pool for a profile's weights")
