"""The bench's side of a worker: start it, send one command at a time, read one reply.

A command is a JSON line `{"do": name, ...arguments}`, a reply `{"ok": result}` or `{"error": text}`. All workers stay alive so that runs
can be interleaved; only the one that works on a command is active.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from bench.live.peers.engine import Settings
from bench.live.peers.play import Answer, Ask
from bench.live.shared.models import ModelShape
from bench.live.shared.report import ROOT

START_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 600.0
# Between commands OpenMP's threads must sleep, not spin: the next worker needs the cores.
QUIET_OPENMP = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


class WorkerFailed(RuntimeError):
    """A worker did not start, died, or answered with an error."""


class Worker:
    """One engine in a process, until the block ends.

    Args:
        name: of the engine, and of the file that gets what it prints.
        kind: which engine, a key of `bench.live.peers.worker.KINDS`.
        settings: the engine's.
        folder: for that file.
    """

    def __init__(self, name: str, kind: str, settings: Settings, folder: Path) -> None:
        self.name = name
        self._log_file = folder / f"{name}.log"
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.live.peers.worker", kind, json.dumps(asdict(settings))],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | QUIET_OPENMP | {"PYTHONPATH": str(ROOT)},
                process_group=0,  # Ctrl-C is the bench's to handle: it closes the workers in order
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the worker: by closing its stdin, then by force."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._kill()
        self._process.wait()

    def wait_ready(self) -> dict[str, Any]:
        """Return the engine's description once it is up. Raises WorkerFailed."""
        return self._read("start", START_TIMEOUT_S)

    def call(self, do: str, **arguments: Any) -> Any:
        """Have one command done. Raises WorkerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(f"{self.name}: gone before {do!r}\n{self._log_tail()}") from None
        return self._read(do, COMMAND_TIMEOUT_S)

    def play(self, asks: Sequence[Ask], *, one_by_one: bool = False) -> list[Answer]:
        """Have requests answered at their times, or each when the one before it is done. Raises WorkerFailed."""
        answers = self.call("play", requests=[asdict(ask) for ask in asks], one_by_one=one_by_one)
        return [Answer(**answer) for answer in answers]

    def _kill(self) -> None:
        """Kill the worker and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, do: str, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        # A worker that hangs must not hang the bench.
        watchdog = threading.Timer(timeout_s, self._kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise WorkerFailed(f"{self.name}: ended during {do!r}\n{self._log_tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(f"{self.name}: {do!r} failed: {reply['error']}")
        return reply["ok"]

    def _log_tail(self) -> str:
        return self._log_file.read_text(errors="replace")[-1500:]


def start_alike(
    kinds: Sequence[str], shape: ModelShape, folder: Path, stack: ExitStack, **settings: Any
) -> dict[str, Worker]:
    """Start engines of these kinds, which are alike in all else, each with a folder of its own; see `start_workers`."""
    arms = {}
    for kind in kinds:
        (folder / kind).mkdir()
        arms[kind] = kind, Settings.of(shape, folder / kind, **settings)
    return start_workers(arms, folder, stack)


def start_workers(
    arms: Mapping[str, tuple[str, Settings]], folder: Path, stack: ExitStack
) -> dict[str, Worker]:
    """Start engines side by side and return them by name once all are ready; they end with `stack`.

    Args:
        arms: the kind and the settings of each engine, by name.
        folder: for the files that get what the engines print.
        stack: ends the engines when it is closed.

    Raises:
        WorkerFailed: if an engine does not start.
    """
    workers = {
        name: stack.enter_context(Worker(name, kind, settings, folder))
        for name, (kind, settings) in arms.items()
    }
    print(f"  { {name: worker.wait_ready() for name, worker in workers.items()} }", flush=True)
    return workers
