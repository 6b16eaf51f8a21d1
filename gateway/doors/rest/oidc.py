"""`/v1/sign-in/oidc`: a browser signs in at the provider of the settings, and gets the cookie that a link gives. Source: docs/protocol.md."""

from __future__ import annotations

import html
import logging
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.access.addresses import address_of
from gateway.doors.http.bodies import json_reply
from gateway.doors.pages.serving import PAGE_HEADERS
from gateway.doors.rest.sign_in import is_secure, note_sign_in, set_cookie
from gateway.doors.rest.trusted_user import person_named
from gateway.errors import GatewayError
from gateway.people.oidc import MAX_COOKIE_CHARS, Attempt, OidcProvider
from gateway.services import SERVICES, Services

log = logging.getLogger(__name__)

ATTEMPT_COOKIE = "overture_oidc"
ATTEMPT_LASTS_S = 600  # Chosen: a person finds a password within ten minutes.
BEGIN, CALLBACK = "/v1/sign-in/oidc", "/v1/sign-in/oidc/callback"


class WaysIn(Struct, frozen=True):
    """The ways in which a person may sign in. "oidc": at `/v1/sign-in/oidc`."""

    ways: list[Literal["key", "link", "oidc"]]


async def ways_in(request: web.Request) -> web.Response:
    """Handle `GET /v1/sign-in`."""
    services = request.app[SERVICES]
    ways: list[Literal["key", "link", "oidc"]] = [] if services.keys.is_open else ["key", "link"]
    return json_reply(WaysIn([*ways, "oidc"] if services.oidc is not None else ways))


async def begin(request: web.Request) -> web.Response:
    """Handle `GET /v1/sign-in/oidc`: send the browser to the provider."""
    services = request.app[SERVICES]
    try:
        provider = _provider(services, request)
        attempt = provider.begin()
        address = await provider.address(attempt, _redirect_uri(request))
    except GatewayError as error:
        return _problem(request, error)
    response = web.Response(status=302, headers={"Location": address, "Cache-Control": "no-store"})
    response.set_cookie(
        ATTEMPT_COOKIE,
        attempt.secret,
        max_age=ATTEMPT_LASTS_S,
        path=f"{services.config.root_path}{BEGIN}",
        httponly=True,
        samesite="Lax",  # the provider's page, which is another site's, sends the browser back
        secure=is_secure(request),
    )
    return response


async def callback(request: web.Request) -> web.Response:
    """Handle `GET /v1/sign-in/oidc/callback`: the provider sent the browser back."""
    services = request.app[SERVICES]
    response = await _signed_in(services, request)
    response.headers["Cache-Control"] = "no-store"
    response.del_cookie(
        ATTEMPT_COOKIE, path=f"{services.config.root_path}{BEGIN}", httponly=True, samesite="Lax"
    )
    return response


async def _signed_in(services: Services, request: web.Request) -> web.Response:
    try:
        provider = _provider(services, request)
        secret = request.cookies.get(ATTEMPT_COOKIE, "")
        if not secret or len(secret) > MAX_COOKIE_CHARS:
            raise GatewayError(
                "unauthorized", "This sign-in was begun elsewhere, or too long ago. Begin again."
            )
        name = await provider.person(Attempt(secret), request.query, _redirect_uri(request))
        named = await person_named(services, name, request.remote or "", "signed in at the OIDC provider")
        if not named.owner:
            raise GatewayError("unauthorized", named.why_not)
        cookie, principal = await services.sign_ins.begin(named.owner)
    except GatewayError as error:
        return _problem(request, error)
    note_sign_in(request, principal, "oidc")
    response = web.Response(status=302, headers={"Location": f"{services.config.root_path}/"})
    set_cookie(request, response, cookie)
    return response


def _provider(services: Services, request: web.Request) -> OidcProvider:
    """Return the provider. Raises GatewayError `not_found` without one, `rate_limited`."""
    if services.oidc is None:
        raise GatewayError("not_found", "This server has no OIDC provider (--oidc-issuer).")
    # Anybody may ask this, so it is counted by address.
    services.budgets.count(f"sign-ins from {address_of(request.remote or '')}")
    return services.oidc


def _redirect_uri(request: web.Request) -> str:
    """Return the address to which the provider sends the browser back, which its settings for this server must list."""
    scheme = "https" if is_secure(request) else "http"
    root = request.app[SERVICES].config.root_path
    return f"{scheme}://{request.headers.get('Host', '')}{root}{CALLBACK}"


def _problem(request: web.Request, error: GatewayError) -> web.Response:
    """Return a page that says why the sign-in failed, for a browser; for any other client raise the error."""
    log.warning("a sign-in by OIDC failed: %s", error.__cause__ or error.message)
    if error.code == "unauthorized":
        request.app[SERVICES].audit.refused(request.remote or "", error.message)
    if "text/html" not in request.headers.get("Accept", ""):
        raise error
    root = html.escape(request.app[SERVICES].config.root_path)
    text = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Not signed in</title><link rel=stylesheet href='{root}/static/css/base.css'><main><h1>Not signed in</h1>"
        f"<p>{html.escape(error.message)}<p><a href='{root}{BEGIN}'>Try again</a> or <a href='{root}/'>go to the chat</a></main>"
    )
    return web.Response(text=text, content_type="text/html", status=error.http_status, headers=PAGE_HEADERS)


ROUTES = (
    web.get("/v1/sign-in", ways_in),
    web.get(BEGIN, begin),
    web.get(CALLBACK, callback),
)
