"""Engines under test in processes of their own, each of which does one command at a time: a method of its engine, by name.

All workers stay alive so that runs can be interleaved; only the one that works on a command is active.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from bench.live.peers.engine import Engine, Settings
from bench.live.peers.ours import Ours
from bench.live.peers.play import Answer, Ask
from bench.live.peers.stock import Stock
from bench.live.shared.models import ModelShape
from bench.live.shared.serving import QUIET_OPENMP

KINDS: dict[str, tuple[type[Ours | Stock], dict[str, Any]]] = {
    "ours": (Ours, {}),
    "ours_off": (Ours, {"has_tiers": False}),
    "ours_disk": (Ours, {"has_page_cache": False}),
    "stock": (Stock, {}),
    "stock_offload": (Stock, {"offload_gib": 16.0}),
}
"""Each kind's engine, and the settings in which it differs."""
START_TIMEOUT_S, COMMAND_TIMEOUT_S, END_TIMEOUT_S = 180.0, 600.0, 20.0
# A new interpreter for each: nothing of vLLM or torch is shared.
SPAWNED = multiprocessing.get_context("spawn")


class WorkerFailed(RuntimeError):
    """A worker did not start, died, took too long, or answered with an error."""


class Worker:
    """One engine in a process, until the block ends.

    Args:
        name: of the engine, and of the file with its output.
        kind: which engine, a key of `KINDS`.
    """

    def __init__(self, name: str, kind: str, settings: Settings, folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        os.environ.update(QUIET_OPENMP)
        self._pipe, theirs = SPAWNED.Pipe()
        self._process = SPAWNED.Process(target=_serve, args=(kind, settings, theirs, self._log))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the worker: by closing its pipe, then by force."""
        self._pipe.close()
        self._process.join(END_TIMEOUT_S)
        self._kill()
        self._process.join()

    def wait_ready(self) -> dict[str, Any]:
        """Return the engine's description once it is up. Raises WorkerFailed."""
        found: dict[str, Any] = self._answer("start", START_TIMEOUT_S)
        return found

    def call(self, do: str, **arguments: Any) -> Any:
        """Have one command done. Raises WorkerFailed."""
        with suppress(BrokenPipeError):  # a worker that has ended does not answer either
            self._pipe.send((do, arguments))
        return self._answer(do, COMMAND_TIMEOUT_S)

    def play(self, asks: Sequence[Ask], *, one_by_one: bool = False) -> list[Answer]:
        """Have requests answered at their times, or each when the one before it is done. Raises WorkerFailed."""
        answers: list[Answer] = self.call("play", asks=asks, one_by_one=one_by_one)
        return answers

    def _kill(self) -> None:
        with suppress(ProcessLookupError, TypeError):
            os.killpg(self._process.pid, signal.SIGKILL)  # type: ignore[arg-type]

    def _answer(self, do: str, timeout_s: float) -> Any:
        is_late = False
        try:
            is_late = not self._pipe.poll(timeout_s)
            if is_late:  # a worker that hangs must not hang the bench
                self._kill()
            found, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            said = self._log.read_text(errors="replace")[-1500:]
            why = f"no answer within {timeout_s:.0f} s" if is_late else "ended"
            raise WorkerFailed(f"{self.name}: {do!r}: {why}\n{said}") from None
        if error:
            raise WorkerFailed(f"{self.name}: {do!r} failed: {error}")
        return found


def _serve(kind: str, settings: Settings, pipe: Connection, log_file: Path) -> None:
    """Do the commands that come through the pipe until its other end is closed. Runs in the worker's process."""
    os.setpgid(0, 0)  # Ctrl-C is the bench's to handle: it closes the workers in order
    with log_file.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    make, changes = KINDS[kind]
    engine: Engine = make(replace(settings, **changes))
    try:
        pipe.send((engine.describe(), ""))
        with suppress(EOFError):
            while True:
                do, arguments = pipe.recv()
                try:
                    pipe.send((getattr(engine, do)(**arguments), ""))
                except Exception as error:
                    traceback.print_exc()
                    pipe.send((None, f"{type(error).__name__}: {error}"))
    finally:
        engine.close()


@contextmanager
def alike(kinds: Sequence[str], shape: ModelShape, **settings: Any) -> Iterator[dict[str, Worker]]:
    """Yield engines of these kinds, which are alike in all else, by kind until the block ends, each with a separate folder; see `start_workers`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overture-bench-")))
        arms = {}
        for kind in kinds:
            (folder / kind).mkdir()
            arms[kind] = kind, Settings.of(shape, folder / kind, **settings)
        yield start_workers(arms, folder, stack)


def start_workers(
    arms: Mapping[str, tuple[str, Settings]], folder: Path, stack: ExitStack
) -> dict[str, Worker]:
    """Start engines side by side and return them by name once all are ready; they end with `stack`. Raises WorkerFailed if one does not start.

    arms: the kind and the settings of each engine, by name. folder: for the files that get what the engines print.
    """
    workers = {
        name: stack.enter_context(Worker(name, kind, settings, folder))
        for name, (kind, settings) in arms.items()
    }
    print(f"  { {name: worker.wait_ready() for name, worker in workers.items()} }", flush=True)
    return workers
