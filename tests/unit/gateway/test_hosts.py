"""By which names a server without keys may be called: none that a page elsewhere could have for its own."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from gateway.doors.http.hosts import is_own_host

from .front import Gateways

FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "a.localhost.co",
    "[",
]
OWN = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "192.168.1.7:8000",
    "[::1]:8000",
    "localhost",
    "LOCALHOST:8000",
    "app.localhost.",
]
OF_A_NETWORK = ["overture:8000", "box.local", "Box.Local.", "gpu.internal", "nas.home.arpa", "chat.of.mine"]


@pytest.mark.parametrize("is_loopback", [True, False])
@pytest.mark.parametrize("host", [*FOREIGN, *OWN, *OF_A_NETWORK, ""])
def test_only_names_that_the_public_dns_cannot_have_are_the_servers(host: str, is_loopback: bool) -> None:
    is_own = is_own_host(host, origins=(), own_names=("Chat.of.mine",), is_loopback=is_loopback)
    assert is_own == (host in OWN or (host in OF_A_NETWORK and not is_loopback))


def test_the_operator_names_others_with_their_origins() -> None:
    origins = ("https://chat.example", "http://other.example:8080", "null", "http://[")
    for host, is_own in (("chat.example", True), ("other.example", False), ("other.example:8080", True)):
        assert is_own_host(host, origins=origins, own_names=(), is_loopback=False) == is_own


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"host": "0.0.0.0"}, 403),
        ({}, 403),
        ({"host": "0.0.0.0", "cors_origins": ("http://evil.example",)}, 200),
        ({"host": "0.0.0.0", "api_keys": ("ov-" + "k" * 43,)}, 401),
    ],
)
async def test_a_foreign_name_is_refused_wherever_there_are_no_keys(
    gateways: Gateways, settings: dict[str, object], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await gateways(**settings)
    url = f"http://127.0.0.1:{gateway.server.port}"
    async with aiohttp.ClientSession(url) as http:
        async with http.get("/api/sessions", headers={"Host": "evil.example"}) as reply:
            assert reply.status == status
        for host in ("127.0.0.1", "localhost"):
            async with http.get("/api/sessions", headers={"Host": host}) as reply:
                assert reply.status == (401 if status == 401 else 200)


async def test_a_request_without_a_host_asks_no_name_server(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("the event loop waits for a name server")

    monkeypatch.setattr(socket, "getfqdn", ask)
    monkeypatch.setattr(socket, "gethostbyaddr", ask)
    gateway = await gateways()
    for head in (
        b"GET /api/sessions HTTP/1.0\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\nOrigin: http://a.example\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(head)
        status = (await reader.readline()).split()[1]
        assert status == (b"403" if b"Origin" in head else b"200")
        writer.close()
