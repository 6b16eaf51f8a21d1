"""The gateway as a user runs it: a process that is killed, started again and told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta, Done
from tests.integration.processes import drains, output_until, serving
from tests.ports import free_port

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


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with serving(taken.getsockname()[1], tmp_path) as process:
            lines = await output_until(process, b"error")
            assert b"--port" in lines[-1]
            assert await process.wait() == 2


async def test_a_server_that_is_told_to_stop_while_it_starts_builds_no_engine_first(tmp_path: Path) -> None:
    async with serving(free_port(), tmp_path) as process:
        await output_until(process, b"importing vLLM")
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert b"ready" not in await process.stdout.read()
            assert await process.wait() == 0
