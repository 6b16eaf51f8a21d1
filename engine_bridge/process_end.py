"""How a process with an engine ends: quickly, once everything in it is closed.

Measured: of 5 s from SIGTERM to the end of an idle server, 4.7 s were garbage collection, by vLLM's shutdown, by ours and by the interpreter's end,
over the millions of objects of torch and vLLM; on a busy machine it took 14 to 21 s. All of that memory goes with the process anyway.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

log = logging.getLogger(__name__)

# From the end of the drain to the end of the process. Chosen: with the drain's 30 s below the 40 s after which service managers lose patience.
CLOSE_S = 9.0


def stop_collecting() -> None:
    """Collect no garbage from now on, also where a library asks for it: vLLM unfreezes and collects all objects when its engine is shut down.

    For a process that is about to end; parts that are closed after this are closed as usual.
    """
    gc.disable()
    gc.freeze()
    for name in ("collect", "unfreeze"):
        setattr(gc, name, _nothing)


def _nothing(*args: Any) -> int:
    return 0


def leave(code: int) -> NoReturn:
    """End the process, all of whose parts are closed. Does not return.

    Functions that are registered for the interpreter's end are called (libraries remove temporary files, end helpers and release semaphores there).
    The rest of the interpreter's end is left out: it waits for every thread, also for a thread that hangs, and takes all objects apart.
    """
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def leave_within(seconds: float) -> None:
    """End the process after that time, even if a disk, a device or native code hangs. Nothing happens if it has ended before."""

    def give_up() -> None:
        """End the process."""
        log.error(
            "closing takes longer than %.0f s: the process ends, and what was not closed is left", seconds
        )
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    try:
        timer.start()
    except (
        RuntimeError
    ) as error:  # the system gives this process no thread; that must not keep it from closing
        log.warning("closing may take any time: %s", error)
