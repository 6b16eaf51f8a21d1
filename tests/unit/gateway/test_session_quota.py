"""What each key may store: counted as texts come and go, and refused before anything is stored."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.errors import KINDS, GatewayError
from gateway.sessions import RESTORE_WINDOW_S, SessionStore, quota
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES

NOW = 1_700_000_000.0
LIMIT = 1 << 20
HALF = "x" * (LIMIT // 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest_asyncio.fixture
async def store(path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(path, max_owner_bytes=LIMIT)
    yield store
    await store.close()


async def say(
    store: SessionStore, turn: str, content: str, *, owner: str = "ann", answer: str = "", **more: object
):
    """A finished turn of session s."""
    await store.create_session(owner, session_id="s", exist_ok=True, now=NOW)
    await store.begin_turn(owner, "s", turn, content, now=NOW, **more)
    over = await store.finish_turn(owner, "s", turn, answer=answer, status="done", now=NOW)
    return over.turn if over is not None else None


def rows(path: Path) -> list[object]:
    """Everything that the file holds of sessions, turns, names and owners."""
    with contextlib.closing(sqlite3.connect(path)) as conn:
        return [
            conn.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
            for table in ("sessions", "turns", "tree", "turn_names", "owners")
        ]


def counted(path: Path, owner: str) -> int:
    with contextlib.closing(sqlite3.connect(path)) as conn:
        return conn.execute("SELECT num_bytes FROM owners WHERE name = ?", (owner,)).fetchone()[0]


async def test_text_is_counted_in_bytes_of_utf8_with_a_little_for_each_row(
    store: SessionStore, path: Path
) -> None:
    """Message, answer and token ids, of all versions."""
    await say(store, "t", "ä€𝄞", answer="ok")
    first = SESSION_BYTES + TURN_BYTES + 9 + 2
    assert counted(path, "ann") == first
    await store.begin_turn("ann", "s", "u", "abc", now=NOW)
    await store.finish_turn("ann", "s", "u", answer="de", status="done", token_ids=bytes(8), now=NOW)
    second = first + TURN_BYTES + 3 + 2 + 4 + 8
    assert counted(path, "ann") == second
    await store.begin_turn("ann", "s", "v", "edited", after="t", now=NOW)
    assert counted(path, "ann") == second + TURN_BYTES + 6


async def test_a_message_above_the_quota_is_refused_and_nothing_of_it_is_stored(
    store: SessionStore, path: Path
) -> None:
    """Also a version of another one; the error says what to do and is not to be repeated."""
    await say(store, "t", HALF)
    await say(store, "u", "short")
    before = rows(path)
    for options in ({}, {"after": "t"}):
        with pytest.raises(GatewayError) as refused:
            await store.begin_turn("ann", "s", "v", HALF, now=NOW, **options)
        assert (refused.value.code, refused.value.retryable) == ("quota_exceeded", False)
        assert "1 MiB" in refused.value.message and "Delete conversations" in refused.value.message
    assert rows(path) == before
    assert (KINDS["quota_exceeded"].http_status, KINDS["quota_exceeded"].openai_type) == (
        429,
        "insufficient_quota",
    )


async def test_reasoning_is_counted_and_given_back(store: SessionStore, path: Path) -> None:
    await store.create_session("ann", session_id="s", now=NOW)
    await store.begin_turn("ann", "s", "t", "abc", now=NOW)
    await store.finish_turn("ann", "s", "t", answer="de", reasoning="thöught", status="failed", now=NOW)
    assert counted(path, "ann") == SESSION_BYTES + TURN_BYTES + 3 + 2 + 8
    await store.begin_turn("ann", "s", "t", "abc", now=NOW)  # asked again: what it thought is gone
    assert counted(path, "ann") == SESSION_BYTES + TURN_BYTES + 3
    await store.finish_turn("ann", "s", "t", answer="de", reasoning="thought", status="done", now=NOW)
    with contextlib.closing(sqlite3.connect(path)) as conn:
        conn.execute("PRAGMA foreign_keys = ON")
        conn.execute("DELETE FROM turns")
        conn.commit()
    assert counted(path, "ann") == SESSION_BYTES


async def test_quotas_are_each_owners_own(store: SessionStore) -> None:
    """One owner at its limit is nothing to another."""
    await say(store, "t", HALF, answer=HALF)
    with pytest.raises(GatewayError, match="Delete"):
        await store.create_session("ann", now=NOW)
    assert await say(store, "t", HALF, owner="bob") is not None


async def test_an_answer_under_way_is_kept_whole(store: SessionStore) -> None:
    """What was accepted is finished, above the limit if it must be; the next message is refused, a known one is still answered."""
    over = await say(store, "t", "question", answer="y" * (2 * LIMIT))
    assert over is not None and len(over.answer) == 2 * LIMIT
    with pytest.raises(GatewayError, match="Delete"):
        await say(store, "u", "more")
    assert not (await store.begin_turn("ann", "s", "t", "question", now=NOW)).is_new


async def test_a_failed_turn_is_not_asked_again_above_the_limit(store: SessionStore) -> None:
    """Else retries would let answers in for ever."""
    await store.create_session("ann", session_id="s", now=NOW)
    await store.begin_turn("ann", "s", "t", "question", now=NOW)
    await store.finish_turn("ann", "s", "t", answer="y" * (2 * LIMIT), status="failed", now=NOW)
    with pytest.raises(GatewayError, match="Delete"):
        await store.begin_turn("ann", "s", "t", "question", now=NOW)


async def test_what_is_deleted_is_free_once_it_can_no_longer_be_restored(
    store: SessionStore, path: Path
) -> None:
    """Not before, or delete and restore in turn would double the quota; and whether or not the sweeper came by."""
    await say(store, "t", HALF, answer=HALF)
    await store.delete("ann", "s", NOW)
    with pytest.raises(GatewayError, match="30 s later"):
        await store.create_session("ann", session_id="new", now=NOW + RESTORE_WINDOW_S)
    later = NOW + RESTORE_WINDOW_S + 1
    await store.create_session("ann", session_id="new", now=later)
    await store.begin_turn("ann", "new", "u", HALF, now=later)
    await store.purge(later)
    assert counted(path, "ann") == SESSION_BYTES + TURN_BYTES + len(HALF)


async def test_an_api_turn_above_the_quota_makes_no_session(store: SessionStore, path: Path) -> None:
    """Its session is made in the same transaction, so a refused turn leaves none behind; one with room leaves both."""
    await say(store, "t", HALF)
    before = rows(path)
    options = {"makes_session": True, "now": NOW}
    with pytest.raises(GatewayError, match="Delete"):
        await store.record_turn("ann", "api", "v", "question", answer=HALF, **options)
    assert rows(path) == before
    assert await store.record_turn("ann", "api", "v", "question", answer="short", **options)
    assert len((await store.get_session("ann", "api")).turns) == 1


async def test_many_small_sessions_are_no_way_around_the_quota(store: SessionStore) -> None:
    """Each counts a kilobyte, text or none."""
    with pytest.raises(GatewayError, match="Delete"):
        for _ in range(LIMIT // SESSION_BYTES + 1):
            await store.create_session("ann", now=NOW)
    assert len((await store.list_sessions("ann", limit=200))[0]) == 200


async def test_without_a_limit_nothing_is_refused(path: Path) -> None:
    """0 is no limit, and what is counted stays counted for a later start with one."""
    store = await SessionStore.open(path, max_owner_bytes=0)
    await say(store, "t", HALF, answer=HALF * 3)
    await say(store, "u", HALF)
    await store.close()
    store = await SessionStore.open(path, max_owner_bytes=LIMIT)
    with pytest.raises(GatewayError, match="Delete"):
        await say(store, "v", "more")
    await store.close()


async def test_asking_for_the_count_reads_no_turns(store: SessionStore, path: Path) -> None:
    """The count is kept, not made: its plan looks up one owner and that owner's deleted sessions."""
    await say(store, "t", "hello")
    with contextlib.closing(sqlite3.connect(path)) as conn:
        plan = [row[3] for row in conn.execute(f"EXPLAIN QUERY PLAN {quota._COUNTED}", (NOW, "ann"))]
    assert not any("SCAN" in step or "turns" in step for step in plan)
    assert any("sessions_deleted (owner=? AND deleted_at" in step for step in plan)
