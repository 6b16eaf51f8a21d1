"""A server on a Unix socket: who can connect, what is removed when, and what asks it."""

import asyncio
import socket
import stat
from pathlib import Path

import aiohttp
import pytest

from gateway.commands.health_check import is_healthy
from gateway.errors import StartupError
from gateway.settings.config import Config
from overture_client.chat import socket_url

from .front import Gateways


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "overture.sock"


def mode_of(file: Path) -> int | None:
    """None where there is no file."""
    return stat.S_IMODE(file.stat().st_mode) if file.exists() else None


def put_in_place_of(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text)


async def test_it_answers_its_own_user_and_leaves_no_file(gateways: Gateways, file: Path) -> None:
    gateway = await gateways(uds=file)
    assert gateway.server.url == f"unix:{file}"
    assert mode_of(file) == 0o600
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(file))) as http:
        for host, status in (("localhost", 200), ("evil.example", 403)):
            async with http.get(f"http://{host}/healthz") as reply:
                assert reply.status == status
        async with http.ws_connect("http://localhost/ws") as chat:
            await chat.send_json({"type": "hello"})
            assert (await chat.receive_json(timeout=60))["type"] == "ready"
    assert await asyncio.to_thread(is_healthy, gateway.server.services.config)
    with pytest.raises(StartupError, match="another server listens on"):
        await gateways(uds=file)
    assert mode_of(file) == 0o600, "a server that may not have it leaves it alone"
    await gateway.server.__aexit__()
    assert mode_of(file) is None


async def test_the_socket_of_a_dead_server_is_replaced_and_nothing_else(
    gateways: Gateways, file: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(file))
    gateway = await gateways(uds=file)
    put_in_place_of(file, "of somebody else")
    await gateway.server.__aexit__()
    assert mode_of(file) is not None
    for path, reason in (
        (file, "is there and is no socket"),
        (file.parent / "gone" / "x", "No such file"),
        (file.parent / ("x" * 120), "too long"),
    ):
        with pytest.raises(StartupError, match=reason):
            await gateways(uds=path)


async def test_the_health_check_asks_a_port_too(gateways: Gateways, tmp_path: Path) -> None:
    port = (await gateways()).server.port
    assert await asyncio.to_thread(is_healthy, Config(host="0.0.0.0", port=port, data_dir=tmp_path))
    with pytest.raises(OSError):
        await asyncio.to_thread(is_healthy, Config(uds=tmp_path / "gone", data_dir=tmp_path))


def test_a_socket_is_of_this_machine_whatever_the_host_is_and_clients_want_a_port() -> None:
    config = Config(uds=Path("/run/x"), host="0.0.0.0")
    assert (config.is_loopback, config.engine, config.warnings()) == (True, "in-process", [])
    with pytest.raises(ValueError, match="Unix socket, which this client does not speak to"):
        socket_url("unix:/run/x")
