"""People whom a reverse proxy names by a header, after it has signed them in itself (`--trusted-user-header`).

Whoever may send that header may be anybody, so it counts from this machine and from the proxies that the operator named, and from nobody else.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from aiohttp import web

from gateway.errors import GatewayError
from gateway.settings.config import Config


class NamedByProxy(NamedTuple):
    """A person of a request. owner: "" where this name cannot be signed in; then `why_not` says why, for the person."""

    name: str
    owner: str
    why_not: str = ""


NAMED_BY_PROXY = web.RequestKey("named_by_proxy", NamedByProxy)


class TrustedHeader:
    """The header that names people, and the peers that may send it. config: names both."""

    def __init__(self, config: Config) -> None:
        self.name = config.trusted_user_header
        self._is_at_a_path = config.uds is not None
        self._proxies = [ipaddress.ip_network(proxy, strict=False) for proxy in config.trusted_proxies]

    def person_in(self, values: Sequence[str], peer: str) -> str | None:
        """Return the name of the person whom a request's headers of this name give; None where none is given, or the peer may not give any.

        Args:
            values: of all headers of this name.
            peer: the address of the other end of the connection; "" on a Unix socket, which only the server's own user can open, and of a client
                that hung up before anybody looked at its connection.

        Raises:
            GatewayError: `bad_request` for more than one name: one of them came from elsewhere than from the proxy.
        """
        if not self.name or not self._is_trusted(peer):
            return None
        if len(values) > 1 or any("," in value for value in values):
            message = f"The header {self.name} names more than one person: the proxy must replace what its clients send."
            raise GatewayError("bad_request", message)
        return values[0].strip() or None if values else None

    def _is_trusted(self, peer: str) -> bool:
        if not peer:
            return self._is_at_a_path
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback or any(address in proxy for proxy in self._proxies)
