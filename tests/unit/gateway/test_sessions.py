"""The session store on real SQLite files: what each method promises, then the whole store against a model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from engine_bridge.protocol.node import pack_token_ids, unpack_token_ids
from gateway.errors import GatewayError, StartupError
from gateway.sessions import RESTORE_WINDOW_S, SCHEMA_VERSION, FinishResult, SessionStore
from gateway.sessions.excerpt import AFTER_CHARS, BEFORE_CHARS, MATCH_CHARS, Excerpt, excerpt
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES

from .parts import IN_MEMORY, refused

NOW = 1_700_000_000.0


@pytest_asyncio.fixture(params=[True, False], ids=["index", "no-index"])
async def searchable(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[SessionStore]:
    """A store with, then one without, the search index: a search must find the same in both."""
    store = await SessionStore.open(path, full_text=request.param)
    yield store
    await store.close()


async def ask(
    store: SessionStore,
    session: str,
    turn: str,
    content: str = "hello",
    *,
    owner: str = "ann",
    now: float = NOW,
    **options: Any,
):
    return await store.begin_turn(owner, session, turn, content, now=now, **options)


async def end(
    store: SessionStore,
    session: str,
    turn: str,
    answer: str = "hi",
    *,
    owner: str = "ann",
    status: Any = "done",
):
    over = await store.finish_turn(
        owner, session, turn, answer=answer, status=status, finish_reason="stop", now=NOW
    )
    return over.turn if over is not None else None


async def chat(store: SessionStore, session: str, *turns: str, owner: str = "ann") -> None:
    """A session with these finished turns; each answer is the turn's id after 're: '."""
    await store.create_session(owner, session_id=session, now=NOW)
    for turn in turns:
        await ask(store, session, turn, f"ask {turn}", owner=owner)
        await end(store, session, turn, f"re: {turn}", owner=owner)


async def turn_ids(store: SessionStore, session: str, owner: str = "ann") -> list[str]:
    return [turn.id for turn in (await store.get_session(owner, session)).turns]


# --- sessions ------------------------------------------------------------------------------------------------------------------------


async def test_what_a_clock_deleted_that_was_put_back_since_is_purged_as_any_other(
    store: SessionStore,
) -> None:
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


# --- turns ---------------------------------------------------------------------------------------------------------------------------


async def test_a_clock_set_back_moves_no_session_back(store: SessionStore) -> None:
    """A session that was just used does not sink in the list."""
    await chat(store, "s", "a")
    await ask(store, "s", "b", now=NOW - 100)
    await store.finish_turn("ann", "s", "b", answer="x", status="done", now=NOW - 99)
    await store.record_turn("ann", "s", "c", "x", answer="y", now=NOW - 98)
    assert (await store.get_session("ann", "s")).updated_at == NOW


async def test_sessions_of_calls_are_listed_apart_until_a_person_goes_on_with_them(
    store: SessionStore,
) -> None:
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


# --- token ids ---------------------------------------------------------------------------------------------------------------------


async def talk_ids(store: SessionStore, turn: str, *token_ids: int, **options: Any) -> list[int]:
    """Ask and finish a turn of session s that came to these ids; returns the history's ids that it was asked with."""
    began = await ask(store, "s", turn, **options)
    status = "done" if token_ids else "failed"
    await store.finish_turn("ann", "s", turn, answer="", status=status, token_ids=pack(token_ids), now=NOW)
    return list(unpack_token_ids(began.history_token_ids))


def pack(token_ids: Iterable[int]) -> bytes:
    return pack_token_ids(list(token_ids))


async def test_a_long_session_keeps_each_id_once(store: SessionStore, path: Path) -> None:
    """Fifty turns that add 100 ids each take little more than 4 bytes an id; prompts that repeat nothing do not add up either."""
    await store.create_session("ann", session_id="s", now=NOW)
    for number in range(50):
        history = await talk_ids(store, f"t{number}", *range(100 * (number + 1)))
        assert history == list(range(100 * number))
    assert stored_bytes(path) == 50 * 100 * 4 + 50 * 4
    for number in range(20):
        ids = range(number, 5_000 + number)
        await talk_ids(store, f"u{number}", *ids)
        assert stored_bytes(path) <= 4 * (5_000 * 4)
    assert await talk_ids(store, "last", 1) == list(ids)


def stored_bytes(path: Path) -> int:
    """Bytes of token ids in the whole file."""
    with contextlib.closing(sqlite3.connect(path)) as conn:
        return conn.execute("SELECT sum(length(token_ids)) FROM turns").fetchone()[0]


# --- lists and search ----------------------------------------------------------------------------------------------------------------


async def test_pages_are_newest_first_and_complete(store: SessionStore) -> None:
    """Walking the pages shows every session once, also where several have the same time."""
    for i in range(11):
        await store.create_session("ann", session_id=f"s{i:02}", now=NOW + i // 4)
    seen, cursor, sizes = [], None, []
    while True:
        page, cursor = await store.list_sessions("ann", limit=4, before=cursor)
        seen += [summary.id for summary in page]
        sizes.append(len(page))
        if cursor is None:
            break
    assert seen == [f"s{i:02}" for i in reversed(range(11))] and sizes == [4, 4, 3]


TEXTS = {
    "percent": "it is 100% sure",
    "under": "snake_case_name",
    "back": "C:\\temp\\%",
    "quotes": "she said \"no\" and it's 'over'",
    "emoji": "a 👩‍🚀 in space 🚀🚀🚀",
    "query": "title:x AND NOT (a OR b*) ^c NEAR -- ; DROP TABLE turns",
    "plain": "100x sure, snakeXcase",
    "umlaut": "Überraschung",
}


FINDS = {
    "%": {"percent", "back"},
    "_": {"under"},
    "\\": {"back"},
    '"': {"quotes"},
    "'": {"quotes"},
    "0% s": {"percent"},
    "snake_case": {"under"},
    "\\temp\\%": {"back"},
    '"no"': {"quotes"},
    "it's 'over'": {"quotes"},
    "🚀": {"emoji"},
    "👩‍🚀 in": {"emoji"},
    "title:x AND NOT (a OR b*) ^c": {"query"},
    "-- ; DROP TABLE": {"query"},
    '" OR "': set(),
    "sure*": set(),
    "SU": {"percent", "plain"},
    "berrasch": {"umlaut"},
    " sure ": {"percent", "plain"},
    "nothing like it": set(),
    "\0": set(),
    "  ": set(TEXTS),
}


async def test_search_takes_any_text_as_it_is(searchable: SessionStore) -> None:
    """No character of a query is an operator, in a title, a message or an answer, with the index or without."""
    for name, text in TEXTS.items():
        await searchable.create_session("title", session_id=name, title=text, now=NOW)
        for owner, content, answer in (("content", text, ""), ("answer", "?", text)):
            await searchable.create_session(owner, session_id=name, title="t", now=NOW)
            await searchable.record_turn(owner, name, "t", content, answer=answer, now=NOW)
    for owner in ("title", "content", "answer"):
        found = {
            q: {summary.id for summary in (await searchable.list_sessions(owner, q=q))[0]} for q in FINDS
        }
        assert found == FINDS, owner


def check_index(path: Path) -> None:
    """Each owner's index holds exactly the texts of its titles and of its turns that are over, place by place."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        owners = conn.execute("SELECT row, name, is_indexed FROM owners").fetchall()
        for row, name, is_indexed in owners:
            assert is_indexed
            conn.execute(f"INSERT INTO search_{row} (search_{row}) VALUES ('integrity-check')")
            assert places_in_index(conn, f"search_{row}") == places_in_texts(conn, name)


def check_counts(path: Path) -> None:
    """What is counted for each owner is what its rows hold: in UTF-8, and so much more for each session and turn."""
    with contextlib.closing(sqlite3.connect(path)) as conn:
        held = dict.fromkeys((name for (name,) in conn.execute("SELECT name FROM owners")), 0)
        for row, owner in conn.execute("SELECT row, owner FROM sessions"):
            held[owner] += SESSION_BYTES
            turns = conn.execute("SELECT content, answer, token_ids FROM turns WHERE session = ?", (row,))
            for content, answer, token_ids in turns:
                held[owner] += (
                    TURN_BYTES + len(content.encode()) + len(answer.encode()) + len(token_ids or b"")
                )
        assert dict(conn.execute("SELECT name, num_bytes FROM owners")) == held


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
    conn.execute(
        "INSERT INTO temp.expected (rowid, title) SELECT row * 2 + 1, title FROM sessions WHERE owner = ?",
        (owner,),
    )
    conn.execute(
        """INSERT INTO temp.expected (rowid, content, answer) SELECT t.seq * 2, content, answer
           FROM turns t JOIN sessions s ON s.row = t.session WHERE s.owner = ? AND t.status <> 'running'""",
        (owner,),
    )
    places = places_in_index(conn, "expected")
    conn.execute("DROP TABLE temp.expected")
    return places


# --- the file ------------------------------------------------------------------------------------------------------------------------


def mode_of(path: Path | str) -> int:
    return os.stat(path).st_mode & 0o777


async def test_the_file_is_private_and_durable(store: SessionStore, path: Path) -> None:
    assert mode_of(path) == mode_of(f"{path}-wal") == 0o600
    pragmas = ("journal_mode", "synchronous", "foreign_keys", "user_version", "busy_timeout")
    values = [
        await store._writer.transact(lambda conn, p=pragma: conn.execute(f"PRAGMA {p}").fetchone()[0])
        for pragma in pragmas
    ]
    assert values == ["wal", 2, 1, SCHEMA_VERSION, 5000]


async def test_a_damaged_file_is_refused_with_advice_and_calls_of_a_closed_store_may_come_again(
    path: Path,
) -> None:
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


# --- against a model -----------------------------------------------------------------------------------------------------------------

OWNERS = ("ann", "bob")
TURN_IDS = tuple("tuvw")
ENDS = st.sampled_from(["done", "stopped", "failed"])


@dataclass
class ModelTurn:
    id: str
    content: str
    status: str = "running"
    answer: str = ""
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


class StoreMachine(RuleBasedStateMachine):
    """Random histories of two owners that use the same ids; after each step the store must say what a plain dictionary says."""

    sessions = Bundle("sessions")

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.path = Path(self.folder.name) / "sessions.db"
        self.runner = asyncio.Runner()
        self.store = self.runner.run(SessionStore.open(self.path))
        self.now = NOW
        self.model: dict[tuple[str, str], ModelSession] = {}
        self.num_nameless = 0  # deleted ones that wait for a purge, while another has their id

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

    def live(self, key: tuple[str, str]) -> ModelSession | None:
        session = self.model.get(key)
        return session if session is not None and session.deleted_at is None else None

    @rule(target=sessions, session_id=st.sampled_from("xy"), exist_ok=st.booleans())
    def create(self, session_id: str, exist_ok: bool) -> Any:
        keys = [(owner, session_id) for owner in OWNERS]
        for owner, _ in keys:
            known = self.model.get((owner, session_id))
            result = self.call(
                self.store.create_session(owner, session_id=session_id, exist_ok=exist_ok, now=self.now)
            )
            if (
                known is not None
                and known.deleted_at is not None
                and self.now - known.deleted_at > RESTORE_WINDOW_S
            ):
                known = None
                self.num_nameless += 1
                del self.model[owner, session_id]
            if known is not None and (known.deleted_at is not None or not exist_ok):
                assert result == "conflict"
            else:
                assert result.id == session_id
                self.model.setdefault((owner, session_id), ModelSession())
        return multiple(*keys)

    @rule(
        key=sessions,
        turn_id=st.sampled_from(TURN_IDS),
        content=st.sampled_from(["one", "two"]),
        after=st.sampled_from(["unset", None, *TURN_IDS]),
    )
    def begin(self, key: tuple[str, str], turn_id: str, content: str, after: str | None) -> None:
        options = {} if after == "unset" else {"after": after}
        result = self.call(self.store.begin_turn(*key, turn_id, content, now=self.now, **options))
        expected = self.model_begin(self.live(key), turn_id, content, after)
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
        if any(turn.status == "running" for turn in session.turns):
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
            known.status, known.answer, known.token_ids = "running", "", b""
            session.choose(known)
        session.title = session.title or content
        before = parent.path()
        history = [turn.id for turn in before if turn.status != "failed" or turn.answer]
        token_ids = next((turn.token_ids for turn in reversed(before) if turn.token_ids), b"")
        return "new" if known is None else "retried", history, token_ids

    @rule(key=sessions, turn_id=st.sampled_from(TURN_IDS))
    def choose(self, key: tuple[str, str], turn_id: str) -> None:
        result = self.call(self.store.choose_version(*key, turn_id))
        session = self.live(key)
        turn = None if session is None else session.find(turn_id)
        if session is None or turn is None:
            assert result == "not_found"
        elif any(turn.status == "running" for turn in session.turns):
            assert result == "busy"
        else:
            session.choose(turn)
            assert [turn.id for turn in result.turns] == [turn.id for turn in session.shown]

    @rule(key=sessions, turn_id=st.sampled_from(TURN_IDS), status=ENDS, answer=st.sampled_from(["", "x"]))
    def finish(self, key: tuple[str, str], turn_id: str, status: str, answer: str) -> None:
        self.finish_one(key, turn_id, status, answer, b"")

    @precondition(lambda self: self.running())
    @rule(
        data=st.data(),
        status=ENDS,
        answer=st.sampled_from(["", "x", "long answer"]),
        token_ids=st.lists(st.sampled_from([1, 2, 70_000]), max_size=12).map(pack_token_ids),
    )
    def finish_running(self, data: st.DataObject, status: str, answer: str, token_ids: bytes) -> None:
        key, turn_id = data.draw(st.sampled_from(self.running()))
        self.finish_one(key, turn_id, status, answer, token_ids)

    def running(self) -> list[tuple[tuple[str, str], str]]:
        return [
            (key, turn.id)
            for key, session in self.model.items()
            for turn in session.turns
            if turn.status == "running"
        ]

    def finish_one(
        self, key: tuple[str, str], turn_id: str, status: Any, answer: str, token_ids: bytes
    ) -> None:
        result: FinishResult | None = self.call(
            self.store.finish_turn(
                *key, turn_id, answer=answer, status=status, token_ids=token_ids, now=self.now
            )
        )
        session = self.model.get(key)
        turn = None if session is None else session.find(turn_id)
        if turn is not None and turn.status == "running":
            turn.status, turn.answer = status, answer
            if token_ids and status != "failed":
                turn.token_ids = token_ids
                for later in turn.below():
                    later.token_ids = b""
        if turn is None or self.live(key) is None:
            assert result is None
        else:
            assert result is not None and result.title == self.model[key].title
            assert (result.turn.status, result.turn.answer) == (turn.status, turn.answer)

    @rule(key=sessions, turn_id=st.sampled_from(TURN_IDS), content=st.sampled_from(["one", "two"]))
    def record(self, key: tuple[str, str], turn_id: str, content: str) -> None:
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

    @rule(key=sessions, title=st.sampled_from([None, "named"]))
    def rename(self, key: tuple[str, str], title: str | None) -> None:
        result = self.call(self.store.patch(*key, title=title))
        session = self.live(key)
        if session is None:
            assert result == "not_found"
        else:
            session.title = title

    @rule(key=sessions)
    def delete(self, key: tuple[str, str]) -> None:
        result = self.call(self.store.delete(*key, self.now))
        session = self.live(key)
        assert result == ("not_found" if session is None else None)
        if session is not None:
            session.deleted_at = self.now

    @rule(key=sessions)
    def restore(self, key: tuple[str, str]) -> None:
        result = self.call(self.store.restore(*key, self.now))
        session = self.model.get(key)
        if (
            session is not None
            and session.deleted_at is not None
            and self.now - session.deleted_at <= RESTORE_WINDOW_S
        ):
            session.deleted_at = None
        assert (result == "not_found") == (self.live(key) is None)

    @rule()
    def purge(self) -> None:
        old = [
            k
            for k, s in self.model.items()
            if s.deleted_at is not None and self.now - s.deleted_at > RESTORE_WINDOW_S
        ]
        assert self.call(self.store.purge(self.now)) == len(old) + self.num_nameless
        self.num_nameless = 0
        for key in old:
            del self.model[key]

    @rule(seconds=st.sampled_from([1.0, 16.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(full_text=st.booleans())
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
            live = {
                key[1]: session
                for key, session in self.model.items()
                if key[0] == owner and session.deleted_at is None
            }
            page, after = await self.store.list_sessions(owner)
            assert after is None and {s.id: s.title for s in page} == {
                name: session.title for name, session in live.items()
            }
            for summary in page:
                turns, expected = (
                    (await self.store.get_session(owner, summary.id)).turns,
                    live[summary.id].shown,
                )
                assert [(t.id, t.content, t.status, t.answer, t.versions) for t in turns] == [
                    (t.id, t.content, t.status, t.answer, [v.id for v in t.parent.children]) for t in expected
                ]
                assert (
                    summary.num_turns == len(turns) and sum(turn.status == "running" for turn in turns) <= 1
                )
            found, _ = await self.store.list_sessions(owner, q="two")
            assert {s.id for s in found} == {
                name for name, session in live.items() if self.speaks_of_two(session)
            }

    @staticmethod
    def speaks_of_two(session: ModelSession) -> bool:
        return session.title == "two" or any(
            turn.content == "two" and turn.status != "running" for turn in session.turns
        )


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Lisbon", Excerpt("", "Lisbon", "")),
        ("  to\n\n lisbon,\tthen", Excerpt("to ", "lisbon", ", then")),
        ("one LISBON and one Lisbon", Excerpt("one ", "LISBON", " and one Lisbon")),
        ("no such place", None),
    ],
)
def test_the_first_match_stands_between_its_neighbours_on_one_line(text: str, found: Excerpt | None) -> None:
    assert excerpt("Lisbon", text) == found


def test_long_texts_are_cut_on_both_sides_and_say_so() -> None:
    found = excerpt("needle", "word " * 1000 + "needle" + " word" * 1000)
    assert found is not None
    assert found.before.startswith("…word") and found.after.endswith("…")
    assert len(found.before) <= BEFORE_CHARS + 1 and len(found.after) <= AFTER_CHARS + 1
    endless = excerpt("x" * 500, "x" * 1000)
    assert endless is not None and len(endless.match) == MATCH_CHARS
