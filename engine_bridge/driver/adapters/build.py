"""Puts the parts of one engine's residency together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine_bridge.core.adapter_worth import Worth
from engine_bridge.core.residency import AdapterPlaces, Rules
from engine_bridge.core.staging import AHEAD_SHARE, HistoryPrefetch, NoPrefetch, ReadAhead
from engine_bridge.core.step_layouts import StepFacts, StepLayouts
from engine_bridge.driver.adapters import slots as slot_kinds
from engine_bridge.driver.adapters.blocks import AdapterBlocks
from engine_bridge.driver.adapters.device_copies import DeviceCopies
from engine_bridge.driver.adapters.host_path import HostPath, NoHostPath
from engine_bridge.driver.adapters.host_workers import HostWorkers, Workers
from engine_bridge.driver.adapters.layouts import LayoutsAhead
from engine_bridge.driver.adapters.loading import LoaderThread
from engine_bridge.driver.adapters.residency import Residency, lora_ids
from engine_bridge.driver.adapters.seam import worker_manager_of
from engine_bridge.driver.adapters.slots import Slots
from engine_bridge.driver.adapters.weights import Loader, contract_of
from engine_bridge.driver.in_process import kv_caches_of
from engine_bridge.engine_config import EngineConfig
from engine_bridge.policy.adapter_cache import PrefixFacts
from engine_bridge.profile import MachineProfile

GIB = 1 << 30


def make_residency(
    engine: Any,
    config: EngineConfig,
    *,
    wake: Callable[[], None],
    fail: Callable[[list[str], Exception], None],
    prefix_facts: Callable[[int], PrefixFacts],
    step_facts: Callable[[], StepFacts],
    on_spoiled: Callable[[int], None] = lambda adapter_id: None,
    profile: MachineProfile | None = None,
) -> Residency:
    """For a newly built in-process engine; from here on its steps load nothing. profile: whose speeds to believe at first. Raises SeamMoved."""
    worker_manager = worker_manager_of(engine)
    manager = worker_manager._adapter_manager
    scheduler = engine.engine_core.engine_core.scheduler
    host_bytes = int(config.adapter_host_gib * GIB)
    contract = contract_of(manager, (config.model, config.served_model_name))
    manager.remove_all_adapters()  # those of vLLM's warm-up
    workers = _make_workers(config, manager, host_bytes)
    slots = slot_kinds.make_slots(manager)
    read_ahead = ReadAhead(AHEAD_SHARE * host_bytes)
    core = _make_core(config, manager, slots, host_bytes, profile)
    copies = DeviceCopies(core, torch.device(manager.device), prefix_facts)
    residency = Residency(
        core,
        contract=contract,
        manager=manager,
        slots=slots,
        loader=LoaderThread(
            Loader(manager, contract, worker_manager.vocab_size, host_bytes // 4),
            workers,
            read_ahead,
            LayoutsAhead(slots.max_cost, slots.prepare, slots.cost),
            wake,
        ),
        running_ids=lambda: lora_ids(scheduler.running),
        has_running=lambda: bool(scheduler.running),
        is_busy=lambda: sum(scheduler.get_request_counts()) > 0,
        on_failed=fail,
        copies=copies,
        workers=workers,
        host_path=_make_host_path(manager, slots),
        step_layouts=StepLayouts(step_facts),
        on_spoiled=on_spoiled,
    )
    if config.adapters_in_kv:
        copies.blocks = AdapterBlocks(
            scheduler.kv_cache_manager.block_pool,
            kv_caches_of(engine),
            copies.lost,
            copies.may_displace,
            copies.less_valuable_than_blocks,
            copies.first_to_go,
        )
    worker_manager.residency = residency
    scheduler.residency = residency
    return residency


def _make_core(
    config: EngineConfig, manager: Any, slots: Slots, host_bytes: int, profile: MachineProfile | None
) -> AdapterPlaces:
    rules = Rules(
        host_bytes=host_bytes,
        num_slots=len(manager.lora_index_to_id),
        step_room=config.max_loras * slots.max_cost,
        cpu_assist=config.cpu_assist,
        fills_from_copies=manager.device.type != "cpu",
    )
    prefetch = HistoryPrefetch() if config.adapter_prefetch else NoPrefetch()
    speeds = profile.adapter_speeds if profile is not None else {}
    return AdapterPlaces(rules, Worth(config.adapter_policy, **speeds), prefetch)


def _make_workers(config: EngineConfig, manager: Any, host_bytes: int) -> Workers:
    if not config.cpu_assist_workers:
        return Workers()
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
