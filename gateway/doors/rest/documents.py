"""Documents as text: `POST /api/documents`. Source: docs/protocol.md, "Documents"."""

from __future__ import annotations

from aiohttp import web

from gateway.doors.http.bodies import in_place, json_reply
from gateway.services import SERVICES


async def read_document(request: web.Request) -> web.Response:
    """Handle `POST /api/documents`: return the text of the body, a document. Nothing of it is kept."""
    services = request.app[SERVICES]
    sender = services.client_of(services.admit(request).owner, request)
    limit = services.config.max_body_bytes
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length or 0)
    data = await request.read()
    return json_reply(await services.documents.read(data, request.content_type, sender))


def add_routes(app: web.Application) -> None:
    """Add the route that reads documents."""
    app.add_routes([web.post("/api/documents", in_place(read_document))])
