"""REST beside the chat socket: sessions, health, metrics and the page. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Annotated, cast, get_args

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.access.auth import tenant_of
from gateway.doors.http.bodies import in_place, json_reply, struct_body
from gateway.doors.pages.serving import manifest, page, sandbox, static_file
from gateway.doors.rest.health import healthz, metrics, readyz
from gateway.doors.rest.shelf import SHELF
from gateway.errors import GatewayError
from gateway.services import SERVICES
from gateway.sessions import Origin, SettingsPatch


class CreateSession(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /api/sessions`."""

    title: str | None = None
    adapter: str | None = None
    settings: SettingsPatch = SettingsPatch()


class ChooseVersion(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of the route that shows another version of a message."""

    turn_id: str


class PatchSession(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `PATCH /api/sessions/{id}`; missing fields stay as they are."""

    title: str | None | UnsetType = UNSET
    adapter: str | None | UnsetType = UNSET
    is_pinned: bool | UnsetType = UNSET
    folder: Annotated[str, Meta(max_length=60)] | None | UnsetType = UNSET
    settings: SettingsPatch = SettingsPatch()


# -- sessions --------------------------------------------------------------------------------------------------------


async def list_sessions(request: web.Request) -> web.Response:
    """Handle `GET /api/sessions`: a page of the list. The first page of all sessions also lists the pinned ones."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    limit = _int_query(request, "limit", 50)
    q, before = request.query.get("q") or None, request.query.get("before") or None
    sessions, following = await services.store.list_sessions(
        owner, q=q, limit=limit, before=before, origin=_origin_query(request)
    )
    pinned = [] if q or before else await services.store.rows.pinned(owner)
    return json_reply({"sessions": sessions, "next": following, "pinned": pinned})


ORIGINS = get_args(Origin)


def _origin_query(request: web.Request) -> Origin | None:
    wanted = request.query.get("origin") or "all"
    if wanted not in ("all", *ORIGINS):
        raise GatewayError("bad_request", "'origin' must be chat, api or all.", param="origin")
    return None if wanted == "all" else cast(Origin, wanted)


async def create_session(request: web.Request) -> web.Response:
    """Handle `POST /api/sessions`."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    body = await struct_body(request, CreateSession)
    adapter = services.turns.known_adapter(body.adapter) if body.adapter else None
    session = await services.store.create_session(
        owner, title=body.title, adapter=adapter or None, settings=body.settings, now=time.time()
    )
    services.list_feed.changed(owner, session.id)
    return json_reply(session, status=201)


async def read_session(request: web.Request) -> web.Response:
    """Handle `GET /api/sessions/{id}`: a conversation with its shown turns."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    return json_reply(await services.store.get_session(owner, request.match_info["id"]))


async def patch_session(request: web.Request) -> web.Response:
    """Handle `PATCH /api/sessions/{id}`: change the fields that the body names."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    body = await struct_body(request, PatchSession)
    session_id = request.match_info["id"]
    summary = await services.store.patch(
        owner,
        session_id,
        title=body.title,
        adapter=services.turns.known_adapter(body.adapter),
        is_pinned=body.is_pinned,
        folder=body.folder,
        settings=body.settings,
        now=time.time(),
    )
    if body.settings.system_prompt is not UNSET:
        # Its prompts begin differently from now on, so prepared KV and the nodes' memory of the session fit none of them.
        services.advisories.end_session(owner, session_id)
        services.node.end_session(tenant_of(owner), session_id)
    services.list_feed.changed(owner, session_id)
    return json_reply(summary)


async def choose_version(request: web.Request) -> web.Response:
    """Show another version of a message, and tell the owner's sockets.

    Preparations for the session's next prompt are for the turns shown before, so they are ended.
    """
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    body = await struct_body(request, ChooseVersion)
    session_id = request.match_info["id"]
    session = await services.store.choose_version(owner, session_id, body.turn_id)
    services.advisories.end_session(owner, session_id)
    services.tell_shown(owner, session_id, body.turn_id)
    return json_reply(session)


async def discard_turn(request: web.Request) -> web.Response:
    """Handle `DELETE /api/sessions/{id}/turns/{turn_id}`: remove a message whose answer failed, and tell the owner's sockets."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    session_id, turn_id = request.match_info["id"], request.match_info["turn_id"]
    session = await services.store.discard_turn(owner, session_id, turn_id)
    services.advisories.end_session(owner, session_id)
    services.tell_shown(owner, session_id, turn_id, is_changed=True)
    return json_reply(session)


async def delete_session(request: web.Request) -> web.Response:
    """Handle `DELETE /api/sessions/{id}`: stop its answers and delete it. It can be restored for a while."""
    services = request.app[SERVICES]
    await remove_session(request.app, services.admit(request).owner, request.match_info["id"])
    return web.Response(status=204)


async def remove_session(app: web.Application, owner: str, session_id: str) -> None:
    """Stop a session's answers and delete it. Raises GatewayError `not_found`."""
    services = app[SERVICES]
    await services.store.delete(owner, session_id, time.time())
    # Its link does not come back with it. Where that cannot be written now, on a full disk, a purge ends the link.
    with contextlib.suppress(GatewayError):
        await asyncio.to_thread(app[SHELF].withdraw, owner, session_id)
    services.list_feed.changed(owner, session_id)
    services.node.end_session(tenant_of(owner), session_id)
    services.drafts.stop(owner, session_id)
    await services.turns.stop_session(owner, session_id)


async def restore_session(request: web.Request) -> web.Response:
    """Handle `POST /api/sessions/{id}/restore`: bring a deleted conversation back."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    session = await services.store.restore(owner, request.match_info["id"], time.time())
    services.list_feed.changed(owner, session.id)
    return json_reply(session)


async def list_models(request: web.Request) -> web.Response:
    """Handle `GET /api/models`: the model and adapters that a conversation can use."""
    services = request.app[SERVICES]
    services.admit(request)
    return json_reply({"models": services.models()})


def _int_query(request: web.Request, name: str, default: int) -> int:
    try:
        return int(request.query.get(name, default))
    except ValueError as error:
        raise GatewayError("bad_request", f"'{name}' must be a whole number.", param=name) from error


# -- health ----------------------------------------------------------------------------------------------------------


# -- the page --------------------------------------------------------------------------------------------------------


ROUTES = (
    web.get("/", page("index.html")),
    web.get("/engine", page("engine.html")),
    web.get("/admin", page("admin.html")),
    web.get("/manifest.webmanifest", manifest),
    web.get("/sandbox", sandbox),
    web.get("/static/{path:.+}", static_file),
    web.get("/api/sessions", in_place(list_sessions)),
    web.post("/api/sessions", in_place(create_session)),
    web.get("/api/sessions/{id}", in_place(read_session)),
    web.patch("/api/sessions/{id}", in_place(patch_session)),
    web.delete("/api/sessions/{id}", in_place(delete_session)),
    web.post("/api/sessions/{id}/restore", in_place(restore_session)),
    web.post("/api/sessions/{id}/choose", in_place(choose_version)),
    web.delete("/api/sessions/{id}/turns/{turn_id}", in_place(discard_turn)),
    web.get("/api/models", list_models),
    web.get("/healthz", healthz),
    web.get("/readyz", readyz),
    web.get("/metrics", metrics),
)
