"""The session store on real SQLite files: what each method promises, then the whole store against a model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from engine_bridge.protocol.node import pack_token_ids
from gateway.errors import GatewayError, StartupError
from gateway.sessions import RESTORE_WINDOW_S, SCHEMA_VERSION, FinishResult, SessionStore
from gateway.sessions.database import open_writer
from gateway.sessions.records import Excerpt
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES
from gateway.sessions.search import AFTER_CHARS, BEFORE_CHARS, MATCH_CHARS, excerpt

from .machine import Machine, action
from .parts import IN_MEMORY, NOW, refused
from .stores import ask, chat, end, pack, rows_of, talk, turn_ids


@pytest_asyncio.fixture(params=[True, False], ids=["index", "no-index"])
async def searchable(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[SessionStore]:
    """A store with, then one without, the search index: a search must find the same in both."""
    store = await SessionStore.open(path, full_text=request.param)
    yield store
    await store.close()


async def test_what_a_clock_deleted_that_was_put_back_since_is_purged_as_well(store: SessionStore) -> None:
    """It can be restored for 30 s from the first purge, and is gone after them, however far ahead the clock was."""
    await chat(store, "s", "t")
    before = await store.get_session("ann", "s")
    await store.delete("ann", "s", NOW + 1e9)
    assert await store.purge(NOW) == 0
    assert await store.restore("ann", "s", NOW + RESTORE_WINDOW_S) == before
    await store.delete("ann", "s", NOW + 1e9)
    assert await store.purge(NOW) == 0
    assert (await refused(store.restore("ann", "s", NOW + RESTORE_WINDOW_S + 1))).code == "not_found"
    assert await store.purge(NOW + RESTORE_WINDOW_S + 1) == 1


async def test_a_clock_set_back_moves_no_session_back(store: SessionStore) -> None:
    """A session that was just used does not sink in the list."""
    await chat(store, "s", "a")
    await ask(store, "s", "b", now=NOW - 100)
    await store.finish_turn("ann", "s", "b", answer="x", status="done", now=NOW - 99)
    await store.record_turn("ann", "s", "c", "x", answer="y", now=NOW - 98)
    assert (await store.get_session("ann", "s")).updated_at == NOW


async def test_sessions_of_calls_are_listed_apart_until_a_person_goes_on(store: SessionStore) -> None:
    await chat(store, "mine", "a")
    for session in ("agent-1", "agent-2"):
        await store.record_turn(
            "ann", session, f"t-{session}", "hello", answer="hi", makes_session=True, now=NOW
        )

    async def listed(**more: Any) -> set[str]:
        sessions, _ = await store.list_sessions("ann", **more)
        return {str(session.id) for session in sessions}

    assert await listed() == {"mine", "agent-1", "agent-2"}
    assert await listed(origin="chat") == {"mine"}
    assert await listed(origin="api") == {"agent-1", "agent-2"} == await listed(origin="api", q="hello")
    await ask(store, "agent-1", "b")
    assert await listed(origin="chat") == {"mine", "agent-1"}
    await store.record_turn("ann", "mine", "t", "hello", answer="hi", makes_session=True, now=NOW)
    assert await listed(origin="api") == {"agent-2"}, "a call makes no chat its own"


@pytest.mark.parametrize(("status", "reason"), [("done", "length"), ("stopped", "stopped")])
async def test_an_answer_that_went_on_is_still_a_cut_one_after_a_crash(
    path: Path, status: Any, reason: str
) -> None:
    """It is found by its words, may go on once more, and has no ids of an earlier part once its text is longer."""
    store = await SessionStore.open(path)
    await store.record_turn("ann", "s", "t", "hello", answer="one", makes_session=True, now=NOW)
    await ask(store, "s", "u")
    await end(store, "s", "u", "begun", status=status, finish_reason=reason, token_ids=pack([1, 2, 3]))
    begun = await ask(store, "s", "u", continues=True)
    assert (begun.outcome, begun.answer_token_ids) == ("continued", pack([1, 2, 3]))
    assert [each.id for each in (await store.list_sessions("ann", origin="chat"))[0]] == ["s"]
    await store.close()
    store = await SessionStore.open(path)
    (_, turn) = (await store.get_session("ann", "s")).turns
    assert (turn.answer, turn.status, turn.finish_reason) == ("begun", status, reason)
    assert len((await store.list_sessions("ann", q="begun"))[0]) == 1
    assert (await ask(store, "s", "u", continues=True)).answer_token_ids == pack([1, 2, 3])
    await end(store, "s", "u", "begun and more", status=status, finish_reason=reason)
    assert (await ask(store, "s", "u", continues=True)).answer_token_ids == b""
    await store.close()


async def test_a_long_session_keeps_each_id_once(store: SessionStore, path: Path) -> None:
    """Fifty turns that add 100 ids each take little more than 4 bytes an id; prompts that repeat nothing do not add up either."""
    await store.create_session("ann", session_id="s", now=NOW)
    for number in range(50):
        history = await talk(store, f"t{number}", *range(100 * (number + 1)))
        assert history == list(range(100 * number))
    assert stored_bytes(path) == 50 * 100 * 4 + 50 * 4
    for number in range(20):
        ids = range(number, 5_000 + number)
        await talk(store, f"u{number}", *ids)
        assert stored_bytes(path) <= 4 * (5_000 * 4)
    assert await talk(store, "last", 1) == list(ids)


def stored_bytes(path: Path) -> int:
    """Bytes of token ids in the whole file."""
    return rows_of(path, "SELECT sum(length(token_ids)) FROM turns")[0][0]


async def test_pages_are_newest_first_and_complete(store: SessionStore) -> None:
    """Walking the pages shows every session once, also where several have the same time."""
    for i in range(11):
        await store.create_session("ann", session_id=f"s{i:02}", now=NOW + i // 4)
    pages, cursor = [], None
    while cursor is not None or not pages:
        page, cursor = await store.list_sessions("ann", limit=4, before=cursor)
        pages.append([summary.id for summary in page])
    assert [len(page) for page in pages] == [4, 4, 3]
    assert list(itertools.chain(*pages)) == [f"s{i:02}" for i in reversed(range(11))]


TEXTS = (
    "it is 100% sure",
    "snake_case_name",
    "C:\\temp\\%",
    "she said \"no\" and it's 'over'",
    "a 👩‍🚀 in space 🚀🚀🚀",
    "title:x AND NOT (a OR b*) ^c NEAR -- ; DROP TABLE turns",
    "100x sure, snakeXcase",
    "Überraschung",
)
PARTS = {text[at : at + size] for text in TEXTS for size in (1, 2, 3, 12) for at in range(0, len(text), 5)}
QUERIES = [*PARTS, *TEXTS, '" OR "', "sure*", "SU", "\\temp\\%", "nothing like it", " sure ", "\0", "  "]


async def test_search_takes_any_text_as_it_is(searchable: SessionStore) -> None:
    """No character of a query is an operator, in a title, a message or an answer, with the index or without."""
    for name, text in enumerate(TEXTS):
        await searchable.create_session("title", session_id=f"{name}", title=text, now=NOW)
        for owner, content, answer in (("content", text, ""), ("answer", "é", text)):
            await searchable.create_session(owner, session_id=f"{name}", title="é", now=NOW)
            await searchable.record_turn(owner, f"{name}", "t", content, answer=answer, now=NOW)
    for owner, q in itertools.product(("title", "content", "answer"), QUERIES):
        found = {summary.id for summary in (await searchable.list_sessions(owner, q=q))[0]}
        holding = {f"{name}" for name, text in enumerate(TEXTS) if q.strip().lower() in text.lower()}
        assert found == holding, (owner, q)


def check_index(path: Path) -> None:
    """Each owner's index holds exactly the texts of its titles and of its turns that are over, place by place."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        for row, name, is_indexed in conn.execute("SELECT row, name, is_indexed FROM owners").fetchall():
            assert is_indexed
            conn.execute(f"INSERT INTO search_{row} (search_{row}) VALUES ('integrity-check')")
            assert places_in_index(conn, f"search_{row}") == places_in_texts(conn, name)


def check_counts(path: Path) -> None:
    """What is counted for each owner is what its rows hold: in UTF-8, and so much more for each session and turn."""
    counted = dict(rows_of(path, "SELECT name, num_bytes FROM owners"))
    held = Counter(dict.fromkeys(counted, 0))
    for row, owner in rows_of(path, "SELECT row, owner FROM sessions"):
        sql = "SELECT content, answer, reasoning, token_ids FROM turns WHERE session = ?"
        turns = rows_of(path, sql, row)
        num_bytes = sum(
            len(part.encode() if isinstance(part, str) else part) for t in turns for part in t if part
        )
        held[owner] += SESSION_BYTES + TURN_BYTES * len(turns) + num_bytes
    assert counted == held


def places_in_index(conn: sqlite3.Connection, table: str) -> list[Any]:
    """Every trigram of an index with its document, column and place."""
    schema = "temp" if table == "expected" else "main"
    conn.execute(f"CREATE VIRTUAL TABLE temp.places USING fts5vocab({schema}, {table}, instance)")
    places = conn.execute("SELECT * FROM places ORDER BY term, doc, col, offset").fetchall()
    conn.execute("DROP TABLE places")
    return places


def places_in_texts(conn: sqlite3.Connection, owner: str) -> list[Any]:
    """What `places_in_index` must be, from an index that is made of the tables now."""
    conn.execute("CREATE VIRTUAL TABLE temp.expected USING fts5(title, content, answer, tokenize='trigram')")
    sql = """INSERT INTO temp.expected (rowid, title, content, answer)
        SELECT row * 2 + 1, title, '', '' FROM sessions WHERE owner = ?1 UNION ALL
        SELECT t.seq * 2, '', content, answer FROM turns t JOIN sessions s ON s.row = t.session
        WHERE s.owner = ?1 AND t.status <> 'running'"""
    conn.execute(sql, (owner,))
    places = places_in_index(conn, "expected")
    conn.execute("DROP TABLE temp.expected")
    return places


async def test_the_file_is_private_and_durable(store: SessionStore, path: Path) -> None:
    assert {os.stat(file).st_mode & 0o777 for file in (path, f"{path}-wal")} == {0o600}
    pragmas = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}
    with contextlib.closing(open_writer(path, True, 0)) as conn:
        for pragma, value in (pragmas | {"user_version": SCHEMA_VERSION}).items():
            assert conn.execute(f"PRAGMA {pragma}").fetchone()[0] == value


async def test_a_damaged_file_is_refused_and_calls_of_a_closed_store_may_come_again(path: Path) -> None:
    """What was asked before the close is done. The message about a file names it and says what to do; a good one in its place then opens."""
    store = await SessionStore.open(path)
    await chat(store, "s", *(f"t{i}" for i in range(20)))
    made, _, _ = await asyncio.gather(store.create_session("ann", now=NOW), store.close(), store.close())
    for call in (store.get_session("ann", made.id), store.create_session("ann", now=NOW)):
        error = await refused(call)
        assert (error.code, error.retryable) == ("draining", True)
    good = await asyncio.to_thread(path.read_bytes)
    for at in (0, len(good) // 2):
        await asyncio.to_thread(path.write_bytes, good[:at] + b"\xa5" * 16384 + good[at + 16384 :])
        with pytest.raises(StartupError, match=r"sessions\.db is damaged .*recover"):
            await SessionStore.open(path)
    await asyncio.to_thread(path.write_bytes, good)
    store = await SessionStore.open(path)
    assert len(await turn_ids(store, "s")) == 20
    assert (await store.get_session("ann", made.id)).id == made.id
    await store.close()


async def test_a_cancelled_call_leaves_no_transaction_open(store: SessionStore) -> None:
    """Cancelling callers at random points does not mix up those that stay."""
    await chat(store, "s")
    tasks = [
        asyncio.ensure_future(store.create_session("ann", session_id=f"c{i}", now=NOW)) for i in range(30)
    ]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await ask(store, "s", "t")).is_new
    ids = {summary.id for summary in (await store.list_sessions("ann", limit=100))[0]}
    assert {f"c{i}" for i in range(1, 30, 2)} <= ids


OWNERS = ("ann", "bob")
Key = tuple[str, str]
KEYS = st.tuples(st.sampled_from(OWNERS), st.sampled_from("xxy"))
TURN_IDS = st.sampled_from("tuv")
MESSAGES = st.sampled_from([("t", "one"), ("u", "two"), ("v", "one"), ("v", "two")])
AFTER = st.just("unset") | st.just("unset") | st.none() | TURN_IDS


@dataclass
class ModelTurn:
    id: str
    content: str
    status: str = "running"
    answer: str = ""
    reasoning: str = ""
    token_ids: bytes = b""
    parent: ModelTurn | None = None
    children: list[ModelTurn] = field(default_factory=list)
    followed_by: ModelTurn | None = None
    """The child that was shown last."""

    def path(self) -> list[ModelTurn]:
        """What it follows, and itself; without the start."""
        return [] if self.parent is None else [*self.parent.path(), self]

    def below(self) -> list[ModelTurn]:
        return [turn for child in self.children for turn in (child, *child.below())]


@dataclass
class ModelSession:
    """Its turns as objects that refer to each other, behind one that stands for the start."""

    title: str | None = None
    deleted_at: float | None = None
    start: ModelTurn = field(default_factory=lambda: ModelTurn("", ""))

    @property
    def turns(self) -> list[ModelTurn]:
        return self.start.below()

    @property
    def shown(self) -> list[ModelTurn]:
        turn, shown = self.start, []
        while turn.followed_by is not None:
            shown.append(turn := turn.followed_by)
        return shown

    def find(self, turn_id: str) -> ModelTurn | None:
        return next((turn for turn in self.turns if turn.id == turn_id), None)

    def add(self, turn: ModelTurn, parent: ModelTurn) -> ModelTurn:
        turn.parent = parent
        parent.children.append(turn)
        self.choose(turn)
        return turn

    def choose(self, turn: ModelTurn) -> None:
        for one in turn.path():
            one.parent.followed_by = one

    @property
    def is_busy(self) -> bool:
        return any(turn.status == "running" for turn in self.turns)

    @property
    def has_two(self) -> bool:
        return any(turn.content == "two" and turn.status != "running" for turn in self.turns)

    def is_gone(self, now: float) -> bool:
        """Whether it can no longer be restored."""
        return self.deleted_at is not None and now - self.deleted_at > RESTORE_WINDOW_S


class StoreMachine(Machine):
    """Random histories of two owners that use the same ids; after each step the store must say what a plain dictionary says."""

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.path = Path(self.folder.name) / "sessions.db"
        self.store = self.runner.run(SessionStore.open(self.path))
        self.now = NOW
        self.model: dict[Key, ModelSession] = {}
        self.num_nameless = 0  # deleted ones that wait for a purge, while another has their id
        self.create(("ann", "x"), False)
        self.create(("bob", "x"), False)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.runner.run(self.store.close())
            self.runner.close()
            self.folder.cleanup()

    def call(self, coroutine: Any) -> Any:
        """The result, or the error's code."""
        try:
            return self.runner.run(coroutine)
        except GatewayError as error:
            return error.code

    @property
    def running(self) -> list[tuple[Key, str]]:
        turns = [(key, turn) for key, session in self.model.items() for turn in session.turns]
        return [(key, turn.id) for key, turn in turns if turn.status == "running"]

    def live(self, key: Key) -> ModelSession | None:
        session = self.model.get(key)
        return session if session is not None and session.deleted_at is None else None

    @action(key=KEYS, exist_ok=st.booleans())
    def create(self, key: Key, exist_ok: bool) -> None:
        owner, session_id = key
        known = self.model.get(key)
        result = self.call(
            self.store.create_session(owner, session_id=session_id, exist_ok=exist_ok, now=self.now)
        )
        if known is not None and known.is_gone(self.now):
            known = None
            self.num_nameless += 1
            del self.model[key]
        if known is not None and (known.deleted_at is not None or not exist_ok):
            assert result == "conflict"
        else:
            assert result.id == session_id
            self.model.setdefault(key, ModelSession())

    @action(often=3, key=KEYS, message=MESSAGES, after=AFTER)
    def begin(self, key: Key, message: tuple[str, str], after: str | None) -> None:
        options = {} if after == "unset" else {"after": after}
        result = self.call(self.store.begin_turn(*key, *message, now=self.now, **options))
        expected = self.model_begin(self.live(key), *message, after)
        if isinstance(expected, str):
            assert getattr(result, "outcome", result) == expected
            return
        outcome, history, token_ids = expected
        # Nothing where the ids of early turns were given up for those of a later one.
        assert result.history_token_ids in (b"", token_ids)
        assert (result.outcome, [turn.id for turn in result.history]) == (outcome, history)

    def model_begin(self, session: ModelSession | None, turn_id: str, content: str, after: str | None) -> Any:
        """An error code, "existing", or (outcome, ids of the history, token ids of the history)."""
        if session is None:
            return "not_found"
        known = session.find(turn_id)
        if known is not None and known.content != content:
            return "conflict"
        if known is not None and known.status != "failed":
            return "existing"
        if session.is_busy:
            return "busy"
        if after == turn_id:
            return "bad_request"
        parent = known.parent if known is not None else [session.start, *session.shown][-1]
        if after != "unset":
            wanted = session.start if after is None else session.find(after)
            if wanted is None:
                return "not_found"
            if known is not None and wanted is not parent:
                return "conflict"
            parent = wanted
        if known is None:
            session.add(ModelTurn(turn_id, content), parent)
        else:
            known.status, known.answer, known.reasoning, known.token_ids = "running", "", "", b""
            session.choose(known)
        session.title = session.title or content
        before = parent.path()
        history = [turn.id for turn in before if turn.status != "failed" or turn.answer]
        token_ids = next((turn.token_ids for turn in reversed(before) if turn.token_ids), b"")
        return "new" if known is None else "retried", history, token_ids

    @action(key=KEYS, turn_id=TURN_IDS)
    def choose(self, key: Key, turn_id: str) -> None:
        result = self.call(self.store.choose_version(*key, turn_id))
        session = self.live(key)
        turn = None if session is None else session.find(turn_id)
        if session is None or turn is None:
            assert result == "not_found"
        elif session.is_busy:
            assert result == "busy"
        else:
            session.choose(turn)
            assert [turn.id for turn in result.turns] == [turn.id for turn in session.shown]

    @action(
        when=lambda self: self.running,
        often=4,
        data=st.data(),
        key=KEYS,
        turn_id=TURN_IDS,
        status=st.sampled_from(["done", "stopped", "failed"]),
        answer=st.sampled_from(["", "x", "lông answer"]),
        token_ids=st.lists(st.sampled_from([1, 2, 70_000]), max_size=12).map(pack_token_ids),
    )
    def finish(self, data: Any, key: Key, turn_id: str, status: Any, answer: str, token_ids: bytes) -> None:
        """One that runs more often than another one, whose end is known already."""
        key, turn_id = data.draw(st.sampled_from([*self.running * 3, (key, turn_id)]))
        end = {"answer": answer, "status": status, "token_ids": token_ids, "reasoning": answer[1:]}
        result: FinishResult | None = self.call(self.store.finish_turn(*key, turn_id, now=self.now, **end))
        session = self.model.get(key)
        turn = None if session is None else session.find(turn_id)
        if turn is not None and turn.status == "running":
            turn.status, turn.answer, turn.reasoning = status, answer, answer[1:]
            if token_ids and status != "failed":
                turn.token_ids = token_ids
                for later in turn.below():
                    later.token_ids = b""
        if turn is None or self.live(key) is None:
            assert result is None
        else:
            assert result is not None and result.title == self.model[key].title
            assert (result.turn.status, result.turn.answer) == (turn.status, turn.answer)

    @action(key=KEYS, message=MESSAGES)
    def record(self, key: Key, message: tuple[str, str]) -> None:
        turn_id, content = message
        result = self.call(self.store.record_turn(*key, turn_id, content, answer="api", now=self.now))
        session = self.live(key)
        if session is None:
            assert result is None
            return
        known = session.find(turn_id)
        if known is None:
            session.add(ModelTurn(turn_id, content, "done", "api"), [session.start, *session.shown][-1])
            session.title = session.title or content
        else:
            assert result == "conflict" if known.content != content else result.status == known.status

    @action(key=KEYS, title=st.sampled_from([None, "named"]))
    def rename(self, key: Key, title: str | None) -> None:
        result = self.call(self.store.patch(*key, title=title))
        session = self.live(key)
        if session is None:
            assert result == "not_found"
        else:
            session.title = title

    @action(key=KEYS)
    def delete_or_restore(self, key: Key) -> None:
        session, is_live = self.model.get(key), self.live(key) is not None
        assert self.call(self.store.delete(*key, self.now)) == (None if is_live else "not_found")
        if session is not None and is_live:
            session.deleted_at = self.now
            return
        result = self.call(self.store.restore(*key, self.now))
        if session is not None and not session.is_gone(self.now):
            session.deleted_at = None
        assert (result == "not_found") == (self.live(key) is None)

    @action(
        often=2,
        seconds=st.sampled_from([31.0, 31.0, 1.0, 16.0]),
        then=st.sampled_from(["purge", "purge", "nothing", "open", "index"]),
    )
    def time_passes(self, seconds: float, then: str) -> None:
        self.now += seconds
        if then == "purge":
            self.purge()
        elif then != "nothing":
            self.reopen(full_text=then == "index")

    def purge(self) -> None:
        old = [key for key, session in self.model.items() if session.is_gone(self.now)]
        assert self.call(self.store.purge(self.now)) == len(old) + self.num_nameless
        self.num_nameless = 0
        for key in old:
            del self.model[key]
        check_counts(self.path)

    def reopen(self, full_text: bool) -> None:
        self.runner.run(self.store.close())
        self.store = self.runner.run(SessionStore.open(self.path, full_text=full_text))
        for session in self.model.values():
            for turn in session.turns:
                turn.status = "failed" if turn.status == "running" else turn.status
        check_counts(self.path)
        if full_text:
            check_index(self.path)

    @invariant()
    def store_and_model_agree(self) -> None:
        """The same sessions, turns, texts and states; at most one turn of a session runs; a search finds what is over."""
        self.runner.run(self.compare())

    async def compare(self) -> None:
        for owner in OWNERS:
            live = {name: session for name in "xy" if (session := self.live((owner, name))) is not None}
            page, after = await self.store.list_sessions(owner)
            titles = {name: session.title for name, session in live.items()}
            assert after is None and {s.id: s.title for s in page} == titles
            for summary in page:
                turns = (await self.store.get_session(owner, summary.id)).turns
                expected = live[summary.id].shown
                versions = [[version.id for version in turn.parent.children] for turn in expected]
                assert [turn.versions for turn in turns] == versions
                assert [(t.id, t.content, t.status, t.answer, t.reasoning) for t in turns] == [
                    (t.id, t.content, t.status, t.answer, t.reasoning) for t in expected
                ]
                assert summary.num_turns == len(turns)
                assert sum(turn.status == "running" for turn in turns) <= 1
            found, _ = await self.store.list_sessions(owner, q="two")
            holding = {name for name, session in live.items() if session.title == "two" or session.has_two}
            assert {summary.id for summary in found} == holding


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_the_first_match_stands_between_its_neighbours_on_one_line_cut_on_both_sides() -> None:
    for text, found in {
        "Lisbon": Excerpt("", "Lisbon", ""),
        "  to\n\n lisbon,\tthen": Excerpt("to ", "lisbon", ", then"),
        "one LISBON and one Lisbon": Excerpt("one ", "LISBON", " and one Lisbon"),
        "no such place": None,
    }.items():
        assert excerpt("Lisbon", text) == found
    long = excerpt("needle", "word " * 1000 + "needle" + " word" * 1000)
    assert long is not None
    assert long.before.startswith("…word") and long.after.endswith("…")
    assert len(long.before) <= BEFORE_CHARS + 1 and len(long.after) <= AFTER_CHARS + 1
    endless = excerpt("x" * 500, "x" * 1000)
    assert endless is not None and len(endless.match) == MATCH_CHARS
