"""A node's sleep: who is let finish, who is refused, and when its engine gives the device's memory up.

What host memory and disk hold stays, conversations' KV among it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from engine_bridge.driver.in_process import scheduler_of
from engine_bridge.protocol.errors import ASLEEP, EngineUnavailable, InternalFailure, NotSupported
from engine_bridge.protocol.node import SleepMode
from engine_bridge.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from engine_bridge.bridge import EngineThread
    from engine_bridge.driver.engine.engine import VllmDriver
    from engine_bridge.driver.serving.streams import Streams

log = logging.getLogger(__name__)

# vLLM's level 1: weights go to host memory, the KV cache's memory is given up, and both come back at the same addresses.
LEVEL = 1


def why_never(config: EngineConfig) -> str:
    """Return why an engine with these settings cannot sleep; "" if it can."""
    if not config.enable_sleep_mode:
        return "The server was started without --enable-sleep-mode."
    if config.device == "cpu":
        return "vLLM has no sleep mode on a CPU: an engine there keeps its memory."
    return ""


class Sleep:
    """The sleep of one node. On the event loop. why_never: the reason why this engine cannot sleep; "" if it can."""

    def __init__(self, why_never: str, thread: EngineThread[VllmDriver], streams: Streams) -> None:
        self._why_never, self._thread, self._streams = why_never, thread, streams
        self.is_on = False
        """Whether new requests are refused: from the moment on when the engine is told to sleep, until it is awake."""

    def check(self) -> None:
        """Raise EngineUnavailable `asleep` while the engine sleeps, or is about to."""
        if self.is_on:
            raise EngineUnavailable(ASLEEP, code="asleep")

    async def begin(self, mode: SleepMode, timeout_s: float) -> None:
        """Refuse new requests, end the running ones or let them finish, and put the engine to sleep; see `Node.sleep`."""
        if self._why_never:
            raise NotSupported(self._why_never)
        if self.is_on:
            return
        self.is_on = True
        try:
            if mode == "abort":
                self._streams.end_all("The engine was put to sleep.")
            await asyncio.wait_for(self._streams.idle.wait(), timeout_s)
            await self._thread.rest(fall_asleep)
        except BaseException as error:
            self.is_on = False
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(
                    f"answers still run after {timeout_s:g} s, so the engine stays awake", code="busy"
                ) from error
            raise

    async def end(self) -> None:
        """Wake the engine up, and take requests again; see `Node.wake_up`. An engine that cannot be woken is rebuilt, and then is awake."""
        if self._why_never:
            raise NotSupported(self._why_never)
        if self.is_on:
            try:
                await self._thread.go_on(wake_up)
            finally:
                self.is_on = False


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
