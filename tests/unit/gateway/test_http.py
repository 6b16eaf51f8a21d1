"""The HTTP door: who may connect, heads, names of the server, bodies that ask for too much, the page's files, lists and description."""

import asyncio
import gzip
import json
import re
import socket
from contextlib import nullcontext
from dataclasses import replace
from ipaddress import ip_network
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from yarl import URL

from engine_bridge.policy.limits.request_limits import check_prompt
from engine_bridge.protocol.api_errors import error_body
from engine_bridge.protocol.errors import ADAPTER_CHANGING, AdapterChanging, InvalidRequest
from engine_bridge.protocol.node import Api, JsonReply
from gateway import json_shape
from gateway.access.addresses import address_of
from gateway.access.hosts import is_own_host
from gateway.app import build_app, build_services
from gateway.doors.api.call_size import check_call, check_shape
from gateway.doors.description.operations import OPERATIONS
from gateway.doors.http.admission import (
    Admission,
    BodyFacts,
    NewConnection,
    Watermark,
    admit,
    body_overdue,
    is_shared,
    limits_for,
)
from gateway.errors import to_openai_body
from gateway.json_shape import ValueCounter, shape_of
from gateway.metrics.metrics import Metrics
from gateway.settings.config import Config
from gateway.turns.failures import from_bridge

from .front import Gateway, Gateways


async def test_a_head_that_is_too_large_is_told_its_bound(gateway: Gateway) -> None:
    many = {f"X-{number}": "a" for number in range(200)}
    for route, headers, says in (
        ("/healthz", {"Cookie": "a=" + "a" * 9000}, "8,190 bytes"),
        ("/healthz?" + "a" * 9000, {}, "8,190 bytes"),
        ("/healthz", many, "128 headers"),
    ):
        reply = await gateway.call("GET", route, headers=headers)
        assert reply.status == 431 and reply.headers["Server"] == "Overture"
        error = reply.body["error"]
        assert says in error["message"] and error["code"] == "frame_too_large"
        assert "aaaa" not in error["message"]


FOREIGN = (
    "evil.example evil.example:8000 127.0.0.1.evil.example localhost.evil.example a.localhost.co [".split()
)
OWN = "127.0.0.1 127.0.0.1:8000 192.168.1.7:8000 [::1]:8000 localhost LOCALHOST:8000 app.localhost.".split()
OF_A_NETWORK = ["overture:8000", "box.local", "Box.Local.", "gpu.internal", "nas.home.arpa", "chat.of.mine"]


def test_only_names_that_the_public_dns_cannot_have_and_the_operators_are_the_servers() -> None:
    for host, is_loopback in product([*FOREIGN, *OWN, *OF_A_NETWORK, ""], [True, False]):
        is_own = is_own_host(host, origins=(), own_names=("Chat.of.mine",), is_loopback=is_loopback)
        assert is_own == (host in OWN or (host in OF_A_NETWORK and not is_loopback)), host
    origins = ("https://chat.example", "http://other.example:8080", "null", "http://[")
    for host, is_own in (("chat.example", True), ("other.example", False), ("other.example:8080", True)):
        assert is_own_host(host, origins=origins, own_names=(), is_loopback=False) == is_own


async def test_without_a_host_no_name_server_is_asked(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("the event loop waits for a name server")

    monkeypatch.setattr(socket, "getfqdn", ask)
    monkeypatch.setattr(socket, "gethostbyaddr", ask)
    for head in (
        b"GET /api/sessions HTTP/1.0\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\nOrigin: http://a.example\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(head)
        status = (await reader.readline()).split()[1]
        assert status == (b"403" if b"Origin" in head else b"200")
        writer.close()


async def test_half_a_character_of_a_body_is_a_question_mark(gateway: Gateway) -> None:
    """An agent would be refused for ever with the history that it cut between the halves of an emoji."""
    for title, shown in ((rb"Trip \ud83d!", "Trip ?!"), (rb"\ude00 and \ud83d\ude00", "? and \U0001f600")):
        reply = await gateway.call("POST", "/api/sessions", data=b'{"title":"%s"}' % title)
        assert reply.status == 201 and reply.body["title"] == shown
    for no_json in (rb'{"title":"\ud83d', rb'{"title":"\ud83d","settings":{"temperature":1e999}}'):
        reply = await gateway.call("POST", "/api/sessions", data=no_json)
        assert reply.status == 400 and "valid JSON" in str(reply.body)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/load_lora_adapter"])
async def test_a_reply_that_says_not_now_says_when(gateways: Gateways, route: str) -> None:
    gateway = await gateways(allow_adapter_loading=True)

    async def not_now(*args: Any) -> JsonReply:
        return JsonReply(503, msgspec.json.encode(error_body(503, ADAPTER_CHANGING)))

    gateway.node.serve = gateway.node.load_adapter = not_now  # type: ignore[method-assign,assignment]
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello!"}]}
    reply = await gateway.call("POST", route, body)
    assert reply.status == 503 and int(reply.headers["Retry-After"]) >= 1
    error = reply.body["error"]
    assert error["code"] == "adapter_changing"
    told = from_bridge(AdapterChanging())
    assert told.retryable and to_openai_body(told)["error"] == error


async def test_only_operators_put_the_engine_to_sleep_and_wake_it_up(gateways: Gateways) -> None:
    tenant, operator = "ov-a-tenants-key", "ov-an-operators-key"
    gateway = await gateways(api_keys=(tenant,), operator_keys=(operator,))
    for method, path, key, status in (
        ("POST", "/sleep", None, 401),
        ("POST", "/sleep", tenant, 403),
        ("POST", "/wake_up", tenant, 403),
        ("POST", "/sleep?level=2", operator, 400),
        ("POST", "/sleep?mode=keep", operator, 400),
    ):
        assert (await gateway.call(method, path, key=key)).status == status, path
    slept = await gateway.call("POST", "/sleep?mode=wait&level=1", key=operator)
    assert slept.body == {"status": "sleeping", "level": 1} and gateway.node.slept == ("wait", 1.0)
    assert (await gateway.call("GET", "/is_sleeping", key=tenant)).body == {"is_sleeping": True}
    ready = await gateway.call("GET", "/readyz")
    assert (ready.status, ready.body["status"]) == (503, "asleep")
    assert (await gateway.call("POST", "/wake_up", key=operator)).body == {"status": "awake"}
    assert (await gateway.call("GET", "/is_sleeping", key=tenant)).body == {"is_sleeping": False}


TEXT = st.text(alphabet='ab",\\[]{}:é\n', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=40,
)


def counted(value: Any) -> tuple[int, int]:
    """(values, depth) of a decoded value."""
    if not isinstance(value, dict | list):
        return 1, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(num for num, _ in inner), 1 + max((depth for _, depth in inner), default=0)


@given(VALUES, st.sampled_from([1, 2, 3, 7, 1 << 18]))
def test_depth_is_exact_and_values_are_never_fewer_than_there_are(value: Any, chunk_bytes: int) -> None:
    """In pieces, too, behind a line that looks like a string's beginning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "CHUNK_BYTES", chunk_bytes)
        shape = shape_of(json.dumps(value, ensure_ascii=False).encode())
    num_values, depth = counted(value)
    assert shape.depth == depth
    assert num_values <= shape.num_values <= 2 * num_values + 1
    counter, text = ValueCounter(), b': "\r\n' + json.dumps(value, ensure_ascii=False, indent=1).encode()
    for start in range(0, len(text), chunk_bytes):
        counter.add(text[start : start + chunk_bytes])
    assert num_values <= counter.num_values <= 4 * num_values + 3


MESSAGE = {"role": "user", "content": "x" * 10}


@pytest.mark.parametrize(
    ("api", "body", "setting"),
    [
        ("chat", {"messages": [MESSAGE] * 8}, None),
        ("chat", {"messages": "malformed", "n": "two"}, None),
        ("chat", ["no object"], None),
        ("chat", {"messages": [MESSAGE], "user": "u" * 1000}, None),
        ("completions", {"prompt": "x" * 300, "n": 4}, None),
        ("completions", {"prompt": ["x" * 300] * 4}, None),
        ("completions", {"prompt": list(range(50)), "n": 4}, None),
        ("responses", {"input": "x" * 300}, None),
        ("messages", {"messages": [MESSAGE], "system": "x" * 250}, None),
        ("chat", {"messages": [MESSAGE] * 9}, "max_messages"),
        ("responses", {"input": [MESSAGE] * 9}, "max_messages"),
        ("chat", {"messages": [MESSAGE], "n": 5}, "max_sequences"),
        ("completions", {"prompt": ["x"] * 3, "n": 2}, "max_sequences"),
        ("completions", {"prompt": ["x"] * 3, "n": "2"}, "max_sequences"),
        ("chat", {"messages": [MESSAGE], "n": 16384.0}, "max_sequences"),
        ("completions", {"prompt": [[1], [2], [3]], "n": 2}, "max_sequences"),
        ("completions", {"prompt": "x" * 301}, "max_prompt_chars"),
        ("completions", {"prompt": ["x", "x" * 301]}, "max_prompt_chars"),
        ("chat", {"messages": [{"content": [{"type": "text", "text": "x" * 301}]}]}, "max_prompt_chars"),
        ("chat", {"messages": [MESSAGE], "tools": [{"description": "x" * 301}]}, "max_prompt_chars"),
        ("messages", {"messages": [], "system": "x" * 301}, "max_prompt_chars"),
    ],
)
def test_calls_over_a_limit_are_refused_with_its_name(api: Api, body: Any, setting: str | None) -> None:
    with pytest.raises(InvalidRequest, match=setting) if setting else nullcontext():
        check_call(api, body, max_messages=8, max_sequences=4)
        check_prompt(api, body, 300)


def test_bodies_with_too_many_values_or_levels_are_refused() -> None:
    check_shape(10, 4, max_values=10, max_depth=4)
    for num_values, depth, setting in ((11, 4, "max_json_values"), (10, 5, "max_json_depth")):
        with pytest.raises(InvalidRequest, match=setting):
            check_shape(num_values, depth, max_values=10, max_depth=4)


async def test_what_is_no_file_of_the_page_does_not_exist(gateway: Gateway) -> None:
    for name in ("", "nothing.js", "js", "%2e%2e/README.md", "..%2fREADME.md", "%00", "x" * 300, "%ff"):
        reply = await gateway.call("GET", URL(f"/static/{name}", encoded=True))
        assert reply.status == 404, (name, reply.body)


async def test_a_socket_that_watches_the_list_hears_of_every_change_of_its_owner(gateways: Gateways) -> None:
    """What a page makes of titles and pins is in tests/browser/test_page.py."""
    gateway = await gateways(api_keys=("ov-one", "ov-two"))
    async with (
        gateway.socket(key="ov-one", hello={}) as watching,
        gateway.socket(key="ov-one", hello={}) as asking,
        gateway.socket(key="ov-two", hello={}) as other,
    ):
        for each in (watching, other):
            await each.send(type="watch_list")
            await each.send(type="ping")
            assert (await each.next())["type"] == "pong"

        async def call(method: str, path: str, body: Any = None) -> Any:
            reply = await gateway.call(method, f"/api/sessions{path}", body, key="ov-one")
            assert 200 <= reply.status < 300
            return reply.body

        async def heard() -> Any:
            frame = await watching.next()
            assert frame["type"] == "listed"
            session = frame["session"]
            return session and (frame["session_id"], session["title"], session["num_turns"])

        name = (await call("POST", "", {}))["id"]
        assert await heard() == (name, None, 0)
        assert (await asking.ask("a", "Hello!", session_id=name))["type"] == "accepted"
        assert await heard() == (name, "Hello!", 1)
        (await gateway.node.asked()).finish("Hi.")
        assert (await asking.rest())[1]["type"] == "done"
        await call("DELETE", f"/{name}")
        assert await heard() is None
        await call("POST", f"/{name}/restore")
        assert await heard() == (name, "Hello!", 1)
        copy = await call("POST", "/import", await call("GET", f"/{name}/export"))
        assert await heard() == (copy["id"], "Hello!", 1)
        for each in (asking, other):
            await each.send(type="ping")
            assert (await each.next())["type"] == "pong", "it does not watch, or is another's"


LIMITS = limits_for(4096, 10_000, None, None)
QUIET = NewConnection(
    num_all=10, num_of_address=2, has_unfinished_of_address=True, has_unfinished=True, has_idle=True
)
FULL = replace(QUIET, num_all=LIMITS.num_general)


def test_files_are_kept_back_for_everything_else() -> None:
    for max_files, total in ((256, 128), (1024, 512), (4096, 3584), (20_000, 19_488), (1 << 20, 20_000)):
        limits = limits_for(max_files, 10_000, None, None)
        assert limits.num_total == total
        assert limits.num_per_address <= total // 2
        assert 0 < limits.num_general < total


PAST = replace(FULL, num_all=LIMITS.num_general + 1)  # others have all places that are not reserved
BUSY = replace(FULL, has_unfinished=False, has_idle=False)
GREEDY = replace(QUIET, num_of_address=LIMITS.num_per_address, has_unfinished_of_address=False)


@pytest.mark.parametrize(
    ("new", "admission"),
    [
        (FULL, Admission(True, "oldest_unfinished")),
        (replace(FULL, has_unfinished=False), Admission(True, "oldest_idle")),
        (PAST, Admission(True, "oldest_unfinished", is_reserved=True)),
        (replace(PAST, has_unfinished=False), Admission(True, "oldest_idle", is_reserved=True)),
        (
            replace(PAST, num_of_address=LIMITS.num_per_address),
            Admission(True, "oldest_of_address", is_reserved=True),
        ),
        (BUSY, Admission(True, is_reserved=True)),
        (replace(BUSY, num_all=LIMITS.num_total), Admission(False, reason="limit")),
        (replace(GREEDY, has_unfinished_of_address=True), Admission(True, "oldest_of_address")),
        (GREEDY, Admission(False, reason="address_limit")),
        (replace(GREEDY, num_of_address=None), Admission(True)),  # an address that many share
    ],
)
def test_who_goes_when_connections_are_scarce(new: NewConnection, admission: Admission) -> None:
    assert admit(new, LIMITS) == admission


@pytest.mark.parametrize(
    ("body", "now_s", "reason"),
    [
        (BodyFacts(0, 0, 0), 19.9, None),
        (BodyFacts(0, 0, 0), 20, "body_timeout"),
        (BodyFacts(0, 100, 1 << 20), 119, None),
        (BodyFacts(0, 100, 1 << 20), 120, "body_timeout"),
        (BodyFacts(0, 59, 100), 61, "body_too_slow"),
        (BodyFacts(0, 187, 1 << 19), 188, "body_too_slow"),
        (BodyFacts(0, 187, 1 << 19), 187, None),
        (BodyFacts(0, 299, 16 << 20), 299, None),
        (BodyFacts(0, 299, 16 << 20), 300, "body_too_slow"),
        (BodyFacts(0, 319, 20 << 20), 319, None),
        (BodyFacts(0, 319, 20 << 20), 320, "body_too_slow"),
    ],
)
def test_when_a_body_is_no_longer_waited_for(body: BodyFacts, now_s: float, reason: str | None) -> None:
    assert body_overdue(body, now_s, 20) == reason


def test_a_warning_comes_once_until_it_has_been_over_for_good() -> None:
    mark = Watermark()
    said = [(used, mark.is_high) for used in (79, 80, 90, 75, 85, 70, 69, 75, 80) if mark.crossed(used, 100)]
    assert said == [(80, True), (69, False), (80, True)]


def test_addresses_of_one_customer_are_one_and_of_many_are_shared() -> None:
    for host, address in {
        "192.0.2.7": "192.0.2.7",
        "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::",
        "::ffff:192.0.2.7": "192.0.2.7",
        "fe80::1%eth0": "fe80::",
        "::1": "::1",
        "unix:": "",
    }.items():
        assert address_of(host) == address
    proxies = [ip_network("10.0.0.0/8"), ip_network("2001:db8:1:2::5")]
    shared = ["", "127.0.0.1", "127.8.8.8", "::1", "10.1.2.3", "2001:db8:1:2::"]
    assert [host for host in [*shared, "192.0.2.7", "2001:db8:1:3::"] if is_shared(host, proxies)] == shared


@pytest.fixture
async def app(tmp_path: Path):
    services = await build_services(
        Config(data_dir=tmp_path, kv_host_gib=0, port=0), metrics=Metrics(CollectorRegistry())
    )
    yield build_app(services)
    await services.node.close()
    await services.store.close()


async def test_every_route_is_described_and_everything_described_is_a_route(app: web.Application) -> None:
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"  # which aiohttp adds to every GET
    }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes


async def test_while_the_engine_starts_there_is_no_half_document(app: web.Application) -> None:
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/openapi.json")
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["code"] == "starting"


TAKE_GZIP = ("GZIP", "br, gzip;q=0.5", "gzip;q=0.10")


async def test_texts_of_the_page_come_packed_and_a_second_time_not_at_all(gateway: Gateway) -> None:
    """Where the client unpacks them; else as they are."""
    async with aiohttp.ClientSession(gateway.server.url, auto_decompress=False) as http:
        for path in ("/", "/static/js/app.js", "/static/css/base.css"):
            async with http.get(path, headers={"Accept-Encoding": "gzip"}) as reply:
                packed, tag = await reply.read(), reply.headers["ETag"]
                assert (
                    reply.headers["Content-Encoding"] == "gzip" and reply.headers["Vary"] == "Accept-Encoding"
                )
            for accepted in ("identity", "gzip;q=0", "br, gzip; Q=0.00", "x-gzip", "", *TAKE_GZIP):
                async with http.get(path, headers={"Accept-Encoding": accepted}) as reply:
                    is_packed = "Content-Encoding" in reply.headers
                    assert is_packed is (accepted in TAKE_GZIP) and reply.headers["Vary"], accepted
                    assert await reply.read() == (packed if is_packed else gzip.decompress(packed)), accepted
            for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
                headers = {"Accept-Encoding": "gzip", "If-None-Match": known}
                async with http.get(path, headers=headers) as reply:
                    assert (reply.status, await reply.read()) == (304, b""), known


async def test_what_a_page_loads_is_kept_by_browsers_as_its_path_names_what_it_is(gateway: Gateway) -> None:
    """Under the path of another version there is the same, which no browser keeps; the sources stay where they were."""
    page = await gateway.call("GET", "/")
    found = re.search(r'src="(static/v-[0-9a-f]+/js/main.js)"', page.body)
    assert found and page.headers["Cache-Control"] == "no-cache"
    replies = {}
    for path in (found[1], "static/v-0123/js/main.js", "static/js/main.js"):
        reply = await gateway.call("GET", f"/{path}")
        assert reply.status == 200 and reply.headers["Content-Type"].startswith("text/javascript")
        replies[reply.body] = reply.headers["Cache-Control"]
    assert list(replies.values()) == ["no-cache", "no-cache"]
    assert "immutable" in (await gateway.call("GET", f"/{found[1]}")).headers["Cache-Control"]
    for path in ("js/../../setup.py", "none.js", "", "css/page-none.css"):
        assert (await gateway.call("GET", f"/static/v-0123/{path}")).status == 404
