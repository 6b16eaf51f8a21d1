"""`/v1/engine/state`: requests that run, requests that wait, and why. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

import time

from aiohttp import web

from gateway.access.auth import tenant_of
from gateway.doors.http.bodies import json_reply
from gateway.errors import GatewayError
from gateway.services import SERVICES

# Requests of each kind that are described. Chosen: more than anybody reads, some 50 KiB.
DEFAULT_LIMIT, MAX_LIMIT = 200, 2000


async def engine_state(request: web.Request) -> web.Response:
    """Handle `GET /v1/engine/state`: figures of the whole engine, but only the caller's own requests and runs of agents.

    Raises EngineUnavailable without an engine.
    """
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    state = await services.node.engine_state(tenant_of(owner), _limit(request))
    scheduling = state.scheduling
    return json_reply(
        {
            "engine": {
                "state": state.state,
                "num_running": scheduling.num_running,
                "num_waiting": scheduling.num_waiting,
                "num_kv_blocks": scheduling.num_kv_blocks,
                "num_free_kv_blocks": scheduling.num_free_kv_blocks,
                "block_size": scheduling.block_size,
                "num_steps": state.num_steps,
                "num_rebuilds": state.num_rebuilds,
            },
            "policy": scheduling.policy,
            "lanes": scheduling.lanes,
            "num_by_reason": scheduling.num_by_reason,
            "counts": scheduling.counts,
            "seconds": scheduling.seconds,
            "length_errors": scheduling.length_errors,
            "calls_by_session": services.recognition.counts,
            "runs": services.recognition.runs.of(owner, time.monotonic()),
            "waiting": {"total": state.num_waiting, "requests": state.waiting},
            "running": {"total": state.num_running, "requests": state.running},
        }
    )


def _limit(request: web.Request) -> int:
    """Return the query's `limit`. Raises GatewayError `bad_request`."""
    given = request.query.get("limit", str(DEFAULT_LIMIT))
    if not given.isascii() or not given.isdecimal() or len(given) > 9:
        raise GatewayError("bad_request", "'limit' must be a whole number, 0 or more.", param="limit")
    return min(int(given), MAX_LIMIT)


ROUTES = (web.get("/v1/engine/state", engine_state),)
