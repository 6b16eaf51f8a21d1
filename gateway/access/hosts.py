"""Names that a request may call this server by where no key is asked for. Pure.

A page elsewhere can have its own name point at this server (DNS rebinding): to the browser the server is then that page's origin, and the page
can read everything. Such a name must be one that its owner can bind in the public DNS; no other name gives its page anything.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

# Names below these are never in the public DNS. Source: RFC 6761 (localhost), RFC 6762 (local), RFC 8375 (home.arpa), ICANN 2024 (internal).
_LOOPBACK_NAMES = ("localhost",)
_PRIVATE_NAMES = ("local", "internal", "home.arpa")
# What browsers send besides the origin of a page: of a file, or a frame without an origin. "*" stands for all origins.
_NO_PAGES = ("*", "null")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._:\[\]-]*)/?")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def as_origin(written: str) -> str | None:
    """Return an origin that an operator has written as browsers send it: in lower case, with no slash behind it, and without its scheme's usual port.

    Returns None for what no browser sends: a name without a scheme, or with letters that its punycode (`xn--…`) lacks, an address with a path or a
    user, a pattern. Source: RFC 6454 §6.2.
    """
    origin = written.strip().lower()
    if origin in _NO_PAGES:
        return origin
    parts = _ORIGIN.fullmatch(origin)
    if parts is None:
        return None
    scheme, place = parts.groups()
    return f"{scheme}://{place.removesuffix(_USUAL_PORTS.get(scheme, ' '))}"


def netloc(origin: str) -> str | None:
    """Return host and port of an origin, in lower case; None for an origin without them ("null", "*")."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def is_own_host(
    host: str, *, origins: Collection[str], own_names: Collection[str], is_loopback: bool
) -> bool:
    """Return whether a `Host` header names this server in a way that no page elsewhere could.

    Such names are addresses, names that the public DNS cannot have, and hosts that the operator gave.

    Args:
        host: the header's value.
        origins: allowed by the operator; their hosts may be named.
        own_names: of this machine.
        is_loopback: only this machine reaches the server, so `localhost` is the one name that it has without the operator.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if host.lower() in {netloc(origin) for origin in origins} or _is_below(name, _LOOPBACK_NAMES):
        return True
    if _is_address(name):
        return True
    if is_loopback or not name:
        return False
    # A name of one word belongs to a machine or a container in a private network (RFC 7085).
    is_private = "." not in name or _is_below(name, _PRIVATE_NAMES)
    return is_private or name in {own.lower() for own in own_names}


def _is_below(name: str, tops: Collection[str]) -> bool:
    return any(name == top or name.endswith(f".{top}") for top in tops)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
