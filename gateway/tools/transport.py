"""The SDK's client of one server, over HTTP that reads no reply longer than a bound.

It is imported when a server is first asked, because the SDK is slow to load.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client


class ReplyTooLong(httpx2.ReadError):
    """A server's reply is longer than the bound, or packed, so that its length cannot be told."""


def http_client(tls: ssl.SSLContext, max_bytes: int) -> httpx2.AsyncClient:
    """Make an HTTP client that trusts these certificates and reads at most `max_bytes` bytes of a reply. It reads files: not for the event loop."""
    # A packed reply could be a thousand times longer than what is counted. The caller bounds the time of everything together.
    headers = {"Accept-Encoding": "identity"}
    return httpx2.AsyncClient(transport=BoundedTransport(tls, max_bytes), headers=headers, timeout=None)


@asynccontextmanager
async def client_of(url: str, http: httpx2.AsyncClient, max_bytes: int) -> AsyncIterator[Client]:
    """Connect to a server for the block.

    Args:
        url: its address. A redirect is followed within its origin only (the SDK sees to that).
        http: from `http_client`; closed at the end.
        max_bytes: of one event of a reply.

    Yields:
        The client, after the handshake.
    """
    async with http:
        transport = streamable_http_client(url, http_client=http, max_sse_event_size=max_bytes)
        async with Client(transport, cache=None) as client:
            yield client


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """HTTP whose replies end with an error behind `max_bytes` bytes."""

    def __init__(self, tls: ssl.SSLContext, max_bytes: int) -> None:
        super().__init__(verify=tls)
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; see httpx2. Raises ReplyTooLong for a packed reply."""
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise ReplyTooLong("a packed reply")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = BoundedStream(response.stream, self._max_bytes)
        return response


class BoundedStream(httpx2.AsyncByteStream):
    """The bytes of a reply, up to a bound."""

    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._left = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._left -= len(chunk)
            if self._left < 0:
                raise ReplyTooLong("a reply that is too long")
            yield chunk

    async def aclose(self) -> None:
        """End the reply."""
        await self._stream.aclose()
