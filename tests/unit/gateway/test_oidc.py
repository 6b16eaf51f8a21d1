"""Signing in at an OIDC provider: a real one, on a port of its own, that signs with RSA keys and misbehaves where a test tells it to."""

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import aiohttp
import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import rsa

from gateway.access.key_file import key_file_line, owner_of
from gateway.people.sign_ins import COOKIE

from .front import Gateway, Gateways
from .parts import KEY, OTHER, key_file
from .test_audit import written
from .test_sign_ins import status

CLIENT, SECRET = "overture", "s3cret: with + signs"
NAME = "bob@example.org"
Claims = dict[str, Any]


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


OURS, ANOTHERS = new_key(), new_key()


def signed_by(key: Any, algorithm: str, kid: str = "k1") -> Callable[[Claims], str]:
    """Make tokens of claims, without those that are None."""
    return lambda claims: jwt.encode(
        {name: value for name, value in claims.items() if value is not None},
        key,
        algorithm,
        headers={"kid": kid},
    )


SIGNED = signed_by(OURS, "RS256")


class Provider:
    """A provider at which everybody is signed in already. What is set here it does otherwise than it should."""

    def __init__(self) -> None:
        self.claims: Claims = {}
        self.signed: Callable[[Claims], Any] = SIGNED
        self.refuses = ""
        self.issuer = ""
        self.secret = SECRET
        self._codes: dict[str, dict[str, str]] = {}

    @property
    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/.well-known/openid-configuration", self.discovery),
                web.get("/authorize", self.authorize),
                web.post("/token", self.token),
                web.get("/keys", self.keys),
            ]
        )
        return app

    async def discovery(self, request: web.Request) -> web.Response:
        base = f"http://{request.host}"
        places = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/keys"}
        found = {name: base + path for name, path in places.items()}
        return web.json_response(found | {"issuer": self.issuer or base})

    async def authorize(self, request: web.Request) -> web.Response:
        asked = dict(request.query)
        assert asked["response_type"] == "code" and asked["client_id"] == CLIENT
        assert asked["code_challenge_method"] == "S256" and "openid" in asked["scope"].split()
        if self.refuses:
            reply = {"error": self.refuses}
        else:
            reply = {"code": f"code-{len(self._codes)}"}
            self._codes[reply["code"]] = asked
        reply |= {"state": asked["state"], "iss": f"http://{request.host}"}
        raise web.HTTPFound(str(aiohttp.client.URL(asked["redirect_uri"]).with_query(reply)))

    async def token(self, request: web.Request) -> web.Response:
        form = await request.post()
        asked = self._codes.pop(str(form["code"]), None)
        user, _, password = (
            base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode().partition(":")
        )
        has_secret = {"user": [user], "password": [self.secret]} == parse_qs(
            f"user={user}&password={password}"
        )
        digest = hashlib.sha256(str(form["code_verifier"]).encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        is_same = asked is not None and (challenge, form["redirect_uri"]) == (
            asked["code_challenge"],
            asked["redirect_uri"],
        )
        if not has_secret or not is_same or asked is None:
            return web.json_response({"error": "invalid_grant"}, status=400)
        now = int(time.time())
        claims = {"iss": f"http://{request.host}", "sub": "1", "aud": CLIENT, "iat": now, "exp": now + 60}
        claims |= {"nonce": asked["nonce"], "email": NAME, "email_verified": True}
        return web.json_response({"id_token": self.signed(claims | self.claims), "token_type": "Bearer"})

    async def keys(self, request: web.Request) -> web.Response:
        key = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(OURS.public_key()))
        return web.json_response({"keys": [key | {"kid": "k1", "use": "sig", "alg": "RS256"}]})


class Site(NamedTuple):
    """The gateway with ada, an operator, and bob; and its provider."""

    gateway: Gateway
    provider: Provider


@pytest.fixture
async def site(gateways: Gateways, tmp_path: Path) -> AsyncIterator[Site]:
    provider = Provider()
    lines = key_file_line("ada", KEY, is_operator=True), key_file_line(NAME, OTHER)
    path = await asyncio.to_thread(key_file, tmp_path, *lines)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    async with TestServer(provider.app) as server:
        gateway = await gateways(
            api_key_file=path,
            oidc_issuer=str(server.make_url("")).rstrip("/"),
            oidc_client_id=CLIENT,
            oidc_client_secret_file=tmp_path / "secret",
        )
        yield Site(gateway, provider)


class Browser:
    """A browser that keeps cookies and follows redirects one by one."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http

    async def get(self, url: str) -> tuple[int, str, str]:
        """Status, where it leads to, and text."""
        headers = {"Accept": "text/html,*/*;q=0.8"}
        async with self.http.get(url, allow_redirects=False, headers=headers) as reply:
            return reply.status, reply.headers.get("Location", ""), await reply.text()

    async def sign_in(self, gateway: Gateway) -> tuple[int, str, str]:
        """The gateway's last word."""
        _, provider, _ = await self.get(f"{gateway.server.url}/v1/sign-in/oidc")
        _, back, _ = await self.get(provider)
        return await self.get(back)

    def cookie(self, gateway: Gateway, name: str = COOKIE) -> str:
        found = [cookie for cookie in self.http.cookie_jar if cookie.key == name]
        return found[0].value if found else ""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        yield Browser(http)


async def test_a_person_signs_in_and_gets_the_cookie_of_a_link(
    site: Site, browser: Browser, tmp_path: Path
) -> None:
    url = site.gateway.server.url
    assert (await site.gateway.call("GET", "/v1/sign-in")).body == {"ways": ["key", "link", "oidc"]}
    assert (await browser.sign_in(site.gateway))[:2] == (302, "/")
    cookie = browser.cookie(site.gateway)
    async with browser.http.get(f"{url}/v1/usage") as reply:
        (person,) = (await reply.json())["people"]
        assert (person["name"], person["owner"]) == (NAME, owner_of(OTHER))
    assert not browser.cookie(site.gateway, "overture_oidc"), "it is good once"
    async with browser.http.ws_connect(f"{url}/ws") as socket:
        await socket.send_json({"type": "hello"})
        assert (await socket.receive_json())["user"]["can_sign_out"]
    async with browser.http.post(f"{url}/v1/sign-out") as reply:
        assert reply.status == 204
    assert await status(site.gateway, cookie) == 401
    noted = [(entry["what"], entry.get("about")) for entry in await written(site.gateway, tmp_path)]
    assert ("signed_in", "oidc") in noted


async def test_attributes_of_both_cookies_keep_scripts_and_other_sites_out(
    site: Site, browser: Browser
) -> None:
    url = site.gateway.server.url
    async with browser.http.get(f"{url}/v1/sign-in/oidc", allow_redirects=False) as reply:
        attempt = reply.headers["Set-Cookie"]
        asked = parse_qs(urlsplit(reply.headers["Location"]).query)
    assert "HttpOnly" in attempt and "SameSite=Lax" in attempt and "Path=/v1/sign-in/oidc" in attempt
    secret = browser.cookie(site.gateway, "overture_oidc")
    assert secret not in str(asked), "what is in addresses tells nothing of the cookie"
    assert len({asked[name][0] for name in ("state", "nonce", "code_challenge")}) == 3
    _, back, _ = await browser.get(f"{url}/v1/sign-in/oidc")
    _, back, _ = await browser.get(back)
    async with browser.http.get(back, allow_redirects=False) as reply:
        (session,) = [each for each in reply.headers.getall("Set-Cookie") if COOKIE in each]
    assert "HttpOnly" in session and "SameSite=Strict" in session


WRONG_CLAIMS: list[Claims] = [
    {"nonce": "another"},
    {"nonce": None},
    {"aud": "another"},
    {"aud": [CLIENT, "another"]},
    {"aud": [CLIENT, "another"], "azp": "another"},
    {"iss": "https://another.example"},
    {"exp": 1},
    {"iat": 4_000_000_000},
    {"sub": None},
    {"email_verified": False},
    {"email_verified": None},
    {"email": None},
    {"email": 5},
    {"email": "eve@example.org"},
]
WRONGLY_SIGNED: dict[str, Callable[[Claims], Any]] = {
    "another's key": signed_by(ANOTHERS, "RS256"),
    "an unknown key": signed_by(OURS, "RS256", kid="k2"),
    "not the key's algorithm": signed_by(OURS, "PS256"),
    "a secret": signed_by(SECRET * 4, "HS256"),
    "none": signed_by(None, "none"),
    "no token": lambda claims: "no.token.at-all",
    "a number": lambda claims: 5,
}


@pytest.mark.parametrize(
    ("claims", "signed"),
    [(claims, SIGNED) for claims in WRONG_CLAIMS] + [({}, signed) for signed in WRONGLY_SIGNED.values()],
    ids=[*map(str, WRONG_CLAIMS), *WRONGLY_SIGNED],
)
async def test_a_token_that_does_not_hold_or_that_the_provider_did_not_sign_signs_nobody_in(
    site: Site, browser: Browser, claims: Claims, signed: Callable[[Claims], Any]
) -> None:
    site.provider.claims, site.provider.signed = claims, signed
    status, _, text = await browser.sign_in(site.gateway)
    assert status == 401 and "Not signed in" in text
    assert not browser.cookie(site.gateway)


async def test_only_the_browser_that_began_can_end_and_once(site: Site, browser: Browser) -> None:
    begin = f"{site.gateway.server.url}/v1/sign-in/oidc"
    _, provider, _ = await browser.get(begin)
    _, back, _ = await browser.get(provider)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        other = Browser(http)
        assert (await other.get(back))[0] == 401, "without the cookie"
        await other.get(begin)
        assert (await other.get(back))[0] == 401, "with the cookie of another attempt"
    assert (await browser.get(back.replace("iss=http", "iss=https")))[0] == 401, "another provider's reply"
    _, provider, _ = await browser.get(begin)
    _, back, _ = await browser.get(provider)
    secret = browser.cookie(site.gateway, "overture_oidc")
    assert (await browser.get(back))[0] == 302
    browser.http.cookie_jar.update_cookies({"overture_oidc": secret})
    assert (await browser.get(back))[0] == 401, "a code is good once"
    assert (await browser.get(f"{begin}/callback"))[0] == 401


async def test_what_the_provider_refuses_is_said(site: Site, browser: Browser) -> None:
    site.provider.refuses = "access_denied<b>"
    status, _, text = await browser.sign_in(site.gateway)
    assert status == 401 and "access_denied&lt;b&gt;" in text
    site.provider.refuses, site.provider.secret = "", "another"
    status, _, text = await browser.sign_in(site.gateway)
    assert status == 401 and "client id and secret" in text


async def test_a_provider_that_is_not_who_it_says_or_is_away_is_not_asked(
    site: Site, gateways: Gateways, browser: Browser, tmp_path: Path
) -> None:
    site.provider.issuer = "https://another.example"
    status, _, text = await browser.get(f"{site.gateway.server.url}/v1/sign-in/oidc")
    assert status == 503 and "cannot be asked now" in text
    async with TestServer(web.Application()) as nothing:
        issuer = str(nothing.make_url("")).rstrip("/")
        gateway = await gateways(api_key_file=tmp_path / "keys", oidc_issuer=issuer, oidc_client_id=CLIENT)
        assert (await browser.get(f"{gateway.server.url}/v1/sign-in/oidc"))[0] == 503
    assert (await browser.get(f"{gateway.server.url}/v1/sign-in/oidc"))[0] == 503
    without = await gateways(api_key_file=tmp_path / "keys")
    assert (await browser.get(f"{without.server.url}/v1/sign-in/oidc"))[0] == 404
    refused = await without.call("GET", "/v1/sign-in/oidc")
    assert (refused.status, refused.body["error"]["code"]) == (404, "not_found"), "programs read no pages"
    assert (await without.call("GET", "/v1/sign-in")).body == {"ways": ["key", "link"]}
    assert (await (await gateways()).call("GET", "/v1/sign-in")).body == {"ways": []}


async def test_a_newcomer_is_added_where_the_operator_wants_it(
    site: Site, gateways: Gateways, browser: Browser, tmp_path: Path
) -> None:
    site.provider.claims = {"email": "eve@example.org"}
    config = site.gateway.server.services.config
    adding = await gateways(
        api_key_file=config.api_key_file,
        oidc_issuer=config.oidc_issuer,
        oidc_client_id=CLIENT,
        oidc_client_secret_file=config.oidc_client_secret_file,
        add_trusted_users=True,
    )
    assert (await browser.sign_in(adding))[0] == 302
    people = (await adding.call("GET", "/v1/admin/people", key=KEY)).body["people"]
    assert [person["role"] for person in people if person["name"] == "eve@example.org"] == ["member"]
    await adding.call("PATCH", "/v1/admin/people/eve@example.org", {"state": "disabled"}, key=KEY)
    status, _, text = await browser.sign_in(adding)
    assert status == 401 and "disabled" in text
