"""Links to conversations, and presets. Source: docs/protocol.md, "Links and presets"."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from gateway.doors.http.bodies import as_struct, in_place, json_body, json_reply
from gateway.doors.rest.pictures import picture_reply
from gateway.errors import GatewayError
from gateway.services import SERVICES
from gateway.sessions import Session, StoredPicture, Turn
from gateway.sessions.text import is_id
from gateway.shelf.store import NAME, Preset, PresetBody, Shelf

SHELF = web.AppKey("shelf", Shelf)


class Link(msgspec.Struct, frozen=True):
    """A conversation's link. token: what stands in the page's address behind `#/shared/`."""

    token: str


class SharedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A message with its answer, as others see it."""

    content: str
    answer: str
    adapter: str | None
    status: str
    created_at: float
    pictures: list[StoredPicture]


class SharedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as others see it: what is shown of it, without its system prompt and its settings."""

    title: str | None
    adapter: str | None
    updated_at: float
    turns: list[SharedTurn]


class PresetList(msgspec.Struct, frozen=True):
    """The presets that the caller may use."""

    presets: list[Preset]


async def make_link(request: web.Request) -> web.Response:
    """Handle `POST /api/sessions/{id}/link`: let the server's people read a conversation by a link."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    session = await services.store.get_session(owner, request.match_info["id"])
    shelf = request.app[SHELF]
    return json_reply(Link(await asyncio.to_thread(shelf.link, owner, session.id, session.created_at)))


async def withdraw_link(request: web.Request) -> web.Response:
    """Handle `DELETE /api/sessions/{id}/link`."""
    owner = request.app[SERVICES].admit(request).owner
    await asyncio.to_thread(request.app[SHELF].withdraw, owner, request.match_info["id"])
    return web.Response(status=204)


async def read_shared(request: web.Request) -> web.Response:
    """Handle `GET /api/shared/{token}`: return the conversation behind a link, as it is now."""
    request.app[SERVICES].admit(request)
    _, session, turns = await _shared(request)
    shown = [_as_shared(turn) for turn in turns]
    return json_reply(
        SharedConversation(
            title=session.title, adapter=session.adapter, updated_at=session.updated_at, turns=shown
        )
    )


async def read_shared_picture(request: web.Request) -> web.Response:
    """Handle `GET /api/shared/{token}/pictures/{id}`: return a picture that the conversation behind a link shows now.

    Other pictures of its owner are not found, also those of its other versions. Browsers ask again each time, because links are withdrawn.
    """
    services = request.app[SERVICES]
    services.admit(request)
    name = request.match_info["id"]
    owner, _, turns = await _shared(request)
    is_shown = any(picture.id == name for turn in turns for picture in turn.pictures)
    found = (await services.store.pictures.read(owner, [name])).get(name) if is_shown else None
    if found is None:
        raise GatewayError("not_found", "This conversation shows no such picture.", param="id")
    return picture_reply(found, "private, no-store")


async def _shared(request: web.Request) -> tuple[str, Session, list[Turn]]:
    """Return the owner of the conversation behind the request's link, it, and those of its turns that others see. Raises GatewayError `not_found`."""
    found = await asyncio.to_thread(request.app[SHELF].behind, request.match_info["token"])
    session = await request.app[SERVICES].store.get_session(found.owner, found.session_id)
    if found.created_at not in (None, session.created_at):
        raise GatewayError("not_found", "The conversation of this link was deleted.", param="token")
    return found.owner, session, [turn for turn in session.turns if turn.status in ("done", "stopped")]


def _as_shared(turn: Turn) -> SharedTurn:
    return SharedTurn(
        content=turn.content,
        answer=turn.answer,
        adapter=turn.adapter,
        status=turn.status,
        created_at=turn.created_at,
        pictures=turn.pictures,
    )


async def list_presets(request: web.Request) -> web.Response:
    """Handle `GET /api/presets`."""
    owner = request.app[SERVICES].admit(request).owner
    return json_reply(PresetList(await asyncio.to_thread(request.app[SHELF].presets, owner)))


async def put_preset(request: web.Request) -> web.Response:
    """Handle `PUT /api/presets/{id}`: store one of the caller's presets. Operators may share theirs with everybody."""
    services = request.app[SERVICES]
    principal = services.admit(request)
    preset_id = request.match_info["id"]
    if not is_id(preset_id):
        raise GatewayError("bad_request", "This cannot be the id of a preset.", param="id")
    body = as_struct(await json_body(request), PresetBody)
    if body.is_shared and not services.keys.is_operator(principal):
        raise GatewayError("forbidden", "Only an operator may share presets.", param="is_shared")
    await asyncio.to_thread(request.app[SHELF].put, principal.owner, preset_id, body)
    return web.Response(status=204)


async def delete_preset(request: web.Request) -> web.Response:
    """Handle `DELETE /api/presets/{id}`."""
    owner = request.app[SERVICES].admit(request).owner
    await asyncio.to_thread(request.app[SHELF].drop, owner, request.match_info["id"])
    return web.Response(status=204)


def add_routes(app: web.Application) -> None:
    """Add the routes of links and presets."""
    app[SHELF] = Shelf(app[SERVICES].config.data_dir / NAME)
    app.add_routes(
        [
            web.post("/api/sessions/{id}/link", in_place(make_link)),
            web.delete("/api/sessions/{id}/link", in_place(withdraw_link)),
            web.get("/api/shared/{token}", in_place(read_shared)),
            web.get("/api/shared/{token}/pictures/{id}", in_place(read_shared_picture)),
            web.get("/api/presets", in_place(list_presets)),
            web.put("/api/presets/{id}", in_place(put_preset)),
            web.delete("/api/presets/{id}", in_place(delete_preset)),
        ]
    )
