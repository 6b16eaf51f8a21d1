"""A web application on a loopback port, on a thread of its own: clients in event loops, in threads and in other processes can talk to it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def served(app: web.Application) -> Iterator[str]:
    """Its address, as long as the block runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def end() -> None:
        await runner.cleanup()
        late = asyncio.all_tasks() - {asyncio.current_task()}  # handlers that wait for ever
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
