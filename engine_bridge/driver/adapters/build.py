"""Puts the parts of one engine's residency together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine_bridge.adapters.files import ModelContract
from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.core.adapters.residency import AdapterPlaces, Rules
from engine_bridge.core.adapters.staging import AHEAD_SHARE, HistoryPrefetch, NoPrefetch, ReadAhead
from engine_bridge.core.adapters.step_layouts import StepFacts, StepLayouts
from engine_bridge.driver.adapters import slots as slot_kinds
from engine_bridge.driver.adapters.blocks import AdapterBlocks, NoBlocks
from engine_bridge.driver.adapters.device_copies import DeviceCopies
from engine_bridge.driver.adapters.host_path import HostPath, NoHostPath
from engine_bridge.driver.adapters.host_workers import AssistWorkers, HostWorkers
from engine_bridge.driver.adapters.layouts import LayoutsAhead
from engine_bridge.driver.adapters.loading import AdapterLoader, LoaderThread
from engine_bridge.driver.adapters.residency import Residency, lora_ids
from engine_bridge.driver.adapters.seam import worker_manager_of
from engine_bridge.driver.adapters.slots import Slots
from engine_bridge.driver.adapters.weights import Loader, contract_of
from engine_bridge.driver.in_process import kv_caches_of
from engine_bridge.driver.memory.block_copy import own_memory
from engine_bridge.policy.adapters.adapter_cache import PrefixFacts
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.profile import MachineProfile

GIB = 1 << 30

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class AdapterParts:
    """The parts with which an engine reads, keeps and computes adapters, wherever its worker is.

    Attributes:
        contract: what an adapter must be to run here.
        table: has the slot table, `lora_index_to_id`: the adapter in each slot, None in an empty one.
        slots: the places that steps compute with.
        workers: compute with adapters on their way into a slot.
        host_path: computes rows of adapters whose slots are not filled.
        device: where the weights of steps are.
        may_assist: whether requests may start while their adapter is still on its way into a slot.
        step_room: see `Rules`.
        make_blocks: makes the adapters' copies in KV blocks, where the settings wish them.
        enter: has a residency hear of each step's adapters.
    """

    contract: ModelContract
    table: Any
    slots: Slots
    loader: AdapterLoader
    workers: AssistWorkers
    host_path: HostPath | NoHostPath
    device: torch.device
    may_assist: bool
    step_room: int | None
    make_blocks: Callable[[DeviceCopies], AdapterBlocks]
    enter: Callable[[Residency], None]


def make_residency(
    engine: Any,
    config: EngineConfig,
    parts: AdapterParts,
    *,
    wake: Callable[[], None],
    fail: Callable[[list[str], Exception], None],
    prefix_facts: Callable[[int], PrefixFacts],
    step_facts: Callable[[], StepFacts],
    on_spoiled: Callable[[int], None] = lambda adapter_id: None,
    profile: MachineProfile | None = None,
) -> Residency:
    """Build the residency of a newly built engine, whose steps load nothing from here on.

    wake is called on the loader's thread when it has done something. The profile's speeds are used at first; without one, assumed speeds are. For the
    other arguments see `own_parts`, `Residency`, `DeviceCopies`, `StepLayouts` and `Failures`.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    slots, host_bytes = parts.slots, int(config.adapter_host_gib * GIB)
    core = _make_core(config, parts, host_bytes, profile)
    copies = DeviceCopies(core, parts.device, prefix_facts)
    residency = Residency(
        core,
        contract=parts.contract,
        manager=parts.table,
        slots=slots,
        loader=LoaderThread(
            parts.loader,
            parts.workers,
            ReadAhead(AHEAD_SHARE * host_bytes),
            LayoutsAhead(slots.max_cost, slots.prepare, slots.cost),
            wake,
        ),
        running_ids=lambda: lora_ids(scheduler.running),
        has_running=lambda: bool(scheduler.running),
        is_busy=lambda: sum(scheduler.get_request_counts()) > 0,
        on_failed=fail,
        copies=copies,
        workers=parts.workers,
        host_path=parts.host_path,
        step_layouts=StepLayouts(step_facts),
        on_spoiled=on_spoiled,
    )
    if config.adapters_in_kv:
        copies.blocks = parts.make_blocks(copies)
    parts.enter(residency)
    scheduler.residency = residency
    return residency


def own_parts(engine: Any, config: EngineConfig, copy_of: Callable[[str], str]) -> AdapterParts:
    """Return the parts of an engine whose worker is in this process. For `copy_of` see `Loader`. Raises SeamMoved."""
    worker_manager = worker_manager_of(engine)
    manager = worker_manager._adapter_manager
    block_pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    host_bytes = int(config.adapter_host_gib * GIB)
    contract = contract_of(manager, (config.model, *config.model_names))
    manager.remove_all_adapters()  # those of vLLM's warm-up
    slots = slot_kinds.make_slots(manager)
    may_assist = _may_assist(engine, config) and not _has_rows_of_several_kinds(manager, slots)
    return AdapterParts(
        contract=contract,
        table=manager,
        slots=slots,
        loader=Loader(manager, contract, worker_manager.vocab_size, host_bytes // 4, copy_of),
        workers=_make_workers(config, manager, host_bytes) if may_assist else AssistWorkers(),
        host_path=_make_host_path(manager, slots) if may_assist else NoHostPath(),
        device=torch.device(manager.device),
        may_assist=may_assist,
        step_room=config.max_loras * slots.max_cost,
        make_blocks=lambda copies: _make_blocks(engine, block_pool, copies),
        enter=lambda residency: setattr(worker_manager, "residency", residency),
    )


def _make_blocks(engine: Any, block_pool: Any, copies: DeviceCopies) -> AdapterBlocks:
    kv_caches = kv_caches_of(engine)
    if not own_memory(kv_caches):
        log.info(
            "adapters are not kept in free KV blocks: layers of this model share the memory of their KV, or have it in a form of its own"
        )
        return NoBlocks()
    return AdapterBlocks(
        block_pool,
        kv_caches,
        copies.lost,
        copies.may_displace,
        copies.less_valuable_than_blocks,
        copies.first_to_go,
    )


def _make_core(
    config: EngineConfig, parts: AdapterParts, host_bytes: int, profile: MachineProfile | None
) -> AdapterPlaces:
    rules = Rules(
        host_bytes=host_bytes,
        num_slots=len(parts.table.lora_index_to_id),
        step_room=parts.step_room,
        cpu_assist=parts.may_assist,
        fills_from_copies=parts.device.type != "cpu",
    )
    prefetch = HistoryPrefetch() if config.adapter_prefetch else NoPrefetch()
    speeds = profile.adapter_speeds if profile is not None else {}
    return AdapterPlaces(rules, Worth(config.adapter_policy, **speeds), prefetch)


def _may_assist(engine: Any, config: EngineConfig) -> bool:
    """Return whether requests may start while their adapter is still being copied to the device.

    On a separate device they may only where vLLM compiles nothing: the host's part is a call behind each layer that is installed once the engine is
    built, and compiled code and captured graphs lack it. Those rows would be computed as the base model's. On a CPU nothing is compiled with LoRA.
    """
    if not config.cpu_assist or config.device == "cpu" or engine.vllm_config.model_config.enforce_eager:
        return config.cpu_assist
    log.info(
        "requests wait until their adapter is on the device: the host can compute for it only with --enforce-eager"
    )
    return False


def _has_rows_of_several_kinds(manager: Any, slots: Slots) -> bool:
    """Return whether steps with pictures have rows of several kinds, as adapters change how pictures are read, too.

    The host path knows the rows of one mapping of a step, and those of tokens would be lost. On a CPU no rows are its.
    """
    if not slots.fills_beside_steps or not getattr(manager, "supports_tower_connector_lora", False):
        return False
    log.info(
        "requests wait until their adapter is on the device: the host does not compute for adapters that read pictures"
    )
    return True


def _make_workers(config: EngineConfig, manager: Any, host_bytes: int) -> AssistWorkers:
    if not config.cpu_assist_workers:
        return AssistWorkers()
    workers = HostWorkers(
        config.cpu_assist_workers, slot_kinds.plain_layers(manager), host_bytes, config.cpu_threads
    )
    workers.calibrate()
    return workers


def _make_host_path(manager: Any, slots: Slots) -> HostPath | NoHostPath:
    if not slots.fills_beside_steps:
        return NoHostPath()
    host_path = HostPath(slot_kinds.plain_layers(manager))
    host_path.install()
    manager.host_path = host_path
    return host_path
