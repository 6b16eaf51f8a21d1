"""`/v1/conversations`: sessions in the form of OpenAI's API, in which `/v1/responses` goes on (`conversation`)."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web
from msgspec import Struct

from gateway.doors.api.response_routes import page_of
from gateway.doors.http.bodies import in_place, json_reply, struct_body
from gateway.doors.rest.sessions import remove_session
from gateway.errors import GatewayError
from gateway.services import SERVICES
from gateway.sessions import Session, StoredResponse, Turn
from gateway.turns.replies import listed_items


class NewConversation(Struct, frozen=True):
    """The body of `POST /v1/conversations`. metadata: is told back, and not kept."""

    metadata: dict[str, Any] | None = None
    items: list[Any] | None = None


async def create(request: web.Request) -> web.Response:
    """Handle `POST /v1/conversations`: begin a session."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    body = await struct_body(request, NewConversation)
    if body.items:
        raise GatewayError(
            "bad_request",
            "Conversations begin empty here: send these items with the `input` of the first response.",
            param="items",
        )
    name = f"conv_{uuid.uuid4().hex}"
    session = await services.store.create_session(owner, session_id=name, now=time.time())
    services.list_feed.changed(owner, session.id)
    return json_reply(_shown(session, body.metadata))


async def read(request: web.Request) -> web.Response:
    """Handle `GET /v1/conversations/{id}`."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    return json_reply(_shown(await services.store.get_session(owner, request.match_info["id"])))


async def delete(request: web.Request) -> web.Response:
    """Handle `DELETE /v1/conversations/{id}`."""
    owner, name = request.app[SERVICES].admit(request).owner, request.match_info["id"]
    await remove_session(request.app, owner, name)
    return json_reply({"id": name, "object": "conversation.deleted", "deleted": True})


async def items(request: web.Request) -> web.Response:
    """Handle `GET /v1/conversations/{id}/items`: what was asked and answered, the newest item first unless `order=asc`."""
    services = request.app[SERVICES]
    owner, name = services.admit(request).owner, request.match_info["id"]
    found = await services.store.responses.of_session(owner, name)
    if found is None:
        raise GatewayError("not_found", f"There is no conversation {name[:100]!r} here.", param="id")
    return page_of(request, await asyncio.to_thread(_items_of, found.turns))


def _items_of(turns: Sequence[tuple[Turn, StoredResponse | None]]) -> list[dict[str, Any]]:
    """Return the items of a session's turns; of many turns that takes long."""
    listed: list[dict[str, Any]] = []
    for turn, response in turns:
        said = [{"role": "user", "content": turn.content}, {"role": "assistant", "content": turn.answer}]
        listed += listed_items(orjson.loads(response.items) if response else said, turn.id)
        listed += orjson.loads(response.reply).get("output") or [] if response else []
    return listed


def _shown(session: Session, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a session as OpenAI's API shows a conversation."""
    return {
        "id": session.id,
        "object": "conversation",
        "created_at": int(session.created_at),
        "metadata": metadata or {},
    }


ROUTES = (
    web.post("/v1/conversations", in_place(create)),
    web.get("/v1/conversations/{id}", in_place(read)),
    web.delete("/v1/conversations/{id}", in_place(delete)),
    web.get("/v1/conversations/{id}/items", in_place(items)),
)
