"""A thread with an event loop for the tiers' file work, so that neither the gateway's loop nor the engine's step waits for a disk."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds for cancelled tasks to end. Chosen: for a slow disk.
CLOSE_S = 10.0


class IoThread:
    """An asyncio loop on a daemon thread, from construction until `close`."""

    def __init__(self, name: str = "kv-io") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop. May be called from any other thread; the future may be waited for or cancelled there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel running tasks and end the thread. A thread that a disk holds up for longer than CLOSE_S ends with the process."""
        if not self._thread.is_alive():
            return
        try:
            self.start(self._cancel_all()).result(CLOSE_S)
        except TimeoutError:
            log.error("the thread of the KV disk does not end within %.0f s; it is left behind", CLOSE_S)
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()
