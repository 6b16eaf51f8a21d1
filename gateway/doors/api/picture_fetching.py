"""Pictures that a call names by an address: fetched from hosts that the operator allows, within bounds, and never from a private address."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from engine_bridge.calls.pictures import replace_urls, urls_of
from gateway.errors import GatewayError
from gateway.settings.config import Config

# The longest time to fetch all pictures of a call. Chosen: a slow host delays only the call that names it.
FETCH_S = 15.0
_PIECE_BYTES = 1 << 16
# IPv4 addresses written as IPv6 ones, private ones among them (RFC 6052, 8215, 4291, 2765), and networks that are routed inside of sites only.
_NOT_PUBLIC = [
    ipaddress.ip_network(each)
    for each in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96", "fec0::/10", "5f00::/16")
]


class PublicAddresses(AbstractResolver):
    """Resolves names to public addresses only: a name may point to a private one, and to another one each time it is asked for."""

    def __init__(self) -> None:
        self._resolver = ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        """Return a host's public addresses. Raises OSError if it has none."""
        found = [each for each in await self._resolver.resolve(host, port, family) if is_public(each["host"])]
        if not found:
            raise OSError("it has no public address")
        return found

    async def close(self) -> None:
        """Do nothing: nothing is kept."""


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the internet at large."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        if any(parsed in network for network in _NOT_PUBLIC):
            return False
        parsed = parsed.ipv4_mapped or parsed.sixtofour or parsed
    return parsed.is_global and not parsed.is_multicast


async def fetch_pictures(config: Config, body: Any, resolver: AbstractResolver | None = None) -> None:
    """Put the data of pictures in the places of their addresses in a call's body, where the operator allows the host.

    Addresses of other hosts stay: the node refuses them. Redirects are not followed, since they may lead to any other host.

    Args:
        config: says which hosts are allowed, and how large a body may be: all of a call's pictures together are no larger.
        body: the call's body, which is changed.
        resolver: finds the addresses of hosts; None: `PublicAddresses`.

    Raises:
        GatewayError: `bad_request` for a picture that cannot be had.
    """
    if not config.allow_image_hosts:
        return
    urls = urls_of(body)
    wanted = Counter(url for url in urls if is_allowed(url, config.allow_image_hosts))
    if not wanted or len(urls) > config.max_images:
        return
    connector = aiohttp.TCPConnector(resolver=resolver or PublicAddresses(), use_dns_cache=False)
    timeout = aiohttp.ClientTimeout(total=FETCH_S)
    # A compressed reply could unpack to any size.
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as http:
        room = _Room(config.max_body_bytes)
        fetched = await asyncio.gather(*(_fetch(http, url, num, room) for url, num in wanted.items()))
    replace_urls(body, dict(zip(wanted, fetched, strict=True)))


def is_allowed(url: str, hosts: Sequence[str]) -> bool:
    """Return whether pictures may be fetched from this address: an http(s) address of one of these hosts."""
    try:
        split = urlsplit(url)
        host = split.hostname or ""
    except ValueError:
        return False
    return split.scheme in ("http", "https") and host in {each.lower() for each in hosts}


class _Room:
    """The bytes that the pictures of a call may still take."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> None:
        """Take room for this many bytes. Raises ValueError where too little is left."""
        self._left -= num_bytes
        if self._left < 0:
            raise ValueError("the pictures are larger than a body may be (max_body_bytes)")


async def _fetch(http: aiohttp.ClientSession, url: str, num_mentions: int, room: _Room) -> str:
    """Return a picture as a `data:` URL. It takes room for each time that the call mentions it. Raises GatewayError."""
    host = urlsplit(url).hostname or ""
    try:
        is_address = host.replace(".", "").isdigit() or ":" in host  # which is not resolved
        if is_address and not is_public(host):
            raise ValueError("it is a private address")
        async with http.get(url, allow_redirects=False) as reply:
            if reply.status != 200:
                raise ValueError(f"the host answered {reply.status}")
            if not reply.content_type.startswith("image/") or "Content-Encoding" in reply.headers:
                raise ValueError("it is no picture")
            data = bytearray()
            async for piece in reply.content.iter_chunked(_PIECE_BYTES):
                # Four bytes of a body for three of a picture.
                room.take(num_mentions * len(piece) * 4 // 3)
                data += piece
            encoded = await asyncio.to_thread(base64.b64encode, data)
            return f"data:{reply.content_type};base64,{encoded.decode()}"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        is_ours = isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError)
        why = str(error) if is_ours else "the host cannot be reached in time"
        raise GatewayError(
            "bad_request", f"The picture at {url[:200]!r} could not be fetched: {why}.", param="messages"
        ) from error
