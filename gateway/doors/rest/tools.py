"""`GET /api/tools`: the MCP servers whose tools conversations may use. Source: docs/protocol.md, "Tools"."""

from __future__ import annotations

import asyncio

from aiohttp import web
from msgspec import Struct

from gateway.doors.http.bodies import json_reply
from gateway.services import SERVICES, Services

MAX_SHOWN_CHARS = 300  # Of a description. Chosen: a few lines of the page.


class ToolShown(Struct, frozen=True):
    """A tool of a server."""

    name: str
    description: str


class ToolServerShown(Struct, frozen=True, kw_only=True):
    """A server that the operator has named. problem: why some of its tools are missing, as a sentence; null for none."""

    name: str
    tools: list[ToolShown]
    problem: str | None = None


class ToolServers(Struct, frozen=True, kw_only=True):
    """All servers. off: why no conversation can use them now, as a sentence; null where they can be used."""

    servers: list[ToolServerShown]
    off: str | None = None


async def list_tools(request: web.Request) -> web.Response:
    """Handle `GET /api/tools`. Servers that were not asked lately are asked, all at once, within seconds."""
    services = request.app[SERVICES]
    services.admit(request)
    toolbox = services.turns.toolbox
    listings = await asyncio.gather(*map(toolbox.listing, toolbox.names))
    servers = [
        ToolServerShown(
            name=name,
            tools=[
                ToolShown(tool.tool, tool.offered.description[:MAX_SHOWN_CHARS]) for tool in listing.tools
            ],
            problem=listing.problem or None,
        )
        for name, listing in zip(toolbox.names, listings, strict=True)
    ]
    return json_reply(ToolServers(servers=servers, off=_why_off(services)))


def _why_off(services: Services) -> str | None:
    if services.node.can_use_tools:
        return None
    if services.node.progress.state != "ready":
        return "The engine is starting."
    if services.config.is_cluster:
        return (
            "This model is not known to call tools (--tool-parser), or a node was not started with "
            "--special-tokens-in-content split, so none are offered."
        )
    return "This model is not known to call tools, so none are offered (--tool-parser)."


ROUTES = (web.get("/api/tools", list_tools),)
