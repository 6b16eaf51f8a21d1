"""A server that benches attack and break, seen from outside: its lives, its log, the stalls of its event loop and what it holds."""

from __future__ import annotations

import asyncio
import signal
import statistics
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.live.robustness.served import STALLS_FILE
from bench.live.shared.serving import HOST, OvertureServer, ServerFailed, free_port

START_TIMEOUT_S = 180.0
SERVED = "bench.live.robustness.served"
MIB = 1 << 20


class Held(NamedTuple):
    """Resources of the server's process."""

    rss_mib: float
    num_fds: int
    num_threads: int


class Server:
    """`bench.live.robustness.served` on one port, in one life after the other."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.num_lives = 0
        self._life: OvertureServer | None = None
        self._flags = flags
        self._log, self._stalls = folder / "server.log", folder / "stalls"
        self._read: dict[Path, int] = {}

    @property
    def running(self) -> OvertureServer:
        """The server's present life, which `start` begins."""
        assert self._life is not None
        return self._life

    async def start(self) -> None:
        """Begin another life; return when the server is ready. Raises ServerFailed."""
        self.num_lives += 1
        self._life = await asyncio.to_thread(
            lambda: OvertureServer(
                self._log,
                *self._flags,
                command=(SERVED,),
                port=self.port,
                **{STALLS_FILE: str(self._stalls)},
            )
        )
        await self.until_ready()

    async def until_ready(self) -> None:
        """Return once the server accepts requests. Raises ServerFailed."""
        await asyncio.to_thread(self.running.wait, self.running.is_ready, START_TIMEOUT_S)

    async def is_alive(self, within_s: float) -> bool:
        """Return whether the server answers within `within_s` seconds."""
        running = self.running
        try:
            await asyncio.to_thread(running.wait, lambda: running.status_of("/healthz") == 200, within_s)
        except ServerFailed:
            return False
        return True

    async def kill(self) -> None:
        """End the server by SIGKILL."""
        self.running.process.kill()
        await asyncio.to_thread(self.running.process.wait)

    def break_step(self) -> None:
        """Have the engine's next step fail."""
        self.running.process.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        """Stop the server, if it was started."""
        if self._life is not None:
            self._life.stop()

    # -- observations ----------------------------------------------------------------------------------------------------

    def take_log(self) -> bytes:
        """Return what the server has logged since the last call."""
        return self._take(self._log)

    def take_stalls(self) -> tuple[float, float]:
        """Return the worst delay of the event loop since the last call, and the most that its thread computed in one, in ms."""
        found = [line.split() for line in self._take(self._stalls).splitlines()]
        worst, work = (max((float(each[column]) for each in found), default=0.0) for column in (0, 1))
        return worst, work

    def _take(self, path: Path) -> bytes:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            new = file.read()
        self._read[path] = self._read.get(path, 0) + len(new)
        return new

    async def held(self) -> Held:
        """Return what the process holds: medians of five looks."""
        process = psutil.Process(self.running.process.pid)
        looks = []
        for _ in range(5):
            looks.append((process.memory_info().rss / MIB, process.num_fds(), process.num_threads()))
            await asyncio.sleep(0.1)
        rss, fds, threads = (statistics.median(column) for column in zip(*looks, strict=True))
        return Held(rss, int(fds), int(threads))
