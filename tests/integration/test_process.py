"""The gateway as a user runs it: a process that crashes in part, is killed, started again and told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from asyncio.subprocess import Process
from pathlib import Path

import aiohttp
import psutil
import pytest

from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta
from tests.integration.conftest import ask, metrics_of, settle, told
from tests.integration.facts import Http
from tests.integration.processes import drains, output_until, serving
from tests.ports import free_port

KV_ON_DISK = 'overture_kv_blocks{tier="disk"}'
LONG = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}
SECRET = "My secret word is Fezin. I like long walks by the sea, old maps, and coffee in the morning."
QUESTION = "What is my secret word?"


async def kv_is_written(http: Http) -> bool:
    """Whether the disk holds KV and no finished block waits for it."""
    found = await metrics_of(http)
    return bool(found[KV_ON_DISK]) and not found['overture_kv_write_queue_blocks{tier="disk"}']


async def warmed(http: Http, session_id: str) -> None:
    """Tell that the session's next request is near, and wait until its KV is on the device."""
    made = await told(http.post("/v1/advisories", json={"session_id": session_id}), 202)

    async def is_warm() -> bool:
        return (await told(http.get(f"/v1/advisories/{made['id']}")))["state"] == "warm"

    await settle(is_warm)


async def is_ready(http: Http) -> bool:
    async with http.get("/readyz") as reply:
        return reply.status == 200


def engine_of(gateway_pid: int) -> psutil.Process:
    """The child that the engine runs in."""
    children = psutil.Process(gateway_pid).children(recursive=True)
    return next(child for child in children if "gateway.nodes.engine_process" in child.cmdline())


async def crash_within_an_answer(client: ChatClient, session_id: str, pid: int) -> ChatError:
    """What a client hears of an answer when the engine crashes in its middle, and at most a few seconds later."""
    num_accepted = 0
    with pytest.raises(ChatError) as failed:
        async with asyncio.timeout(60):
            async for event in client.ask("Tell me a long story.", session_id=session_id, sampling=LONG):
                num_accepted += isinstance(event, Accepted)
                if isinstance(event, Delta):
                    os.kill(pid, signal.SIGSEGV)
    assert num_accepted == 1
    return failed.value


async def kill_within_an_answer(client: ChatClient, session_id: str, gateway: Process) -> None:
    asked = client.ask("Tell me a long story.", session_id=session_id, turn_id="killed", sampling=LONG)
    with contextlib.suppress(ChatError, TimeoutError):
        async with asyncio.timeout(60):
            async for event in asked:
                if isinstance(event, Delta):
                    gateway.kill()
                    break


@pytest.mark.slow
async def test_a_crash_of_engine_or_gateway_costs_a_retry_and_no_conversation(tmp_path: Path) -> None:
    """The engine crashes in native code, then the gateway is killed; the next one drains at a hang-up, as there is no key file."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serving(port, tmp_path, "--engine", "process") as gateway:
        lines = await output_until(gateway, b"ready")
        assert url.encode() in lines[0] and len(lines) >= 3, "progress is shown while the engine starts"
        async with ChatClient(url) as client, Http(url) as http:
            (answer, crashed), (_, other), (_, killed), (_, again) = [
                await ask(client, SECRET) for _ in range(4)
            ]
            undisturbed, _ = await ask(client, QUESTION, session_id=other.session_id)
            await settle(lambda: kv_is_written(http))
            dead = engine_of(gateway.pid)
            assert os.getsid(dead.pid) == os.getsid(gateway.pid), "processor time is shared by session"
            assert os.getpgid(dead.pid) == dead.pid, "Ctrl-C is the gateway's"
            error = await crash_within_an_answer(client, crashed.session_id, dead.pid)
            assert (error.code, error.retryable) == ("engine_failed", True)
            with pytest.raises(ChatError) as refused:
                await ask(client, "Are you there?", session_id=crashed.session_id)
            assert refused.value.retryable, "the socket is still open, and says what to do"
            await settle(lambda: is_ready(http), 180)
            assert engine_of(gateway.pid).pid != dead.pid
            text, done = await ask(client, QUESTION, session_id=again.session_id)
            assert text == undisturbed
            kv = done.timings.kv
            assert kv.disk + kv.host + kv.device >= 32, f"KV came back from disk: {kv}"
            assert "vllm:generation_tokens_total" in await told(http.get("/metrics")), "the child's, too"
            turns = (await told(http.get(f"/api/sessions/{crashed.session_id}")))["turns"]
            assert turns[0]["answer"] == answer, "nothing that was acknowledged is lost"
            orphan = engine_of(gateway.pid)
            await kill_within_an_answer(client, killed.session_id, gateway)
        await gateway.wait()
        await asyncio.to_thread(psutil.wait_procs, [orphan], timeout=30)
        assert not orphan.is_running(), "nothing outlives a gateway that was killed"
    async with serving(port, tmp_path) as gateway:
        await output_until(gateway, b"ready")
        loaded = await asyncio.to_thread(Path(f"/proc/{gateway.pid}/maps").read_text)
        assert "/uvloop/" in loaded and "/ray/" not in loaded, "one node needs no Ray"
        async with ChatClient(url) as client, Http(url) as http:
            turns = (await told(http.get(f"/api/sessions/{killed.session_id}")))["turns"]
            assert [(turn["status"], turn["answer"]) for turn in turns] == [("done", answer), ("failed", "")]
            assert turns[1]["id"] == "killed"
            assert (await metrics_of(http))[KV_ON_DISK] > 0, "KV is found again"
            await warmed(http, killed.session_id)
            assert sum((await metrics_of(http, "overture_kv_read_bytes_total")).values()) > 0
            recalled, done = await ask(client, QUESTION, session_id=killed.session_id)
            assert "Fezin" in recalled
            assert recalled == undisturbed, "the same, to the letter, as without a restart"
            assert done.timings.kv.device >= 32, f"it came back from disk: {done.timings.kv}"
            # The kernel and the shell may both send it.
            await drains(gateway, client, signal.SIGHUP, signal.SIGHUP, session_id=killed.session_id)


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with serving(taken.getsockname()[1], tmp_path) as process:
            lines = await output_until(process, b"error")
            assert b"--port" in lines[-1]
            assert await process.wait() == 2


async def test_a_server_that_is_told_to_stop_while_it_starts_builds_no_engine_first(tmp_path: Path) -> None:
    """And leaves no file where it listened."""
    path = tmp_path / "overture.sock"
    async with serving(free_port(), tmp_path, "--uds", str(path)) as process:
        lines = await output_until(process, b"importing vLLM")
        assert f"Overture is at unix:{path}\n".encode() in lines
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
            await told(http.get("http://localhost/healthz"))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert b"ready" not in await process.stdout.read()
            assert await process.wait() == 0
        assert not path.exists()
