"""The one server that all clients ask."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.live.report import ROOT

MODEL = "overture-demo"
LIMITS = "--kv-cache-gib 0.5 --kv-host-gib 0.25 --kv-disk-gib 0".split()
CLOSE_TIMEOUT_S = 60.0


@contextlib.contextmanager
def started(url: str | None, say: Callable[[str], None]) -> Iterator[str]:
    """The address of a server with the demo model on a free loopback port, until the block ends; `url` itself where it is given.

    Raises RuntimeError where the server does not start.
    """
    if url:
        yield url.rstrip("/").removesuffix("/v1")
        return
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        command = [
            sys.executable,
            "-m",
            "gateway.cli",
            "serve",
            "--port=0",
            f"--data-dir={folder}/data",
            *LIMITS,
        ]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            address = _address(process)
            if address is None:
                raise RuntimeError(f"the server did not start:\n{Path(folder, 'log').read_text()[-2000:]}")
            say(f"the server is ready at {address}")
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_TIMEOUT_S)
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str]) -> str | None:
    """The server's address once it is ready; None where it ends before."""
    assert process.stdout is not None
    address = None
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            address = found[0]
        if " ready: " in line and address is not None:
            return address
    return None
