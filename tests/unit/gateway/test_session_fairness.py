"""What one owner's searches and the purge may take from others: a thread is never theirs for long."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.sessions import SessionStore, health, listing, search

from .parts import NOW, refused, until


@pytest.fixture
async def store(store: SessionStore) -> SessionStore:
    for owner in ("ann", "bob"):
        await store.create_session(owner, session_id=owner, now=NOW)
        await store.record_turn(owner, owner, "t", "x" * 3000, answer="yes", now=NOW)
    return store


class Searches:
    """The store's searches, which wait until they may go on. begun: their owners."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.may_go_on = threading.Event()
        self._list = listing.list_sessions
        monkeypatch.setattr("gateway.sessions.listing.list_sessions", self)

    def __call__(self, conn: Any, owner: str, q: str | None, *args: Any) -> Any:
        if q:
            self.begun.append(owner)
            self.may_go_on.wait(60)
        return self._list(conn, owner, q, *args)


async def test_a_third_search_of_one_owner_is_refused_and_others_and_lists_are_not(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Searches(monkeypatch)
    searches = [asyncio.create_task(store.list_sessions("ann", q="x")) for _ in range(2)]
    await asyncio.sleep(0)
    error = await refused(store.list_sessions("ann", q="x"))
    assert (error.code, error.retryable) == ("rate_limited", True)
    assert error.retry_after_s == search.RETRY_AFTER_S
    other = asyncio.create_task(store.list_sessions("bob", q="x"))
    assert len((await store.list_sessions("ann"))[0]) == 1, "a list waits for no search"
    held.may_go_on.set()
    assert [len((await one)[0]) for one in (*searches, other)] == [1, 1, 1]
    assert len((await store.list_sessions("ann", q="x"))[0]) == 1


async def test_a_search_whose_client_left_is_not_run(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Searches(monkeypatch)
    running = asyncio.create_task(store.list_sessions("bob", q="x"))
    left = asyncio.create_task(store.list_sessions("ann", q="x"))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    held.may_go_on.set()
    await running
    await store.list_sessions("bob", q="x")  # what waited before it is over
    assert held.begun == ["bob", "bob"]


async def test_a_search_that_takes_too_long_is_ended_and_the_next_one_works(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with monkeypatch.context() as patch:
        patch.setattr(search, "MAX_SEARCH_S", 0.0)
        patch.setattr(listing, "list_sessions", lambda conn, *args: conn.execute(endless).fetchone())
        error = await refused(store.list_sessions("ann", q="x"))
    assert (error.code, error.retryable) == ("rate_limited", False) and "took longer" in error.message
    assert len((await store.list_sessions("ann", q="x"))[0]) == 1
    assert not store.has_failed


async def test_the_watch_goes_on_after_any_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def look(file: Path) -> bool:
        looks.append(file)
        if len(looks) == 1:
            raise OSError("gone")
        return True

    monkeypatch.setattr(health, "is_whole", look)
    watched = health.Health(tmp_path / "sessions.db")
    watched.note(sqlite3.DatabaseError("bad"))
    task = asyncio.create_task(watched.watch((0.0,)))
    await until(lambda: not watched.has_failed)
    task.cancel()
    assert len(looks) == 2
