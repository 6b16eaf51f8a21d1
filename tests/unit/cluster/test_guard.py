import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engine_bridge.cluster import guard
from tests.conftest import ROOT
from tests.unit.cluster.catalog_node import PATIENCE_S


class Watched:
    """A process that is looked at from outside; it has ended when the system says so, whoever takes note of that and when."""

    def __init__(self, pid: int) -> None:
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def has_ended(self, within_s: float = PATIENCE_S) -> bool:
        return bool(select.select([self._fd], [], [], within_s)[0])


# Starts one that lost its parent and has a session of its own, tells its number, and waits for the end of its own input.
STRAYS = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
    time.sleep(60)
sys.stdin.read()
"""


def command_of(guarding: subprocess.Popen[bytes]) -> int:
    """The number of the process that the guard started itself; strays are its children, too, and may have lower numbers."""
    children = [child.pid for child in psutil.Process(guarding.pid).children()]
    [command] = [pid for pid in children if os.getsid(pid) == os.getsid(guarding.pid)]
    return command


@contextmanager
def guarded(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Watched, int]]:
    """A guard, the stray under it, and the pipe whose end is the gateway's."""
    life, held = os.pipe()
    guarding = (sys.executable, "-m", "engine_bridge.cluster.guard", str(life), str(folder))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": (life,)}
    with subprocess.Popen([*guarding, sys.executable, "-c", STRAYS], **pipes, cwd=ROOT) as process:
        os.close(life)
        stray = Watched(int(process.stdout.readline()))
        try:
            yield process, stray, held
        finally:
            os.close(held)
            process.stdin.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ray"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("has_lost_gateway", [False, True])
def test_strays_end_when_the_command_has_ended(folder: Path, has_lost_gateway: bool) -> None:
    """It outlives the gateway only to put its things in order."""
    with guarded(folder) as (process, stray, held):
        if has_lost_gateway:
            os.dup2(os.open(os.devnull, os.O_RDONLY), held)  # the gateway's end of the pipe has gone
            assert process.poll() is None and not stray.has_ended(within_s=0)
        process.stdin.close()  # the command has noticed for itself
        assert process.wait(PATIENCE_S) == 0
        assert stray.has_ended()
    assert not folder.exists()


def test_signals_of_a_terminal_do_not_end_a_guard_but_one_byte_ends_all_of_it(tmp_path: Path) -> None:
    """It and what runs under it have a group of their own, in the session of their starter."""
    with guarded(tmp_path) as (process, stray, held):
        command = command_of(process)
        assert os.getpgid(process.pid) == os.getpgid(command) == process.pid != os.getpgrp()
        assert os.getsid(process.pid) == os.getsid(command) == os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        os.write(held, b"k")
        assert process.wait(PATIENCE_S) == 0, "it ended for the byte"
        assert stray.has_ended()


def test_what_a_dead_guard_left_can_be_cleared(folder: Path) -> None:
    with guarded(folder) as (process, stray, _):
        command = Watched(command_of(process))
        process.kill()
        process.wait(PATIENCE_S)
        guard.clear(str(folder))
        assert command.has_ended() and stray.has_ended()
    assert not folder.exists()
