"""What one owner's searches and the purge may take from others: a thread is never theirs for long."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from gateway import app
from gateway.errors import GatewayError
from gateway.sessions import SessionStore, health, search
from gateway.sessions.database import compact, num_free_pages

NOW = 1_700_000_000.0


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(tmp_path / "sessions.db")
    for owner in ("ann", "bob"):
        await store.create_session(owner, session_id=owner, now=NOW)
        await store.record_turn(owner, owner, "t", "x" * 3_000_000, answer="yes", now=NOW)
    yield store
    await store.close()


async def test_giving_free_pages_back_lets_other_work_in_after_each_part(store: SessionStore) -> None:
    await store.delete("ann", "ann", NOW)
    await store.purge(NOW + 100)
    free = await store._writer.run(num_free_pages)
    assert free > 512
    assert await store._writer.run(compact)
    assert 0 < await store._writer.run(num_free_pages) < free
    while await store._writer.run(compact):
        await store.record_turn("bob", "bob", "between", "hello", answer="there", now=NOW)
    assert await store._writer.run(num_free_pages) == 0


async def test_a_purge_that_has_nothing_to_give_back_leaves_the_file_alone(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0

    def counted(conn: sqlite3.Connection) -> bool:
        nonlocal rounds
        rounds += 1
        return compact(conn)

    monkeypatch.setattr("gateway.sessions.room.compact", counted)
    store._room._reserve._path.unlink()
    monkeypatch.setattr(store._room._reserve, "_free_bytes", lambda: 0)  # the reserve stays missing
    await store.purge(NOW)
    assert rounds > 0
    before = rounds
    await store.purge(NOW)
    assert rounds == before
    await store.delete("ann", "ann", NOW)
    await store.purge(NOW + 100)
    assert rounds > before + 2


async def test_a_third_search_of_one_owner_is_refused_and_others_are_not(store: SessionStore) -> None:
    gate = threading.Event()
    blocker = asyncio.create_task(store._searcher.run(lambda conn: gate.wait(60)))
    searches = [asyncio.create_task(store.list_sessions("ann", q="x")) for _ in range(2)]
    await asyncio.sleep(0)
    try:
        with pytest.raises(GatewayError) as caught:
            await store.list_sessions("ann", q="x")
        other = asyncio.create_task(store.list_sessions("bob", q="x"))
        await store.list_sessions("ann")
    finally:
        gate.set()
    assert (caught.value.code, caught.value.retryable) == ("rate_limited", True)
    assert caught.value.retry_after_s == search.RETRY_AFTER_S
    assert [len((await one)[0]) for one in (*searches, other)] == [1, 1, 1]
    await blocker
    assert len((await store.list_sessions("ann", q="x"))[0]) == 1


async def test_a_search_whose_client_left_before_it_began_is_not_run(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, ran = threading.Event(), []
    monkeypatch.setattr("gateway.sessions.listing.list_sessions", lambda *args: ran.append(args))
    blocker = asyncio.create_task(store._searcher.run(lambda conn: gate.wait(60)))
    left = asyncio.create_task(store.list_sessions("ann", q="x"))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    gate.set()
    await blocker
    await store._searcher.run(lambda conn: None)  # what waited before it is over
    assert ran == []
    await store.list_sessions("ann", q="x")
    assert len(ran) == 1


async def test_a_search_that_takes_too_long_is_ended_and_the_next_one_works(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with monkeypatch.context() as patch:
        patch.setattr(search, "MAX_SEARCH_S", 0.0)
        patch.setattr(
            "gateway.sessions.listing.list_sessions",
            lambda conn, *args: conn.execute(endless).fetchone(),
        )
        with pytest.raises(GatewayError, match="took longer") as caught:
            await store.list_sessions("ann", q="x")
    assert (caught.value.code, caught.value.retryable) == ("rate_limited", False)
    assert len((await store.list_sessions("ann", q="x"))[0]) == 1
    assert not store.has_failed


class _Moved:
    """A store whose file was moved, at the first purge."""

    def __init__(self) -> None:
        self.num_purges = 0
        self.second = asyncio.Event()

    async def purge(self, now: float) -> int:
        self.num_purges += 1
        if self.num_purges == 1:
            raise FileNotFoundError("sessions.db")
        self.second.set()
        return 0


async def test_the_purge_goes_on_after_an_unexpected_error_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "PURGE_EVERY_S", 0.0)
    moved = _Moved()
    task = asyncio.create_task(app._purge(cast(Any, SimpleNamespace(store=moved))))
    try:
        await asyncio.wait_for(moved.second.wait(), 10)
    finally:
        task.cancel()
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR] == [
        True
    ]


async def test_the_watch_goes_on_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look(file: Path) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError("gone")
        return True

    monkeypatch.setattr(health, "is_whole", look)
    watched = health.Health(tmp_path / "sessions.db")
    watched.note(sqlite3.DatabaseError("bad"))
    task = asyncio.create_task(watched.watch((0.0,)))
    try:
        async with asyncio.timeout(10):
            while watched.has_failed:
                await asyncio.sleep(0)
    finally:
        task.cancel()
    assert looks == 2
