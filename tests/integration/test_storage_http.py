"""What a client and an operator see over HTTP when the session database is full, over its quota or damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.app import Server
from gateway.sessions import SessionStore
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES
from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError

from .conftest import Gateways, ask, demo_config, served, settle, told
from .facts import BODY, CHAT, KEYS, Http, bearer

MIB = 1 << 20


@pytest_asyncio.fixture(loop_scope="session")
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Its engine is not started."""
    limits = {"max_stored_mib": 1, "api_keys": KEYS}
    async with served(demo_config(tmp_path / "data", **limits)) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def http(server: Server) -> AsyncIterator[Http]:
    async with Http(server.url, headers=bearer(KEYS[0])) as session:
        yield session


async def test_a_key_over_its_quota_hears_what_to_do_and_others_go_on(http: Http, server: Server) -> None:
    """429 with OpenAI's type for it, and no Retry-After: nothing comes of repeating."""
    owner = server.services.gatekeeper.authenticate(KEYS[0], None).owner
    text = "x" * (MIB - TURN_BYTES - 3 * SESSION_BYTES)
    store = server.services.store
    await store.record_turn(owner, "large", "t", text, answer="", makes_session=True, now=1.0)
    for _ in range(2):
        last = await told(http.post("/api/sessions", json={}), 201)
    async with http.post("/api/sessions", json={}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (429, "quota_exceeded")
        assert error["type"] == "insufficient_quota" and "Delete conversations" in error["message"]
        assert "Retry-After" not in response.headers
    await told(http.post("/api/sessions", json={}, headers=bearer(KEYS[1])), 201)
    await told(http.delete(f"/api/sessions/{last['id']}"), 204)


async def test_above_its_quota_a_key_is_answered_by_api_and_refused_by_chat(gateways: Gateways) -> None:
    """Neither leaves anything behind; deleting, and waiting until it cannot be restored, lets both in again."""
    server = await gateways(max_stored_mib=1)
    store, then = server.services.store, 1_700_000_000.0  # longer ago than what is deleted can be restored
    await store.record_turn("local", "old", "t", "x" * (MIB - 2000), answer="", makes_session=True, now=then)

    async def names_after_a_call() -> set[str]:
        await told(http.post(CHAT, json=BODY, headers={"X-Session-Id": "api"}))
        return {summary.id for summary in (await store.list_sessions("local"))[0]}

    async with Http(server.url) as http, ChatClient(server.url) as chat:
        with pytest.raises(ChatError) as refused:
            await ask(chat, "Hello!", session_id="old")
        assert (refused.value.code, refused.value.retryable) == ("quota_exceeded", False)
        assert await names_after_a_call() == {"old"}
        await store.delete("local", "old", then)
        assert await names_after_a_call() == {"api"}


async def test_a_damaged_database_is_not_ready_until_it_is_mended(http: Http, server: Server) -> None:
    """503 `storage_failed` for what needs it, `/readyz` says so, `/healthz` stays well: a restart mends nothing."""
    kept = (await told(http.post("/api/sessions", json={"title": "kept"}), 201))["id"]
    store, path = server.services.store, server.services.config.data_dir / "sessions.sqlite3"
    await store._room.fold_log()
    good = await asyncio.to_thread(path.read_bytes)
    await asyncio.to_thread(path.write_bytes, b"\xa5" * len(good))
    for connection in (store._reader, store._writer):
        await connection.run(lambda conn: conn.execute("PRAGMA shrink_memory").fetchall())
    found = await told(http.get(f"/api/sessions/{kept}"), 503)
    assert found["error"]["code"] == "storage_failed"
    body = await told(http.get("/readyz"), 503)
    assert (body["status"], body["stage"]) == ("failed", "session database")
    assert "log says why" in body["message"]
    await told(http.get("/healthz"))
    await asyncio.to_thread(path.write_bytes, good)
    await settle(lambda: not store.has_failed)
    assert (await told(http.get("/readyz"), 503))["stage"] != "session database"
    assert (await told(http.get(f"/api/sessions/{kept}")))["title"] == "kept"


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_log_that_lost_commits_is_a_metric(tmp_path: Path, is_damaged: bool) -> None:
    """After a log as `kill -9` leaves it, with and without a bit turned over in its middle."""
    live = await SessionStore.open(tmp_path / "live")
    await live._room.fold_log()
    for _ in range(10):
        await live.create_session("local", now=1.0)

    def kill() -> None:
        (tmp_path / "data").mkdir(mode=0o700)
        for end in ("", "-wal", "-shm"):
            data = bytearray((tmp_path / f"live{end}").read_bytes())
            if end == "-wal" and is_damaged:
                data[len(data) // 2] ^= 1
            (tmp_path / "data" / f"sessions.sqlite3{end}").write_bytes(data)

    await asyncio.to_thread(kill)
    await live.close()
    async with served(demo_config(tmp_path / "data")) as server, Http(server.url) as http:
        num_sessions = len((await told(http.get("/api/sessions")))["sessions"])
    num_lost = server.services.metrics.registry.get_sample_value("overture_session_wal_lost_frames")
    assert ((num_lost or 0) > 0, num_sessions < 10) == (is_damaged, is_damaged)
