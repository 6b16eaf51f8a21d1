"""A server in a process of its own: every live bench starts, awaits and ends its servers here."""

from __future__ import annotations

import os
import signal
import socket
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

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.live.shared.report import ROOT

HOST = "127.0.0.1"
READY_TIMEOUT_S, CLOSE_TIMEOUT_S, METRICS_TIMEOUT_S = 240.0, 60.0, 60.0
# Beside other engines OpenMP's threads must sleep, not spin, while theirs has nothing to do.
QUIET_OPENMP = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


class ServerFailed(RuntimeError):
    """A server ended, or did not become ready in time. The message has the end of its log."""


def free_port() -> int:
    """Return a port of loopback on which no process listens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A command that serves on a port of loopback until the block ends.

    Args:
        log: the file to which the command's output is appended.
        environ: the whole environment of the command.
    """

    def __init__(
        self, command: Sequence[str], port: int, log: Path, folder: Path, environ: Mapping[str, str]
    ) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self._log = log
        with log.open("ab") as output:
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
        """Stop the server."""
        self.stop()

    def stop(self) -> None:
        """End the server by SIGTERM and, if it takes more than CLOSE_TIMEOUT_S, by force with all of its processes."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def wait(self, is_so: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once `is_so` holds. Raises ServerFailed if the server ends first or `timeout_s` seconds pass."""
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise ServerFailed(f"the server did not get so far:\n{self.log_tail()}")
            time.sleep(0.1)

    def log_tail(self) -> str:
        """Return the last 3,000 characters of the server's log."""
        return self._log.read_text(errors="replace")[-3000:]

    def is_ready(self) -> bool:
        """Return whether the server accepts requests."""
        return self.status_of("/readyz") == 200

    def status_of(self, path: str) -> int | None:
        """Return the status of a GET of `path`, or None if the server does not answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None


def samples(url: str, name: str, key: str = "") -> list[Sample]:
    """Return the samples of one metric of a server. name: of the samples. key: an operator's, where the server takes keys. Raises OSError."""
    request = urllib.request.Request(
        f"{url}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    with urllib.request.urlopen(request, timeout=METRICS_TIMEOUT_S) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return [sample for family in families for sample in family.samples if sample.name == name]


def without_our_modules() -> dict[str, str]:
    """Return this process's environment without the variable by which Python would import this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class OvertureServer(ServerProcess):
    """`overture serve` of a checkout, on this interpreter.

    Args:
        log: the file to which the server's output is appended.
        command: the module that serves, with its first arguments.
        port: the port to serve on; 0 for a free port.
        variables: of the server's environment, beside this process's.
    """

    def __init__(
        self,
        log: Path,
        *flags: str,
        checkout: Path = ROOT,
        command: Sequence[str] = ("gateway.cli", "serve"),
        port: int = 0,
        **variables: str,
    ) -> None:
        port = port or free_port()
        environ = os.environ | {"PYTHONPATH": str(checkout)} | variables
        whole = [sys.executable, "-m", *command, f"--port={port}", *flags]
        super().__init__(whole, port, log, checkout, environ)


@contextmanager
def demo_server(*flags: str, **variables: str) -> Iterator[ServerProcess]:
    """Serve the demo model of this checkout; yield the server once it is ready, and stop it when the block ends.

    flags: further ones of `overture serve`. variables: of the server's environment, beside this process's.
    """
    with tempfile.TemporaryDirectory() as name:
        log, data = Path(name) / "server.log", f"--data-dir={name}/data"
        with OvertureServer(log, data, *flags, **variables) as server:
            server.wait(server.is_ready)
            yield server
