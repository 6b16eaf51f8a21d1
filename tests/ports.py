"""Ports for servers that are started by their command."""

from __future__ import annotations

import random
import socket

# Below those that the system gives out by itself, to connections and to servers of tests that run beside.
_FIRST, _LAST = 20_000, 30_000


def free_port() -> int:
    """One that nobody listens on now; whoever asks for any port never gets it."""
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
