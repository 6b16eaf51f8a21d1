"""How our residency takes the place of vLLM's LoRA manager: the one class that vLLM builds by name. The gate is in `driver/scheduling/seam.py`.

Source: vLLM 0.32, `v1/worker/lora_model_runner_mixin.py` (the manager), `v1/core/sched/scheduler.py` (the gate).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from engine_bridge.driver.adapters.host_path import HostPath
from engine_bridge.driver.adapters.residency import Residency
from engine_bridge.driver.adapters.slots import SPARE_SLOTS
from engine_bridge.driver.in_process import runner_of
from engine_bridge.driver.lora.experts import leave_experts_out, names_outside
from engine_bridge.driver.vllm_api import (
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    current_platform,
)
from engine_bridge.driver.vllm_api import lora_model_runner_mixin as mixin
from engine_bridge.protocol.errors import SeamMoved


class SlotTable(LRUCacheLoRAModelManager):
    """vLLM's manager, of which we use the layers, the packing of weights and the slot table."""

    host_path: HostPath | None = None

    @property
    def lora_slots(self) -> int:
        """The number of slots: vLLM's, and on a CPU SPARE_SLOTS more."""
        # On a CPU the stacks are memory that is never touched: a few slots more cost nothing.
        spare = SPARE_SLOTS if current_platform.is_cpu() else 0
        return int(self.lora_config.max_loras) + spare

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.lora_slots

    def _create_lora_modules(self) -> None:
        """Make the layers that take adapters, by the names that adapters have for them. On a CPU experts are none of them."""
        if current_platform.is_cpu():
            leave_experts_out(self)
        super()._create_lora_modules()
        for inside, name in names_outside(self.model).items():
            if inside in self.modules:
                self.modules[name] = self.modules.pop(inside)
            if inside in self.packed_modules:
                place, parts = name.rpartition(".")[0], self.packed_modules.pop(inside)
                self.packed_modules[name] = [f"{place}.{part.rpartition('.')[2]}" for part in parts]

    def set_adapter_mapping(self, mapping: Any) -> None:
        """Set the next step's mapping, without the rows that the host path computes."""
        if self.host_path is not None:
            # The mapping is always set anew: which adapters are cold changes without the mapping.
            self._last_mapping = None
            mapping = dataclasses.replace(
                mapping,
                index_mapping=self.host_path.split(mapping.index_mapping),
                prompt_mapping=tuple(0 if i in self.host_path.cold else i for i in mapping.prompt_mapping),
            )
        super().set_adapter_mapping(mapping)


class GatedWorkerManager(LRUCacheWorkerLoRAManager):
    """A worker manager that loads nothing in a step. Until it has a residency (profiling, warm-up with dummies) it is vLLM's own."""

    _manager_cls = SlotTable
    residency: Residency | None = None

    def _apply_adapters(self, lora_requests: set[Any]) -> None:
        if self.residency is None:
            super()._apply_adapters(lora_requests)
        else:
            self.residency.enter({request.lora_int_id for request in lora_requests if request})


def install() -> None:
    """Make the next engine of this process use our manager."""
    mixin.LRUCacheWorkerLoRAManager = GatedWorkerManager


def worker_manager_of(engine: Any) -> GatedWorkerManager:
    """Return the worker manager of an in-process `LLMEngine`. Raises SeamMoved if it is not ours."""
    manager = runner_of(engine).lora_manager
    if not isinstance(manager, GatedWorkerManager):
        raise SeamMoved(f"the engine loads adapters with {type(manager).__name__}: install() came too late")
    return manager
