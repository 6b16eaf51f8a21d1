"""The routes of `vllm serve` beside its APIs, for probes, load balancers and tools that expect them: `/health`, `/ping`, `/version`, `/load`."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import cast, get_args

from aiohttp import web

from engine_bridge.protocol.node import SleepMode
from gateway.doors.description.bodies import IsSleeping, ServerLoad, Slept, Versions, Woken
from gateway.doors.http.bodies import json_reply
from gateway.doors.rest.health import readyz
from gateway.errors import GatewayError
from gateway.packages import vllm
from gateway.services import SERVICES
from overture_client import __version__

SLEEPING = "Putting the engine to sleep is"


async def show_version(request: web.Request) -> web.Response:
    """VLLM's release under the name that its clients read, and ours beside it."""
    return json_reply(Versions(version=await asyncio.to_thread(vllm_version), overture=__version__))


@cache
def vllm_version() -> str | None:
    """The release of vLLM that is installed here; None where there is none. Reads files."""
    return found.version if (found := vllm()) is not None else None


async def load(request: web.Request) -> web.Response:
    """Answer with the number of all tenants' requests in the engine, running and waiting."""
    services = request.app[SERVICES]
    services.principal(request)
    stats = services.node.figures().scheduling_stats
    return json_reply(ServerLoad(server_load=stats.num_running + stats.num_waiting if stats else 0))


async def sleep(request: web.Request) -> web.Response:
    """Put the engine to sleep, as vLLM's route does: `mode=abort` (by itself) ends running answers, `mode=wait` lets them finish."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    services.check_operator(principal, SLEEPING)
    mode, level = request.query.get("mode", "abort"), request.query.get("level", "1")
    if level != "1":
        raise GatewayError(
            "bad_request",
            "'level' is 1 here: 0 frees nothing, and after 2 the weights would have to be loaded anew.",
            param="level",
        )
    if mode not in get_args(SleepMode):
        raise GatewayError("bad_request", "'mode' is 'abort' or 'wait'.", param="mode")
    services.note_operator(request, principal)
    await services.node.sleep(cast(SleepMode, mode), services.config.drain_timeout_s)
    return json_reply(Slept(status="sleeping", level=1))


async def wake_up(request: web.Request) -> web.Response:
    """Wake the engine up. It has all of its memory back, whatever `tags` say."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    services.check_operator(principal, SLEEPING)
    services.note_operator(request, principal)
    await services.node.wake_up()
    return json_reply(Woken(status="awake"))


async def is_sleeping(request: web.Request) -> web.Response:
    """Answer whether the engine sleeps."""
    services = request.app[SERVICES]
    services.principal(request)
    return json_reply(IsSleeping(is_sleeping=services.node.progress.state == "asleep"))


ROUTES = (
    web.get("/health", readyz),
    web.get("/ping", readyz),
    web.post("/ping", readyz),
    web.get("/version", show_version),
    web.get("/load", load),
    web.post("/sleep", sleep),
    web.post("/wake_up", wake_up),
    web.get("/is_sleeping", is_sleeping),
)
