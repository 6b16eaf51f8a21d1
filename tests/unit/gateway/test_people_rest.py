"""`/v1/admin/people`: what operators change while the server runs takes effect at once, and what a person had is gone when it was erased."""

import asyncio
import io
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from engine_bridge.protocol.errors import EngineUnavailable
from gateway.access.auth import Principal, generate_key
from gateway.access.key_file import key_file_line, owner_of
from gateway.errors import GatewayError
from gateway.nodes.known_nodes import LOCAL
from gateway.people import erasures
from gateway.people.estate import Erased
from gateway.people.ledger import Spent
from gateway.sessions import SessionStore
from kvtiers.io.files import claim
from kvtiers.io.inspect import erase, inspect

from .front import Gateway, Gateways
from .parts import KEY, OTHER, key_file, until
from .stores import chat
from .test_access import old_line
from .test_audit import written
from .test_people import everything_in, fill_kv

ADMIN = "/v1/admin/people"


async def people(gateway: Gateway) -> dict[str, Any]:
    """The list, by name."""
    reply = await gateway.call("GET", ADMIN, key=KEY)
    assert reply.status == 200 and reply.body["me"] == owner_of(KEY)
    return {person["name"]: person for person in reply.body["people"]}


@pytest.fixture
async def gateway(gateways: Gateways, tmp_path: Path) -> Gateway:
    """With ada, an operator, and bob, whose line is of an earlier version."""
    lines = key_file_line("ada", KEY, is_operator=True), old_line("bob", OTHER)
    path = await asyncio.to_thread(key_file, tmp_path, *lines)
    return await gateways(api_key_file=path)


async def is_let_in(gateway: Gateway, key: str) -> bool:
    return (await gateway.call("GET", "/api/sessions", key=key)).status == 200


async def test_keys_are_made_replaced_and_withdrawn_at_once(gateway: Gateway, tmp_path: Path) -> None:
    made = await gateway.call("POST", ADMIN, {"name": "eve"}, key=KEY)
    first = made.body["key"]
    assert (
        made.status == 201 and made.body["id"] == first[:11] and made.headers["Cache-Control"] == "no-store"
    )
    assert await is_let_in(gateway, first)
    eve = owner_of(first)
    second = (await gateway.call("POST", f"{ADMIN}/{eve}/keys", key=KEY)).body["key"]
    async with gateway.socket(key=first, hello={}) as one, gateway.socket(key=second, hello={}) as two:
        replaced = await gateway.call("POST", f"{ADMIN}/eve/keys/{first[:11]}/replace", key=KEY)
        third = replaced.body["key"]
        assert (await one.next())["code"] == "unauthorized"
        with pytest.raises(ConnectionClosed):
            await one.next()
        await two.send(type="ping", t=1)
        assert (await two.next())["type"] == "pong", "the other key of the person goes on"
    assert not await is_let_in(gateway, first) and await is_let_in(gateway, third)
    assert (await gateway.call("DELETE", f"{ADMIN}/eve/keys/{second[:11]}", key=KEY)).status == 204
    assert not await is_let_in(gateway, second)
    shown = (await people(gateway))["eve"]
    assert (shown["owner"], shown["role"], shown["state"]) == (eve, "member", "active")
    assert [key["id"] for key in shown["keys"]] == [third[:11]]
    changed = await gateway.call("PATCH", f"{ADMIN}/eve", {"state": "disabled"}, key=KEY)
    assert changed.body["state"] == "disabled" and not await is_let_in(gateway, third)
    await gateway.call("PATCH", f"{ADMIN}/eve", {"state": "active"}, key=KEY)
    assert await is_let_in(gateway, third)
    found = [entry["what"] for entry in await written(gateway, tmp_path) if entry.get("whom") == "eve"]
    assert found == [
        "person_added",
        "key_added",
        "key_replaced",
        "key_revoked",
        "person_disabled",
        "person_enabled",
    ]
    text = (tmp_path / "audit.jsonl").read_text() + (tmp_path / "keys").read_text()
    assert not any(key in text for key in (first, second, third))


async def test_limits_of_a_person_are_set_shown_and_applied_in_each_protocols_form(
    gateway: Gateway, tmp_path: Path
) -> None:
    made = await gateway.call("POST", ADMIN, {"name": "eve"}, key=KEY)
    eve = made.body["key"]
    limits = {"requests_per_min": 1, "tokens_per_day": 5, "stored_mib": 3}
    changed = await gateway.call("PATCH", f"{ADMIN}/eve", {"limits": limits}, key=KEY)
    assert changed.body["limits"] == limits | {"concurrent_requests": None}
    changed = await gateway.call("PATCH", f"{ADMIN}/eve", {"limits": {"tokens_per_day": None}}, key=KEY)
    assert (changed.body["limits"]["tokens_per_day"], changed.body["limits"]["stored_mib"]) == (None, 3)
    assert (await people(gateway))["eve"]["limits"] == changed.body["limits"]
    assert (await gateway.call("GET", "/v1/usage", key=eve)).body["people"][0]["limits"] == {
        "requests_per_min": 1,
        "concurrent_requests": 256,
        "stored_mib": 3,
        "tokens_per_day": None,
    }
    async with gateway.socket(key=eve, hello={}) as socket:
        await socket.ask("a")
        (await gateway.node.asked(0)).finish("Hi")
        assert (await socket.rest())[1]["type"] == "done"
        refused = await socket.ask("b")
        assert (refused["code"], refused["retryable"]) == ("rate_limited", True)
        assert "1 times a minute" in refused["message"] and refused["retry_after_s"] > 0
    message = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello!"}]}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        reply = await gateway.call("POST", path, message, key=eve)
        assert (reply.status, reply.body["error"]["type"]) == (429, "rate_limit_error"), path
        assert (
            int(reply.headers["Retry-After"]) > 0 and "an operator set this" in reply.body["error"]["message"]
        )
    assert (await gateway.call("GET", "/api/sessions", key=eve)).status == 200, "the page goes on"
    for wrong in ({"limits": {"stored_mib": -1}}, {"limits": {"x": 1}}, {"limits": None}):
        assert (await gateway.call("PATCH", f"{ADMIN}/eve", wrong, key=KEY)).status == 400
    assert (await gateway.call("PATCH", f"{ADMIN}/eve", {"limits": limits}, key=eve)).status == 403
    found = [
        entry["about"] for entry in await written(gateway, tmp_path) if entry["what"] == "person_limited"
    ]
    assert found[0] == "requests-per-min=1 stored-mib=3 tokens-per-day=5" and len(found) == 2


async def test_only_operators_may_and_not_against_themselves(gateway: Gateway, gateways: Gateways) -> None:
    calls = (
        ("GET", ADMIN, None),
        ("POST", ADMIN, {"name": "x"}),
        ("PATCH", f"{ADMIN}/ada", {"state": "disabled"}),
        ("DELETE", f"{ADMIN}/ada", None),
        ("GET", f"{ADMIN}/ada/export", None),
        ("POST", f"{ADMIN}/ada/keys", None),
        ("POST", f"{ADMIN}/ada/keys/{KEY[:11]}/replace", None),
        ("DELETE", f"{ADMIN}/ada/keys/{KEY[:11]}", None),
    )
    before = await people(gateway)
    for method, path, body in calls:
        assert (await gateway.call(method, path, body, key=OTHER)).status == 403, path
        assert (await gateway.call(method, path, body)).status == 401, path
    for method, path, body in (calls[2], calls[3], calls[7]):
        reply = await gateway.call(method, path, body, key=KEY)
        assert (reply.status, reply.body["error"]["code"]) == (409, "conflict"), path
    for method, path in (
        ("DELETE", f"{ADMIN}/nobody"),
        ("GET", f"{ADMIN}/nobody/export"),
        ("POST", f"{ADMIN}/x/keys"),
    ):
        assert (await gateway.call(method, path, key=KEY)).status == 404
    taken = await gateway.call("POST", ADMIN, {"name": "bob"}, key=KEY)
    assert taken.status == 409 and "named 'bob' already" in taken.body["error"]["message"]
    after = await people(gateway)
    assert after["ada"] == before["ada"] and after.keys() == before.keys()
    open_to_all = await gateways()
    refused = await open_to_all.call("GET", ADMIN)
    assert refused.status == 409 and "--api-key-file" in refused.body["error"]["message"]


async def test_where_flags_alone_make_operators_the_file_needs_none(
    gateways: Gateways, tmp_path: Path
) -> None:
    chief = generate_key()
    path = await asyncio.to_thread(key_file, tmp_path, key_file_line("bob", OTHER))
    gateway = await gateways(api_key_file=path, operator_keys=(chief,))
    made = await gateway.call("POST", ADMIN, {"name": "eve"}, key=chief)
    assert made.status == 201 and await is_let_in(gateway, made.body["key"])


async def test_a_file_that_cannot_be_changed_is_not_named_to_clients(
    gateway: Gateway, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("nonsense\n")
    reply = await gateway.call("POST", ADMIN, {"name": "eve"}, key=KEY)
    assert reply.status == 503 and str(tmp_path) not in json.dumps(reply.body)
    assert await is_let_in(gateway, KEY), "a broken file shuts nobody out"


async def test_a_person_of_an_earlier_version_is_exported_and_erased_once_the_key_was_used(
    gateway: Gateway, tmp_path: Path
) -> None:
    bob = owner_of(OTHER)
    unknown = (await people(gateway))["bob"]
    assert unknown["owner"] is None and unknown["tokens_today"] is None
    assert (await gateway.call("DELETE", f"{ADMIN}/bob", key=KEY)).status == 409
    await chat(gateway.store, "his", "one", "two", owner=bob)
    await chat(gateway.store, "hers", "three", owner=owner_of(KEY))
    gateway.usage.add(bob, Spent(1, 5, 6))
    async with gateway.socket(key=OTHER, hello={}) as socket:
        await socket.ask("running", "a question that is never answered")
        answer = await gateway.node.asked(0)
        shown = (await people(gateway))["bob"]
        assert (shown["owner"], shown["tokens_today"], shown["num_sessions"]) == (bob, 11, 2)
        reply = await gateway.call("GET", f"{ADMIN}/bob/export", key=KEY)
        assert reply.headers["Content-Type"] == "application/zip"
        assert 'filename="bob.zip"' in reply.headers["Content-Disposition"]
        packed = zipfile.ZipFile(io.BytesIO(reply.content))
        assert len(packed.namelist()) == 3 and json.loads(packed.read("person.json"))["owner"] == bob
        erased = await gateway.call("DELETE", f"{ADMIN}/bob", key=KEY)
        assert (erased.status, erased.body) == (200, {"num_sessions": 2, "num_kv_blocks": 3})
        assert gateway.node.erased == [bob]
        assert answer.is_cancelled
        frames = [frame async for frame in _until_closed(socket)]
        assert frames[-1]["code"] == "unauthorized"
    assert not await is_let_in(gateway, OTHER) and list(await people(gateway)) == ["ada"]
    (tmp_path / "audit.jsonl").unlink()
    everything = everything_in(tmp_path)
    for trace in (b"re: one", b"ask two", b"never answered", bob.encode()):
        assert trace not in everything, trace
    assert b"re: three" in everything
    assert (await gateway.call("DELETE", f"{ADMIN}/{bob}", key=KEY)).body == {
        "num_sessions": 0,
        "num_kv_blocks": 3,
    }, "again is nothing"
    back = generate_key()
    assert back != OTHER and not await is_let_in(gateway, back)


async def test_an_erasure_whose_engine_is_away_says_so_and_is_ended_later(gateway: Gateway) -> None:
    assert await is_let_in(gateway, OTHER)
    gateway.node.erase_error = EngineUnavailable("the node n2 is away")
    refused = await gateway.call("DELETE", f"{ADMIN}/bob", key=KEY)
    assert (refused.status, refused.body["error"]["code"]) == (503, "overloaded")
    assert "All is erased but KV" in refused.body["error"]["message"]
    assert not await is_let_in(gateway, OTHER)
    left = (await people(gateway))["bob"]
    assert (left["state"], left["owner"]) == ("disabled", owner_of(OTHER)), "an operator sees who is left"
    gateway.node.erase_error = None
    again = await gateway.call("DELETE", f"{ADMIN}/bob", key=KEY)
    assert (again.status, gateway.node.erased) == (200, [owner_of(OTHER)])
    assert list(await people(gateway)) == ["ada"]


async def test_kv_of_engines_that_the_server_had_before_is_erased_and_that_of_its_nodes_is_theirs(
    gateway: Gateway, tmp_path: Path
) -> None:
    assert await is_let_in(gateway, OTHER)
    bob, ada = owner_of(OTHER), owner_of(KEY)
    for folder in ("model", "node-3/model", f"{LOCAL}/model"):
        await fill_kv(tmp_path / "kv" / folder, ada, bob)
    held = await asyncio.to_thread(claim, tmp_path / "kv" / "model")
    erased = await gateway.call("DELETE", f"{ADMIN}/bob", key=KEY)
    assert erased.body == {"num_sessions": 0, "num_kv_blocks": 3 + 1}
    held.release()
    left = {store.directory: erase(store.directory, bob) for store in inspect(tmp_path / "kv")}
    assert list(left.values()) == [1, 1, 0], left


async def test_a_long_erasure_says_what_is_left_and_goes_on_by_itself(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await is_let_in(gateway, OTHER)
    monkeypatch.setattr(erasures, "WAIT_S", 0.0)
    gateway.node.may_erase.clear()
    for _ in range(2):
        under_way = await gateway.call("DELETE", f"{ADMIN}/bob", key=KEY)
        assert under_way.status == 202 and set(under_way.body) == {"num_left_sessions", "num_left_bytes"}
    assert not await is_let_in(gateway, OTHER)
    gateway.node.may_erase.set()
    while "bob" in await people(gateway):
        await asyncio.sleep(0)
    monkeypatch.undo()
    done = await gateway.call("DELETE", f"{ADMIN}/{owner_of(OTHER)}", key=KEY)
    assert (done.status, done.body) == (200, {"num_sessions": 0, "num_kv_blocks": 3})
    assert gateway.node.erased == [owner_of(OTHER)], "once"


async def test_a_person_who_has_come_back_is_erased_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, num_erased = erasures.Erasures(), 0
    may_end = asyncio.Event()

    async def erase_all() -> Erased:
        nonlocal num_erased
        await may_end.wait()
        num_erased += 1
        return Erased(num_erased, 0)

    with monkeypatch.context() as patched:
        patched.setattr(erasures, "WAIT_S", 0.0)
        assert await under_way.wait_for("bob", erase_all, is_known=True) is None
    may_end.set()
    await until(lambda: num_erased == 1)
    assert await under_way.wait_for("bob", erase_all, is_known=True) == (2, 0)
    assert await under_way.wait_for("bob", erase_all, is_known=False) == (3, 0)


async def _until_closed(socket: Any) -> Any:
    try:
        while True:
            yield await socket.next()
    except ConnectionClosed:
        return


async def test_an_erasure_waits_for_calls_that_are_still_stored(
    gateway: Gateway, store: SessionStore
) -> None:
    """A call that is cut off keeps what was answered so far, which would otherwise outlive its person."""
    assert await is_let_in(gateway, OTHER)
    bob, calls = owner_of(OTHER), gateway.server.services.calls
    is_under_way, may_store = asyncio.Event(), asyncio.Event()

    async def call() -> None:
        async with calls.of(Principal(bob, "bob", key=bob)):
            try:
                is_under_way.set()
                await asyncio.Event().wait()
            finally:
                await may_store.wait()
                turn = {"answer": "A secret.", "makes_session": True, "now": time.time()}
                await store.record_turn(bob, "agent", "a", "How?", **turn)

    calling = asyncio.create_task(call())
    await is_under_way.wait()
    erasing = asyncio.create_task(gateway.call("DELETE", f"{ADMIN}/bob", key=KEY))
    await until(lambda: gateway.server.services.keys.person(bob) is None)
    for _ in range(50):
        await asyncio.sleep(0.002)
    assert not erasing.done()
    may_store.set()
    with pytest.raises(GatewayError, match="withdrawn"):
        await calling
    assert (await erasing).status == 200
    assert await store.rows.ids_of(bob) == []
