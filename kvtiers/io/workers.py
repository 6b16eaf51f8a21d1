"""Threads for work on files, and how to wait for them: memory that a thread writes into is not given up before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")


class FileWorkers:
    def __init__(self, num_threads: int) -> None:
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-disk")

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run it in the pool. A cancelled caller still waits for the thread: it may be writing into memory that the caller owns."""
        job = self.pool.submit(function, *args)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if not job.cancel():
                await outlast(asyncio.wrap_future(job))
            raise


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`; if we are cancelled, finish it first and then be cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await outlast(task)
        raise


async def outlast(future: Awaitable[Any]) -> None:
    """Wait until it is done, whatever comes of it and however often we are cancelled."""
    waiting = asyncio.ensure_future(future)
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            pass
    if not waiting.cancelled():
        waiting.exception()  # Looked at, so that asyncio does not complain that nobody did.
