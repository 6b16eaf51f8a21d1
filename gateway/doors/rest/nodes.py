"""`/v1/nodes`: the nodes and their states, draining a node and starting it again. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from gateway.doors.http.bodies import json_reply, struct_body
from gateway.nodes.node_states import listed
from gateway.services import SERVICES

# Chosen: a day; answers do not take longer.
MAX_TIMEOUT_S = 86_400.0
CHANGING = "Draining and restarting nodes is"


class NodeChange(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a request that drains or restarts a node.

    force: do it even if no other node takes requests meanwhile. timeout_s: how long running answers get to end; `--drain-timeout-s` if left out.
    """

    force: bool = False
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)] | None = None


async def list_nodes(request: web.Request) -> web.Response:
    """Handle `GET /v1/nodes`: all nodes with their states. KV figures and failures are for operators only."""
    services = request.app[SERVICES]
    is_operator = services.keys.is_operator(services.admit(request))
    return json_reply(listed(services.maintenance.states(), to_operator=is_operator))


async def drain(request: web.Request) -> web.Response:
    """Handle the route that drains a node."""
    change = await _change(request)
    maintenance = request.app[SERVICES].maintenance
    node = await maintenance.drain(request.match_info["id"], change.timeout_s, is_forced=change.force)
    return json_reply(node, status=202)


async def restart(request: web.Request) -> web.Response:
    """Handle the route that drains and restarts a node."""
    change = await _change(request)
    maintenance = request.app[SERVICES].maintenance
    node = await maintenance.restart(request.match_info["id"], change.timeout_s, is_forced=change.force)
    return json_reply(node, status=202)


async def reopen(request: web.Request) -> web.Response:
    """Handle the route that lets a drained node take requests again."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    services.check_operator(principal, CHANGING)
    services.note_operator(request, principal)
    return json_reply(services.maintenance.reopen(request.match_info["id"]))


async def _change(request: web.Request) -> NodeChange:
    """Check the key and return the body. Raises GatewayError `unauthorized`, `forbidden`, `bad_request`."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    services.check_operator(principal, CHANGING)
    change = await struct_body(request, NodeChange)
    services.note_operator(request, principal)
    return change


ROUTES = (
    web.get("/v1/nodes", list_nodes),
    web.post("/v1/nodes/{id}/drain", drain),
    web.post("/v1/nodes/{id}/restart", restart),
    web.post("/v1/nodes/{id}/reopen", reopen),
)
