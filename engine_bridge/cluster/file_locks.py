"""Locks that a process holds by having a file open: the kernel lets go of them when it ends, however it ended. Source: flock(2)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

LOOK_EVERY_S = 0.2


@asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """Hold the lock; waits for as long as other processes hold it."""
    fd = _open(path)
    try:
        while not _is_ours(fd):  # noqa: ASYNC110 (the kernel sends no event)
            await asyncio.sleep(LOOK_EVERY_S)
        yield
    finally:
        os.close(fd)


def wait_until_free(path: Path, patience_s: float) -> bool:
    """Return whether the lock is free within `patience_s`. For worker threads. Makes the file."""
    deadline_s = time.monotonic() + patience_s
    while not _is_free(path):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _is_free(path: Path) -> bool:
    fd = _open(path)
    try:
        return _is_ours(fd)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_ours(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
