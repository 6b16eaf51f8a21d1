"""Listening on a Unix socket in place of a port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

from aiohttp import web

from gateway.errors import StartupError

# The user that the server runs as. vLLM leaves it to the umask, by which others can mostly not connect, either.
MODE = 0o600
# A server that is alive takes a connection at once, unless it has no room for one. Chosen.
CONNECT_S = 1.0


class UnixSite(web.BaseSite):
    """A site of aiohttp's on a socket file, which is there from `start` until `remove`."""

    def __init__(self, runner: web.BaseRunner, path: Path, *, backlog: int) -> None:
        super().__init__(runner, backlog=backlog)
        self._path = path
        self._inode = 0

    @property
    def name(self) -> str:
        """The address at which the server answers."""
        return f"unix:{self._path}"

    async def start(self) -> None:
        """Listen. Raises StartupError where something else is at the path, or no socket can be made there."""
        bound = await asyncio.to_thread(_bound, self._path)
        self._inode = (await asyncio.to_thread(os.lstat, self._path)).st_ino
        await super().start()
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_unix_server(
            server, sock=bound, backlog=self._backlog
        )

    def remove(self) -> None:
        """Remove the file, unless another server has put its own there. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def _bound(path: Path) -> socket.socket:
    """Return a socket that is bound to a path and does not listen yet, so that no client can connect before the file has its mode."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_room(path)
        made.bind(str(path))
        os.chmod(path, MODE)
    except OSError as error:
        made.close()
        raise StartupError(f"uds: cannot listen on {path}: {error.strerror or error}") from error
    except StartupError:
        made.close()
        raise
    return made


def _make_room(path: Path) -> None:
    """Remove the socket that a dead server has left. Raises StartupError for anything else at the path; OSError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"uds: {path} is there and is no socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise StartupError(f"uds: another server listens on {path}: choose another path")
