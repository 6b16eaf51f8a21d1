"""`/v1/advisories`: word from an agent about requests that it, or the next agent, will send. Source: docs/protocol.md, "Advisories"."""

from __future__ import annotations

import time

from aiohttp import web

from gateway.advisories.advisories import AdvisoryRequest
from gateway.doors.http.bodies import as_struct, json_body, json_reply
from gateway.services import SERVICES


async def create(request: web.Request) -> web.Response:
    """Handle `POST /v1/advisories`: one advisory, or an envelope of them in the shape of vLLM's KV hints."""
    services = request.app[SERVICES]
    owner = services.principal(request).owner
    client = services.client_of(owner, request)
    body = await json_body(request)
    if isinstance(body, dict) and "actions" in body:
        records = services.advisories.hint(owner, body, client=client)
        items = [record.describe(time.monotonic()) for record in records]
        return json_reply({"message_id": body["message_id"], "advisories": items}, status=202)
    wanted = as_struct(body, AdvisoryRequest, "advisory")
    record = services.advisories.submit(owner, wanted, "rest", client=client)
    return json_reply(record.describe(time.monotonic()), status=202)


async def read(request: web.Request) -> web.Response:
    """Handle `GET /v1/advisories/{id}`."""
    services = request.app[SERVICES]
    record = services.advisories.find(services.principal(request).owner, request.match_info["id"])
    return json_reply(record.describe(time.monotonic()))


async def delete(request: web.Request) -> web.Response:
    """Handle `DELETE /v1/advisories/{id}`: cancel the advisory."""
    services = request.app[SERVICES]
    services.advisories.cancel(services.principal(request).owner, request.match_info["id"])
    return web.Response(status=204)


ROUTES = (
    web.post("/v1/advisories", create),
    web.get("/v1/advisories/{id}", read),
    web.delete("/v1/advisories/{id}", delete),
)
