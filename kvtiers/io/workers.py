"""Threads for work on files. Memory that a thread writes into is not given up before the thread is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")


class FileWorkers:
    """A pool of threads for file work."""

    def __init__(self, num_threads: int) -> None:
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-disk")

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a function in the pool. A cancelled caller still waits for the thread, which may be writing into the caller's memory."""
        job = self.pool.submit(function, *args)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if not job.cancel():
                await outlast(asyncio.wrap_future(job))
            raise


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`; a cancelled caller finishes it first."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await outlast(task)
        raise


async def outlast(future: Awaitable[Any]) -> None:
    """Wait until a future is done, whatever its outcome and however often the caller is cancelled."""
    waiting = asyncio.ensure_future(future)
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            pass
    if not waiting.cancelled():
        waiting.exception()  # Retrieved, so that asyncio does not warn of an exception that was never retrieved.
