"""Cold adapters' part of a step, computed by worker processes while the adapter is on its way into a slot (CaraServe §4.2, §4.3).

--cpu-assist-workers asks for them. Without them the engine's own threads compute that part, which on a CPU costs less than the hand-over
(bench/LOG.md). Workers are meant for a separate device, whose step waits for nothing else meanwhile.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine_bridge.driver.adapters.slots import ComputeFor, lay_out
from engine_bridge.driver.adapters.weights import AdapterWeights
from engine_bridge.driver.assist.pool import AssistPool
from engine_bridge.driver.assist.profile import one_worker
from engine_bridge.driver.assist.shares import ModuleShape, rows_per_core
from engine_bridge.driver.assist.team import AssistLost

log = logging.getLogger(__name__)

# The most rows of one hand-over; a longer prompt is computed by the engine's threads. Chosen: memory for the rows is taken at the start.
MAX_ROWS = 2048
# How long a module's delta may take one worker: about as long as the base model's own part of it. Chosen.
BUDGET_S = 0.001
# The rank at which a worker's share is measured. Chosen: most adapters have no higher rank.
PROFILE_RANK = 64


class AssistWorkers:
    """Worker processes that compute with adapters on their way into a slot, besides the engine's own threads; this base class has none."""

    def put(self, adapter_id: int, weights: AdapterWeights) -> None:
        """Offer an adapter, which is kept if there is room for it. On the loader's thread."""

    def drop(self, adapter_id: int) -> None:
        """Give up an adapter that leaves host memory. On the loader's thread."""

    def computes(self, adapter_id: int) -> ComputeFor | None:
        """Return a function that finds, by a layer's name, what computes the adapter's delta there; None: no worker computes it."""
        return None

    def counts(self) -> dict[str, int]:
        """Return counts for `AdapterStats.counts`."""
        return {}

    def close(self) -> None:
        """Stop the workers."""


class HostWorkers(AssistWorkers):
    """Worker processes and the adapters that they hold.

    Args:
        layers: vLLM's LoRA layers by name, only layers that our wrapper alone reads.
        weight_bytes: bound of the adapters' memory.
        engine_cores: number of cores that workers keep off, where there are others.
    """

    def __init__(
        self, num_workers: int, layers: dict[str, Any], weight_bytes: int, engine_cores: int | None
    ) -> None:
        self._layers = layers
        widths = [(layer.lora_a_stacked[0].shape[-1], _width(layer)) for layer in layers.values()]
        self._pool = AssistPool(
            num_workers,
            max_rows=MAX_ROWS,
            max_in=max(num_in for num_in, _ in widths),
            max_out=max(num_out for _, num_out in widths),
            weight_bytes=weight_bytes,
            cpus=_free_cores(engine_cores),
        )
        self._shapes = [ModuleShape(num_in, PROFILE_RANK, num_out) for num_in, num_out in set(widths)]
        self.num_deltas = 0

    def calibrate(self) -> None:
        """Wait for the workers and find how many rows one of them takes. On the engine thread, at the start."""
        self._pool.wait_ready()
        with one_worker(self._pool) as measure:
            self._pool.rows_per_core = rows_per_core(measure, self._shapes, BUDGET_S, max_rows=MAX_ROWS)
        log.info("a worker computes %d rows of rank %d in 1 ms", self._pool.rows_per_core, PROFILE_RANK)

    def put(self, adapter_id: int, weights: AdapterWeights) -> None:
        """Give an adapter to the workers, unless they hold it or have died. On the loader's thread."""
        if not self._pool.is_alive or self._pool.holds(adapter_id):
            return
        packed = {
            name: layout
            for name, module in weights.modules.items()
            if name in self._layers and (layout := lay_out(self._layers[name], module)) is not None
        }
        self._pool.put(adapter_id, packed)

    def drop(self, adapter_id: int) -> None:
        """Give up an adapter that leaves host memory. On the loader's thread."""
        self._pool.drop(adapter_id)

    def computes(self, adapter_id: int) -> ComputeFor:
        """Return `compute_for` of this adapter."""
        return partial(self.compute_for, adapter_id)

    def counts(self) -> dict[str, int]:
        """Return the number of deltas that workers computed, for `AdapterStats.counts`."""
        return {"worker_deltas": self.num_deltas}

    def compute_for(self, adapter_id: int, name: str) -> Callable[[torch.Tensor, torch.Tensor, float], bool]:
        """Return a function that adds the adapter's delta in this layer for fp32 rows x to fp32 rows y.

        The function returns False if it added nothing: then the caller computes the delta itself.
        """

        def compute(y: torch.Tensor, x: torch.Tensor, scale: float) -> bool:
            """Add the delta for rows x to rows y; False: nothing was added."""
            if x.size(0) > MAX_ROWS or not self._pool.is_alive or not self._pool.has_module(adapter_id, name):
                return False
            try:
                self._pool.add(adapter_id, name, y, x, scale)
            except AssistLost as error:
                log.warning("cold adapters are computed by the engine's own threads: %s", error)
                return False
            self.num_deltas += 1
            return True

        return compute

    def close(self) -> None:
        """Stop the worker processes."""
        self._pool.close()


def _width(layer: Any) -> int:
    return int(sum(stack.shape[-2] for stack in layer.lora_b_stacked))


def _free_cores(engine_cores: int | None) -> list[int] | None:
    """Return the cores that the engine's threads do not run on; None if there are none.

    The engine binds its threads to the last cores (`configure_environment`).
    """
    cores = sorted(os.sched_getaffinity(0))
    others = cores[: len(cores) - engine_cores] if engine_cores is not None else []
    return others or None
