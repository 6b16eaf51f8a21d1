"""Servers as users run them: processes that are started, watched and told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from overture_client.chat import ChatClient
from overture_client.chat_frames import Delta, Done
from tests.conftest import ROOT

OVERTURE = (sys.executable, "-m", "gateway.cli")


@contextlib.asynccontextmanager
async def serving(
    port: int, data_dir: Path, *flags: str, overture: Sequence[str | Path] = OVERTURE, folder: Path = ROOT
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`overture serve` until the block ends, however it ends. `overture` is the command, `folder` where it is started.

    Outside of the checkout, the checkout's modules cannot be imported.
    """
    environ = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    if folder != ROOT:
        environ.pop("PYTHONPATH", None)
    # Where the tests run under nohup, the server would inherit that it ignores hang-ups, and would rightly go on ignoring them.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = await asyncio.create_subprocess_exec(
        *(*overture, "serve", "--port", str(port), "--data-dir", str(data_dir)),
        *("--kv-host-gib", "0.25", *flags),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        env=environ,
    )
    signal.signal(signal.SIGHUP, before)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def output_until(process: asyncio.subprocess.Process, word: bytes) -> list[bytes]:
    """The lines of stdout up to one that holds `word`."""
    assert process.stdout is not None
    lines = []
    async with asyncio.timeout(180):
        while not (lines and word in lines[-1]):
            line = await process.stdout.readline()
            assert line, f"the server ended before it said {word!r}: {lines}"
            lines.append(line)
    return lines


async def drains(
    process: asyncio.subprocess.Process,
    client: ChatClient,
    *signals: signal.Signals,
    session_id: str | None = None,
) -> None:
    """A running answer may finish after these signals, then the server ends."""
    events = client.ask("Hello, how are you?", session_id=session_id, sampling={"temperature": 0})
    async for event in events:
        if isinstance(event, Delta):
            for each in signals:
                process.send_signal(each)
            break
    rest = [event async for event in events]
    assert isinstance(rest[-1], Done), "a running answer may finish while the server drains"
    async with asyncio.timeout(60):
        assert await process.wait() == 0
