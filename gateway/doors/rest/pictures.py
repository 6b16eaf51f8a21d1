"""Pictures of messages: `POST /api/pictures` and `GET /api/pictures/{id}`. Source: docs/protocol.md, "Pictures"."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from engine_bridge.protocol.engine_request import Picture
from gateway.doors.http.bodies import in_place, json_reply
from gateway.errors import GatewayError
from gateway.services import SERVICES
from gateway.sessions.pictures import describe


async def store_picture(request: web.Request) -> web.Response:
    """Handle `POST /api/pictures`: keep the body, a picture, for a message that will show it."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    if services.node.progress.state == "ready" and not services.node.max_images:
        raise GatewayError("bad_request", "This server's model reads no pictures.", param="picture")
    limit = services.config.max_body_bytes
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length or 0)
    data = await request.read()
    picture = await asyncio.to_thread(describe, data, services.config.max_image_mpixels * 1e6)
    await services.store.pictures.put(owner, picture, data, time.time())
    return json_reply(picture, status=201)


async def read_picture(request: web.Request) -> web.Response:
    """Handle `GET /api/pictures/{id}`: return the caller's picture as it was stored. It never changes under its id."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    name = request.match_info["id"]
    found = (await services.store.pictures.read(owner, [name])).get(name)
    if found is None:
        raise GatewayError("not_found", "There is no such picture.", param="id")
    return picture_reply(found, "private, max-age=31536000, immutable")


def picture_reply(picture: Picture, caching: str) -> web.Response:
    """Return a stored picture as a response that no browser takes for a page or a program. caching: its Cache-Control."""
    headers = {
        "Cache-Control": caching,
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "X-Content-Type-Options": "nosniff",
    }
    return web.Response(body=picture.data, content_type=picture.media_type, headers=headers)


ROUTES = (
    web.post("/api/pictures", in_place(store_picture)),
    web.get("/api/pictures/{id}", in_place(read_picture)),
)
