"""REST beside the chat socket: sessions, health, metrics and the page. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import orjson
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from msgspec import UNSET, Struct, UnsetType

from engine_bridge.protocol.errors import BridgeError
from gateway.access.auth import tenant_of
from gateway.doors.api.call_size import check_shape
from gateway.doors.http.json_shape import shape_of
from gateway.errors import GatewayError
from gateway.metrics.metrics import CONTENT_TYPE
from gateway.services import SERVICES
from gateway.sessions import Origin, SettingsPatch
from gateway.settings.config import STATIC_DIR
from gateway.turns.turns import unavailable

# Larger bodies are looked at in a thread. Chosen: so much takes a third of a millisecond.
INLINE_BYTES = 1 << 16

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Always asked again, answered 304 while nothing changed: a page never runs with yesterday's scripts.
    "Cache-Control": "no-cache",
}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CreateSession(Struct, frozen=True, forbid_unknown_fields=True):
    title: str | None = None
    adapter: str | None = None
    settings: SettingsPatch = SettingsPatch()


class ChooseVersion(Struct, frozen=True, forbid_unknown_fields=True):
    turn_id: str


class PatchSession(Struct, frozen=True, forbid_unknown_fields=True):
    title: str | None | UnsetType = UNSET
    adapter: str | None | UnsetType = UNSET
    is_pinned: bool | UnsetType = UNSET
    settings: SettingsPatch = SettingsPatch()


def json_reply(value: Any, status: int = 200) -> web.Response:
    """A JSON response from builtins or msgspec structs."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def json_body(request: web.Request, at_least_values: int = 0) -> Any:
    """The request's JSON value. Raises GatewayError `bad_request`, or aiohttp's own error for a body that is too large.

    at_least_values: of a route whose bodies have more values than a prompt: as many are taken, unless `max_json_values` says otherwise.
    """
    limit = request.app[SERVICES].config.max_body_bytes
    if (request.content_length or 0) > limit:
        # Said at once: aiohttp itself would first read up to the limit.
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length or 0)
    try:
        body = await request.read()
    except RequestPayloadError as error:
        raise GatewayError(
            "bad_request", "The body could not be read: its encoding or length is wrong."
        ) from error
    body = _as_utf8(await _unpacked(request, body, limit))
    await _check_shape(request, body, at_least_values)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise GatewayError("bad_request", f"The body is not valid JSON: {error}") from error


def _as_utf8(body: bytes) -> bytes:
    """The same text in UTF-8 without a mark in front: some programs send one, or UTF-16 (RFC 4627 §3). Raises GatewayError."""
    if body.startswith(codecs.BOM_UTF8):
        return body.removeprefix(codecs.BOM_UTF8)
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding).encode()
    except UnicodeError as error:
        raise GatewayError("bad_request", "The body is not valid JSON: it is no text in UTF-8.") from error


async def _unpacked(request: web.Request, body: bytes, limit: int) -> bytes:
    """The body without its compression. Raises GatewayError, HTTPRequestEntityTooLarge for one that is larger than the limit when unpacked."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity" or not body:
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise web.HTTPUnsupportedMediaType(reason="Send the body plain, or compressed with gzip or deflate.")
    try:
        unpacked = await asyncio.to_thread(_inflated, body, limit + 1)
    except zlib.error as error:
        raise GatewayError("bad_request", f"The body is not what its encoding says: {encoding}.") from error
    if len(unpacked) > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(unpacked))
    return unpacked


def _inflated(body: bytes, max_bytes: int) -> bytes:
    """As many bytes as `max_bytes` at most, of a gzip or zlib stream, or of one without a head (RFC 9110 §8.4.1.2 has clients that leave it out)."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, max_bytes)
    except zlib.error:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(body, max_bytes)


async def _check_shape(request: web.Request, body: bytes, at_least_values: int) -> None:
    """Raises InvalidRequest for a body that would take long to decode: nobody else is served meanwhile."""
    services = request.app[SERVICES]
    shape = await asyncio.to_thread(shape_of, body) if len(body) > INLINE_BYTES else shape_of(body)
    config = services.config
    check_shape(
        *shape,
        max_values=config.json_values(services.node.max_model_len, at_least_values),
        max_depth=config.max_json_depth,
    )


async def _struct_body(request: web.Request, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(await json_body(request) if request.can_read_body else {}, kind)
    except msgspec.ValidationError as error:
        raise GatewayError("bad_request", f"The body was not understood: {error}") from error


# -- sessions --------------------------------------------------------------------------------------------------------


def in_place(handler: Handler) -> Handler:
    """A route of one owner's conversations: it takes a place among the owner's until its answer was sent, and ends when the key is withdrawn.

    Places of its own, so that many API calls of a key do not close its page, and a bound on what is read and waits for a slow client.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        services = request.app[SERVICES]
        owner = services.principal(request).owner
        with services.budgets.enter(f"conversations of {owner}"):
            async with services.calls.of(owner):
                response = await handler(request)
                await response.prepare(request)
                await response.write_eof()
                return response

    return handle


async def list_sessions(request: web.Request) -> web.Response:
    """`GET /api/sessions`: a page of the list. The first page of all sessions also says which ones are pinned."""
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
# Chosen: less than Prometheus waits for a whole scrape (10 s).
ENGINE_METRICS_S = 5.0


def _origin_query(request: web.Request) -> Origin | None:
    wanted = request.query.get("origin") or "all"
    if wanted not in ("all", *ORIGINS):
        raise GatewayError("bad_request", "'origin' must be chat, api or all.", param="origin")
    return None if wanted == "all" else cast(Origin, wanted)


async def create_session(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    body = await _struct_body(request, CreateSession)
    adapter = services.turns.known_adapter(body.adapter) if body.adapter else None
    session = await services.store.create_session(
        owner, title=body.title, adapter=adapter or None, settings=body.settings, now=time.time()
    )
    services.list_watch.changed(owner, session.id)
    return json_reply(session, status=201)


async def read_session(request: web.Request) -> web.Response:
    """`GET /api/sessions/{id}`: a conversation's summary."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    return json_reply(await services.store.get_session(owner, request.match_info["id"]))


async def patch_session(request: web.Request) -> web.Response:
    """`PATCH /api/sessions/{id}`: changes what the body names, such as the title or settings."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    body = await _struct_body(request, PatchSession)
    session_id = request.match_info["id"]
    summary = await services.store.patch(
        owner,
        session_id,
        title=body.title,
        adapter=services.turns.known_adapter(body.adapter),
        is_pinned=body.is_pinned,
        settings=body.settings,
        now=time.time(),
    )
    if body.settings.system_prompt is not UNSET:
        # Its prompts begin differently from now on: what is prepared, and what nodes keep for it, fits none of them.
        services.advisories.end_session(owner, session_id)
        services.node.end_session(tenant_of(owner), session_id)
    services.list_watch.changed(owner, session_id)
    return json_reply(summary)


async def choose_version(request: web.Request) -> web.Response:
    """Show another version of a message, and tell the owner's sockets.

    What was being prepared for the session is for the turns that it showed before, and is ended.
    """
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    body = await _struct_body(request, ChooseVersion)
    session_id = request.match_info["id"]
    session = await services.store.choose_version(owner, session_id, body.turn_id)
    services.advisories.end_session(owner, session_id)
    services.tell_shown(owner, session_id, body.turn_id)
    return json_reply(session)


async def delete_session(request: web.Request) -> web.Response:
    """`DELETE /api/sessions/{id}`: stops its answers and deletes it. It can be restored for a while."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    session_id = request.match_info["id"]
    await services.store.delete(owner, session_id, time.time())
    services.list_watch.changed(owner, session_id)
    services.node.end_session(tenant_of(owner), session_id)
    services.drafts.stop(owner, session_id)
    await services.turns.stop_session(owner, session_id)
    return web.Response(status=204)


async def restore_session(request: web.Request) -> web.Response:
    """`POST /api/sessions/{id}/restore`: brings a deleted conversation back."""
    services = request.app[SERVICES]
    owner = services.admit(request).owner
    session = await services.store.restore(owner, request.match_info["id"], time.time())
    services.list_watch.changed(owner, session.id)
    return json_reply(session)


async def list_models(request: web.Request) -> web.Response:
    """`GET /api/models`: the model and adapters that a conversation can use."""
    services = request.app[SERVICES]
    services.admit(request)
    return json_reply({"models": services.models()})


def _int_query(request: web.Request, name: str, default: int) -> int:
    try:
        return int(request.query.get(name, default))
    except ValueError as error:
        raise GatewayError("bad_request", f"'{name}' must be a whole number.", param=name) from error


# -- health ----------------------------------------------------------------------------------------------------------


async def healthz(request: web.Request) -> web.Response:
    """The process answers: restart it only when this fails."""
    return json_reply({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """Whether requests are taken now, and how far the engine has come. No key is asked for: it says nothing private."""
    services = request.app[SERVICES]
    progress = services.node.progress
    if services.store.has_failed:
        body = {"status": "failed", "stage": "session database", "elapsed_s": round(progress.elapsed_s, 1)}
        body["message"] = "Conversations cannot be read or stored. The server's log says why."
        return json_reply(body, status=503)
    if progress.state == "ready":
        return json_reply({"status": "ready"})
    status = "starting" if progress.state == "rebuilding" else progress.state
    body = {"status": status, "stage": progress.stage, "elapsed_s": round(progress.elapsed_s, 1)}
    if progress.state == "failed":
        body["message"] = unavailable(progress.state, progress.stage).message
    return json_reply(body, status=503)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text. Asks for an operator's key where the server asks for keys: the figures are those of everybody."""
    services = request.app[SERVICES]
    services.check_operator(services.principal(request), "/metrics is")
    services.metrics.engine_steps.set(services.node.num_steps)
    services.metrics.engine_rebuilds.set(services.node.num_rebuilds)
    services.node_metrics.note(services.steward.states())
    engine = ""
    # The gateway's own figures matter most when the engine does not answer.
    with contextlib.suppress(BridgeError, TimeoutError):
        async with asyncio.timeout(ENGINE_METRICS_S):
            engine = await services.node.engine_metrics()
    body = await services.metrics.exposition(engine)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


# -- the page --------------------------------------------------------------------------------------------------------


async def page(request: web.Request) -> web.FileResponse:
    """`GET /`: the chat page."""
    return web.FileResponse(STATIC_DIR / "index.html", headers=PAGE_HEADERS)


async def engine_page(request: web.Request) -> web.FileResponse:
    """`GET /engine`: the engine room's page."""
    return web.FileResponse(STATIC_DIR / "engine.html", headers=PAGE_HEADERS)


async def static_file(request: web.Request) -> web.FileResponse:
    """A file under static/."""
    # In a thread: a file system may be slow, and every socket would wait with it.
    path = await asyncio.to_thread(_static_path, request.match_info["path"])
    if path is None:
        raise web.HTTPNotFound
    headers = PAGE_HEADERS | ({"Content-Type": "text/javascript"} if path.suffix == ".js" else {})
    return web.FileResponse(path, headers=headers)


def _static_path(name: str) -> Path | None:
    """The file of this name. Anything that resolves outside the folder does not exist."""
    try:
        path = (STATIC_DIR / name).resolve()
        is_ours = path.is_relative_to(STATIC_DIR.resolve()) and path.is_file()
    except (ValueError, OSError):  # a NUL, or a name that no file system takes
        return None
    return path if is_ours else None


def add_routes(app: web.Application) -> None:
    """Adds the pages and what they ask for."""
    app.add_routes(
        [
            web.get("/", page),
            web.get("/engine", engine_page),
            web.get("/static/{path:.+}", static_file),
            web.get("/api/sessions", in_place(list_sessions)),
            web.post("/api/sessions", in_place(create_session)),
            web.get("/api/sessions/{id}", in_place(read_session)),
            web.patch("/api/sessions/{id}", in_place(patch_session)),
            web.delete("/api/sessions/{id}", in_place(delete_session)),
            web.post("/api/sessions/{id}/restore", in_place(restore_session)),
            web.post("/api/sessions/{id}/choose", in_place(choose_version)),
            web.get("/api/models", list_models),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
        ]
    )
