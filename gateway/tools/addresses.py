"""MCP servers as the command line names them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

# Two underscores divide a server's name from a tool's (`catalog.offered_name`), so a server's own name has none.
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-]{0,31}")


def parse_mcp_servers(entries: Iterable[str]) -> dict[str, str]:
    """Return the addresses of servers by their names, in the order of "NAME=URL" entries.

    Raises:
        ValueError: with a text for the operator, for another form, a name that no server may have, and a name given twice. It quotes no address,
            which may hold a secret.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, _, url = (part.strip() for part in entry.partition("="))
        if not _NAME.fullmatch(name):
            raise ValueError(
                "expected NAME=URL, such as files=http://127.0.0.1:9000/mcp, where NAME has letters, digits and dashes, 32 at most"
            )
        if name in found:
            raise ValueError(f"the server {name!r} is given twice")
        if not _is_address(url):
            raise ValueError(f"the address of {name!r} must begin with http:// or https:// and name a host")
        found[name] = url
    return found


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
