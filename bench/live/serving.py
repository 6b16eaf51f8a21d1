"""A server in a process of its own: started, waited for, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from bench.live.report import ROOT
from bench.live.soak.server import HOST, free_port

READY_TIMEOUT_S, CLOSE_TIMEOUT_S = 240.0, 60.0


class ServerProcess:
    """A command that serves on a port of loopback, until the block ends.

    Args:
        log: the file that gets what it prints.
        environ: all of its environment.
    """

    def __init__(
        self, command: Sequence[str], port: int, log: Path, folder: Path, environ: Mapping[str, str]
    ) -> None:
        self.url = f"http://{HOST}:{port}"
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=output,
                stderr=output,
                env=environ,
                process_group=0,  # Ctrl-C is the bench's to handle
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End it: by SIGTERM, then by force with all that it has started."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def wait(self, is_so: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Raises RuntimeError, with the end of what it has printed, where the server ends or takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"the server did not get ready:\n{self._log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.status_of("/readyz") == 200

    def status_of(self, path: str) -> int | None:
        """Of a GET; None where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None


def without_our_modules() -> dict[str, str]:
    """Our environment, from which this checkout cannot be imported."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@contextmanager
def demo_server(*flags: str, **variables: str) -> Iterator[ServerProcess]:
    """`overture serve` of this checkout with the demo model, ready, until the block ends. variables: of its environment, beside ours."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        command = [
            sys.executable,
            "-m",
            "gateway.cli",
            "serve",
            f"--port={port}",
            f"--data-dir={folder}/data",
        ]
        environ = os.environ | {"PYTHONPATH": str(ROOT)} | variables
        with ServerProcess([*command, *flags], port, folder / "server.log", ROOT, environ) as server:
            server.wait(server.is_ready)
            yield server
