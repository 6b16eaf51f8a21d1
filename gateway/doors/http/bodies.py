"""Bodies of requests and replies over HTTP: JSON in and out, in pieces of bounded size."""

from __future__ import annotations

import asyncio
import codecs
import json
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from gateway.doors.api.call_size import check_shape
from gateway.errors import GatewayError
from gateway.half_characters import without_halves
from gateway.json_shape import shape_of
from gateway.services import SERVICES

# Larger bodies are checked in a thread. Chosen: a body of this size takes a third of a millisecond.
INLINE_BYTES = 1 << 16


T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_reply(value: Any, status: int = 200) -> web.Response:
    """Return a JSON response of builtins or msgspec structs."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def json_body(request: web.Request, at_least_values: int = 0) -> Any:
    """Return the request's JSON value.

    Args:
        request: not read so far.
        at_least_values: for routes whose bodies have more values than a prompt: this many are allowed even if `max_json_values` is lower.

    Raises:
        GatewayError: `bad_request`.
        HTTPRequestEntityTooLarge: aiohttp's own error for a body that is too large.
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
        whole = await asyncio.to_thread(without_halves, body) if "surrogate" in str(error) else None
        if whole is None:
            raise _no_json(error) from error
    try:
        return orjson.loads(whole)
    except orjson.JSONDecodeError as error:
        raise _no_json(error) from error


def _no_json(error: orjson.JSONDecodeError) -> GatewayError:
    return GatewayError("bad_request", f"The body is not valid JSON: {error}")


def _as_utf8(body: bytes) -> bytes:
    """Return the text in UTF-8 without a byte order mark: some programs send one, or UTF-16 (RFC 4627 §3). Raises GatewayError."""
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
    """Decompress a body. Raises GatewayError, or HTTPRequestEntityTooLarge if it is larger than the limit when decompressed."""
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
    """Decompress at most `max_bytes` of a gzip or zlib stream, or of a raw deflate stream, which some clients send (RFC 9110 §8.4.1.2)."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, max_bytes)
    except zlib.error:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(body, max_bytes)


async def _check_shape(request: web.Request, body: bytes, at_least_values: int) -> None:
    """Raise InvalidRequest for a body that would take long to decode, because no other request is served meanwhile."""
    services = request.app[SERVICES]
    shape = await asyncio.to_thread(shape_of, body) if len(body) > INLINE_BYTES else shape_of(body)
    config = services.config
    check_shape(
        *shape,
        max_values=config.json_values(services.node.max_model_len, at_least_values),
        max_depth=config.max_json_depth,
    )


async def struct_body(request: web.Request, kind: type[T]) -> T:
    """Return the request's JSON value as a struct of its own; no body is an empty object. Raises what `json_body` does."""
    return as_struct(await json_body(request) if request.can_read_body else {}, kind)


def as_struct(value: Any, kind: type[T], what: str = "body") -> T:
    """Return a JSON value as a struct. what: names it in the error. Raises GatewayError `bad_request`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise GatewayError("bad_request", f"The {what} was not understood: {error}") from error


def in_place(handler: Handler) -> Handler:
    """Wrap a route of one owner's conversations, so that each request holds one of the owner's places.

    It holds the place until its answer was sent, and ends when the key is withdrawn. These places are separate from those of API calls, so that
    many calls of a key do not close its page. They also bound the replies that are held for slow clients.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        """Run the handler and send its response within a place."""
        services = request.app[SERVICES]
        principal = services.principal(request)
        with services.budgets.enter(f"conversations of {principal.owner}"):
            async with services.calls.of(principal):
                response = await handler(request)
                await response.prepare(request)
                await response.write_eof()
                return response

    return handle
