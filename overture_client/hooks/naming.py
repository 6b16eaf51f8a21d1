"""Ways in which the hooks put an agent's session into its requests, and the warning where they cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

# Gives the headers for a request to this address, which is sent right now; none for a request that no agent of ours sends.
HeadersFor = Callable[[str], Mapping[str, str]]

HTTP_LIBRARIES = "httpx", "httpx2"
_MARK = "names_sessions"
_LOOPBACK = "localhost", "127.0.0.1", "::1"
_asked: list[HeadersFor] = []


def same_server(url: str, other: str) -> bool:
    """Return whether two addresses name the same host and port. The names of this machine are one."""

    def place(address: str) -> tuple[str, int]:
        """Return host and port of an address."""
        parts = urlsplit(address)
        host = parts.hostname or ""
        return "localhost" if host in _LOOPBACK else host, parts.port or (
            443 if parts.scheme == "https" else 80
        )

    return place(url) == place(other)


def add_to_requests(headers_for: HeadersFor) -> None:
    """Let every request that httpx (or httpx2, as newer SDKs) sends in this process carry `headers_for(url)`.

    Headers that a request has already stay. Most clients of language models send by httpx, and many frameworks make theirs where no hook can
    reach them. Calling it again with the same function changes nothing.
    """
    if headers_for not in _asked:
        _asked.append(headers_for)
    for name in HTTP_LIBRARIES:
        with suppress(ImportError):
            _wrap(import_module(name))


def _wrap(library: Any) -> None:
    """Let the clients of `library` name their requests. Does nothing the second time."""
    send, send_async = library.Client.send, library.AsyncClient.send
    if getattr(send, _MARK, False):
        return

    def named_send(self: Any, request: Any, *args: Any, **more: Any) -> Any:
        """Send a request with its session's headers."""
        _name(request)
        return send(self, request, *args, **more)

    async def named_send_async(self: Any, request: Any, *args: Any, **more: Any) -> Any:
        """Send a request with its session's headers."""
        _name(request)
        return await send_async(self, request, *args, **more)

    setattr(named_send, _MARK, True)
    library.Client.send, library.AsyncClient.send = named_send, named_send_async


def _name(request: Any) -> None:
    for headers_for in _asked:
        for header, value in headers_for(str(request.url)).items():
            request.headers.setdefault(header, value)


def warn_unnamed(framework: str, agents: Iterable[str], remedy: str) -> None:
    """Warn once about all agents whose requests will carry no session, so that no advisory can meet them. No agents: no warning.

    remedy: what the user can do, a sentence.
    """
    names = ", ".join(sorted(agents))
    if names:
        warnings.warn(
            f"{framework}: requests of {names} will not carry their sessions, so advisories cannot warm anything for them. {remedy}",
            UserWarning,
            stacklevel=3,
        )
