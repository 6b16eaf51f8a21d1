"""The gateway as a user runs it: a process that is killed, started again and told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from gateway.auth import generate_key, key_file_line
from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta, Done
from tests.conftest import ROOT

KV_ON_DISK = 'overture_kv_blocks{tier="disk"}'
LONG = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}


SECRET = "My secret word is Fezin. I like long walks by the sea, old maps, and coffee in the morning."
QUESTION = "What is my secret word?"


async def figure(http: aiohttp.ClientSession, name: str) -> float:
    """The value of the line of `/metrics` that starts with `name`."""
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


async def kv_is_written(http: aiohttp.ClientSession) -> None:
    """Wait until the disk holds KV and no finished block waits for it."""
    async with asyncio.timeout(60):
        while not (
            await figure(http, KV_ON_DISK) and await figure(http, "overture_kv_write_queue_blocks") == 0
        ):
            await asyncio.sleep(0.3)


async def warmed(http: aiohttp.ClientSession, session_id: str) -> None:
    """Tell that the session's next request is near, and wait until its KV is on the device."""
    async with http.post("/v1/advisories", json={"session_id": session_id}) as response:
        advisory = await response.json()
    async with asyncio.timeout(60):
        while advisory["state"] != "warm":
            await asyncio.sleep(0.05)
            async with http.get(f"/v1/advisories/{advisory['id']}") as response:
                advisory = await response.json()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Also where these tests run under nohup: what a process ignores its children ignore, and a server is to go on ignoring that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextlib.asynccontextmanager
async def serving(port: int, data_dir: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`overture serve` until the block ends, however it ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), "--data-dir", str(data_dir)),
        *("--kv-host-gib", "0.25", *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
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


async def ask(client: ChatClient, content: str, session_id: str | None = None) -> tuple[str, Done]:
    text = ""
    async for event in client.ask(content, session_id=session_id, sampling={"temperature": 0}):
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Done):
            return text, event
    raise AssertionError("no done frame")


def libraries(pid: int) -> str:
    """What a process has in its memory of files, by their paths."""
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
async def test_kill_9_loses_no_acknowledged_turn_and_sighup_drains_where_there_is_no_key_file(
    tmp_path: Path,
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serving(port, tmp_path) as process:
        lines = await output_until(process, b"ready")
        assert url.encode() in lines[0] and len(lines) >= 3, "progress is shown while the engine starts"
        loaded = libraries(process.pid)
        assert "/uvloop/" in loaded and "/ray/" not in loaded, "one node needs no Ray"
        async with ChatClient(url) as client, aiohttp.ClientSession(url) as http:
            _, elsewhere = await ask(client, SECRET)
            undisturbed, _ = await ask(client, QUESTION, elsewhere.session_id)
            answer, done = await ask(client, SECRET)
            await kv_is_written(http)
            turn_id = None
            with contextlib.suppress(ChatError, TimeoutError):
                async with asyncio.timeout(60):
                    async for event in client.ask(
                        "Tell me a long story.", session_id=done.session_id, sampling=LONG
                    ):
                        turn_id = event.id if isinstance(event, Accepted) else turn_id
                        if isinstance(event, Delta):
                            process.send_signal(signal.SIGKILL)
                            break
        await process.wait()
    async with serving(port, tmp_path) as process:
        await output_until(process, b"ready")
        async with aiohttp.ClientSession(url) as http:
            async with http.get(f"/api/sessions/{done.session_id}") as response:
                turns = (await response.json())["turns"]
            assert await figure(http, KV_ON_DISK) > 0, "KV is found again"
            await warmed(http, done.session_id)
            assert await figure(http, "overture_kv_read_bytes_total") > 0
        assert [(turn["status"], turn["answer"]) for turn in turns] == [("done", answer), ("failed", "")]
        assert turns[1]["id"] == turn_id
        async with ChatClient(url) as client:
            recalled, done = await ask(client, QUESTION, done.session_id)
            assert "Fezin" in recalled
            assert recalled == undisturbed, "the same, to the letter, as without a restart"
            kv = done.timings.kv
            assert kv.device >= 32, f"what was computed before the kill came back from disk: {kv}"
            # The kernel and the shell may both send it.
            await drains(process, client, signal.SIGHUP, signal.SIGHUP, session_id=done.session_id)


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


@pytest.mark.slow
async def test_sighup_has_the_key_file_read_and_the_server_goes_on_until_sigterm_drains_it(
    tmp_path: Path,
) -> None:
    port, keys = free_port(), tmp_path / "keys"
    old, new = generate_key(), generate_key()
    keys.write_text(key_file_line("old", old) + "\n")
    url = f"http://127.0.0.1:{port}"
    async with serving(port, tmp_path, "--api-key-file", str(keys)) as process:
        await output_until(process, b"ready")
        async with aiohttp.ClientSession(url) as http:

            async def status_of(key: str) -> int:
                async with http.get("/api/sessions", headers={"Authorization": f"Bearer {key}"}) as response:
                    return response.status

            assert (await status_of(old), await status_of(new)) == (200, 401)
            keys.write_text(key_file_line("new", new) + "\n")
            process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(60):
                while await status_of(old) != 401:  # a wrong key asked so often would be refused for that
                    await asyncio.sleep(0.05)
            assert await status_of(new) == 200
        async with ChatClient(url, api_key=new) as client:
            await drains(process, client, signal.SIGTERM)


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with serving(taken.getsockname()[1], tmp_path) as process:
            lines = await output_until(process, b"error")
            assert b"--port" in lines[-1]
            assert await process.wait() == 2
