"""A process that outlives its starter until all processes below it have ended: `python -m engine_bridge.cluster.guard FD FOLDER COMMAND…`.

Ray's processes outlive the process that started them by tens of seconds, some lose their parents, and a killed gateway can end nothing. So the
guard stands between: it adopts processes that lose their parent below it, and when the command or the gateway has ended it kills them all.
FD is the read end of a pipe that only the gateway holds open. When the gateway ends, the pipe does: the command, which notices for itself, is given
PATIENCE_MS to finish its work. A byte in it asks for the end at once. FOLDER is removed in the end, if it is not empty.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

# The name of the guard's folder, in the environment of all processes under it.
MARK = "OVERTURE_GUARDED_BY"
# Linux's prctl(2).
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# For KV that is on its way to the disk. Chosen: `host.CLOSE_S` and a little more.
PATIENCE_MS = 25_000
# How long killed processes may hang in the kernel. Chosen.
REAP_S = 10.0
POLL_S = 0.02
REAP_EVERY_MS = 60_000


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends in any way."""
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def own_group() -> None:
    """Keep Ctrl-C in the terminal away from this process.

    It stays in its session: Linux shares processor time among sessions before it looks at processes (sched(7), "autogroup"), and a gateway that
    is busy for a hundredth of the time would wait for up to two seconds for its turn beside engines in a session of theirs (seen).
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run(life: int, folder: str, command: Sequence[str]) -> None:
    """Run the command until it has ended, or is to end; then end all that it started."""
    own_group()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, close_fds=False, env=os.environ | {MARK: folder})
    ended = os.pidfd_open(child.pid)
    try:
        _wait(life, ended)
    finally:
        end_all()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _wait(life: int, ended: int) -> None:
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(life, select.POLLIN)
    while not (ready := {fd for fd, _ in poll.poll(REAP_EVERY_MS)}):
        _reap()
    if ended not in ready and not os.read(life, 1):
        poll.unregister(life)
        poll.poll(PATIENCE_MS)


def end_all() -> None:
    """Kill all descendants, and those started meanwhile, until there is none."""
    deadline_s = time.monotonic() + REAP_S
    while time.monotonic() < deadline_s:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not _reap():
            return
        time.sleep(POLL_S)


def _reap() -> bool:
    """Reap children that have ended; return whether others live."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def clear(folder: str) -> None:
    """Kill the processes of a guard that ended too early, and delete its folder."""
    mark = f"{MARK}={folder}".encode()
    for pid, _ in _processes():
        with suppress(OSError):  # another user's process, or it has ended meanwhile
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def descendants(root: int) -> list[int]:
    """Return all processes below `root`, at any depth."""
    children: dict[int, list[int]] = {}
    for pid, parent in _processes():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    ahead = [root]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _processes() -> Iterator[tuple[int, int]]:
    """Yield each process with its parent. Source: proc_pid_stat(5); the name in brackets may hold anything."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):  # it has ended meanwhile
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(entry.name), int(fields[1])


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
