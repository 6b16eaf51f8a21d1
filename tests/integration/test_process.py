"""The gateway as a user runs it: a process that crashes in part, is killed, told to stop, and started again from its wheel.

One data folder goes through both servers, as a start takes most of this file's time: what the first one leaves, the one from the wheel serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import psutil
import pytest
import pytest_asyncio

from gateway.access.auth import generate_key
from gateway.access.key_file import key_file_line
from overture_client import __version__
from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta
from tests.conftest import ROOT
from tests.integration import environments
from tests.integration.conftest import ask, metrics_of, settle, told
from tests.integration.facts import Http, bearer
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


class Files(NamedTuple):
    """What both servers are given: a folder for data and a file with one key, an operator's."""

    data: Path
    key_file: Path
    key: str

    @property
    def flags(self) -> tuple[str, str]:
        return "--api-key-file", str(self.key_file)


class Left(NamedTuple):
    """What was said before a gateway was killed: in the session that was being answered, and to QUESTION before and after a crash of the engine.

    failed: how the answer ended during which it crashed.
    """

    session_id: str
    answer: str
    undisturbed: str
    again: str
    failed: ChatError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder, key = tmp_path_factory.mktemp("files"), generate_key()
    (folder / "keys").write_text(key_file_line("first", key, is_operator=True) + "\n")
    return Files(folder / "data", folder / "keys", key)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def left(files: Files) -> Left:
    """The engine crashes in native code, and when it is up again the gateway is killed."""
    port = free_port()
    url, key = f"http://127.0.0.1:{port}", files.key
    async with serving(port, files.data, "--engine", "process", *files.flags) as gateway:
        lines = await output_until(gateway, b"ready")
        assert url.encode() in lines[0] and len(lines) >= 3, "progress is shown while the engine starts"
        async with ChatClient(url, api_key=key) as client, Http(url, headers=bearer(key)) as http:
            (answer, crashed), (_, other), (_, killed), (_, again) = [
                await ask(client, SECRET) for _ in range(4)
            ]
            undisturbed, _ = await ask(client, QUESTION, session_id=other.session_id)
            await settle(lambda: kv_is_written(http))
            dead = engine_of(gateway.pid)
            assert os.getsid(dead.pid) == os.getsid(gateway.pid), "processor time is shared by session"
            assert os.getpgid(dead.pid) == dead.pid, "Ctrl-C is the gateway's"
            failed = await crash_within_an_answer(client, crashed.session_id, dead.pid)
            with pytest.raises(ChatError) as refused:
                await ask(client, "Are you there?", session_id=crashed.session_id)
            assert refused.value.retryable, "the socket is still open, and says what to do"
            await settle(lambda: is_ready(http), 180)
            assert engine_of(gateway.pid).pid != dead.pid
            text, done = await ask(client, QUESTION, session_id=again.session_id)
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
    return Left(killed.session_id, answer, undisturbed, text, failed)


@pytest.mark.slow
async def test_a_crash_of_the_engine_costs_a_retry_and_no_conversation(left: Left) -> None:
    assert (left.failed.code, left.failed.retryable) == ("engine_failed", True)
    assert left.again == left.undisturbed


class Installed(NamedTuple):
    """A server that runs from its wheel, and the client's `overture`."""

    process: Process
    url: str
    client: Path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The server's wheel and the client's."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, str(ROOT / "requirements" / "wheels.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def installed(
    files: Files, left: Left, wheels: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Installed]:
    """Both wheels in environments of their own, and the server started in an empty folder with what a killed one has left."""
    folder, empty = tmp_path_factory.mktemp("environments"), tmp_path_factory.mktemp("empty")
    overture = environments.with_everything(folder / "server", wheels)
    client = environments.with_dependencies(folder / "client", wheels[1])
    port = free_port()
    async with serving(port, files.data, *files.flags, overture=[overture], folder=empty) as process:
        await output_until(process, b"ready")
        assert not list(empty.iterdir())
        yield Installed(process, f"http://127.0.0.1:{port}", client)


@pytest.mark.slow
async def test_what_a_killed_gateway_has_left_is_served_by_the_next(
    installed: Installed, files: Files, left: Left
) -> None:
    """No turn that was acknowledged is lost, and the KV comes back from disk to the letter, though the model lies elsewhere now."""
    process, url, _ = installed
    loaded = await asyncio.to_thread(Path(f"/proc/{process.pid}/maps").read_text)
    assert "/uvloop/" in loaded and "/ray/" not in loaded, "one node needs no Ray"
    key, session_id = files.key, left.session_id
    async with ChatClient(url, api_key=key) as client, Http(url, headers=bearer(key)) as http:
        turns = (await told(http.get(f"/api/sessions/{session_id}")))["turns"]
        assert [(turn["status"], turn["answer"]) for turn in turns] == [("done", left.answer), ("failed", "")]
        assert turns[1]["id"] == "killed"
        assert (await metrics_of(http))[KV_ON_DISK] > 0, "KV is found again"
        await warmed(http, session_id)
        assert sum((await metrics_of(http, "overture_kv_read_bytes_total")).values()) > 0
        recalled, done = await ask(client, QUESTION, session_id=session_id)
    assert "Fezin" in recalled
    assert recalled == left.undisturbed, "the same, to the letter, as without a restart"
    assert done.timings.kv.device >= 32, f"it came back from disk: {done.timings.kv}"


@pytest.mark.slow
async def test_the_wheel_serves_its_page_its_documentation_and_its_demo_model(
    installed: Installed, files: Files
) -> None:
    async with Http(installed.url, headers=bearer(files.key), raise_for_status=True) as http:
        for path in ("/", "/docs", "/engine", "/admin", "/sign-in"):
            async with http.get(path) as page:
                needed = re.findall(r'(?:src|href)="(static/[^"]+)"', await page.text())
            assert needed, f"{path} has scripts and styles"
            for name in needed:
                async with http.get(f"/{name}"):
                    pass
        async with http.get("/openapi.json") as description:
            assert (await description.json())["info"]["version"] == __version__
        async with http.get("/v1/models") as models:
            names = {model["id"] for model in (await models.json())["data"]}
        assert {"overture-demo", "pirate", "poet"} <= names
        body = {
            "model": "pirate",
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 30,
            "temperature": 0,
        }
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"].strip()


@pytest.mark.slow
async def test_the_client_from_its_wheel_chats_without_any_module_of_the_server(
    installed: Installed, files: Files
) -> None:
    async def output(*command: str | Path) -> str:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=-1, stderr=-1, cwd=files.key_file.parent, env={"PATH": "/usr/bin:/bin"}
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()

    python = installed.client.parent / "python"
    question = ("--temperature", "0", "My name is Ada.", "What is my name?")
    chat, commands, _ = await asyncio.gather(
        output(installed.client, "chat", "--url", installed.url, "--api-key", files.key, *question),
        output(installed.client, "--help"),
        output(
            python,
            "-c",
            "import overture_client.nodes, overture_client.advisor, overture_client.hooks.langgraph, "
            "importlib.util as u, sys; sys.exit(any(map(u.find_spec, ('gateway', 'vllm', 'torch', 'numpy'))))",
        ),
    )
    assert "Ada" in chat
    assert "\n  chat " in commands and "\n  serve " not in commands


@pytest.mark.slow
async def test_sighup_has_the_key_file_read_and_sigterm_drains_the_server(
    installed: Installed, files: Files
) -> None:
    (process, url, _), (_, keys, old) = installed, files
    new = generate_key()
    async with Http(url) as http:

        async def status_of(key: str) -> int:
            async with http.get("/api/sessions", headers=bearer(key)) as response:
                return response.status

        assert (await status_of(old), await status_of(new)) == (200, 401)
        keys.write_text(key_file_line("new", new) + "\n")
        process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(60):
            while await status_of(old) != 401:  # a wrong key asked so often would be refused for that
                await asyncio.sleep(0.05)
        assert await status_of(new) == 200
    async with ChatClient(url, api_key=new) as client:
        await drains(process, client)


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with serving(taken.getsockname()[1], tmp_path) as process:
            lines = await output_until(process, b"error")
            assert b"--port" in lines[-1]
            assert await process.wait() == 2


async def test_a_server_that_is_told_to_stop_while_it_starts_builds_no_engine_first(tmp_path: Path) -> None:
    """And leaves no file where it listened. A hang-up is such an order where there is no key file; the kernel and the shell may both send it."""
    path = tmp_path / "overture.sock"
    async with serving(free_port(), tmp_path, "--uds", str(path)) as process:
        lines = await output_until(process, b"importing vLLM")
        assert f"Overture is at unix:{path}\n".encode() in lines
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
            await told(http.get("http://localhost/healthz"))
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(60):
            assert b"ready" not in await process.stdout.read()
            assert await process.wait() == 0
        assert not path.exists()
