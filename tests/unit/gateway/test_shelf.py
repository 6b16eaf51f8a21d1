"""Links to conversations, and presets: who may read, make and withdraw them, and that they go with their person."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from gateway.access.key_file import owner_of
from gateway.background import purge
from gateway.errors import GatewayError
from gateway.sessions import RESTORE_WINDOW_S, SessionStore
from gateway.shelf.store import _SCHEMA_1, MAX_PRESETS, NAME, PresetBody, Shelf

from .front import Gateway, Gateways
from .parts import KEYS, NOW
from .test_pictures import image, put

ANN, BOB = KEYS


@pytest.fixture
async def gateway(gateways: Gateways) -> Gateway:
    return await gateways(api_keys=KEYS)


def test_a_link_leads_to_its_conversation_until_it_is_withdrawn(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    token = shelf.link("ann", "s", NOW)
    assert shelf.link("ann", "s", NOW) == token != shelf.link("bob", "s", NOW)
    assert shelf.behind(token) == ("ann", "s", NOW)
    shelf.withdraw("bob", "s")
    assert shelf.behind(token) == ("ann", "s", NOW)
    shelf.withdraw("ann", "s")
    with pytest.raises(GatewayError, match="withdrawn"):
        shelf.behind(token)
    assert shelf.link("ann", "s", NOW) != token


def test_presets_are_ones_own_and_those_that_are_shared(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    shelf.put("ann", "a", PresetBody(name="mine"))
    shelf.put("bob", "b", PresetBody(name="Theirs", is_shared=True, adapter="pirate"))
    shelf.put("bob", "c", PresetBody(name="hidden"))
    assert [(each.name, each.is_own) for each in shelf.presets("ann")] == [("mine", True), ("Theirs", False)]
    shelf.put("ann", "a", PresetBody(name="renamed"))
    assert shelf.presets("ann")[0].name == "renamed"
    with pytest.raises(GatewayError, match="no such preset"):
        shelf.drop("ann", "b")
    shelf.erase("bob")
    assert [each.name for each in shelf.presets("ann")] == ["renamed"]
    for number in range(MAX_PRESETS - 1):
        shelf.put("ann", f"p{number}", PresetBody(name="more"))
    with pytest.raises(GatewayError, match="100 presets"):
        shelf.put("ann", "one-more", PresetBody(name="more"))


def test_a_file_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "shelf").write_bytes(b"no database" * 100)
    with pytest.raises(GatewayError) as caught:
        Shelf(tmp_path / "shelf").presets("ann")
    assert caught.value.code == "storage_failed"


async def test_others_read_a_shared_conversation_without_its_settings(gateway: Gateway) -> None:
    made = await gateway.call(
        "POST",
        "/api/sessions/import",
        {
            "title": "Tides",
            "messages": [{"role": "system", "content": "Secret."}, {"role": "user", "content": "How?"}],
        },
        key=ANN,
    )
    path = f"/api/sessions/{made.body['id']}/link"
    assert (await gateway.call("POST", path, key=BOB)).status == 404
    token = (await gateway.call("POST", path, key=ANN)).body["token"]
    read = await gateway.call("GET", f"/api/shared/{token}", key=BOB)
    assert (read.body["title"], [turn["content"] for turn in read.body["turns"]]) == ("Tides", ["How?"])
    assert "Secret" not in str(read.body)
    assert (await gateway.call("GET", f"/api/shared/{token}")).status == 401
    assert (await gateway.call("DELETE", path, key=ANN)).status == 204
    assert (await gateway.call("GET", f"/api/shared/{token}", key=BOB)).status == 404


async def test_readers_see_the_pictures_that_a_shared_conversation_shows_and_no_others(
    gateway: Gateway, store: SessionStore
) -> None:
    owner, now = owner_of(ANN), time.time()
    shown, failed, replaced, unshared = [await put(store, image(shade), owner, now) for shade in (1, 2, 3, 4)]
    await store.create_session(owner, session_id="s", now=now)
    record = {"owner": owner, "session_id": "s", "answer": "A", "now": now}
    await store.record_turn(turn_id="a", content="Old", pictures=[replaced], **record)
    await store.begin_turn(owner, "s", "b", "New", after=None, pictures=[shown], now=now)
    await store.finish_turn(owner, "s", "b", answer="A", status="done", now=now)
    await store.record_turn(turn_id="c", content="Look", pictures=[failed], status="failed", **record)
    link = "/api/sessions/s/link"
    token = (await gateway.call("POST", link, key=ANN)).body["token"]
    pictures = f"/api/shared/{token}/pictures"
    turns = (await gateway.call("GET", f"/api/shared/{token}", key=BOB)).body["turns"]
    assert [[each["id"] for each in turn["pictures"]] for turn in turns] == [[shown]]
    reply = await gateway.call("GET", f"{pictures}/{shown}", key=BOB)
    assert (reply.status, reply.content, reply.headers["Content-Type"]) == (200, image(1), "image/png")
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in reply.headers["Content-Security-Policy"]
    assert reply.headers["Cache-Control"] == "private, no-store", "or it outlives its link in browsers"
    for other in (failed, replaced, unshared, "0" * 64, "x", "%ff%00"):
        assert (await gateway.call("GET", f"{pictures}/{other}", key=BOB)).status == 404
    assert (await gateway.call("GET", f"/api/pictures/{shown}", key=BOB)).status == 404
    assert (await gateway.call("GET", f"{pictures}/{shown}")).status == 401
    assert (await gateway.call("DELETE", link, key=ANN)).status == 204
    assert (await gateway.call("GET", f"{pictures}/{shown}", key=BOB)).status == 404


async def test_only_operators_share_presets(gateways: Gateways) -> None:
    gateway = await gateways(api_keys=KEYS, operator_keys=KEYS[:1])
    body = {"name": "Patient", "settings": {"temperature": 0.5, "stop": ["END"]}, "is_shared": True}
    assert (await gateway.call("PUT", "/api/presets/p", body, key=BOB)).status == 403
    assert (await gateway.call("PUT", "/api/presets/p", body, key=ANN)).status == 204
    [found] = (await gateway.call("GET", "/api/presets", key=BOB)).body["presets"]
    assert found["settings"] == body["settings"] and not found["is_own"]
    for bad in ({}, {"name": ""}, {"name": "x", "settings": {"temperature": 9}}):
        assert (await gateway.call("PUT", "/api/presets/p", bad, key=ANN)).status == 400
    assert (await gateway.call("DELETE", "/api/presets/p", key=BOB)).status == 404
    assert (await gateway.call("DELETE", "/api/presets/p", key=ANN)).status == 204


async def test_a_link_is_of_one_conversation_however_that_went(
    gateway: Gateway, store: SessionStore, tmp_path: Path
) -> None:
    """Clients of the APIs name sessions themselves: the link of one that was deleted leads to no later one of its name, until that is shared, too."""
    now, later = time.time(), time.time() + RESTORE_WINDOW_S + 9
    await store.record_turn(owner_of(ANN), "agent", "a", "How?", answer="So.", makes_session=True, now=now)
    old = (await gateway.call("POST", "/api/sessions/agent/link", key=ANN)).body["token"]
    await store.delete(owner_of(ANN), "agent", now)
    await store.record_turn(
        owner_of(ANN), "agent", "b", "Now?", answer="A secret.", makes_session=True, now=later
    )
    assert (await gateway.call("GET", f"/api/shared/{old}", key=BOB)).status == 404
    new = (await gateway.call("POST", "/api/sessions/agent/link", key=ANN)).body["token"]
    assert new != old
    assert (await gateway.call("GET", f"/api/shared/{new}", key=BOB)).status == 200
    assert (await gateway.call("GET", f"/api/shared/{old}", key=BOB)).status == 404
    assert (await gateway.call("DELETE", "/api/sessions/agent", key=ANN)).status == 204
    assert Shelf(tmp_path / NAME).links() == []


async def test_links_of_the_first_version_lead_where_they_did(gateway: Gateway, tmp_path: Path) -> None:
    made = (await gateway.call("POST", "/api/sessions", {"title": "Tides"}, key=ANN)).body["id"]
    with closing(sqlite3.connect(tmp_path / NAME)) as conn, conn:
        for statement in _SCHEMA_1:
            conn.execute(statement)
        conn.execute("INSERT INTO links VALUES ('old', ?, ?)", (owner_of(ANN), made))
        conn.execute("PRAGMA user_version = 1")
    assert (await gateway.call("GET", "/api/shared/old", key=BOB)).body["title"] == "Tides"
    assert (await gateway.call("POST", f"/api/sessions/{made}/link", key=ANN)).body["token"] == "old"


async def test_a_conversation_is_deleted_also_where_its_link_cannot_be(
    gateway: Gateway, tmp_path: Path
) -> None:
    """On a full disk deleting is the way to room."""
    made = (await gateway.call("POST", "/api/sessions", {}, key=ANN)).body["id"]
    await gateway.call("POST", f"/api/sessions/{made}/link", key=ANN)
    (tmp_path / NAME).write_bytes(b"no database" * 100)
    assert (await gateway.call("DELETE", f"/api/sessions/{made}", key=ANN)).status == 204
    assert (await gateway.call("GET", f"/api/sessions/{made}", key=ANN)).status == 404


async def test_a_purge_ends_links_whose_conversations_are_gone(
    gateway: Gateway, store: SessionStore, tmp_path: Path
) -> None:
    """Earlier versions left them, and a later conversation of that name could have been read by them."""
    services, shelf = gateway.server.services, Shelf(tmp_path / NAME)
    await purge(services, shelf, time.time())
    assert not (tmp_path / NAME).exists(), "a purge makes no file"
    for session in ("kept", "deleted"):
        await store.create_session("ann", session_id=session, now=time.time())
    tokens = [shelf.link("ann", session, NOW) for session in ("kept", "deleted", "purged")]
    tokens.append(shelf.link("bob", "kept", NOW))
    await store.delete("ann", "deleted", time.time())
    await purge(services, shelf, time.time())
    assert shelf.behind(tokens[0]) == ("ann", "kept", NOW)
    for token in tokens[1:]:
        with pytest.raises(GatewayError, match="withdrawn"):
            shelf.behind(token)


async def test_what_cannot_be_purged_keeps_nothing_else_from_it(
    gateway: Gateway, store: SessionStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_bytes(b"no database" * 100)
    await store.create_session("ann", session_id="s", now=NOW)
    await store.delete("ann", "s", NOW)
    await purge(gateway.server.services, Shelf(tmp_path / NAME), NOW + RESTORE_WINDOW_S + 1)
    assert "links to deleted conversations could not be purged" in caplog.text
    assert (await store.rows.stored())["ann"] == (0, 0)
