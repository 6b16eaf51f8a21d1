"""Versions of messages, files of older versions of the schema, and searches that depend on their owner's texts alone."""

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gateway.app import build_services
from gateway.metrics.metrics import Metrics
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.router import Router
from gateway.sessions import SCHEMA_VERSION, SessionStore, listing
from gateway.settings.config import Config
from gateway.turns.protocol import Message

from .nodes import TestPlacement, routed
from .parts import NOW, refused
from .stores import ask, chat, end, rows_of, turn_ids
from .test_sessions import check_counts

PHRASE = "the quarterly figures"


async def write(store: SessionStore, owner: str, session: str, *texts: str) -> None:
    """A session of `owner` with one finished turn a text."""
    for number, text in enumerate(texts):
        turn = f"{session}-{number}"
        more = {"response_id": f"r-{turn}", "makes_session": True}
        await store.record_turn(owner, session, turn, text, answer=f"re: {text}", now=NOW, **more)


async def found(store: SessionStore, owner: str, q: str) -> set[str]:
    return {summary.id for summary in (await store.list_sessions(owner, q=q))[0]}


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


async def test_a_search_takes_the_same_steps_whatever_others_wrote(store: SessionStore, path: Path) -> None:
    def steps() -> list[int]:
        """Of a search by the index and of one by reading."""
        return [steps_of(path, listing.list_sessions, "bob", q, 50, None, None) for q in (PHRASE, "qu")]

    await write(store, "ann", "a", *(f"something else, {n}" for n in range(100)))
    await write(store, "bob", "b", "nothing of that kind", "nor here")
    await write(store, "ann", "later", "something else")
    before = steps()
    await write(store, "ann", "more", *(f"{PHRASE} of {n}" for n in range(100)))
    assert steps() == before
    await write(store, "bob", "c", PHRASE)
    assert all(now > then for now, then in zip(steps(), before, strict=True))


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
            title = f"title of {owner}"
            conn.execute("INSERT INTO sessions VALUES (?, ?, 's', ?, NULL, 1, 2, NULL)", (row, owner, title))
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
    assert rows_of(path, "PRAGMA integrity_check") == [("ok",)]
    assert rows_of(path, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    check_counts(path)
    tables = rows_of(path, "SELECT name FROM sqlite_master")
    assert not any(name.startswith(("turn_texts", "session_titles")) for (name,) in tables)


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


@pytest.mark.parametrize("num_statements", [None, 6, 55, 75])
async def test_a_migration_that_is_killed_goes_on_at_the_next_start(
    path: Path, num_statements: int | None
) -> None:
    """Each session of an older file is one line without versions, and can have some from then on."""
    await asyncio.to_thread(make_version_1, path)
    if num_statements is not None:
        command = [sys.executable, "-c", KILLED_WHILE_OPENING, str(path), str(num_statements)]
        killed = await asyncio.to_thread(subprocess.run, command, check=False)
        assert killed.returncode == -signal.SIGKILL
    await check_migrated(path)
    store = await SessionStore.open(path)
    assert await versions(store) == [[f"t{number}"] for number in range(NUM_TURNS)]
    began = await ask(store, "s", "new", after="t3")
    assert [turn.id for turn in began.history] == ["t0", "t1", "t2", "t3"]
    await end(store, "s", "new")
    assert await choose(store, "t4") == [f"t{number}" for number in range(NUM_TURNS)]
    await store.close()
    assert rows_of(path, "SELECT * FROM pragma_foreign_key_check") == []
    assert rows_of(path, "SELECT count(*) FROM turns") == rows_of(path, "SELECT count(*) FROM tree")


async def versions(store: SessionStore) -> list[list[str]]:
    return [turn.versions for turn in (await store.get_session("ann", "s")).turns]


async def choose(store: SessionStore, turn: str) -> list[str]:
    return [turn.id for turn in (await store.choose_version("ann", "s", turn)).turns]


async def test_responses_follow_the_one_that_they_go_on_from(store: SessionStore) -> None:
    """Two that go on from the same one are versions, and each one's history is its own branch, shown or not."""

    async def call(name: str, previous: str | None = None, session: str = "s") -> None:
        more = {"response_id": f"r_{name}", "previous": previous, "makes_session": True}
        await store.record_turn("ann", session, name, "q", answer="a", now=NOW, **more)

    async def history(name: str) -> list[str]:
        found = await store.responses.history("ann", f"r_{name}")
        assert found is not None
        return [turn.id for turn, _ in found.turns]

    await call("a")
    await call("b", "r_a")
    await call("c", "r_a")
    await call("d", "r_c")
    assert await turn_ids(store, "s") == ["a", "c", "d"]
    assert (await history("b"), await history("d")) == (["a", "b"], ["a", "c", "d"])
    await call("z", "r_a", session="other")
    assert await turn_ids(store, "other") == ["z"], "that of another session is no turn to follow"
    await store.responses.delete("ann", "r_c", NOW)
    assert (await turn_ids(store, "s"), await history("d")) == (["a", "d"], ["a", "d"])
    assert await versions(store) == [["a"], ["b", "d"]]
    await store.responses.delete("ann", "r_d", NOW)
    assert await turn_ids(store, "s") == ["a", "b"], "in its place the newest of the others is shown"
    await store.responses.delete("ann", "r_a", NOW)
    assert await turn_ids(store, "s") == ["b"]


async def test_a_step_of_a_loop_of_tools_hides_no_message_that_is_being_answered(store: SessionStore) -> None:
    async def step(name: str) -> None:
        more = {"is_version": True, "makes_session": True}
        await store.record_turn("ann", "s", name, "mend it", answer="a", now=NOW, **more)

    await step("a")
    await step("b")
    assert await versions(store) == [["a", "b"]]
    await store.begin_turn("ann", "s", "c", "mend it", now=NOW)
    await step("d")
    assert await turn_ids(store, "s") == ["b", "c", "d"]


@pytest.mark.parametrize("full_text", [True, False])
async def test_a_search_names_the_turn_that_holds_the_text(path: Path, full_text: bool) -> None:
    store = await SessionStore.open(path, full_text=full_text)
    await chat(store, "s", "alpha", "beta", "gamma")
    await ask(store, "s", "delta", "ask delta", after="alpha")
    await end(store, "s", "delta", "re: delta")
    await store.create_session("ann", session_id="titled", title="alpha beta", now=NOW)
    await chat(store, "s", "alpha", owner="bob")

    async def found_in(q: str | None) -> dict[str, str | None]:
        return {summary.id: summary.found_in for summary in (await store.list_sessions("ann", q=q))[0]}

    assert await found_in("re: ") == await found_in("k") == {"s": "delta"}
    for q, turn in (("alpha", "alpha"), ("ta", "delta"), ("beta", "beta")):
        assert await found_in(q) == {"s": turn, "titled": None}
    assert await found_in("mm") == await found_in("gamma") == {"s": "gamma"}
    await choose(store, "beta")
    assert await found_in("ta") == {"s": "beta", "titled": None}
    assert await found_in(None) == {"s": None, "titled": None}
    await store.close()


async def test_homes_are_those_of_the_last_turns_and_the_latest_session_comes_last(path: Path) -> None:
    store = await SessionStore.open(path)
    homes = (("old", "n1"), ("lost", "n1"), ("none", ""), ("moved", "n1"), ("moved", "n2"), ("moved", ""))
    for number, (session, home) in enumerate(homes):
        now = NOW + number
        await store.create_session("ann", session_id=session, exist_ok=True, now=now)
        await ask(store, session, f"t{number}", now=now)
        await end(store, session, f"t{number}", now=now, home=home)
    await store.delete("ann", "lost", NOW + 6)
    await store.close()
    store = await SessionStore.open(path)
    assert await store.homes(10) == [("ann", "old", "n1"), ("ann", "moved", "n2")]
    assert await store.homes(1) == [("ann", "moved", "n2")]
    await store.close()


async def test_a_gateway_over_several_nodes_stores_homes_and_knows_them_again(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path, port=0)
    async with routed("a", "b") as (router, placement):
        services = await build_services(config, node=router, metrics=Metrics(CollectorRegistry()))
        asked = await services.turns.ask("ann", Message(id="m1", content="hello"))
        (await placement.inner["a"].asked()).finish("hi")
        await services.turns.drain(10.0)
        await services.store.close()
    placement = TestPlacement("a", "b")
    again = Router(placement, AdapterSync(lambda: placement.nodes))
    services = await build_services(config, node=again, metrics=Metrics(CollectorRegistry()))
    assert again.home_of("ann", asked.session_id) == "a"
    await services.store.close()


async def test_a_turn_whose_answer_failed_can_be_discarded_and_no_other(store: SessionStore) -> None:
    """What followed it follows the turn before it then; searches do not find it any more."""
    await chat(store, "s", "a")
    await ask(store, "s", "b", "lost words")
    assert (await refused(store.discard_turn("ann", "s", "b"))).code == "conflict"
    await end(store, "s", "b", "half", status="failed")
    await ask(store, "s", "c")
    await end(store, "s", "c")
    assert (await refused(store.discard_turn("ann", "s", "a"))).code == "conflict"
    assert (await refused(store.discard_turn("bob", "s", "b"))).code == "not_found"
    assert await found(store, "ann", "lost words") == {"s"}
    assert [turn.id for turn in (await store.discard_turn("ann", "s", "b")).turns] == ["a", "c"]
    assert await found(store, "ann", "lost words") == set()
    assert (await refused(store.discard_turn("ann", "s", "b"))).code == "not_found"


async def test_conversations_in_folders_are_listed_at_once_after_pinned_ones(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in ("a", "b", "c"):
        await chat(store, session, session)
    assert (await store.patch("ann", "a", folder=" Travel ")).folder == "Travel"
    await store.patch("ann", "b", is_pinned=True, now=NOW)
    listed = await store.rows.pinned("ann")
    assert [(each.id, each.folder) for each in listed] == [("b", None), ("a", "Travel")]
    monkeypatch.setattr(listing, "MAX_FILED", 1)
    await store.patch("ann", "a", folder="Other")
    assert (await refused(store.patch("ann", "c", folder="Travel"))).code == "conflict"
    assert (await store.patch("ann", "a", folder=" ")).folder is None
