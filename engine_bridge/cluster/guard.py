"""Outlives whoever started it for as long as it takes to end all that ran under it: `python -m engine_bridge.cluster.guard FD FOLDER COMMAND…`.

Ray's processes outlive the one that started them by tens of seconds, some are nobody's children, and a gateway that is killed can end nothing. So a
process stands between: it adopts whatever loses its parent below it, and when the command or the gateway has gone it leaves nobody behind.
FD is the read end of a pipe that only the gateway holds open. Its end is the gateway's: the command, which notices for itself, is given PATIENCE_MS
to put its things in order. A byte in it asks for the end at once. FOLDER is removed in the end, if it is not empty.
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

# In the environment of all that runs under a guard: its folder.
MARK = "OVERTURE_GUARDED_BY"
# Linux's prctl(2).
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# For KV that is on its way to the disk. Chosen: as `child.CLOSE_S`, and a little for who waits for that.
PATIENCE_MS = 25_000
# How long killed processes may hang in the kernel. Chosen.
REAP_S = 10.0
POLL_S = 0.02
REAP_EVERY_MS = 60_000


def die_with_parent() -> None:
    """This process is killed when its parent ends, however that ends."""
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def own_group() -> None:
    """Ctrl-C in the terminal is not for this process from now on.

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
    """Until the command has ended, or is to end. Nothing that it started is left then."""
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
    """Kill all descendants, and theirs who were born meanwhile, until there is none."""
    deadline_s = time.monotonic() + REAP_S
    while time.monotonic() < deadline_s:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not _reap():
            return
        time.sleep(POLL_S)


def _reap() -> bool:
    """Take note of children that have ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def clear(folder: str) -> None:
    """For who started a guard with this folder, and sees it gone before its time: end what it would have ended."""
    mark = f"{MARK}={folder}".encode()
    for pid, _ in _processes():
        with suppress(OSError):  # somebody else's, or it has gone meanwhile
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def descendants(root: int) -> list[int]:
    """All processes below one, as far as it goes."""
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
    """The process and its parent, of all. Source: proc_pid_stat(5); the name in brackets may hold anything."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):  # it has gone meanwhile
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(entry.name), int(fields[1])


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
