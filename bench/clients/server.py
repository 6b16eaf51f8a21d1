"""The one server that all clients ask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from bench.live.serving import demo_server

MODEL = "overture-demo"
LIMITS = "--kv-cache-gib 0.5 --kv-host-gib 0.25 --kv-disk-gib 0".split()


@contextlib.contextmanager
def started(url: str | None, say: Callable[[str], None]) -> Iterator[str]:
    """The address of a server with the demo model on a free loopback port, until the block ends; `url` itself where it is given.

    Raises RuntimeError where the server does not start.
    """
    if url:
        yield url.rstrip("/").removesuffix("/v1")
        return
    with demo_server(*LIMITS) as server:
        say(f"the server is ready at {server.url}")
        yield server.url
