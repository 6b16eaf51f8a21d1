"""`/v1/adapters`: the adapters, where each one is, and which ones are pinned in memory. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

from aiohttp import web
from msgspec import to_builtins

from gateway.doors.http.bodies import json_reply
from gateway.errors import GatewayError
from gateway.services import SERVICES

MAX_QUOTED_CHARS = 100  # Chosen: enough to recognise a mistyped name.


async def list_adapters(request: web.Request) -> web.Response:
    """Handle `GET /v1/adapters`: all adapters by name, and the node's figures for them; `stats` is null until the engine is up.

    Other people's use of adapters is for operators: without an operator's key, uses and figures are null.
    """
    services = request.app[SERVICES]
    adapters = services.node.adapters()
    if services.keys.is_operator(services.admit(request)):
        return json_reply({"adapters": adapters, "stats": services.node.figures().adapter_stats})
    shown = [to_builtins(info) | {"num_uses": None, "last_used_at": None} for info in adapters]
    return json_reply({"adapters": shown, "stats": None})


async def pin(request: web.Request) -> web.Response:
    """Handle the route that pins an adapter in memory."""
    return await _set_pinned(request, True)


async def unpin(request: web.Request) -> web.Response:
    """Handle the route that unpins an adapter."""
    return await _set_pinned(request, False)


async def _set_pinned(request: web.Request, is_pinned: bool) -> web.Response:
    """Pin or unpin an adapter and return it as it is now.

    Raises:
        GatewayError: `unauthorized` or `bad_request` if this is not allowed, `unknown_model`.
    """
    services = request.app[SERVICES]
    principal = services.admit(request)
    services.check_may_change_adapters(principal)
    services.note_operator(request, principal)
    name = request.match_info["name"]
    info = await services.node.pin_adapter(name, is_pinned)
    if info is None:
        raise GatewayError(
            "unknown_model", f"There is no adapter named {name[:MAX_QUOTED_CHARS]!r} here.", param="name"
        )
    return json_reply(info)


ROUTES = (
    web.get("/v1/adapters", list_adapters),
    web.post("/v1/adapters/{name:.+}/pin", pin),
    web.delete("/v1/adapters/{name:.+}/pin", unpin),
)
