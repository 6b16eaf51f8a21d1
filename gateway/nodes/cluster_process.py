"""The process that drives Ray for a gateway: `python -m gateway.nodes.cluster_process FORMAT LEVEL FD`."""

from __future__ import annotations

import os
import socket
import sys

from gateway.settings import logs


def main() -> None:
    """Drive Ray for the gateway that started this process, until the gateway ends."""
    log_format, log_level, fd = sys.argv[1:]
    # Ray and its native code write to the standard streams at will. Their lines are in Ray's logs, too, so the streams are closed to them.
    log_to = os.dup(2)
    logs.setup(log_format, log_level, stream=os.fdopen(log_to, "w", buffering=1, closefd=False))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    from engine_bridge.cluster import actors

    actors.drive(socket.socket(fileno=int(fd)), log_to)


if __name__ == "__main__":
    main()
