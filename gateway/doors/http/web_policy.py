"""Steps that every HTTP request passes on its way in and out: errors in the caller's shape, origins, CORS, request ids and counts."""

from __future__ import annotations

import logging
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from itertools import dropwhile
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from opentelemetry.trace import StatusCode

from engine_bridge.protocol.api_errors import anthropic_type
from engine_bridge.protocol.errors import BridgeError
from engine_bridge.tracing import traceparent_of
from gateway.access.budgets import retry_after
from gateway.access.hosts import is_own_host, netloc
from gateway.doors.http.connections import has_left
from gateway.errors import GatewayError, as_gateway_error, to_openai_body
from gateway.services import SERVICES
from gateway.settings.config import Config
from gateway.turns.failures import from_bridge

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RETRY_AFTER_S = 3
BEGUN = web.RequestKey("begun", web.StreamResponse)  # of a request: the response whose head is on its way
REQUEST_ID_HEADER = "X-Request-Id"
LEFT_OUT_HEADER = "X-Overture-Left-Out"
# The session that an API call was found to belong to, whether or not its client named it.
FOUND_SESSION_HEADER = "X-Overture-Session"
HINTS_HEADER = "X-Overture-KV-Hints"
# Where Anthropic's SDKs look for the request's id.
ANTHROPIC_ID_HEADER = "Request-Id"
ANTHROPIC_VERSION_HEADER = "Anthropic-Version"
_EXPOSED = (
    "X-Session-Id",
    FOUND_SESSION_HEADER,
    REQUEST_ID_HEADER,
    ANTHROPIC_ID_HEADER,
    LEFT_OUT_HEADER,
    HINTS_HEADER,
    "Retry-After",
)
_REQUEST_ID = web.RequestKey("request_id", str)


class Trace(NamedTuple):
    """The W3C `traceparent` of the span that a request is served in, and when it came, in Unix seconds."""

    traceparent: str = ""
    begun_s: float = 0.0


TRACE = web.RequestKey("trace", Trace)
# A client's own id is repeated if it is short and visible ASCII. Chosen: two UUIDs and a trace id fit.
_SANE_ID = re.compile(r"[!-~]{1,128}")
# Names of headers, between commas, as a preflight asks for them (Fetch standard, "CORS-unsafe request-header names").
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:[ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
MAX_HEADER_NAMES_CHARS = 4096


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn any exception of a handler into a body of the API's own shape, so that no request ends as a bare 500."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _http_error(request, error)
    except GatewayError as error:
        return error_reply(request, error)
    except BridgeError as error:
        return error_reply(request, from_bridge(error))
    except Exception as error:
        if isinstance(error, ConnectionError) and has_left(request):
            raise  # so no error can be sent
        log.exception("%s %s failed", request.method, _route(request))
        return error_reply(request, as_gateway_error(error))


def _http_error(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.app[SERVICES].config.max_body_bytes
        wrapped = GatewayError("frame_too_large", f"The body is larger than the limit of {limit} bytes.")
    elif isinstance(error, web.HTTPMethodNotAllowed):
        wrapped = GatewayError("bad_request", f"{request.method} is not allowed on {request.path}.")
    elif isinstance(error, web.HTTPNotFound):
        wrapped = GatewayError("not_found", f"There is nothing at {request.path}.")
    else:
        wrapped = GatewayError("bad_request", error.reason)
    response = error_reply(request, wrapped, status=error.status)
    if "Allow" in error.headers:  # which methods would be: RFC 9110 §15.5.6 asks for it
        response.headers["Allow"] = error.headers["Allow"]
    return response


def speaks_anthropic(request: web.Request) -> bool:
    """Return whether a request is of Anthropic's API: by its route, or on routes that both APIs have by Anthropic's required header."""
    return request.path.startswith("/v1/messages") or (
        request.path.startswith("/v1/models") and ANTHROPIC_VERSION_HEADER in request.headers
    )


def error_body(request: web.Request, error: GatewayError, *, status: int | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape, or in Anthropic's for its routes."""
    if speaks_anthropic(request):
        kind = anthropic_type(status or error.http_status)
        details = {"details": error.details} if error.details is not None else {}
        return {"type": "error", "error": {"type": kind, "message": error.message} | details}
    return to_openai_body(error)


def error_reply(
    request: web.Request, error: GatewayError, *, status: int | None = None
) -> web.StreamResponse:
    """Return an error in OpenAI's shape, or in Anthropic's for its routes and clients. If an answer has begun, the connection is cut instead."""
    if BEGUN in request:
        if request.transport is not None:
            request.transport.abort()
        return request[BEGUN]
    status = status or error.http_status
    headers = {}
    if error.retryable or error.retry_after_s is not None:
        headers["Retry-After"] = str(retry_after(error.retry_after_s or RETRY_AFTER_S))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.Response(
        body=orjson.dumps(error_body(request, error, status=status)),
        status=status,
        content_type="application/json",
        headers=headers,
    )
    if status == 408:
        response.force_close()  # the rest of the body may still come, and must not be read as a request
    return response


@web.middleware
async def origins(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep other web pages out, and answer CORS where the operator has allowed an origin. Source: docs/operations/people.md.

    A browser sends `Origin` with every websocket and every request that could change something, so a page elsewhere cannot talk to a
    server on the user's own machine. Requests without `Origin` come from programs and pass.
    """
    config = request.app[SERVICES].config
    # Not `request.host`, which asks the DNS where the header is missing. Browsers always send it.
    named = request.headers.get("Host")
    is_for_all = config.has_api_keys or "*" in config.cors_origins
    if named is not None and not is_for_all and not _is_own_host(named, config):
        # A foreign name that was made to point here (DNS rebinding); its page sends no Origin when it reads.
        raise web.HTTPForbidden(
            reason="This name is not one of this server's: use its address, or name it with --cors-origin."
        )
    origin = request.headers.get("Origin")
    if origin is None:
        return await handler(request)
    is_cross = _is_cross_origin(origin, request, config)
    if is_cross and not _is_allowed(origin, config):
        raise web.HTTPForbidden(reason="Pages of this origin may not use this server (see --cors-origin).")
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return web.Response(status=204)
    return await handler(request)


@web.middleware
async def lead_to_route(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Redirect to a route where only slashes, or the number of times that the path begins with `/v1`, keep a path from being one.

    Clients put their path behind a base address that ends with a slash, or with `/v1`, or without. `vllm serve` redirects slashes at the end.
    """
    if request.match_info.http_exception is not None:
        given, mark, query = request.raw_path.partition("?")
        for path in _likely_paths(given):
            resolved = await request.app.router.resolve(request.clone(rel_url=path))
            if resolved.http_exception is None:
                raise web.HTTPTemporaryRedirect(path + mark + query)
    return await handler(request)


def _likely_paths(given: str) -> Iterator[str]:
    """Yield the paths that may have been meant, each with a single slash at its beginning: `//` would be another server."""
    parts = [part for part in given.split("/") if part]
    behind = list(dropwhile("v1".__eq__, parts))
    for likely in (parts, ["v1", *behind]):
        if behind and (path := "/" + "/".join(likely)) != given:
            yield path


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that all responses carry. A signal handler, called before the head is sent; it also notes that the response has begun."""
    request[BEGUN] = response
    response.headers["Server"] = "Overture"  # aiohttp's own tells which versions of it and of Python run here
    response.headers[REQUEST_ID_HEADER] = request_id(request)
    # Replies are one person's. A cache in front knows that of requests with a key, and not of those with a cookie, or whom a proxy names.
    response.headers.setdefault("Cache-Control", "no-store")
    if TRACE in request:
        response.headers["traceparent"] = request[TRACE].traceparent
    if speaks_anthropic(request):
        response.headers[ANTHROPIC_ID_HEADER] = request_id(request)
    origin = request.headers.get("Origin")
    config = request.app[SERVICES].config
    if origin is not None and _is_cross_origin(origin, request, config) and _is_allowed(origin, config):
        asked = request.headers.get("Access-Control-Request-Headers", "")
        response.headers.update(cors_headers(origin, asked))


def request_id(request: web.Request) -> str:
    """Return the name of a request in the reply, in ids of answers and in `/v1/engine/state`: the client's `X-Request-Id` if valid, else ours."""
    if _REQUEST_ID not in request:
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[_REQUEST_ID] = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
    return request[_REQUEST_ID]


def cors_headers(origin: str, asked: str) -> dict[str, str]:
    """Return the headers that let a page of an allowed origin use this server.

    asked: `Access-Control-Request-Headers` of a preflight. The SDKs for browsers send a dozen headers that change with each release
    (`x-stainless-lang`, `anthropic-version` …). All of them are allowed, because the origin decides here.
    """
    usual = f"Authorization, Content-Type, X-Session-Id, {REQUEST_ID_HEADER}, X-Api-Key"
    is_sane = len(asked) <= MAX_HEADER_NAMES_CHARS and _HEADER_NAMES.fullmatch(asked) is not None
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": asked if is_sane else usual,
        "Access-Control-Expose-Headers": ", ".join(_EXPOSED),
        "Access-Control-Max-Age": "600",
        "Vary": "Origin, Access-Control-Request-Headers",
    }


def _is_allowed(origin: str, config: Config) -> bool:
    return "*" in config.cors_origins or origin in config.cors_origins


def _is_cross_origin(origin: str, request: web.Request, config: Config) -> bool:
    host = netloc(origin)
    if host is None or host != request.headers.get("Host", "").lower():
        return True
    # The same name in both headers proves nothing when no key is asked for: see `origins`.
    return not config.has_api_keys and not _is_own_host(host, config)


def _is_own_host(host: str, config: Config) -> bool:
    own_names = (config.host, socket.gethostname())
    return is_own_host(host, origins=config.cors_origins, own_names=own_names, is_loopback=config.is_loopback)


@web.middleware
async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep a span for each call of an API, from its head to the last byte of its answer."""
    traces = request.app[SERVICES].traces
    if not traces.is_on or request.method != "POST" or not request.path.startswith("/v1/"):
        return await handler(request)
    route = _route(request)
    named = {"http.request.method": "POST", "http.route": route, "overture.request_id": request_id(request)}
    begun_s = time.time()
    with traces.request(f"POST {route}", request.headers.get("traceparent", ""), named, begun_s) as span:
        request[TRACE] = Trace(traceparent_of(span), begun_s)
        response = await handler(request)
        span.set_attribute("http.response.status_code", response.status)
        if response.status >= 500:
            span.set_status(StatusCode.ERROR)
        return response


@web.middleware
async def counts(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count requests by route and status."""
    status = 499  # the client went away
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as error:
        status = error.status
        raise
    finally:
        request.app[SERVICES].metrics.http.labels(_route(request), str(status)).inc()


def _route(request: web.Request) -> str:
    """Return the route's pattern, without the client's values: "/api/sessions/{id}"."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
