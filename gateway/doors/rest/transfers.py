"""Conversations as files: `GET /api/sessions/{id}/export` and `POST /api/sessions/import`. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import quote

import msgspec
from aiohttp import web

from gateway.doors.http.bodies import in_place, json_body, json_reply
from gateway.errors import GatewayError
from gateway.services import SERVICES
from gateway.sessions.archive import MAX_VALUES, Archive, as_markdown, file_name, read_archive
from gateway.sessions.pictures import describe
from gateway.turns.protocol import MAX_PICTURES

MEDIA = {"json": "application/json", "markdown": "text/markdown"}
SUFFIXES = {"json": "json", "markdown": "md"}


async def export_session(request: web.Request) -> web.Response:
    """Handle the export: return a conversation as a file, `format=json`, which can be imported, or `format=markdown`, for people."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    wanted = request.query.get("format", "json")
    if wanted not in MEDIA:
        raise GatewayError("bad_request", "'format' must be json or markdown.", param="format")
    archive = await services.store.export(owner, request.match_info["id"])
    # A long conversation takes a while to write down: others are served meanwhile.
    body = await asyncio.to_thread(_written, archive, wanted, services.config.served_model_name)
    headers = saved_as(file_name(archive.title, SUFFIXES[wanted]), f"conversation.{SUFFIXES[wanted]}")
    return web.Response(body=body, content_type=MEDIA[wanted], charset="utf-8", headers=headers)


def saved_as(name: str, plain: str) -> dict[str, str]:
    """Return the headers of a file that a browser saves. plain: its name for clients that take letters of ASCII only."""
    return {
        "Content-Disposition": f"attachment; filename=\"{name if name.isascii() else plain}\"; filename*=UTF-8''{quote(name)}",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def _written(archive: Archive, wanted: str, model: str) -> bytes:
    if wanted == "markdown":
        return as_markdown(archive, model).encode()
    return msgspec.json.format(msgspec.json.encode(archive), indent=1)


async def import_session(request: web.Request) -> web.Response:
    """Handle the import: store an exported conversation, from here or elsewhere, as a new session of the caller."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    body = await json_body(request, at_least_values=MAX_VALUES)
    # As many as a message may have that is sent to this server, and as one of a server whose model reads fewer.
    archive = await asyncio.to_thread(read_archive, body, max(MAX_PICTURES, services.node.max_images))
    adapters = frozenset(model["id"] for model in services.models() if model.get("adapter"))
    max_pixels = services.config.max_image_mpixels * 1e6
    described = await asyncio.to_thread(
        lambda: [[describe(each.data, max_pixels) for each in turn.pictures] for turn in archive.turns]
    )
    session = await services.store.bring_in(owner, archive, adapters, time.time(), described)
    services.list_feed.changed(owner, session.id)
    return json_reply(session, status=201)


ROUTES = (
    web.get("/api/sessions/{id}/export", in_place(export_session)),
    web.post("/api/sessions/import", in_place(import_session)),
)
