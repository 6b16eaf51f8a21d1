"""`/v1/sign-in` and `/v1/sign-out`: browsers that are signed in by a link and a cookie. Source: docs/protocol.md, "REST beside it"."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.access.addresses import address_of
from gateway.access.auth import Principal
from gateway.doors.http.bodies import json_reply
from gateway.doors.http.key_changes import cut_off
from gateway.doors.pages.serving import page
from gateway.errors import GatewayError
from gateway.people.audit import Entry, What
from gateway.people.sign_ins import COOKIE, SESSION_LASTS_S
from gateway.services import SERVICES

MAX_BODY_BYTES = 1024  # Chosen: a token and some room.


class SignIn(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/sign-in`. token: what stands behind the `#` of a link."""

    token: str


class SignedInAs(Struct, frozen=True):
    """The person signed in now. owner: the id that stays when a name changes."""

    owner: str
    name: str
    role: Literal["member", "operator"]


async def sign_in(request: web.Request) -> web.Response:
    """Handle `POST /v1/sign-in`: use up a link, and give the browser a cookie."""
    services = request.app[SERVICES]
    if services.keys.is_open:
        raise GatewayError("conflict", "This server asks for no keys, so nobody needs to sign in.")
    # Anybody may ask this, so it is counted by address.
    services.budgets.count(f"sign-ins from {address_of(request.remote or '')}")
    body = await _body(request)
    try:
        cookie, principal = await services.sign_ins.sign_in(body.token)
    except GatewayError as error:
        if error.code == "unauthorized":
            services.audit.refused(request.remote or "", error.message)
        raise
    note_sign_in(request, principal, "link")
    role: Literal["member", "operator"] = "operator" if principal.is_operator else "member"
    response = json_reply(SignedInAs(principal.owner, principal.name, role))
    set_cookie(request, response, cookie)
    response.headers["Cache-Control"] = "no-store"
    return response


def set_cookie(request: web.Request, response: web.Response, cookie: str) -> None:
    """Set the cookie by which a browser is signed in as a person."""
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=int(SESSION_LASTS_S),
        path="/",
        httponly=True,
        samesite="Strict",
        secure=is_secure(request),
    )


def is_secure(request: web.Request) -> bool:
    """Return whether the browser speaks HTTPS, to us or to a proxy in front that speaks HTTP to us."""
    return request.secure or request.headers.get("X-Forwarded-Proto", "").lower() == "https"


async def _body(request: web.Request) -> SignIn:
    """Return the body, reading no more than a token takes, because its sender has no key yet. Raises GatewayError."""
    body = bytearray()
    while len(body) <= MAX_BODY_BYTES and (
        piece := await request.content.read(MAX_BODY_BYTES + 1 - len(body))
    ):
        body += piece
    if len(body) > MAX_BODY_BYTES:
        raise GatewayError("frame_too_large", f"The body may have {MAX_BODY_BYTES} bytes at most.")
    try:
        return msgspec.json.decode(body, type=SignIn)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GatewayError("bad_request", f"The body was not understood: {error}") from error


async def sign_out(request: web.Request) -> web.Response:
    """Handle `POST /v1/sign-out`: end the browser's sign-in, with everything open by it."""
    services = request.app[SERVICES]
    principal = services.by_cookie(request)
    if principal is not None:
        ended = await services.sign_ins.sign_out(request.cookies[COOKIE])
        _note(request, "signed_out", principal)
        if ended is not None:
            await cut_off(services, ended)
    response = web.Response(status=204)
    response.del_cookie(COOKIE, path="/", httponly=True, samesite="Strict")
    return response


def note_sign_in(request: web.Request, principal: Principal, way: str) -> None:
    """Write into the audit log that a person has signed in. way: "link" or "oidc"."""
    _note(request, "signed_in", principal, way)


def _note(request: web.Request, what: What, principal: Principal, about: str = "") -> None:
    entry = Entry(
        what=what, who=principal.name, owner=principal.owner, place=request.remote or "", about=about
    )
    request.app[SERVICES].audit.note(entry)


ROUTES = (
    web.get("/sign-in", page("sign-in.html")),
    web.post("/v1/sign-in", sign_in),
    web.post("/v1/sign-out", sign_out),
)
