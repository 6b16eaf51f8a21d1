"""The server as `overture serve` starts it, whose engine can be broken from outside. For the soak bench only.

    python -m bench.live.soak.breakable FLAGS OF `overture serve`

SIGUSR1: the forward pass of the engine's next step raises, as a kernel that fails would. SIGUSR2: what holds memory is written to the file
that the environment variable SOAK_MEMORY_FILE names. Nothing of this is reachable in the server itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from engine_bridge.driver.engine import VllmDriver
from gateway.cli import cli

MIB = 1 << 20


class Fault:
    """Breaks the next step of whatever engine there is, once for each signal."""

    def __init__(self) -> None:
        self._is_due = False
        self._step = VllmDriver.step

    def install(self) -> None:
        fault = self

        def step(driver: VllmDriver) -> list[Any]:
            if fault._is_due:
                fault._is_due = False
                driver.engine.engine_core.engine_core.model_executor.execute_model = raises
            return fault._step(driver)

        VllmDriver.step = step  # type: ignore[method-assign, assignment]
        signal.signal(signal.SIGUSR1, self._note)

    def _note(self, *_: object) -> None:
        self._is_due = True


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("injected fault")


def write_memory(*_: object) -> None:
    """Resident memory as it is, after a collection, and after free memory went back to the system; and the commonest types of
    objects and of threads."""
    process = psutil.Process()
    sizes = {"rss_mib": process.memory_info().rss / MIB}
    gc.unfreeze()  # vLLM hides from the collector all that an engine has when it is built
    gc.collect()
    sizes["after_gc_mib"] = process.memory_info().rss / MIB
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    sizes["after_trim_mib"] = process.memory_info().rss / MIB
    objects = Counter(type(each).__qualname__ for each in gc.get_objects())
    gc.freeze()
    threads = Counter(f"thread {re.sub('[0-9]+', '#', thread.name)}" for thread in threading.enumerate())
    report = sizes | {"num_objects": sum(objects.values()), "types": dict(objects.most_common(400)) | threads}
    file = Path(os.environ["SOAK_MEMORY_FILE"])
    file.with_suffix(".new").write_text(json.dumps(report))
    file.with_suffix(".new").replace(file)


def main() -> None:
    Fault().install()
    if "SOAK_MEMORY_FILE" in os.environ:
        signal.signal(signal.SIGUSR2, write_memory)
    cli(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
