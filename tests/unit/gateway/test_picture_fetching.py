"""Pictures that are named by an address."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.test_utils import TestServer

from gateway.doors.api.picture_fetching import PublicAddresses, fetch_pictures, is_public
from gateway.errors import GatewayError
from gateway.settings.config import Config

LIMIT_BYTES = 1 << 16


class Here(AbstractResolver):
    """Finds every host on this machine."""

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        named = {"hostname": host, "host": "127.0.0.1", "port": port, "proto": 0, "flags": 0}
        return [ResolveResult(family=socket.AF_INET, **named)]

    async def close(self) -> None:
        pass


async def answer(request: web.Request) -> web.StreamResponse:
    match request.path:
        case "/small":
            return web.Response(body=b"ABC", content_type="image/png")
        case "/large":
            return web.Response(body=bytes(LIMIT_BYTES), content_type="image/png")
        case "/moved":
            raise web.HTTPFound("/small")
        case "/cut":
            reply = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "image/png"})
            await reply.prepare(request)
            await reply.write(b"AB")
            assert request.transport is not None
            request.transport.abort()
            return reply
        case _:
            return web.Response(text="no picture")


def body_of(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}]}


async def fetched(tmp_path: Path, *urls: str, resolver: AbstractResolver | None = None) -> list[str]:
    config = Config(
        model="m",
        data_dir=tmp_path,
        allow_image_hosts=("pictures.example", "10.0.0.1", "localhost"),
        max_body_bytes=LIMIT_BYTES,
        max_images=3,
    )
    body = body_of(*urls)
    await fetch_pictures(config, body, resolver)
    return [part["image_url"]["url"] for part in body["messages"][0]["content"]]


async def test_pictures_come_from_allowed_hosts_within_bounds(tmp_path: Path) -> None:
    application = web.Application()
    application.router.add_get("/{name}", answer)
    async with TestServer(application) as server:
        host, far = f"http://pictures.example:{server.port}", "https://other.example/a.png"
        data = "data:image/png;base64,QUJD"
        small = f"{host}/small"
        assert await fetched(tmp_path, small, far, small, resolver=Here()) == [data, far, data]
        assert await fetched(tmp_path, "data:,x", "http://[", resolver=Here()) == ["data:,x", "http://["]
        many = [f"{small}?{number}" for number in range(4)]
        assert await fetched(tmp_path, *many, resolver=Here()) == many, "the node refuses so many"
        for name, why in {
            "large": "larger than a body may be",
            "moved": "the host answered 302",
            "text": "it is no picture",
            "cut": "cannot be reached",
        }.items():
            with pytest.raises(GatewayError, match=why):
                await fetched(tmp_path, f"{host}/{name}", resolver=Here())
        # By its name and by its address.
        for url in (f"http://localhost:{server.port}/small", f"http://10.0.0.1:{server.port}/small"):
            with pytest.raises(GatewayError, match=r"cannot be reached|private address"):
                await fetched(tmp_path, url)


@pytest.mark.parametrize(
    "address",
    (
        "127.0.0.1 10.1.2.3 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 ::1 fe80::1 fc00::1 "
        "::ffff:10.0.0.1 64:ff9b::a00:1 2002:a00:1::1"
    ).split(),
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)
    assert is_public("93.184.216.34") and is_public("2606:4700::1111")


async def test_a_name_of_this_machine_has_no_public_address() -> None:
    with pytest.raises(OSError, match="no public address"):
        await PublicAddresses().resolve("localhost", 80, socket.AF_INET)
