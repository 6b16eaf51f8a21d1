"""What a client and an operator see over HTTP when the session database is full, over its quota or damaged. The engine is not started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from gateway.app import Server, build_services
from gateway.metrics.metrics import Metrics
from gateway.sessions import SessionStore
from gateway.sessions.schema import SESSION_BYTES
from gateway.settings.config import DEMO_MODEL_DIR, Config

KEYS = ("ov-first-key-for-tests-only", "ov-second-key-for-tests-only")
MIB = 1 << 20


def config(data_dir: Path, **changes: object) -> Config:
    return Config(model=str(DEMO_MODEL_DIR), port=0, data_dir=data_dir, drain_timeout_s=1, **changes)


@pytest_asyncio.fixture(loop_scope="session")
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    services = await build_services(
        config(tmp_path / "data", max_stored_mib=1, api_keys=KEYS, max_requests_per_s=10_000),
        metrics=Metrics(CollectorRegistry()),
    )
    async with Server(services) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as session:
        yield session


async def test_a_key_over_its_quota_hears_what_to_do_and_others_go_on(http: aiohttp.ClientSession) -> None:
    """429 with OpenAI's type for it, and no Retry-After: nothing comes of repeating."""
    for _ in range(MIB // SESSION_BYTES):
        async with http.post("/api/sessions", json={}) as response:
            assert response.status == 201
            last = (await response.json())["id"]
    async with http.post("/api/sessions", json={}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (
            429,
            "quota_exceeded",
            "insufficient_quota",
        )
        assert "Delete conversations" in error["message"]
        assert "Retry-After" not in response.headers
    async with http.post(
        "/api/sessions", json={}, headers={"Authorization": f"Bearer {KEYS[1]}"}
    ) as response:
        assert response.status == 201
    async with http.delete(f"/api/sessions/{last}") as response:
        assert response.status == 204


async def test_a_damaged_database_is_not_ready_until_it_is_mended(
    http: aiohttp.ClientSession, server: Server
) -> None:
    """503 `storage_failed` for what needs it, `/readyz` says so, `/healthz` stays well: a restart mends nothing."""
    async with http.post("/api/sessions", json={"title": "kept"}) as response:
        kept = (await response.json())["id"]
    store, path = server.services.store, server.services.config.data_dir / "sessions.sqlite3"
    await store._room.fold_log()
    good = await asyncio.to_thread(path.read_bytes)
    await asyncio.to_thread(path.write_bytes, b"\xa5" * len(good))
    for connection in (store._reader, store._writer):
        await connection.run(lambda conn: conn.execute("PRAGMA shrink_memory").fetchall())
    async with http.get(f"/api/sessions/{kept}") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "storage_failed")
    async with http.get("/readyz") as response:
        body = await response.json()
        assert (response.status, body["status"], body["stage"]) == (503, "failed", "session database")
        assert "log says why" in body["message"]
    async with http.get("/healthz") as response:
        assert response.status == 200
    await asyncio.to_thread(path.write_bytes, good)
    async with asyncio.timeout(60):
        while store.has_failed:
            await asyncio.sleep(0.05)
    async with http.get("/readyz") as response:
        assert (await response.json())["stage"] != "session database"
    async with http.get(f"/api/sessions/{kept}") as response:
        assert (await response.json())["title"] == "kept"


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
    services = await build_services(config(tmp_path / "data"), metrics=Metrics(CollectorRegistry()))
    async with Server(services) as server, aiohttp.ClientSession(server.url) as http:
        async with http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        async with http.get("/api/sessions") as response:
            num_sessions = len((await response.json())["sessions"])
    (line,) = [line for line in lines if line.startswith("overture_session_wal_lost_frames ")]
    assert (float(line.split()[1]) > 0) is is_damaged
    assert (num_sessions < 10) is is_damaged
