"""What the soak bench breaks: the server's engine and process, its disk, and an adapter in its folder."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.live.robustness import server
from bench.live.robustness.soak.ledger import Ledger, Reading
from bench.live.shared.serving import samples
from gateway.settings.config import DEMO_ADAPTERS_DIR
from gateway.turns.turns import STORE_AGAIN_S

QUIET_TIMEOUT_S = 90.0
REBUILDS, HELD_BY_CLIENTS = "overture_engine_rebuilds", ("overture_sockets", "overture_turns_running")
DISK_MIB = 128
CHANGING = "changing"
"""The adapter that is replaced in its folder, by turns with what these hold."""
CHANGES = ("pirate", "robot")
# Small, so that all memory that is ever used has been touched when the warm-up is over: some 16,000 tokens each.
SIZES = "--kv-cache-gib 0.0625 --kv-host-gib 0.0625 --kv-disk-gib 0.03 --max-num-seqs 16".split()


class Disk:
    """The data folder, on a small tmpfs if this user may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
        self.can_be_filled = (
            shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
        )

    def fill(self) -> None:
        """Leave no free byte on the disk."""
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            for size in (server.MIB, 4096, 1):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue

    def empty(self) -> None:
        """Remove what `fill` has written."""
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount the disk, if one was mounted."""
        if self.can_be_filled:
            subprocess.run(["umount", str(self.folder)], capture_output=True)


class Server(server.Server):
    """The server of the soak bench.

    Args:
        keys: that it takes; the first is an operator's, which reads /metrics.
        ledger: is told of each break.

    Attributes:
        num_kills: engines broken on purpose in this life.
    """

    def __init__(self, folder: Path, disk: Disk, keys: tuple[str, ...], ledger: Ledger) -> None:
        self._folder, self._adapters = folder, folder / "adapters"
        self.disk, self.ledger, self.num_kills = disk, ledger, 0
        self._operator_key = keys[0]
        shutil.copytree(DEMO_ADAPTERS_DIR, self._adapters)
        shutil.copytree(self._adapters / CHANGES[0], self._adapters / CHANGING)
        flags = [f"--data-dir={disk.folder}", f"--adapters-dir={self._adapters}", *SIZES]
        flags += [f"--operator-key={keys[0]}", *(f"--api-key={key}" for key in keys[1:])]
        super().__init__(folder, *flags)

    def replace_adapter(self, number: int) -> None:
        """Put another version of CHANGING where the old one was."""
        new, old = self._folder / f"new-{number}", self._folder / f"old-{number}"
        shutil.copytree(self._adapters / CHANGES[number % len(CHANGES)], new)
        (self._adapters / CHANGING).rename(old)
        new.rename(self._adapters / CHANGING)
        shutil.rmtree(old)

    def figure(self, name: str) -> float:
        """Return a value of `/metrics`."""
        return sum(each.value for each in samples(self.url, name, self._operator_key))

    async def break_engine(self) -> None:
        """Have a step fail; return when another engine was built in place of the dead one. Raises ServerFailed."""
        before = await asyncio.to_thread(self.figure, REBUILDS)
        self.ledger.disturb("engine")
        self.break_step()
        is_rebuilt: Callable[[], bool] = lambda: self.figure(REBUILDS) > before  # noqa: E731
        await asyncio.to_thread(self.running.wait, is_rebuilt, server.START_TIMEOUT_S)
        await self.until_ready()
        self.ledger.mend("engine", time.monotonic())
        self.num_kills += 1

    async def kill_and_restart(self) -> None:
        """End the server by SIGKILL and start it again on the same data. Raises ServerFailed."""
        self.ledger.disturb("server")
        await self.kill()
        await self.start()
        self.num_kills = 0
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

    async def at_rest(self) -> Reading:
        """Return what the process holds once the last client has left and the last answer has ended. Raises ServerFailed."""
        is_quiet: Callable[[], bool] = lambda: not any(map(self.figure, HELD_BY_CLIENTS))  # noqa: E731
        await asyncio.to_thread(self.running.wait, is_quiet, QUIET_TIMEOUT_S)
        await asyncio.sleep(1.0)  # transports are closed one loop cycle after their sockets
        return Reading(*await self.held(), self.num_kills)
