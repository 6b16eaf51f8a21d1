"""Pinned conversations: on top of the list, wherever the list's page ends."""

import pytest

from gateway.errors import GatewayError
from gateway.sessions import SessionStore
from gateway.sessions.listing import MAX_PINNED

from .front import Gateway
from .parts import NOW


@pytest.fixture
async def store(store: SessionStore) -> SessionStore:
    for number in range(3):
        await store.create_session("ann", session_id=f"s{number}", now=NOW + number)
    return store


async def pinned(store: SessionStore, owner: str = "ann") -> list[str]:
    return [str(session.id) for session in await store.rows.pinned(owner)]


async def test_what_was_pinned_last_is_first_until_it_is_unpinned(store: SessionStore) -> None:
    assert (await store.patch("ann", "s0", is_pinned=True, now=NOW + 10)).is_pinned
    await store.patch("ann", "s2", is_pinned=True, now=NOW + 11)
    assert await pinned(store) == ["s2", "s0"] and await pinned(store, "bob") == []
    listed, _ = await store.list_sessions("ann")
    assert [(str(each.id), each.is_pinned) for each in listed] == [("s2", True), ("s1", False), ("s0", True)]
    await store.patch("ann", "s2", title="another", now=NOW + 12)
    assert await pinned(store) == ["s2", "s0"], "a change of something else is no change of the pin"
    assert not (await store.patch("ann", "s2", is_pinned=False, now=NOW + 13)).is_pinned
    assert await pinned(store) == ["s0"]


async def test_more_pins_than_a_list_can_show_are_refused(store: SessionStore) -> None:
    for number in range(MAX_PINNED + 1):
        await store.create_session("ann", session_id=f"p{number}", now=NOW)
    for number in range(MAX_PINNED):
        await store.patch("ann", f"p{number}", is_pinned=True, now=NOW + number)
    with pytest.raises(GatewayError, match="unpin one first") as refused:
        await store.patch("ann", f"p{MAX_PINNED}", is_pinned=True, now=NOW)
    assert refused.value.code == "conflict"
    await store.patch("ann", "p0", is_pinned=True, now=NOW + 99)
    assert (await pinned(store))[0] == "p0", "one that is pinned may be pinned again"


async def test_the_first_page_says_what_is_pinned(gateway: Gateway) -> None:
    oldest, newest = "one", "two"
    for number, name in enumerate((oldest, newest)):
        await gateway.store.create_session("local", session_id=name, title="hello", now=NOW + number)
    path = f"/api/sessions/{oldest}"
    reply = await gateway.call("PATCH", path, {"is_pinned": True})
    assert (reply.status, reply.body["is_pinned"]) == (200, True)
    assert (await gateway.call("PATCH", path, {"is_pinned": "yes"})).status == 400

    shown, query = [], "limit=1"
    for _ in range(2):
        page = (await gateway.call("GET", f"/api/sessions?{query}")).body
        shown.append(tuple([each["id"] for each in page[name]] for name in ("sessions", "pinned")))
        query = f"limit=1&before={page['next']}"
    assert shown == [([newest], [oldest]), ([oldest], [])]
    assert (await gateway.call("GET", "/api/sessions?q=hello")).body["pinned"] == []
