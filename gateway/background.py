"""What a server does beside requests, as long as it runs: endless tasks, each begun again when it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from gateway.doors.chat import socket
from gateway.doors.http.connections import CONNECTIONS
from gateway.doors.http.key_changes import follow_key_file, follow_sign_ins
from gateway.errors import GatewayError
from gateway.services import SERVICES, Services

log = logging.getLogger(__name__)

PURGE_EVERY_S = 60.0
# Before a watch that failed begins again. Chosen.
AGAIN_S = 1.0


async def work_beside(app: web.Application) -> AsyncIterator[None]:
    """Run the endless tasks of an application as long as it serves."""
    services = app[SERVICES]
    watches: dict[str, Callable[[], Awaitable[object]]] = {
        "slow readers": lambda: socket.sweep_slow_readers(services),
        "connections": app[CONNECTIONS].watch,
        "open files": app[CONNECTIONS].watch_files,
        "loop stall": services.metrics.watch_loop,
        "purge": lambda: _purge(services),
        "sign-ins": lambda: follow_sign_ins(services),
        "session database": services.store.watch,
        "learned agents": services.learned.keep_saving,
        "usage": services.usage.keep_saving,
        "audit log": services.audit.keep_writing,
    }
    if services.config.api_key_file is not None:
        watches["key file"] = lambda: follow_key_file(services)
    tasks = [asyncio.create_task(_kept_up(name, watch), name=name) for name, watch in watches.items()]
    if services.embeddings is not None:
        tasks.append(asyncio.create_task(services.embeddings.start_behind(services.node), name="embeddings"))
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _kept_up(what: str, watch: Callable[[], Awaitable[object]]) -> None:
    """Run an endless task, and start it again when it fails, because otherwise its end would not be noticed."""
    while True:
        try:
            await watch()
        except Exception:
            log.exception("%s: failed, and begins again", what)
        await asyncio.sleep(AGAIN_S)


async def _purge(services: Services) -> None:
    while True:
        await asyncio.sleep(PURGE_EVERY_S)
        try:
            await services.store.purge(time.time())
        except GatewayError as error:
            log.warning("deleted sessions could not be purged: %s", error.message)
        except Exception:
            # An OSError of a file that was moved, say. The next round may go well.
            log.exception("deleted sessions could not be purged")
