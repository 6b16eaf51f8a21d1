"""The SDK's client of one server, over HTTP that reads no reply longer than a bound.

It is imported when a server is first asked, because the SDK is slow to load.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from gateway.json_shape import ValueCounter

# Of one reply, before it is decoded: the SDK decodes and checks it in steps, each of which holds up all other requests. Measured: 2 µs a value at
# the most, in lists of tools without a description; half of that in ordinary ones. Five hundred tools have so many.
MAX_VALUES = 20_000


class ReplyTooLong(httpx2.ReadError):
    """A server's reply is longer than the bound, or packed, so that its length cannot be told."""


class TooManyValues(ReplyTooLong):
    """A server's reply would take long to decode, whatever its length."""


def http_client(transport: BoundedTransport) -> httpx2.AsyncClient:
    """Make an HTTP client for a transport. It reads files: not for the event loop."""
    # A packed reply could be a thousand times longer than what is counted. The caller bounds the time of everything together.
    headers = {"Accept-Encoding": "identity"}
    return httpx2.AsyncClient(transport=transport, headers=headers, timeout=None)


@asynccontextmanager
async def client_of(url: str, http: httpx2.AsyncClient, transport: BoundedTransport) -> AsyncIterator[Client]:
    """Connect to a server for the block.

    Args:
        url: its address. A redirect is followed within its origin only (the SDK sees to that).
        http: from `http_client`; closed at the end.
        transport: what `http` uses.

    Yields:
        The client, after the handshake.

    Raises:
        ReplyTooLong: a reply was too long, whatever the SDK made of that: it tells only that a stream has ended.
    """
    try:
        async with http:
            connected = streamable_http_client(url, http_client=http, max_sse_event_size=transport.max_bytes)
            async with Client(connected, cache=None) as client:
                yield client
    except Exception as error:
        if transport.refused is not None and transport.refused is not error:
            raise transport.refused from error
        raise


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """HTTP whose replies end with an error behind `max_bytes` bytes, or behind MAX_VALUES values.

    Args:
        tls: the certificates to trust.
        max_bytes: of one reply.

    Attributes:
        refused: why a reply was not read; None while all were.
        on_refused: is called when that happens, with the reason.
    """

    def __init__(self, tls: ssl.SSLContext, max_bytes: int) -> None:
        super().__init__(verify=tls)
        self.max_bytes = max_bytes
        self.refused: ReplyTooLong | None = None
        self.on_refused: Callable[[ReplyTooLong], object] = lambda error: None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; see httpx2. Raises ReplyTooLong for a packed reply."""
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise self.refuse(ReplyTooLong("a packed reply"))
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = BoundedStream(response.stream, self)
        return response

    def refuse(self, error: ReplyTooLong) -> ReplyTooLong:
        """Note why a reply is not read, and return that."""
        self.refused = error
        self.on_refused(error)
        return error


class BoundedStream(httpx2.AsyncByteStream):
    """The bytes of a reply, up to the bounds of its transport."""

    def __init__(self, stream: httpx2.AsyncByteStream, transport: BoundedTransport) -> None:
        self._stream, self._transport = stream, transport
        self._left = transport.max_bytes
        self._counter = ValueCounter()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._left -= len(chunk)
            if self._left < 0:
                raise self._transport.refuse(ReplyTooLong("a reply that is too long"))
            if self._counter.add(chunk) > MAX_VALUES:
                raise self._transport.refuse(TooManyValues("a reply of too many values"))
            yield chunk

    async def aclose(self) -> None:
        """End the reply."""
        await self._stream.aclose()
