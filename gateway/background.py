"""What a server does beside requests, as long as it runs: endless tasks, each begun again when it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from gateway.doors.chat import socket
from gateway.doors.http.certificate import CERTIFICATE, follow_certificate
from gateway.doors.http.connections import CONNECTIONS
from gateway.doors.http.key_changes import follow_key_file, follow_sign_ins
from gateway.doors.rest.shelf import SHELF
from gateway.errors import GatewayError
from gateway.services import SERVICES, Services
from gateway.shelf.store import Shelf

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
        "purge": lambda: _purge_now_and_then(services, app[SHELF]),
        "sign-ins": lambda: follow_sign_ins(services),
        "session database": services.store.watch,
        "learned agents": services.learned.keep_saving,
        "usage": services.usage.keep_saving,
        "audit log": services.audit.keep_writing,
    }
    if services.config.api_key_file is not None:
        watches["key file"] = lambda: follow_key_file(services)
    if (certificate := app.get(CERTIFICATE)) is not None:
        watches["certificate"] = lambda: follow_certificate(certificate)
    tasks = [asyncio.create_task(_kept_up(name, watch), name=name) for name, watch in watches.items()]
    for model in services.models_beside:
        tasks.append(asyncio.create_task(model.start_behind(services.node), name=model.name))
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


async def _purge_now_and_then(services: Services, shelf: Shelf) -> None:
    while True:
        await asyncio.sleep(PURGE_EVERY_S)
        await purge(services, shelf, time.time())


async def purge(services: Services, shelf: Shelf, now: float) -> None:
    """Remove once, for ever, what nobody can have any more. What cannot be removed is logged, and hinders nothing else.

    Args:
        services: have the conversations and the sign-ins.
        shelf: has the links.
        now: seconds since the epoch.
    """
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "deleted sessions": lambda: services.store.purge(now),
        "links to deleted conversations": lambda: _end_dead_links(services, shelf),
        "sign-ins whose time is over": services.sign_ins.purge,
    }
    for what, step in steps.items():
        try:
            await step()
        except GatewayError as error:
            log.warning("%s could not be purged: %s", what, error.message)
        except Exception:
            # An OSError of a file that was moved, say. The next round may go well.
            log.exception("%s could not be purged", what)


async def _end_dead_links(services: Services, shelf: Shelf) -> None:
    """End links whose conversations are gone. Deleting one ends its link, but earlier versions left links behind."""
    linked = await asyncio.to_thread(shelf.links)
    for owner, session_id in await services.store.rows.missing(linked) if linked else ():
        await asyncio.to_thread(shelf.withdraw, owner, session_id)
