"""How the processes of ranks are started: they log errors alone, no signal meant for the engine's process ends them, and why one ends is told."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Any

from engine_bridge.driver.ranks.failing import TELL, Notes
from engine_bridge.driver.vllm_api.start import importing_vllm

# The environment of a rank: it would warn a dozen times at a healthy start, as our own log settings do not reach it.
QUIET = {
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "PYTHONWARNINGS": "ignore",
}


class RankKilled(RuntimeError):
    """A rank was killed while its engine was built, which says nothing of the model."""


@contextmanager
def ranks_starting(*, is_quiet: bool) -> Iterator[None]:
    """Have ranks that are started in the block hear no SIGINT until they ignore it themselves (`end_with_parent`).

    Args:
        is_quiet: whether these ranks log errors alone. The environment of this process stays as it is.

    Raises:
        RankKilled: the block failed, and a rank was killed, and not by vLLM.
        RankFailed: it failed, and a rank has told why.
    """
    from engine_bridge.driver.vllm_api import WorkerProc

    stock = WorkerProc.make_worker_process
    was = {name: vars(WorkerProc)[name] for name in ("make_worker_process", "worker_main")}  # static methods
    started: list[Any] = []
    killed_by_vllm: list[int] = []
    kills: list[Callable[[], None]] = []
    notes = Notes()
    variables = {TELL: notes.path} | (QUIET if is_quiet else {})
    with _environment(variables):
        # It would warn at this process's end of the queues' memory that killed ranks have left, and that it gives back.
        resource_tracker.ensure_running()

    def make_worker_process(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Start a rank."""
        with _environment(variables), _log_level(vllm_config, is_quiet=is_quiet), _held_back(signal.SIGINT):
            handle = stock(vllm_config, *args, **kwargs)
        started.append(handle.proc)
        kills.append(handle.proc.kill)
        _note_kills(handle.proc, killed_by_vllm)
        return handle

    def end() -> None:
        """Kill the ranks: at its end Python asks them by SIGTERM, which they ignore, and waits for them."""
        for kill in kills:
            kill()

    WorkerProc.make_worker_process = staticmethod(make_worker_process)
    WorkerProc.worker_main = _WorkerMain()
    atexit.register(end)  # called before what multiprocessing has registered
    try:
        yield
    except Exception as error:
        if (killed := _killed(started, killed_by_vllm)) is not None:
            raise killed from error
        if (failed := notes.first()) is not None:
            raise failed from None
        raise
    finally:
        atexit.unregister(end)
        for name, found in was.items():
            setattr(WorkerProc, name, found)
        notes.close()


class _WorkerMain:
    """Stands for vLLM's main function of a rank. The new process reads this first, and imports vLLM with it as the engine's process does.

    It would do so for the arguments otherwise, in 2.2 s more (measured).
    """

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _load_worker_main, ()


def _load_worker_main() -> Any:
    """Return vLLM's main function of a rank, in the process of one."""
    with importing_vllm():
        from engine_bridge.driver.vllm_api import WorkerProc

    return WorkerProc.worker_main


def _killed(started: Sequence[Any], killed_by_vllm: Sequence[int]) -> RankKilled | None:
    """Return an error that names the first of these processes that was killed, and not by vLLM; None where none was."""
    for rank, process in enumerate(started):
        if process.exitcode == -signal.SIGKILL and process.pid not in killed_by_vllm:
            return RankKilled(
                f"rank {rank} of the model was killed while the engine started, as the kernel does where memory runs out"
            )
    return None


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Block a signal on this thread. Processes that are started in the block begin with it blocked.

    The resource tracker must run: multiprocessing starts it before the first process, and that would unblock the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for processes that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _log_level(vllm_config: Any, *, is_quiet: bool) -> Iterator[None]:
    """Have processes that get this configuration in the block log errors alone, where that is wished."""
    if not is_quiet:
        yield
        return
    logging_config = vllm_config.logging_config
    vllm_config.logging_config = replace(logging_config, log_level="ERROR", configure_logging=True)
    try:
        yield
    finally:
        vllm_config.logging_config = logging_config


def _note_kills(process: Any, killed: list[int]) -> None:
    """Note a process's id once this process kills it: vLLM does so with ranks that do not end in time behind one that failed."""
    stock = process.kill

    def kill() -> None:
        """Kill the process."""
        killed.append(process.pid)
        stock()

    process.kill = kill
