"""The server as `overture serve` starts it, whose engine can be broken from outside. For the soak bench only.

    python -m bench.live.soak.breakable FLAGS OF `overture serve`

SIGUSR1: the forward pass of the engine's next step raises, as a kernel that fails would. Nothing of this is reachable in the server itself.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from engine_bridge.driver.engine.engine import VllmDriver
from gateway.cli import cli


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


def main() -> None:
    Fault().install()
    cli(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
