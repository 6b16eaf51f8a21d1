"""The page's files, health and sessions over HTTP, without a model: what they answer, and that none of it blocks the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from yarl import URL

from gateway.settings.config import STATIC_DIR

from .front import Gateway, Gateways


@pytest.fixture
async def gateway(gateways: Gateways) -> Gateway:
    return await gateways()


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(gateway.server.url) as session:
        yield session


async def test_the_page_and_its_scripts_are_served(http: aiohttp.ClientSession) -> None:
    async with http.get("/") as reply:
        assert reply.status == 200 and b"<html" in await reply.read()
        assert "script-src 'self'" in reply.headers["Content-Security-Policy"]
    script = next(STATIC_DIR.rglob("*.js"))
    async with http.get(f"/static/{script.relative_to(STATIC_DIR)}") as reply:
        assert reply.status == 200 and reply.content_type == "text/javascript"
        assert await reply.read() == script.read_bytes()


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "js", "%2e%2e/README.md", "..%2fREADME.md", "%00", "x" * 300, "%ff"]
)
async def test_what_is_no_file_of_the_page_does_not_exist(gateway: Gateway, name: str) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.get(URL(f"{gateway.server.url}/static/{name}", encoded=True)) as reply,
    ):
        assert reply.status == 404, await reply.text()


async def test_health_says_how_far_the_node_is(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.get("/readyz") as reply:
        assert reply.status == 200
    gateway.node.state = "rebuilding"
    async with http.get("/readyz") as reply:
        assert reply.status == 503 and (await reply.json())["status"] == "starting"
    async with http.get("/healthz") as reply:
        assert reply.status == 200


async def test_a_session_is_made_renamed_found_deleted_and_brought_back(
    gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    turn = await gateway.answered("a", "Fezin it is.", owner="local")
    path = f"/api/sessions/{turn.session_id}"
    async with http.patch(path, json={"title": "About Fezin", "adapter": "shout"}) as reply:
        assert (await reply.json())["title"] == "About Fezin"
    async with http.get("/api/sessions", params={"q": "fezin"}) as reply:
        assert [s["id"] for s in (await reply.json())["sessions"]] == [turn.session_id]
    async with http.delete(path) as reply:
        assert reply.status == 204
    assert gateway.node.ended_sessions == [("", turn.session_id)]
    async with http.get(path) as reply:
        assert reply.status == 404
    async with http.post(f"{path}/restore") as reply:
        assert [t["answer"] for t in (await reply.json())["turns"]] == ["Fezin it is."]


async def test_another_version_of_a_message_is_chosen(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    """The reply is the session as it is shown then; while an answer is written the choice is refused."""
    turn = await gateway.answered("a", "Yes.", owner="local")
    session = {"owner": "local", "session_id": turn.session_id}
    await gateway.answered("b", "Fezin.", content="Who?", **session)
    other = await gateway.answered("c", "No.", after=None, **session)
    assert other.versions == ["a", "c"]
    path = f"/api/sessions/{turn.session_id}/choose"
    async with gateway.socket(hello={"session_id": turn.session_id}) as socket:
        async with http.post(path, json={"turn_id": "a"}) as reply:
            turns = (await reply.json())["turns"]
        assert await socket.next() == {"type": "shown", "session_id": turn.session_id, "turn_id": "a"}
    assert [(t["id"], t["versions"]) for t in turns] == [("a", ["a", "c"]), ("b", ["b"])]
    await gateway.ask("d", **session)
    answer = await gateway.node.asked(3)
    assert [m.content for m in answer.request.messages] == ["Hello!", "Yes.", "Who?", "Fezin.", "Hello!"]
    for body, code in (({"turn_id": "c"}, "busy"), ({"turn_id": "z"}, "not_found"), ({}, "bad_request")):
        async with http.post(path, json=body) as reply:
            assert (await reply.json())["error"]["code"] == code
    answer.finish("Well.")


async def test_a_socket_that_watches_the_list_hears_of_every_change(
    gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    """Made, asked in, renamed, pinned, deleted, brought back and imported. One that does not watch hears of none."""
    async with gateway.socket(hello={}) as watching, gateway.socket(hello={}) as asking:
        await watching.send(type="watch_list")
        await watching.send(type="ping")
        assert (await watching.next())["type"] == "pong"

        async def heard(session_id: str, **fields: object) -> None:
            frame = await watching.next()
            assert (frame["type"], frame["session_id"]) == ("listed", session_id)
            assert {name: frame["session"][name] for name in fields} == fields

        async with http.post("/api/sessions", json={}) as reply:
            session_id = (await reply.json())["id"]
        await heard(session_id, title=None, num_turns=0)
        assert (await asking.ask("a", "Hello!", session_id=session_id))["type"] == "accepted"
        await heard(session_id, title="Hello!", num_turns=1)
        (await gateway.node.asked()).finish("Hi.")
        assert (await asking.rest())[1]["type"] == "done"
        path = f"/api/sessions/{session_id}"
        for change in ({"title": "Greetings"}, {"is_pinned": True}):
            async with http.patch(path, json=change) as reply:
                assert reply.status == 200
            await heard(session_id, **change)
        async with http.delete(path) as reply:
            assert reply.status == 204
        assert await watching.next() == {"type": "listed", "session_id": session_id, "session": None}
        async with http.post(f"{path}/restore") as reply:
            assert reply.status == 200
        await heard(session_id, is_pinned=True)
        async with http.get(f"{path}/export") as reply:
            archive = await reply.json()
        async with http.post("/api/sessions/import", json=archive) as reply:
            copy = (await reply.json())["id"]
        await heard(copy, title="Greetings", num_turns=1)
        await asking.send(type="ping")
        assert (await asking.next())["type"] == "pong"


async def test_only_the_owner_hears_of_changes_of_a_list(gateways: Gateways) -> None:
    gateway = await gateways(api_keys=("ov-one", "ov-two"))
    ann, bob = gateway.socket(key="ov-one", hello={}), gateway.socket(key="ov-two", hello={})
    async with ann as own, bob as other:
        for socket in (other, own):
            await socket.send(type="watch_list")
            await socket.send(type="ping")
            assert (await socket.next())["type"] == "pong"
        headers = {"Authorization": "Bearer ov-one"}
        async with (
            aiohttp.ClientSession(gateway.server.url, headers=headers) as http,
            http.post("/api/sessions", json={"title": "Mine"}) as reply,
        ):
            assert reply.status == 201
        assert (await own.next())["session"]["title"] == "Mine"
        await other.send(type="ping")
        assert (await other.next())["type"] == "pong"


async def test_deleting_a_session_stops_its_answer(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    turn = await gateway.ask("a", owner="local")
    answer = await gateway.node.asked()
    async with http.delete(f"/api/sessions/{turn.session_id}") as reply:
        assert reply.status == 204
    assert answer.is_cancelled


async def test_metrics_are_rendered_off_the_loop(http: aiohttp.ClientSession) -> None:
    async with http.get("/metrics") as reply:
        assert reply.status == 200 and "overture_turns_running 0.0" in await reply.text()
