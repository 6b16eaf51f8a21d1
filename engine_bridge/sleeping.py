"""A node's sleep: who is let finish, who is refused, and when its engine gives the device's memory up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine_bridge.protocol.errors import ASLEEP, EngineUnavailable, NotSupported
from engine_bridge.protocol.node import SleepMode
from engine_bridge.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from engine_bridge.bridge import EngineThread
    from engine_bridge.driver.engine.engine import VllmDriver
    from engine_bridge.driver.serving.streams import Streams


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
        from engine_bridge.driver.engine.sleeping import fall_asleep

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
        from engine_bridge.driver.engine.sleeping import wake_up

        if self._why_never:
            raise NotSupported(self._why_never)
        if self.is_on:
            try:
                await self._thread.go_on(wake_up)
            finally:
                self.is_on = False
