"""A reverse proxy names people by a header: it is believed from trusted peers alone, and keys go before it."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict

from gateway.access.key_file import owner_of
from gateway.app import build_app
from gateway.people.named_by_proxy import TrustedHeader
from gateway.people.sign_ins import COOKIE
from gateway.settings.config import Config

from .front import Gateway, Gateways, bearer
from .parts import KEY, OTHER, key_file
from .test_access import old_line
from .test_audit import written
from .test_sign_ins import signed_in

HEADER = "X-Forwarded-User"
ADMIN = "/v1/admin/people"


@pytest.fixture
async def gateway(gateways: Gateways, team: Path) -> Gateway:
    """A proxy may name its people."""
    return await gateways(api_key_file=team, trusted_user_header=HEADER)


async def asked(url: str, *names: str, path: str = "/v1/usage", **headers: str) -> tuple[int, Any]:
    """Status and body of a request that names these people, each in a header of its own."""
    sent = CIMultiDict((name.replace("_", "-"), value) for name, value in headers.items())
    for name in names:
        sent.add(HEADER, name)
    async with aiohttp.ClientSession(url) as http, http.get(path, headers=sent) as reply:
        return reply.status, await reply.json()


async def greeted(url: str, name: str, **hello: Any) -> dict[str, Any]:
    """What a chat socket answers to its hello."""
    async with (
        aiohttp.ClientSession(url, headers={HEADER: name}) as http,
        http.ws_connect("/ws") as socket,
    ):
        await socket.send_json({"type": "hello", **hello})
        frame: dict[str, Any] = await socket.receive_json()
        return frame


async def test_whom_the_proxy_names_is_signed_in_over_rest_and_sockets(gateway: Gateway) -> None:
    url = gateway.server.url
    status, usage = await asked(url, "bob")
    assert (status, [person["name"] for person in usage["people"]]) == (200, ["bob"])
    assert (await asked(url, "bob", path=ADMIN))[0] == 403
    status, people = await asked(url, "ada", path=ADMIN)
    assert (status, people["me"]) == (200, owner_of(KEY)), "the role is the person's"
    ready = await greeted(url, "bob")
    assert ready["user"] == {
        "owner": owner_of(OTHER),
        "name": "bob",
        "role": "member",
        "can_sign_out": False,
    }
    assert (await asked(url))[0] == 401


async def test_keys_go_before_the_header_and_the_header_before_cookies(gateway: Gateway) -> None:
    url = gateway.server.url
    cookie = {"Cookie": f"{COOKIE}={await signed_in(gateway, 'bob')}"}
    assert (await asked(url, "bob", path=ADMIN, **bearer(KEY)))[0] == 200
    assert (await asked(url, "ada", path=ADMIN, **bearer("wrong-key-of-sixteen")))[0] == 401
    assert (await asked(url, "ada", path=ADMIN, **cookie))[0] == 200
    assert (await asked(url, path=ADMIN, **cookie))[0] == 403, "bob's"
    assert (await greeted(url, "bob", api_key=KEY))["user"]["name"] == "ada"
    assert (await greeted(url, "nobody", api_key=KEY))["user"]["name"] == "ada"


async def test_pages_elsewhere_are_not_signed_in_by_the_proxy(gateways: Gateways, team: Path) -> None:
    allowed = "http://other.test"
    gateway = await gateways(api_key_file=team, trusted_user_header=HEADER, cors_origins=(allowed,))
    url = gateway.server.url
    assert (await asked(url, "bob", Origin=allowed))[0] == 401
    assert (await asked(url, "bob", Origin=url))[0] == 200


@pytest.mark.parametrize("names", [("ada", "bob"), ("bob", "bob"), ("ada,bob",), ("ada, bob",)])
async def test_more_than_one_name_is_refused(gateway: Gateway, names: tuple[str, ...]) -> None:
    status, body = await asked(gateway.server.url, *names)
    assert (status, body["error"]["code"]) == (400, "bad_request")
    assert "more than one person" in body["error"]["message"]
    status, body = await asked(gateway.server.url, *names, path="/v1/models", anthropic_version="2023-06-01")
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "peer", ["192.0.2.7", "10.0.0.1", "2001:db8:0:1::1", "::ffff:192.0.2.7", "no address"]
)
def test_the_header_of_any_other_peer_is_not_read(peer: str) -> None:
    config = Config(trusted_user_header=HEADER, trusted_proxies=("192.0.2.0/30", "2001:db8::1"))
    header = TrustedHeader(config)
    for names in (["ada"], ["ada", "bob"]):
        assert header.person_in(names, peer) is None
    assert header.person_in(["ada"], "") is None, "a peer that has hung up has no address"
    trusted = ["127.0.0.1", "::1", "192.0.2.3", "::ffff:192.0.2.3", "2001:db8::1"]
    assert [header.person_in([" ada "], each) for each in trusted] == ["ada"] * len(trusted)
    assert TrustedHeader(Config()).person_in(["ada"], "127.0.0.1") is None
    assert header.person_in([""], "127.0.0.1") is None
    assert (
        TrustedHeader(Config(trusted_user_header=HEADER, uds=Path("socket"))).person_in(["ada"], "") == "ada"
    )


def hang_up_after(port: int, request: bytes) -> None:
    """Send a request and reset the connection at once, so that the server no longer learns whose it was."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def test_a_client_that_hangs_up_is_not_taken_for_a_proxy(gateway: Gateway) -> None:
    """On uvloop, which servers run on, its connection has no address, as one of a Unix socket has none."""
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    body = b'{"name": "mallory", "role": "operator"}'
    head = f"POST {ADMIN} HTTP/1.1\r\nHost: a\r\n{HEADER}: ada\r\nContent-Length: {len(body)}\r\n\r\n"
    hang_up_after(gateway.server.port, head.encode() + body)  # before the server's loop can look at it
    people = (await gateway.call("GET", ADMIN, key=KEY)).body["people"]
    assert [person["name"] for person in people] == ["ada", "bob"]


async def test_a_client_that_comes_past_the_proxy_is_nobody(gateway: Gateway) -> None:
    """Its connection is given another address, as if it came from another machine."""

    @web.middleware
    async def elsewhere(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        return await handler(request.clone(remote="192.0.2.7"))

    app = build_app(gateway.server.services)
    app.middlewares.insert(0, elsewhere)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        assert (await asked(url, "ada"))[0] == 401
        assert (await asked(url, "ada", "bob"))[0] == 401
        assert (await asked(url, "bob", path=ADMIN, **bearer(KEY)))[0] == 200
        assert (await greeted(url, "ada"))["code"] == "unauthorized"
        assert (await greeted(url, "ada", api_key=OTHER))["user"]["name"] == "bob"


async def test_a_stranger_is_refused_or_added_as_a_member(
    gateway: Gateway, gateways: Gateways, tmp_path: Path
) -> None:
    status, body = await asked(gateway.server.url, "eve")
    assert status == 401 and "'eve' is not among the people" in body["error"]["message"]
    assert (await greeted(gateway.server.url, "eve"))["code"] == "unauthorized"
    adding = await gateways(
        api_key_file=tmp_path / "keys", trusted_user_header=HEADER, add_trusted_users=True
    )
    url = adding.server.url
    found = await asyncio.gather(*(asked(url, "eve@example.org") for _ in range(5)))
    owners = {usage["people"][0]["owner"] for _, usage in found}
    assert len(owners) == 1 and {status for status, _ in found} == {200}
    people = (await adding.call("GET", ADMIN, key=KEY)).body["people"]
    assert [person["role"] for person in people if person["name"] == "eve@example.org"] == ["member"]
    assert (await asked(url, owner_of(KEY), path=ADMIN))[0] == 401, "a name leads to nobody by an owner id"
    for name in ("x y", "a:b", "x" * 65, "#note", owner_of(KEY), owner_of("nobody's key")):
        status, body = await asked(url, name)
        assert status == 401 and "cannot be a name" in body["error"]["message"], name
    assert (await asked(url, "eve@example.org"))[0] == 200
    added = [entry["whom"] for entry in await written(adding, tmp_path) if entry["what"] == "person_added"]
    assert added == ["eve@example.org"]


async def test_who_is_disabled_or_erased_is_shut_out_at_once(gateway: Gateway) -> None:
    url = gateway.server.url
    async with gateway.socket(headers={HEADER: "bob"}, hello={}) as socket:
        await gateway.call("PATCH", f"{ADMIN}/bob", {"state": "disabled"}, key=KEY)
        assert (await socket.next())["code"] == "unauthorized"
    status, body = await asked(url, "bob")
    assert status == 401 and "bob is disabled" in body["error"]["message"]
    assert (await gateway.call("DELETE", f"{ADMIN}/bob", key=KEY)).status == 200
    assert (await asked(url, "bob"))[0] == 401


async def test_a_line_of_an_earlier_version_needs_its_key_used_once(
    gateways: Gateways, tmp_path: Path
) -> None:
    path = await asyncio.to_thread(key_file, tmp_path, old_line("bob", OTHER))
    gateway = await gateways(api_key_file=path, trusted_user_header=HEADER)
    status, body = await asked(gateway.server.url, "bob")
    assert status == 401 and "owner id of bob is not known" in body["error"]["message"]
    assert (await gateway.call("GET", "/v1/usage", key=OTHER)).status == 200
    status, usage = await asked(gateway.server.url, "bob")
    assert (status, usage["people"][0]["owner"]) == (200, owner_of(OTHER))


@pytest.mark.parametrize("route", ["/api/sessions", "/api/sessions/none", "/v1/usage", "/v1/sign-in"])
async def test_no_cache_keeps_a_reply_for_another_person(gateway: Gateway, route: str) -> None:
    """A person may be known by a cookie or a proxy's word, of which a cache in front knows nothing (RFC 9111 §3.5)."""
    for path, kept in ((route, "no-store"), ("/", "no-cache")):
        reply = await gateway.call("GET", path, headers={HEADER: "bob"})
        assert reply.headers["Cache-Control"] == kept
