"""`python -m gateway.commands.health_check`: whether the server of this environment and config file is healthy. For container images.

The exit status is 0 if `/health` answers with 200, and 1 if not.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys

from gateway.settings.config import Config
from gateway.settings.sources import load_config

TIMEOUT_S = 4.0  # chosen: below the image's own five seconds


def is_healthy(config: Config) -> bool:
    """Ask the server with these settings, on this machine. Blocks for TIMEOUT_S at most. Raises OSError, http.client.HTTPException."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = _connected(config)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def _connected(config: Config) -> socket.socket:
    if config.uds is not None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(TIMEOUT_S)
        made.connect(str(config.uds))
        return made
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    plain = socket.create_connection((host.strip("[]"), config.port), TIMEOUT_S)
    if config.ssl_certfile is None:
        return plain
    # The certificate is for the name that clients use, which is not this one.
    context = ssl._create_unverified_context()
    return context.wrap_socket(plain)


def main() -> int:
    """Return the exit status; print why the server is not healthy."""
    try:
        if is_healthy(load_config()):
            return 0
        print("the server is not ready", file=sys.stderr)
    except (OSError, http.client.HTTPException) as error:
        print(f"the server does not answer: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
