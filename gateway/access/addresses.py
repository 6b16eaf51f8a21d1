"""What counts as one address: one machine, or one customer, may have many."""

from __future__ import annotations

import ipaddress


def address_of(host: str) -> str:
    """Return an address as it is counted: itself, or the /64 network of an IPv6 address, all of which one customer has (RFC 6177); "" for no address.

    An IPv4 address that is written as an IPv6 one is the IPv4 address; a zone is left out; the loopback address stays itself.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if not address.is_loopback:
            return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)).network_address)
    return str(address)
