"""CPU-assist on a separate device: in steps with rows of an adapter that is still being copied, those rows' deltas come from the host.

vLLM's mapping has such rows as rows of the base model; an opaque operator behind each LoRA layer adds their deltas, computed by worker processes
(`host_workers.py`) or here. The operator is installed once the engine is built, so it is for engines that compile nothing: compiled code and captured
graphs would lack it (`build.py`). It does nothing where no row is cold. Only prefills have such rows, since the copy is done by the next step or two.

Source: CaraServe §4.1. Departs in that base output and delta of a layer are computed one after the other, and in that no kernel signals the host: the
copy of x does. Not run on a GPU yet (tests/gpu holds the test); the CPU engine runs all but the copies on a stream
(tests/integration/test_adapters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from engine_bridge.driver.adapters.slots import lay_out
from engine_bridge.driver.adapters.weights import AdapterWeights, ModuleWeights
from engine_bridge.driver.lora.lora_weights import Compute
from engine_bridge.driver.vllm_api import (
    BaseLinearLayerWithLoRA,
    direct_register_custom_op,
)


@dataclass(frozen=True, slots=True)
class ColdAdapter:
    """The means to compute an adapter's cold rows: `compute_for` a layer by name, if it has workers, else `weights`."""

    weights: AdapterWeights
    compute_for: Callable[[str], Compute] | None
    failed: Callable[[Exception], None] | None = None
    """Called with an error raised while computing with this adapter; the step then continues without. None: the error is raised."""


@dataclass(frozen=True, slots=True)
class ColdRows:
    """Rows `start:stop` of the step, which are computed with a cold adapter."""

    start: int
    stop: int
    adapter: ColdAdapter


class HostPath:
    """The cold rows of the step that runs, in one engine. layers: vLLM's plain LoRA layers by name."""

    current: HostPath | None = None
    """The host path of this process: the operator has no other way to find it."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = dict(layers)
        self._rows: tuple[ColdRows, ...] = ()
        self.cold: Mapping[int, ColdAdapter] = {}
        """Cold adapters of the next step by adapter id; set before the step's mapping."""
        self.num_deltas = 0

    def covers(self, weights: AdapterWeights) -> bool:
        """Return whether all of an adapter's layers can be computed here. Embeddings and the output layer cannot."""
        return weights.modules.keys() <= self._layers.keys()

    @property
    def is_active(self) -> bool:
        """Whether the step that runs has any cold rows."""
        return bool(self._rows)

    def split(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Take the cold rows out of a step's mapping (an adapter's id per row, 0 for the base model); returns the remaining mapping."""
        self._rows = _cold_rows(ids, self.cold)
        return tuple(0 if adapter_id in self.cold else adapter_id for adapter_id in ids)

    def add(self, y: torch.Tensor, x: torch.Tensor, name: str) -> None:
        """Add the deltas of the cold rows in the layer `name` to `y`, in place, rounded to its type once. x, y: a row per token of the step."""
        for rows in self._rows:
            module = rows.adapter.weights.modules.get(name)
            if module is None:
                continue
            try:
                self._add_rows(y, x, name, rows, module)
            except Exception as error:
                if rows.adapter.failed is None:
                    raise
                rows.adapter.failed(error)

    def _add_rows(
        self, y: torch.Tensor, x: torch.Tensor, name: str, rows: ColdRows, module: ModuleWeights
    ) -> None:
        x_host = x[rows.start : rows.stop].float().cpu()
        y_host = y[rows.start : rows.stop].float().cpu()
        compute = rows.adapter.compute_for(name) if rows.adapter.compute_for is not None else None
        if compute is None or not compute(y_host, x_host, 1.0):
            layout = lay_out(self._layers[name], module)
            if layout is not None:
                layout.add_to(y_host, x_host, 1.0)
        y[rows.start : rows.stop].copy_(y_host)
        self.num_deltas += 1

    def counts(self) -> dict[str, int]:
        """Return the number of deltas computed so far, for `AdapterStats.counts`."""
        return {"host_path_deltas": self.num_deltas}

    def install(self) -> None:
        """Become the host path of this process, and put the operator behind each layer."""
        HostPath.current = self
        for name, layer in self._layers.items():
            layer.overture_name = name
        BaseLinearLayerWithLoRA._apply_lora_to_output = _apply_with_host_path

    def close(self) -> None:
        """Give vLLM its own function back: the engine closes."""
        HostPath.current = None
        BaseLinearLayerWithLoRA._apply_lora_to_output = _stock_apply


class NoHostPath:
    """Stands in where slots are filled by the time a step computes with them, or by the step itself."""

    cold: Mapping[int, ColdAdapter] = {}

    def covers(self, weights: AdapterWeights) -> bool:
        """Return False: no layer is computed here."""
        return False

    def counts(self) -> dict[str, int]:
        """Return no counts."""
        return {}

    def close(self) -> None:
        """Do nothing: nothing was installed."""


def _cold_rows(ids: Sequence[int], cold: Mapping[int, ColdAdapter]) -> tuple[ColdRows, ...]:
    rows, start = [], 0
    for adapter_id, run in groupby(ids):
        stop = start + sum(1 for _ in run)
        if adapter_id in cold:
            rows.append(ColdRows(start, stop, cold[adapter_id]))
        start = stop
    return tuple(rows)


# -- the operator ----------------------------------------------------------------------------------------------------


def _host_lora(y: torch.Tensor, x: torch.Tensor, name: str) -> None:
    path = HostPath.current
    if path is not None and path.is_active:
        path.add(y.view(-1, y.size(-1)), x.view(-1, x.size(-1)), name)


def _host_lora_fake(y: torch.Tensor, x: torch.Tensor, name: str) -> None:
    return None


direct_register_custom_op(
    op_name="overture_host_lora", op_func=_host_lora, mutates_args=["y"], fake_impl=_host_lora_fake
)

_stock_apply: Any = BaseLinearLayerWithLoRA._apply_lora_to_output


def _apply_with_host_path(self: Any, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _stock_apply(self, x, output)
    name = getattr(self, "overture_name", None)
    if name is not None:
        torch.ops.vllm.overture_host_lora(result, x, name)
    return result
