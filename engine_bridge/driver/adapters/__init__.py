"""Adapters of one engine: never loaded in a step, cached in memory that KV does not need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency
    from engine_bridge.engine_config import EngineConfig
    from engine_bridge.policy.adapter_cache import PrefixFacts

GIB = 1 << 30


def make_residency(
    engine: Any,
    config: EngineConfig,
    *,
    wake: Callable[[], None],
    fail: Callable[[list[str], Exception], None],
    prefix_facts: Callable[[int], PrefixFacts],
) -> Residency:
    """For a newly built in-process engine; from here on its steps load nothing. Raises SeamMoved."""
    from engine_bridge.driver.adapters.blocks import AdapterBlocks
    from engine_bridge.driver.adapters.host_path import HostPath
    from engine_bridge.driver.adapters.host_workers import HostWorkers
    from engine_bridge.driver.adapters.residency import Residency, ResidencyConfig, lora_ids
    from engine_bridge.driver.adapters.seam import worker_manager_of
    from engine_bridge.driver.adapters.slots import PackedSlots, make_slots, plain_layers
    from engine_bridge.driver.adapters.weights import Loader, contract_of
    from engine_bridge.driver.in_process import kv_caches_of

    worker_manager = worker_manager_of(engine)
    manager = worker_manager._adapter_manager
    scheduler = engine.engine_core.engine_core.scheduler
    host_bytes = int(config.adapter_host_gib * GIB)
    contract = contract_of(manager, (config.model, config.served_model_name))
    manager.remove_all_adapters()  # those of vLLM's warm-up
    workers = None
    if config.cpu_assist_workers:
        workers = HostWorkers(
            config.cpu_assist_workers, plain_layers(manager), host_bytes, config.cpu_threads
        )
        workers.calibrate()
    slots = make_slots(manager)
    host_path = None
    if slots.fills_beside_steps:
        host_path = HostPath(plain_layers(manager))
        host_path.install()
        manager.host_path = host_path
    residency = Residency(
        ResidencyConfig(
            host_bytes=host_bytes,
            step_room=config.max_loras * (slots.max_cost if isinstance(slots, PackedSlots) else 1),
            cpu_assist=config.cpu_assist,
            policy=config.adapter_policy,
            prefetch_by_history=config.adapter_prefetch,
        ),
        contract=contract,
        manager=manager,
        slots=slots,
        loader=Loader(manager, contract, worker_manager.vocab_size, host_bytes // 4),
        running_ids=lambda: lora_ids(scheduler.running),
        is_busy=lambda: sum(scheduler.get_request_counts()) > 0,
        wake=wake,
        on_failed=fail,
        prefix_facts=prefix_facts,
        workers=workers,
        host_path=host_path,
    )
    if config.adapters_in_kv:
        residency.blocks = AdapterBlocks(
            scheduler.kv_cache_manager.block_pool,
            kv_caches_of(engine),
            residency.lost,
            residency.may_displace,
            residency.worth_less,
        )
    worker_manager.residency = residency
    scheduler.residency = residency
    return residency
