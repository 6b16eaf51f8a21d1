"""What a user gets from the two wheels: a server that serves its page and its demo model, and a client that talks to it.

The server also goes through what it does with hang-ups and its key file, as its start takes half of this file's time.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from gateway.access.auth import generate_key
from gateway.access.key_file import key_file_line
from overture_client import __version__
from overture_client.chat import ChatClient
from tests.conftest import ROOT
from tests.integration import environments
from tests.integration.processes import drains, output_until, serving
from tests.ports import free_port

from .facts import Http

pytestmark = pytest.mark.slow


class Installed(NamedTuple):
    """A server that runs from its wheel with one key, and the client's `overture`."""

    process: asyncio.subprocess.Process
    url: str
    key_file: Path
    key: str
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
async def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Installed]:
    """Both wheels in environments of their own, and the server started in an empty folder."""
    folder, empty = tmp_path_factory.mktemp("environments"), tmp_path_factory.mktemp("empty")
    overture = environments.with_everything(folder / "server", wheels)
    client = environments.with_dependencies(folder / "client", wheels[1])
    key, key_file, port = generate_key(), folder / "keys", free_port()
    key_file.write_text(key_file_line("first", key) + "\n")
    flags = ("--api-key-file", str(key_file))
    async with serving(port, folder / "data", *flags, overture=[overture], folder=empty) as process:
        await output_until(process, b"ready")
        assert not list(empty.iterdir())
        yield Installed(process, f"http://127.0.0.1:{port}", key_file, key, client)


async def test_the_wheel_serves_its_page_its_documentation_and_its_demo_model(installed: Installed) -> None:
    headers = {"Authorization": f"Bearer {installed.key}"}
    async with Http(installed.url, headers=headers, raise_for_status=True) as http:
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


async def test_the_client_from_its_wheel_chats_without_any_module_of_the_server(installed: Installed) -> None:
    async def output(*command: str | Path) -> str:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=-1, stderr=-1, cwd=installed.key_file.parent, env={"PATH": "/usr/bin:/bin"}
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()

    python = installed.client.parent / "python"
    question = ("--temperature", "0", "My name is Ada.", "What is my name?")
    chat, commands, _ = await asyncio.gather(
        output(installed.client, "chat", "--url", installed.url, "--api-key", installed.key, *question),
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


async def test_sighup_has_the_key_file_read_and_sigterm_drains_the_server(installed: Installed) -> None:
    process, url, keys, old, _ = installed
    new = generate_key()
    async with Http(url) as http:

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
