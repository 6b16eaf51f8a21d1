"""Signing in by a link: it is good once, the cookie stands for the person, and it ends when the person does or signs out."""

import asyncio
import sqlite3
from contextlib import closing
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key_file import key_file_line, owner_of
from gateway.people.ledger import Ledger
from gateway.people.sign_ins import COOKIE, LINK_LASTS_S, MAX_SESSIONS, SESSION_LASTS_S, SignIns

from .front import Gateway, Gateways, Reply
from .parts import KEY, OTHER, Clock, passes, refused
from .test_access import ring_of
from .test_audit import written
from .test_usage import NOON

ADMIN = "/v1/admin/people"
BOB = owner_of(OTHER)


@pytest.fixture
async def gateway(gateways: Gateways, team: Path) -> Gateway:
    return await gateways(api_key_file=team)


async def link_of(gateway: Gateway, name: str = "bob") -> str:
    made = await gateway.call("POST", f"{ADMIN}/{name}/sign-in-link", key=KEY)
    assert made.status == 201 and made.headers["Cache-Control"] == "no-store"
    path, mark, token = made.body["path"].partition("#")
    assert (path, mark) == ("sign-in", "#")
    return str(token)


def carrying(cookie: str) -> dict[str, str]:
    """Headers with it."""
    return {"Cookie": f"{COOKIE}={cookie}"}


def cookie_of(reply: Reply) -> tuple[str, Any]:
    """The cookie of a reply, and its attributes."""
    found = SimpleCookie(reply.headers["Set-Cookie"])[COOKIE]
    return found.value, found


async def signed_in(gateway: Gateway, name: str = "bob") -> str:
    reply = await gateway.call("POST", "/v1/sign-in", {"token": await link_of(gateway, name)})
    assert reply.status == 200
    return cookie_of(reply)[0]


async def status(gateway: Gateway, cookie: str, path: str = "/api/sessions", **headers: str) -> int:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await gateway.call("GET", path, headers=sent | carrying(cookie))).status


async def test_a_link_signs_one_browser_in_once(gateway: Gateway, tmp_path: Path) -> None:
    token = await link_of(gateway)
    reply = await gateway.call("POST", "/v1/sign-in", {"token": token})
    assert (reply.status, reply.body) == (200, {"owner": BOB, "name": "bob", "role": "member"})
    cookie, attributes = cookie_of(reply)
    assert attributes["httponly"] and attributes["samesite"] == "Strict" and not attributes["secure"]
    again = await gateway.call("POST", "/v1/sign-in", {"token": token})
    assert again.status == 401 and "used already" in again.body["error"]["message"]
    assert "Set-Cookie" not in again.headers
    assert await status(gateway, cookie) == 200
    for wrong in ("", "x", cookie[:-1], token):
        assert await status(gateway, wrong) == 401
    assert await status(gateway, cookie, ADMIN) == 403
    assert await status(gateway, await signed_in(gateway, "ada"), ADMIN) == 200
    noted = [
        (entry["what"], entry.get("who"), entry.get("whom")) for entry in await written(gateway, tmp_path)
    ]
    assert noted[:3] == [
        ("link_made", "ada", "bob"),
        ("signed_in", "bob", None),
        ("sign_in_refused", None, None),
    ]
    kept = b"".join(path.read_bytes() for path in (tmp_path / "people.sqlite3", tmp_path / "audit.jsonl"))
    assert token.encode() not in kept and cookie.encode() not in kept


async def test_a_cookie_is_of_this_servers_own_pages(gateways: Gateways, team: Path) -> None:
    """A key goes before it. A page at another origin may not use it, though the operator let the origin use keys."""
    allowed = "http://other.test"
    gateway = await gateways(api_key_file=team, cors_origins=(allowed,))
    cookie = await signed_in(gateway)
    assert await status(gateway, cookie, Authorization="Bearer wrong-key-of-sixteen") == 401
    own = gateway.server.url
    assert await status(gateway, cookie, Origin=own) == 200
    assert await status(gateway, cookie, Origin=allowed) == 401
    assert await status(gateway, cookie, Origin=allowed, Sec_Fetch_Site="same-site") == 401
    assert await status(gateway, cookie, Origin=allowed, Sec_Fetch_Site="same-origin") == 200, (
        "behind a proxy"
    )


@pytest.mark.parametrize("how", ["sign out", "end", "disable", "erase"])
async def test_what_is_open_ends_with_the_sign_in(gateway: Gateway, how: str) -> None:
    cookie, other = await signed_in(gateway), await signed_in(gateway)
    async with gateway.socket(headers=carrying(cookie)) as socket:
        await socket.send(type="hello")
        user = {"owner": BOB, "name": "bob", "role": "member", "can_sign_out": True}
        assert (await socket.next())["user"] == user
        if how == "sign out":
            reply = await gateway.call("POST", "/v1/sign-out", headers=carrying(cookie))
            assert reply.status == 204 and 'overture_session=""' in reply.headers["Set-Cookie"]
        elif how == "end":
            assert (await gateway.call("DELETE", f"{ADMIN}/bob/sign-ins", key=KEY)).status == 204
        elif how == "disable":
            await gateway.call("PATCH", f"{ADMIN}/bob", {"state": "disabled"}, key=KEY)
        else:
            assert (await gateway.call("DELETE", f"{ADMIN}/bob", key=KEY)).status == 200
        assert (await socket.next())["code"] == "unauthorized"
        assert await socket.closed() == 4401
    assert await status(gateway, cookie) == 401
    assert await status(gateway, other) == (200 if how == "sign out" else 401)
    works = (await gateway.call("GET", "/api/sessions", key=OTHER)).status == 200
    assert works is (how in ("sign out", "end")), "keys stay"


async def test_who_signs_out_is_signed_out_also_where_that_cannot_be_written(
    gateway: Gateway, tmp_path: Path
) -> None:
    """On a full disk. After a restart the browser would be signed in again, were it not written later."""
    cookie = await signed_in(gateway)
    services = gateway.server.services
    ledger = services.usage.ledger
    async with gateway.socket(headers=carrying(cookie), hello={}) as socket:
        ledger._conn.execute("PRAGMA query_only = ON")
        everywhere = await gateway.call("DELETE", f"{ADMIN}/bob/sign-ins", key=KEY)
        assert everywhere.status == 503 and await status(gateway, cookie) == 200, "may be asked again"
        reply = await gateway.call("POST", "/v1/sign-out", headers=carrying(cookie))
        assert reply.status == 204 and 'overture_session=""' in reply.headers["Set-Cookie"]
        assert (await socket.next())["code"] == "unauthorized"
    assert await status(gateway, cookie) == 401
    ledger._conn.execute("PRAGMA query_only = OFF")
    await services.sign_ins.purge()
    assert ledger.browsers(0.0) == []


@pytest.mark.virtual_time
async def test_a_socket_ends_when_its_sign_in_has_lasted_its_time(gateway: Gateway) -> None:
    """Its turn goes on as for any page that has lost its connection, and other sign-ins and keys stay."""
    gateway.node.script = None
    old = await signed_in(gateway)
    gateway.clock_ahead_s = 10.0
    opened = (
        gateway.socket(headers=carrying(old), hello={}),
        gateway.socket(headers=carrying(await signed_in(gateway)), hello={}),
        gateway.socket(key=OTHER, hello={}),
    )
    async with opened[0] as ended, opened[1] as other, opened[2] as by_key:
        await ended.ask("a")
        answer = await gateway.node.asked(0)
        gateway.clock_ahead_s = SESSION_LASTS_S + 5.0
        await passes(1.0)
        assert (await ended.next())["code"] == "unauthorized"
        assert await ended.closed() == 4401
        for socket in (other, by_key):
            await socket.send(type="ping", t=1)
            assert (await socket.next())["type"] == "pong"
        answer.finish("Here it is.")
    kept = await gateway.call("GET", "/api/sessions", key=OTHER)
    assert kept.body["sessions"][0]["num_turns"] == 1
    assert not answer.is_cancelled


@pytest.mark.virtual_time
async def test_a_socket_ends_when_newer_sign_ins_take_the_place_of_its_own(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.people.sign_ins.MAX_SESSIONS", 1)
    async with gateway.socket(headers=carrying(await signed_in(gateway)), hello={}) as oldest:
        await signed_in(gateway)
        await passes(1.0)
        assert (await oldest.next())["code"] == "unauthorized"
        assert await oldest.closed() == 4401


async def test_a_link_of_a_disabled_person_and_a_large_body_are_refused(
    gateway: Gateway, gateways: Gateways
) -> None:
    token = await link_of(gateway)
    await gateway.call("PATCH", f"{ADMIN}/bob", {"state": "disabled"}, key=KEY)
    assert (await gateway.call("POST", "/v1/sign-in", {"token": token})).status == 401
    assert (await gateway.call("POST", f"{ADMIN}/bob/sign-in-link", key=KEY)).status == 409
    assert (await gateway.call("POST", f"{ADMIN}/bob/sign-in-link", key=OTHER)).status == 401
    assert (await gateway.call("POST", "/v1/sign-in", {"token": "x" * 2000})).status == 413
    assert (await gateway.call("POST", "/v1/sign-in", {"token": "x", "more": 1})).status == 400
    assert (await gateway.call("POST", "/v1/sign-in", [])).status == 400
    open_to_all = await gateways()
    assert (await open_to_all.call("POST", "/v1/sign-in", {"token": "x"})).status == 409
    assert (await open_to_all.call("POST", "/v1/sign-out")).status == 204


async def test_sign_ins_outlive_a_restart_and_grow_old(tmp_path: Path) -> None:
    clock = Clock(NOON)
    keys = await asyncio.to_thread(ring_of, tmp_path, key_file_line("bob", OTHER))
    ledger = await asyncio.to_thread(Ledger.open, tmp_path / "people.sqlite3")
    sign_ins = SignIns(ledger, keys, clock)
    late, _ = await sign_ins.make_link(BOB)
    token, expires_s = await sign_ins.make_link(BOB)
    assert expires_s == clock.now_s + LINK_LASTS_S
    cookie, principal = await sign_ins.sign_in(token)
    assert (principal.owner, principal.name) == (BOB, "bob")
    clock.now_s += LINK_LASTS_S
    assert (await refused(sign_ins.sign_in(late))).code == "unauthorized"
    again = SignIns(ledger, keys, clock)
    await again.load()
    assert again.principal(cookie) == principal
    clock.now_s += SESSION_LASTS_S
    assert again.principal(cookie) is None
    await again.make_link(BOB)
    clock.now_s += LINK_LASTS_S
    kept, _ = await again.make_link(BOB)
    await again.purge()
    with closing(sqlite3.connect(tmp_path / "people.sqlite3")) as conn:
        assert conn.execute("SELECT count(*) FROM browsers").fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM links").fetchone() == (1,)
    await again.sign_in(kept)
    cookies = []
    for _ in range(MAX_SESSIONS + 1):
        token, _ = await again.make_link(BOB)
        cookies.append((await again.sign_in(token))[0])
    assert again.principal(cookies[0]) is None and again.principal(cookies[1]) == principal
    ledger.close()
