"""The server process of the soak bench: started, looked at, broken and killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import aiohttp
import psutil

from bench.live.peers.client import ROOT
from bench.live.soak.ledger import Ledger, Reading
from gateway.settings.config import DEMO_ADAPTERS_DIR
from gateway.turns.turns import STORE_AGAIN_S

HOST = "127.0.0.1"
START_TIMEOUT_S, QUIET_TIMEOUT_S = 180.0, 90.0
MIB = 1 << 20
DISK_MIB = 128
CHANGING = "changing"
"""The adapter that is replaced in its folder, by turns with what these hold."""
CHANGES = ("pirate", "robot")
# Small, so that all memory that is ever used has been touched when the warm-up is over: some 16,000 tokens each.
SIZES = "--kv-cache-gib 0.0625 --kv-host-gib 0.0625 --kv-disk-gib 0.03 --max-num-seqs 16".split()


class SoakFailed(RuntimeError):
    """The server is not there when it should be, or does not come to rest."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Disk:
    """The data folder, on a small file system of its own where this user may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
        self.can_be_filled = (
            shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
        )

    def fill(self) -> None:
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            for size in (MIB, 4096, 1):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue

    def empty(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        if self.can_be_filled:
            subprocess.run(["umount", str(self.folder)], capture_output=True)


@dataclass
class Server:
    """One server on one port, in one life after the other.

    Attributes:
        num_kills: engines broken on purpose in this life.
    """

    folder: Path
    disk: Disk
    keys: tuple[str, ...]
    ledger: Ledger
    port: int
    process: subprocess.Popen[bytes] | None = None
    num_kills: int = 0
    num_lives: int = 0
    log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def adapters(self) -> Path:
        return self.folder / "adapters"

    def prepare(self) -> None:
        shutil.copytree(DEMO_ADAPTERS_DIR, self.adapters)
        shutil.copytree(self.adapters / CHANGES[0], self.adapters / CHANGING)
        self.log = (self.folder / "server.log").open("ab")

    def replace_adapter(self, number: int) -> None:
        """Put another version of CHANGING where the old one was."""
        new, old = self.folder / f"new-{number}", self.folder / f"old-{number}"
        shutil.copytree(self.adapters / CHANGES[number % len(CHANGES)], new)
        (self.adapters / CHANGING).rename(old)
        new.rename(self.adapters / CHANGING)
        shutil.rmtree(old)

    async def start(self) -> None:
        """Returns when it answers as ready. Raises SoakFailed."""
        self.num_lives += 1
        self.num_kills = 0
        self.process = await asyncio.to_thread(self._spawn)
        await self.until_ready(START_TIMEOUT_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        flags = [f"--port={self.port}", f"--data-dir={self.disk.folder}", f"--adapters-dir={self.adapters}"]
        flags.append(f"--operator-key={self.keys[0]}")  # it reads /metrics
        flags += [f"--api-key={key}" for key in self.keys[1:]]
        return subprocess.Popen(
            [sys.executable, "-m", "bench.live.soak.breakable", *flags, *SIZES],
            cwd=ROOT,
            stdout=self.log,
            stderr=self.log,
            env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
            process_group=0,  # Ctrl-C is the bench's to handle
        )

    async def until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < deadline:
                if self.process is not None and self.process.poll() is not None:
                    raise SoakFailed(f"the server ended with {self.process.returncode}:\n{self.log_tail()}")
                try:
                    async with http.get(f"{self.url}/readyz") as reply:
                        if reply.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        raise SoakFailed(f"the server was not ready within {timeout_s:.0f} s:\n{self.log_tail()}")

    async def figure(self, http: aiohttp.ClientSession, name: str) -> float:
        """A value of `/metrics`."""
        headers = {"Authorization": f"Bearer {self.keys[0]}"}
        async with http.get(f"{self.url}/metrics", headers=headers) as reply:
            for line in (await reply.text()).splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[-1])
        return 0.0

    async def break_engine(self) -> None:
        """Have a step fail; returns when another engine was built in place of the one that died."""
        assert self.process is not None
        async with aiohttp.ClientSession() as http:
            before = await self.figure(http, "overture_engine_rebuilds")
            self.ledger.disturb("engine")
            self.process.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + START_TIMEOUT_S
            while await self.figure(http, "overture_engine_rebuilds") <= before:
                if time.monotonic() > deadline:
                    raise SoakFailed(f"no engine was rebuilt:\n{self.log_tail()}")
                await asyncio.sleep(0.1)
        await self.until_ready(START_TIMEOUT_S)
        self.ledger.mend("engine", time.monotonic())
        self.num_kills += 1

    async def kill_and_restart(self) -> None:
        assert self.process is not None
        self.ledger.disturb("server")
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        await self.start()
        self.ledger.mend("server", time.monotonic())

    async def fill_disk(self, until_felt: Callable[[], Awaitable[None]]) -> None:
        """Leave no byte free while `until_felt` runs."""
        self.ledger.disturb("disk")
        try:
            await asyncio.to_thread(self.disk.fill)
            await until_felt()
        finally:
            await asyncio.to_thread(self.disk.empty)
            self.ledger.mend("disk", time.monotonic() + STORE_AGAIN_S[-1])

    async def at_rest(self, started_s: float) -> Reading:
        """What the process holds once the last client has gone and the last answer is over. Raises SoakFailed."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            while await self.figure(http, "overture_sockets") or await self.figure(
                http, "overture_turns_running"
            ):
                if time.monotonic() > deadline:
                    raise SoakFailed("sockets or turns are left although every client has gone")
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # transports are closed one loop cycle after their sockets
        assert self.process is not None
        process = psutil.Process(self.process.pid)
        samples = []
        for _ in range(5):
            samples.append((process.memory_info().rss / MIB, process.num_fds(), process.num_threads()))
            await asyncio.sleep(0.1)
        rss, fds, threads = (statistics.median(column) for column in zip(*samples, strict=True))
        return Reading(time.monotonic() - started_s, rss, int(fds), int(threads), self.num_kills)

    def log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """SIGTERM, then by force."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.log is not None:
            self.log.close()
