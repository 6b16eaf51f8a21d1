"""`/v1/kv_hints`: what a session's KV is worth, said without a request. Source: docs/protocol.md, "Hints of KV"."""

from __future__ import annotations

import time

from aiohttp import web

from gateway.doors.http.bodies import as_struct, json_body, json_reply
from gateway.hints.kv_hints import Asker, KvHintRequest
from gateway.hints.parsing import CallHints, read_envelope
from gateway.nodes.adapter_names import known_adapter
from gateway.services import SERVICES


async def create(request: web.Request) -> web.Response:
    """Handle `POST /v1/kv_hints`: one hint, or an envelope of them in the shape of vLLM's and SGLang's KV hints."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    asker = Asker(owner, services.client_of(owner, request))
    body = await json_body(request)
    if isinstance(body, dict) and "actions" in body:
        found = CallHints()
        read_envelope(body, found)
        records = services.kv_hints.submit_all(asker, found)
        items = [record.describe(time.monotonic()) for record in records]
        reply = {"message_id": str(body.get("message_id", "")), "hints": items}
        return json_reply(reply | {"num_ignored": len(found.noted)}, status=202)
    wanted = as_struct(body, KvHintRequest, "hint")
    adapter = known_adapter(services.node, wanted.model)
    assert adapter is None or isinstance(adapter, str)
    record = await services.kv_hints.submit(Asker(owner, asker.client, adapter), wanted)
    return json_reply(record.describe(time.monotonic()), status=202)


async def read(request: web.Request) -> web.Response:
    """Handle `GET /v1/kv_hints/{id}`."""
    services = request.app[SERVICES]
    record = services.kv_hints.find(services.principal(request).owner, request.match_info["id"])
    return json_reply(record.describe(time.monotonic()))


async def delete(request: web.Request) -> web.Response:
    """Handle `DELETE /v1/kv_hints/{id}`: end what the hint has begun."""
    services = request.app[SERVICES]
    services.kv_hints.take_back(services.principal(request).owner, request.match_info["id"])
    return web.Response(status=204)


ROUTES = (
    web.post("/v1/kv_hints", create),
    web.get("/v1/kv_hints/{id}", read),
    web.delete("/v1/kv_hints/{id}", delete),
)
