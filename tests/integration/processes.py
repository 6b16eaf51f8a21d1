"""Servers as users run them: processes that are started, watched and told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil

from overture_client.chat import ChatClient
from overture_client.chat_frames import Delta, Done
from tests.conftest import ROOT

# Of a server that has only to close what it has. Chosen: between 0.2 and 4.7, as measured.
MOST_CPU_S = 2.0
OVERTURE = (sys.executable, "-m", "gateway.cli")
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


@contextlib.asynccontextmanager
async def serving(
    port: int, data_dir: Path, *flags: str, overture: Sequence[str | Path] = OVERTURE, folder: Path = ROOT
) -> AsyncIterator[Process]:
    """`overture serve` until the block ends, however it ends. `overture` is the command, `folder` where it is started.

    Outside of the checkout, the checkout's modules cannot be imported.
    """
    environ = os.environ | QUIET
    if folder != ROOT:
        environ.pop("PYTHONPATH", None)
    # Where the tests run under nohup, the server would inherit that it ignores hang-ups, and would rightly go on ignoring them.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = await asyncio.create_subprocess_exec(
        *(*overture, "serve", "--port", str(port), "--data-dir", str(data_dir)),
        *("--kv-host-gib", "0.25", "--kv-cache-gib", "0.25", *flags),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        env=environ,
    )
    signal.signal(signal.SIGHUP, before)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def output_until(process: Process, word: bytes) -> list[bytes]:
    """The lines of stdout up to one that holds `word`."""
    lines = []
    async with asyncio.timeout(180):
        while not (lines and word in lines[-1]):
            line = await process.stdout.readline()
            assert line, f"the server ended before it said {word!r}: {lines}"
            lines.append(line)
    return lines


async def drains(process: Process, client: ChatClient) -> None:
    """A running answer may finish after a SIGTERM, then the server ends."""
    ending = Ending(process)
    events = client.ask("Hello, how are you?", sampling={"temperature": 0})
    async for event in events:
        if isinstance(event, Delta):
            process.terminate()
            break
    rest = [event async for event in events]
    assert isinstance(rest[-1], Done), "a running answer may finish while the server drains"
    await ending.is_tidy()


class Ending:
    """A server's end: what it had while it ran is what may be left behind."""

    def __init__(self, process: Process) -> None:
        self._process, self._server = process, psutil.Process(process.pid)
        self._children = self._server.children(recursive=True)
        self._shared = _shared_memory(process.pid)

    async def is_tidy(self) -> None:
        """A server that is going down, and whose answers have ended, ends with 0. It leaves no process and no shared memory, and hardly computes.

        Closing all takes 0.2 s of processor time (measured), taking apart the objects of torch and vLLM 4.7 s.
        """
        first_s = last_s = _cpu_s(self._server)
        async with asyncio.timeout(60):
            while self._process.returncode is None:
                last_s = max(last_s, _cpu_s(self._server))
                await asyncio.sleep(0.02)
            assert await self._process.wait() == 0
            _, alive = await asyncio.to_thread(psutil.wait_procs, self._children, 30)
        assert not alive
        assert not [path for path in self._shared if path.exists()]
        assert last_s - first_s < MOST_CPU_S


def _cpu_s(process: psutil.Process) -> float:
    """0 once it has ended."""
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.Error:
        return 0.0


def _shared_memory(pid: int) -> set[Path]:
    words = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {Path(each[-1]) for each in words if each[-1].startswith("/dev/shm/")}
