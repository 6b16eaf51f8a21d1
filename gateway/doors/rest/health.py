"""Whether the server lives, whether it is ready, and its figures for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from engine_bridge.protocol.errors import BridgeError
from gateway.doors.http.bodies import json_reply
from gateway.metrics.metrics import CONTENT_TYPE
from gateway.services import SERVICES
from gateway.turns.failures import unavailable

# Chosen: less than Prometheus waits for a whole scrape (10 s).
ENGINE_METRICS_S = 5.0


async def healthz(request: web.Request) -> web.Response:
    """Handle `GET /healthz`: the process answers. Restart it only if this fails."""
    return json_reply({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """Handle `GET /readyz`: whether requests are taken now, and how far the engine has come. Public, because it says nothing private."""
    services = request.app[SERVICES]
    progress = services.node.progress
    if services.store.has_failed:
        body = {"status": "failed", "stage": "session database", "elapsed_s": round(progress.elapsed_s, 1)}
        body["message"] = "Conversations cannot be read or stored. The server's log says why."
        return json_reply(body, status=503)
    if progress.state == "ready":
        return json_reply({"status": "ready"})
    status = "starting" if progress.state == "rebuilding" else progress.state
    body = {"status": status, "stage": progress.stage, "elapsed_s": round(progress.elapsed_s, 1)}
    if progress.state == "failed":
        body["message"] = unavailable(progress.state, progress.stage).message
    return json_reply(body, status=503)


async def metrics(request: web.Request) -> web.Response:
    """Handle `GET /metrics`: Prometheus text. It asks for an operator's key if the server asks for keys, because the figures are everybody's."""
    services = request.app[SERVICES]
    services.check_operator(services.principal(request), "/metrics is")
    figures = services.node.figures()
    services.metrics.engine_steps.set(figures.num_steps)
    services.metrics.engine_rebuilds.set(figures.num_rebuilds)
    services.node_metrics.note(services.maintenance.states())
    engine = ""
    # The gateway's own figures matter most when the engine does not answer.
    with contextlib.suppress(BridgeError, TimeoutError):
        async with asyncio.timeout(ENGINE_METRICS_S):
            engine = await services.node.engine_metrics()
    body = await services.metrics.exposition(engine)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
