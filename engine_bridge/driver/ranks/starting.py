"""What becomes of ranks while an engine is built: signals meant for its process do not end them, and one that others kill is said to be."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any


class RankKilled(RuntimeError):
    """A rank was killed while its engine was built, which says nothing of the model."""


@contextmanager
def ranks_starting() -> Iterator[None]:
    """Have ranks that are started in the block hear no SIGINT until they ignore it themselves (`end_with_parent`).

    Raises:
        RankKilled: the block failed, and a rank was killed, and not by vLLM.
    """
    from engine_bridge.driver.vllm_api import WorkerProc

    stock = WorkerProc.make_worker_process
    was = vars(WorkerProc)["make_worker_process"]  # as the class has it: a static method
    started: list[Any] = []
    ended: list[int] = []

    def make_worker_process(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Start a rank."""
        resource_tracker.ensure_running()  # its start would let the signals through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the rank has the mask from here
        try:
            handle = stock(vllm_config, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        started.append(handle.proc)
        _note_kills(handle.proc, ended)
        return handle

    def end() -> None:
        """Kill the ranks: at its end Python asks them by SIGTERM, which they ignore, and waits for them."""
        for process in started:
            process.kill()

    WorkerProc.make_worker_process = staticmethod(make_worker_process)
    atexit.register(end)  # called before what multiprocessing has registered
    try:
        yield
    except Exception as error:
        for rank, process in enumerate(started):
            if process.exitcode == -signal.SIGKILL and process.pid not in ended:
                said = f"rank {rank} of the model was killed while the engine started, as the kernel does where memory runs out"
                raise RankKilled(said) from error
        raise
    finally:
        atexit.unregister(end)
        WorkerProc.make_worker_process = was


def _note_kills(process: Any, ended: list[int]) -> None:
    """Note a process's id once this process kills it: vLLM does so with ranks that do not end in time behind one that failed."""
    stock = process.kill

    def kill() -> None:
        """Kill the process."""
        ended.append(process.pid)
        stock()

    process.kill = kill
