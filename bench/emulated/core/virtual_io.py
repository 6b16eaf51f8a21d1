"""An asyncio loop in virtual time, for the KV store's work on files: nothing waits, the simulator's clock says when things happen."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any

from bench.emulated.core.clock import Clock
from kvtiers.io.io_thread import IoThread, T


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop with the clock's time. It runs on the caller's thread, in `turn`, until nothing is left that could run now."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._virtual = clock

    def time(self) -> float:
        """Return the clock's time."""
        return self._virtual.now

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Call back when the clock says so."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def due(now: float) -> None:
            """Call back now, unless that was cancelled."""
            if not handle.cancelled() and not self.is_closed():
                self.call_soon(callback, *args, context=context)
                self.turn()

        self._virtual.at(max(when, self._virtual.now), due)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """Call back at this time, but after the code that runs now, which may hold a lock that the callback takes."""
        handle = self.call_soon(callback, *args, context=context)
        self._virtual.at(self._virtual.now, lambda now: None if self.is_closed() else self.turn())
        return handle

    def turn(self) -> None:
        """Run all due callbacks. A call from within a turn does nothing: the outer call runs all of it."""
        while not self.is_running() and self._ready:  # type: ignore[attr-defined]  # asyncio has no other way to ask
            self.call_soon(self.stop)
            self.run_forever()


class VirtualIo(IoThread):
    """I/O without a thread: work that is started runs at once, as far as it gets without waiting."""

    def __init__(self, clock: Clock) -> None:
        self.loop: VirtualLoop = VirtualLoop(clock)

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start work and run it as far as it gets."""
        started = super().start(work)
        self.loop.turn()
        return started

    def close(self) -> None:
        """Cancel the work that still waits."""
        self.start(self._cancel_all()).result()
        self.loop.close()
