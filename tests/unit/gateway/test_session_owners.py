"""What an owner's requests do in the session file depends on that owner's texts only; and files of version 1 become such files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.errors import StartupError
from gateway.sessions import SCHEMA_VERSION, SessionStore, listing, search, transactions

NOW = 1_700_000_000.0
PHRASE = "the quarterly figures"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest_asyncio.fixture
async def store(path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(path)
    yield store
    await store.close()


async def write(store: SessionStore, owner: str, session: str, *texts: str) -> None:
    """A session of `owner` with one finished turn a text."""
    await store.create_session(owner, session_id=session, exist_ok=True, now=NOW)
    for number, text in enumerate(texts):
        turn = f"{session}-{number}"
        await store.record_turn(
            owner, session, turn, text, answer=f"re: {text}", response_id=f"r-{turn}", now=NOW
        )


async def found(store: SessionStore, owner: str, q: str) -> set[str]:
    return {summary.id for summary in (await store.list_sessions(owner, q=q))[0]}


# --- the same work whatever others wrote -----------------------------------------------------------------------------------------------


def steps_of(path: Path, work: object, *args: object) -> int:
    """How many steps of SQLite's machine a read takes on a connection that has done it once already (the first one reads the schema)."""
    num_steps = 0

    def count() -> int:
        nonlocal num_steps
        num_steps += 1
        return 0

    with contextlib.closing(sqlite3.connect(path)) as conn:
        work(conn, *args)
        conn.set_progress_handler(count, 1)
        work(conn, *args)
    return num_steps


@pytest.mark.parametrize("q", [PHRASE, "qu"], ids=["by index", "by reading"])
async def test_a_search_takes_the_same_steps_whether_or_not_another_owner_wrote_the_phrase(
    store: SessionStore, path: Path, q: str
) -> None:
    """Counted in SQLite's own steps; what the searcher wrote itself does show, so the count is one that can differ."""
    await write(store, "ann", "a", *(f"something else, {n}" for n in range(300)))
    await write(store, "bob", "b", "nothing of that kind", "nor here")
    await write(store, "ann", "later", "something else")
    read = (listing.list_sessions, "bob", q, 50, None, None)
    before = steps_of(path, *read)
    await write(store, "ann", "more", *(f"{PHRASE} of {n}" for n in range(300)))
    assert steps_of(path, *read) == before
    await write(store, "bob", "c", PHRASE)
    assert steps_of(path, *read) > before


@pytest.mark.parametrize(
    ("find", "name"), [(transactions.find_turn, "a-0"), (transactions.find_response, "r-a-0")]
)
async def test_looking_for_a_name_takes_the_same_steps_whether_or_not_another_owner_used_it(
    store: SessionStore, path: Path, find: object, name: str
) -> None:
    """Names are the client's to choose, so one owner can ask for those of another."""
    await write(store, "bob", "b", "hello")
    before = steps_of(path, find, "bob", name)
    await write(store, "ann", "a", "hello")
    assert steps_of(path, find, "bob", name) == before
    await write(store, "bob", "a", "hello")
    assert steps_of(path, find, "bob", name) > before


async def test_a_search_reads_no_index_but_its_owners(store: SessionStore, path: Path) -> None:
    """With the other owner's index turned to rubbish one's own search finds the same, and the other's finds nothing or fails."""
    await write(store, "ann", "a", PHRASE)
    await write(store, "bob", "b", PHRASE)
    await store.close()
    with contextlib.closing(sqlite3.connect(path)) as conn:
        ann, bob = (search.find_owner(conn, name) for name in ("ann", "bob"))
        conn.execute(f"UPDATE {search.table_of(ann.row)}_data SET block = x'ff'")
        conn.commit()
        find = "SELECT rowid FROM {0} WHERE {0} MATCH '" + PHRASE + "'"
        assert conn.execute(find.format(search.table_of(bob.row))).fetchall()
        with contextlib.suppress(sqlite3.DatabaseError):
            assert not conn.execute(find.format(search.table_of(ann.row))).fetchall()
    again = await SessionStore.open(path)
    assert await found(again, "bob", PHRASE) == {"b"}
    await again.close()


async def test_a_search_by_index_reads_the_searchers_rows_only(store: SessionStore, path: Path) -> None:
    """No step of the plan is a scan of a table that all owners share."""
    await write(store, "bob", "b", PHRASE)
    with contextlib.closing(sqlite3.connect(path)) as conn:
        condition, args = search.condition(search.find_owner(conn, "bob"), PHRASE)
        sql = f"SELECT s.id FROM sessions s WHERE s.owner = ? AND s.deleted_at IS NULL{condition}"
        plan = [row[3] for row in conn.execute(f"EXPLAIN QUERY PLAN {sql}", ("bob", *args))]
    assert [step for step in plan if step.startswith("SCAN")] == [
        "SCAN search_1 VIRTUAL TABLE INDEX 0:M3",
        "SCAN hits",
        "SCAN hits",
    ]
    assert any("sessions_by_time (owner=?" in step or "USING INTEGER PRIMARY KEY" in step for step in plan)


async def test_a_long_search_holds_up_no_other_read(store: SessionStore) -> None:
    """Searches have a connection of their own: while one is busy, sessions are read, listed and written."""
    await write(store, "ann", "a", PHRASE)
    may_end = threading.Event()
    searching = asyncio.create_task(store._searcher.transact(lambda conn: may_end.wait(60)))
    waiting = asyncio.create_task(found(store, "ann", PHRASE))
    assert (await store.get_session("ann", "a")).turns
    assert len((await store.list_sessions("ann"))[0]) == 1
    await write(store, "ann", "b", PHRASE)
    assert not waiting.done()
    may_end.set()
    assert await waiting == {"a", "b"} and await searching


async def test_many_owners_search_each_their_own(store: SessionStore) -> None:
    """Fifty owners that wrote the same words find one session each."""
    for number in range(50):
        await write(store, f"owner {number}", f"s{number}", PHRASE)
    for number in range(50):
        assert await found(store, f"owner {number}", PHRASE) == {f"s{number}"}
    assert await found(store, "nobody", PHRASE) == set()


# --- files of version 1 ----------------------------------------------------------------------------------------------------------------

# What version 1 of the schema was, its index and triggers included: a file that an installed server may have.
VERSION_1 = """
CREATE TABLE sessions (row INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, title TEXT, adapter TEXT, created_at REAL NOT NULL,
    updated_at REAL NOT NULL, deleted_at REAL, UNIQUE (owner, id));
CREATE INDEX sessions_by_time ON sessions (owner, updated_at, id) WHERE deleted_at IS NULL;
CREATE INDEX sessions_deleted ON sessions (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE TABLE turns (seq INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions (row) ON DELETE CASCADE, id TEXT NOT NULL,
    content TEXT NOT NULL, answer TEXT NOT NULL DEFAULT '', status TEXT NOT NULL CHECK (status IN ('running', 'done', 'stopped', 'failed')),
    adapter TEXT, finish_reason TEXT, usage TEXT, timings TEXT, created_at REAL NOT NULL, response_id TEXT, token_ids BLOB, UNIQUE (session, id));
CREATE UNIQUE INDEX turns_running ON turns (session) WHERE status = 'running';
CREATE INDEX turns_by_id ON turns (id);
CREATE INDEX turns_by_response ON turns (response_id) WHERE response_id IS NOT NULL;
CREATE VIRTUAL TABLE turn_texts USING fts5(content, answer, content='turns', content_rowid='seq', tokenize='trigram');
CREATE VIRTUAL TABLE session_titles USING fts5(title, content='sessions', content_rowid='row', tokenize='trigram');
CREATE TRIGGER turn_texts_insert AFTER INSERT ON turns BEGIN INSERT INTO turn_texts (rowid, content, answer)
    SELECT new.seq, new.content, new.answer WHERE new.status <> 'running'; END;
CREATE TRIGGER turn_texts_delete AFTER DELETE ON turns BEGIN INSERT INTO turn_texts (turn_texts, rowid, content, answer)
    SELECT 'delete', old.seq, old.content, old.answer WHERE old.status <> 'running'; END;
CREATE TRIGGER session_titles_insert AFTER INSERT ON sessions BEGIN INSERT INTO session_titles (rowid, title) VALUES (new.row, new.title); END;
PRAGMA user_version = 1;
"""
OWNERS = ("ann", "bob", "cleo")
NUM_TURNS = 12


def make_version_1(path: Path) -> None:
    """A file of version 1 with one session of `NUM_TURNS` turns for each owner, the last one cut off while it ran."""
    with contextlib.closing(sqlite3.connect(path)) as conn:
        conn.execute("PRAGMA journal_mode = WAL")
        conn.executescript(VERSION_1)
        for row, owner in enumerate(OWNERS, 1):
            conn.execute(
                "INSERT INTO sessions VALUES (?, ?, 's', ?, NULL, 1, 2, NULL)",
                (row, owner, f"title of {owner}"),
            )
            for number in range(NUM_TURNS):
                status = "running" if number == NUM_TURNS - 1 else "done"
                answer = "" if status == "running" else f"ä answer {number} to {owner}"
                conn.execute(
                    "INSERT INTO turns (session, id, content, answer, status, created_at, response_id, token_ids) VALUES (?,?,?,?,?,1,?,?)",
                    (row, f"t{number}", f"{owner} asks {number}", answer, status, f"r{number}", b"\1\0\0\0"),
                )
        conn.commit()


async def check_migrated(path: Path) -> None:
    """All that the file of version 1 had is there and found by its owner alone."""
    store = await SessionStore.open(path)
    for owner in OWNERS:
        turns = (await store.get_session(owner, "s")).turns
        assert [turn.content for turn in turns] == [f"{owner} asks {n}" for n in range(NUM_TURNS)]
        assert [turn.status for turn in turns] == ["done"] * (NUM_TURNS - 1) + ["failed"]
        for q in (f"title of {owner}", f"Ä ANSWER 3 to {owner}", f"{owner} asks {NUM_TURNS - 1}"):
            assert {name for name in OWNERS if await found(store, name, q)} == {owner}
        assert await store.responses.find(owner, "r3") == ("s", "t3")
        assert await store.find_turn(owner, "t3") == "s"
    await store.close()
    with contextlib.closing(sqlite3.connect(path)) as conn:
        tables = {name for (name,) in conn.execute("SELECT name FROM sqlite_master")}
        assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert conn.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        counted = dict(conn.execute("SELECT name, num_bytes FROM owners"))
        sizes = conn.execute(
            """SELECT s.owner, 1024 + sum(512 + length(CAST(content AS BLOB)) + length(CAST(answer AS BLOB)) + length(token_ids))
               FROM turns t JOIN sessions s ON s.row = t.session GROUP BY s.row"""
        )
        assert counted == dict(sizes)
    assert not any(name.startswith(("turn_texts", "session_titles")) for name in tables)


async def test_a_file_of_version_1_is_brought_up_to_date(path: Path) -> None:
    """Texts, names, counts and a search index for each owner."""
    await asyncio.to_thread(make_version_1, path)
    await check_migrated(path)


async def test_a_file_of_version_1_works_without_an_index_first(path: Path) -> None:
    """A process that keeps no index brings the tables up to date; the next one that does builds the index."""
    await asyncio.to_thread(make_version_1, path)
    store = await SessionStore.open(path, full_text=False)
    assert await found(store, "ann", "answer 3 to ann") == {"s"}
    await store.close()
    await check_migrated(path)


# Opens the file and kills itself before the statement of the given number.
KILLED_WHILE_OPENING = """
import asyncio, os, signal, sys
from gateway.sessions import SessionStore, connection, database

class Killed(connection.Database):
    left = int(sys.argv[2])
    def execute(self, *args):
        Killed.left -= 1
        if Killed.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(*args)

database.Database = Killed
asyncio.run(SessionStore.open(sys.argv[1]))
"""


@pytest.mark.parametrize("num_statements", [6, 20, 30, 42, 55, 75])
async def test_a_migration_that_is_killed_goes_on_at_the_next_start(path: Path, num_statements: int) -> None:
    """Killed between statements of the tables' part and of the index's, the file is whole and the next start ends the work."""
    await asyncio.to_thread(make_version_1, path)
    command = [sys.executable, "-c", KILLED_WHILE_OPENING, str(path), str(num_statements)]
    killed = await asyncio.to_thread(subprocess.run, command, check=False)
    assert killed.returncode == -signal.SIGKILL
    await check_migrated(path)


async def test_a_long_indexing_says_how_far_it_is(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line counts turns; with the limit at zero each part of the work writes one."""
    await asyncio.to_thread(make_version_1, path)
    monkeypatch.setattr(search, "SAY_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "gateway.sessions"):
        await (await SessionStore.open(path)).close()
    assert f"{NUM_TURNS} of {3 * NUM_TURNS} turns" in caplog.text
    assert f"{3 * NUM_TURNS} of {3 * NUM_TURNS} turns" in caplog.text


async def test_a_damaged_file_of_version_1_is_refused_and_left_as_it_was(path: Path) -> None:
    """Damage is looked for before anything is written."""

    def damage() -> bytes:
        make_version_1(path)
        good = path.read_bytes()
        path.write_bytes(good[:8192] + b"\xa5" * 8192 + good[16384:])
        return path.read_bytes()

    before = await asyncio.to_thread(damage)
    with pytest.raises(StartupError, match="damaged"):
        await SessionStore.open(path)
    assert await asyncio.to_thread(path.read_bytes) == before
