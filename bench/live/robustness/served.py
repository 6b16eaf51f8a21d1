"""The server as `overture serve` starts it, watched, with an engine that can be broken from outside. For benches that attack and break it.

    OVERTURE_BENCH_STALLS=FILE python -m bench.live.robustness.served FLAGS OF `overture serve`

FILE gets a line for each delay of the event loop of SHOWN_MS and more: how late a timer was and how long the loop's thread computed meanwhile, in ms;
the second is the part that is not a wait for a core or for Python's lock. SIGUSR1: the forward pass of the engine's next step raises, as a kernel
that fails would. Nothing of this is reachable in the server itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine_bridge.driver.engine.engine import VllmDriver
from gateway.app import Server
from gateway.cli import cli

PROBE_S, SHOWN_MS = 0.005, 5.0
STALLS_FILE = "OVERTURE_BENCH_STALLS"


async def watch_loop(file: Path) -> None:
    """Note delays of the event loop for ever."""
    loop = asyncio.get_running_loop()
    with file.open("a", buffering=1) as lines:
        while True:
            due_s, began_s = loop.time() + PROBE_S, time.thread_time()
            await asyncio.sleep(PROBE_S)
            stall_ms = (loop.time() - due_s) * 1e3
            if stall_ms >= SHOWN_MS:
                lines.write(f"{stall_ms:.1f} {(time.thread_time() - began_s) * 1e3:.1f}\n")


def raises(*_: object, **__: object) -> None:
    """Fail as a broken kernel would. Raises RuntimeError."""
    raise RuntimeError("injected fault")


def main() -> None:
    """Serve with the flags of the command line."""
    enter, step, is_fault_due = Server.__aenter__, VllmDriver.step, threading.Event()

    async def watched(server: Server) -> Server:
        """Watch the event loop from the server's start."""
        server.watching = asyncio.create_task(watch_loop(Path(os.environ[STALLS_FILE])))
        return await enter(server)

    def breakable(driver: VllmDriver) -> list[Any]:
        """Step whatever engine there is, after breaking its forward pass if a fault is due."""
        if is_fault_due.is_set():
            is_fault_due.clear()
            driver.engine.engine_core.engine_core.model_executor.execute_model = raises
        return step(driver)

    Server.__aenter__, VllmDriver.step = watched, breakable
    signal.signal(signal.SIGUSR1, lambda *_: is_fault_due.set())
    cli(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
