"""Putting an engine to sleep: its device memory is given up, and what host memory and disk hold stays, conversations' KV among it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine_bridge.driver.in_process import scheduler_of
from engine_bridge.protocol.errors import EngineUnavailable, InternalFailure

if TYPE_CHECKING:
    from engine_bridge.driver.engine.engine import VllmDriver

log = logging.getLogger(__name__)

# vLLM's level 1: weights go to host memory, the KV cache's memory is given up, and both come back at the same addresses.
LEVEL = 1


def fall_asleep(driver: VllmDriver) -> None:
    """Give up the device's memory. On the engine thread, between two steps; no step may run until `wake_up`.

    The order counts. All that lies in KV blocks is forgotten while the blocks are there: promotions, adapters, prefixes. Then vLLM's worker waits for
    the device, so copies into host memory are whole, and gives the memory up. vLLM's own `sleep` would also have the connector, so our tiers, forget.

    Raises:
        EngineUnavailable: `busy` where requests are left.
        InternalFailure: blocks are in use though no request is left. The engine is awake and well, without what was forgotten.
    """
    scheduler = scheduler_of(driver.engine)
    if sum(scheduler.get_request_counts()):
        raise EngineUnavailable("requests came meanwhile, so the engine stays awake", code="busy")
    while scheduler.has_requests():  # it has yet to be told which ones have ended
        driver.step()
    driver.promoter.give_up()
    driver.adapters.put_back(driver.adapters.places(), keeps_host=True)
    if not driver.engine.reset_prefix_cache():
        raise InternalFailure("KV blocks are in use though no request is left, so the engine stays awake")
    driver.engine.reset_mm_cache()
    driver.engine.reset_encoder_cache()
    driver.engine.engine_core.engine_core.model_executor.sleep(LEVEL)
    log.info("the engine sleeps; conversations' KV is in host memory and on disk")


def wake_up(driver: VllmDriver) -> None:
    """Take the device's memory back, weights included. On the engine thread; steps may run afterwards."""
    driver.engine.engine_core.engine_core.model_executor.wake_up()
    log.info("the engine is awake")
