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
from gateway.sessions import RESTORE_WINDOW_S, SCHEMA_VERSION, FinishResult, SessionStore, title_from
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES

NOW = 1_700_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest_asyncio.fixture(params=[True, False], ids=["index", "no-index"])
async def searchable(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[SessionStore]:
    """A store with, then one without, the search index: a search must find the same in both."""
    store = await SessionStore.open(path, full_text=request.param)
    yield store
    await store.close()


@pytest_asyncio.fixture
async def store(path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(path)
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


class raises_code:
    """``pytest.raises`` for one error code."""

    def __init__(self, code: str, *, retryable: bool = False) -> None:
        self._code, self._retryable = code, retryable

    def __enter__(self) -> None:
        self._raises = pytest.raises(GatewayError)
        self._caught = self._raises.__enter__()

    def __exit__(self, *exc: Any) -> bool:
        caught = self._raises.__exit__(*exc)
        assert (self._caught.value.code, self._caught.value.retryable) == (self._code, self._retryable)
        return caught


# --- sessions ------------------------------------------------------------------------------------------------------------------------


async def test_a_session_comes_back_as_it_was_made(store: SessionStore) -> None:
    """What create_session returns is what get_session finds."""
    made = await store.create_session("ann", title="  Tea \n and cake ", adapter="poet", now=NOW)
    assert (made.title, made.adapter, made.created_at, made.updated_at, made.turns) == (
        "Tea and cake",
        "poet",
        NOW,
        NOW,
        [],
    )
    assert await store.get_session("ann", made.id) == made


async def test_made_ids_do_not_repeat(store: SessionStore) -> None:
    """Ids made by the server are 128 random bits in hex."""
    ids = {(await store.create_session("ann", now=NOW)).id for _ in range(20)}
    assert len(ids) == 20 and all(len(i) == 32 and int(i, 16) >= 0 for i in ids)


async def test_an_id_of_the_client_must_be_visible_ascii(store: SessionStore) -> None:
    """A malformed id is refused when it would be stored, and is simply unknown where it is looked up."""
    await store.create_session("ann", session_id="s", now=NOW)
    for bad in ("", "a b", "x" * 129, "ä", "a\n", "a\0", "\ud800"):
        with raises_code("bad_request"):
            await store.create_session("ann", session_id=bad, now=NOW)
        with raises_code("bad_request"):
            await ask(store, "s", bad)
        for call in (
            store.get_session("ann", bad),
            store.restore("ann", bad, NOW),
            ask(store, "s", "t", after=bad),
        ):
            with raises_code("not_found"):
                await call
        assert await end(store, bad, bad) is None


async def test_two_owners_may_use_one_id(store: SessionStore) -> None:
    """The same external id names two sessions that do not see each other in any method."""
    await chat(store, "s", "a1", owner="ann")
    await chat(store, "s", "b1", owner="bob")
    await store.record_turn("bob", "s", "b2", "secret", answer="word", response_id="r", now=NOW)
    assert await turn_ids(store, "s", "ann") == ["a1"]
    assert await turn_ids(store, "s", "bob") == ["b1", "b2"]
    assert await store.list_sessions("ann", q="secret") == ([], None)
    assert await store.responses.find("ann", "r") is None
    assert await store.responses.find("bob", "r") == ("s", "b2")
    await store.delete("ann", "s", NOW)
    assert await turn_ids(store, "s", "bob") == ["b1", "b2"]


async def test_another_owners_session_does_not_exist(store: SessionStore) -> None:
    """Every method answers for it as for an id that nobody has."""
    await chat(store, "s", "t")
    calls = [
        store.get_session("bob", "s"),
        store.patch("bob", "s", title="mine"),
        store.delete("bob", "s", NOW),
        store.restore("bob", "s", NOW),
        ask(store, "s", "u", owner="bob"),
    ]
    for call in calls:
        with raises_code("not_found"):
            await call
    assert await end(store, "s", "t", "mine", owner="bob") is None
    assert await store.record_turn("bob", "s", "u", "x", answer="y", now=NOW) is None


async def test_a_taken_id_is_a_conflict_unless_asked_otherwise(store: SessionStore) -> None:
    """exist_ok answers with the session that is there, unchanged; a deleted one is a conflict while it can be restored."""
    await chat(store, "s", "t")
    with raises_code("conflict"):
        await store.create_session("ann", session_id="s", now=NOW)
    found = await store.create_session("ann", session_id="s", title="other", exist_ok=True, now=NOW)
    assert (found.title, [turn.id for turn in found.turns]) == ("ask t", ["t"])
    await store.delete("ann", "s", NOW)
    with raises_code("conflict"):
        await store.create_session("ann", session_id="s", exist_ok=True, now=NOW + RESTORE_WINDOW_S)
    later = NOW + RESTORE_WINDOW_S + 1
    assert (await store.create_session("ann", session_id="s", exist_ok=True, now=later)).turns == []
    assert await store.purge(later) == 1
    assert (await store.restore("ann", "s", later)).turns == []


async def test_patch_changes_what_is_given(store: SessionStore) -> None:
    """None is a value (no title, base model); what is left out stays; the place in the list stays too."""
    await store.create_session("ann", session_id="s", title="old", adapter="poet", now=NOW)
    assert (await store.patch("ann", "s", title="new")).adapter == "poet"
    summary = await store.patch("ann", "s", adapter=None)
    assert (summary.title, summary.adapter, summary.updated_at, summary.num_turns) == ("new", None, NOW, 0)
    assert (await store.patch("ann", "s", title=" ")).title is None
    with raises_code("bad_request"):
        await store.patch("ann", "s", title="x" * 201)


async def test_delete_hides_and_restore_brings_back_for_30_s(store: SessionStore) -> None:
    """The last moment of the window still counts, for restore and against purge."""
    await chat(store, "s", "t")
    before = await store.get_session("ann", "s")
    await store.delete("ann", "s", NOW)
    for call in (store.get_session("ann", "s"), store.delete("ann", "s", NOW), ask(store, "s", "u")):
        with raises_code("not_found"):
            await call
    assert await store.list_sessions("ann", q="ask") == ([], None)
    assert await store.purge(NOW + RESTORE_WINDOW_S) == 0
    assert await store.restore("ann", "s", NOW + RESTORE_WINDOW_S) == before
    assert await store.restore("ann", "s", NOW + 99) == before
    await store.delete("ann", "s", NOW)
    with raises_code("not_found"):
        await store.restore("ann", "s", NOW + RESTORE_WINDOW_S + 0.1)
    assert await store.purge(NOW + RESTORE_WINDOW_S + 0.1) == 1
    with raises_code("not_found"):
        await store.restore("ann", "s", NOW)


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
    with raises_code("not_found"):
        await store.restore("ann", "s", NOW + RESTORE_WINDOW_S + 1)
    assert await store.purge(NOW + RESTORE_WINDOW_S + 1) == 1


# --- turns ---------------------------------------------------------------------------------------------------------------------------


async def test_a_turn_from_begin_to_finish(store: SessionStore) -> None:
    """A turn is stored running, then with all that finish_turn was told."""
    await store.create_session("ann", session_id="s", now=NOW)
    began = await ask(store, "s", "t", "Why is\nthe sky blue?", adapter="poet", now=NOW + 1)
    assert (began.is_new, began.outcome, began.title, began.history) == (True, "new", "Why is", [])
    assert (began.turn.status, began.turn.answer, began.turn.created_at) == ("running", "", NOW + 1)
    usage, timings = {"prompt_tokens": 3}, {"tpot_ms": None, "kv": {"disk": 2}}
    finished = await store.finish_turn(
        "ann",
        "s",
        "t",
        answer="Air.",
        status="done",
        finish_reason="length",
        usage=usage,
        timings=timings,
        now=NOW + 2,
    )
    assert finished is not None and finished.title == "Why is"
    over, session = finished.turn, await store.get_session("ann", "s")
    assert session.turns == [over] and (over.answer, over.finish_reason, over.usage, over.timings) == (
        "Air.",
        "length",
        usage,
        timings,
    )
    assert (session.adapter, session.title, session.updated_at) == ("poet", "Why is", NOW + 2)


async def test_the_last_adapter_stays(store: SessionStore) -> None:
    """An adapter left out is the session's last one; None is the base model."""
    await store.create_session("ann", session_id="s", adapter="poet", now=NOW)
    used = []
    for turn, options in (
        ("a", {}),
        ("b", {"adapter": "pirate"}),
        ("c", {}),
        ("d", {"adapter": None}),
        ("e", {}),
    ):
        used.append((await ask(store, "s", turn, **options)).turn.adapter)
        await end(store, "s", turn)
    assert used == ["poet", "pirate", "pirate", None, None]


@pytest.mark.parametrize("status", ["running", "done", "stopped"])
async def test_a_repeated_message_is_stored_once(store: SessionStore, status: str) -> None:
    """A known id is answered with the turn as it is, even where the repeat carries the `after` of the first time."""
    await chat(store, "s", "a", "b")
    await ask(store, "s", "t", after="a")
    if status != "running":
        await end(store, "s", "t", "text", status=status)
    again = await ask(store, "s", "t", after="a")
    assert (again.is_new, again.turn.status, again.turn.answer) == (
        False,
        status,
        "" if status == "running" else "text",
    )
    assert await turn_ids(store, "s") == ["a", "t"]


async def test_another_content_under_a_known_id_is_a_conflict(store: SessionStore) -> None:
    """Whatever became of the first one."""
    await store.create_session("ann", session_id="s", now=NOW)
    await ask(store, "s", "t", "one")
    with raises_code("conflict"):
        await ask(store, "s", "t", "two")
    await end(store, "s", "t", status="failed")
    with raises_code("conflict"):
        await ask(store, "s", "t", "two")


async def test_one_turn_at_a_time(store: SessionStore) -> None:
    """A second message is `busy`, also one that would replace the running turn; another session is not touched by it."""
    await chat(store, "s", "a")
    await chat(store, "other")
    await ask(store, "s", "b")
    for options in ({}, {"after": "a"}, {"after": None}):
        with raises_code("busy"):
            await ask(store, "s", "c", **options)
    assert (await ask(store, "other", "c")).is_new


async def test_many_at_once_let_one_through(store: SessionStore) -> None:
    """Of 20 messages sent at the same time one runs and the others are told that the session is busy."""
    await store.create_session("ann", session_id="s", now=NOW)
    results = await asyncio.gather(*(ask(store, "s", f"t{i}") for i in range(20)), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert len(errors) == 19 and all(
        isinstance(error, GatewayError) and error.code == "busy" for error in errors
    )
    assert len(await turn_ids(store, "s")) == 1


async def test_many_sessions_at_once(store: SessionStore) -> None:
    """Turns of 20 sessions, begun and finished at the same time, do not mix."""

    async def talk(name: str) -> None:
        await store.create_session("ann", session_id=name, now=NOW)
        for turn in ("a", "b"):
            await ask(store, name, turn, f"{name} {turn}")
            await end(store, name, turn, f"re: {name} {turn}")

    names = [f"s{i}" for i in range(20)]
    await asyncio.gather(*(talk(name) for name in names))
    for name in names:
        turns = (await store.get_session("ann", name)).turns
        assert [turn.answer for turn in turns] == [f"re: {name} a", f"re: {name} b"]


async def test_a_failed_turn_runs_again_where_it_stood(store: SessionStore) -> None:
    """The retry starts clean, keeps its place, and is answered in the light of the turns before it only."""
    await chat(store, "s", "a", "b")
    first = (await ask(store, "s", "x")).turn
    facts = {"finish_reason": "stop", "usage": {"prompt_tokens": 1}, "timings": {"ttft_ms": 1.0}}
    await store.finish_turn("ann", "s", "x", answer="half an ans", status="failed", **facts, now=NOW)
    await ask(store, "s", "c")
    await end(store, "s", "c")
    again = await ask(store, "s", "x")
    assert (again.outcome, again.turn) == ("retried", first)
    assert [turn.id for turn in again.history] == ["a", "b"]
    assert await turn_ids(store, "s") == ["a", "b", "x", "c"]


async def test_a_clock_set_back_moves_no_session_back(store: SessionStore) -> None:
    """A session that was just used does not sink in the list."""
    await chat(store, "s", "a")
    await ask(store, "s", "b", now=NOW - 100)
    await store.finish_turn("ann", "s", "b", answer="x", status="done", now=NOW - 99)
    await store.record_turn("ann", "s", "c", "x", answer="y", now=NOW - 98)
    assert (await store.get_session("ann", "s")).updated_at == NOW


async def test_a_failed_turn_keeps_its_place(store: SessionStore) -> None:
    """Asked again with the `after` that it has it runs there, and with another one it is a conflict that changes nothing."""
    await chat(store, "s", "a")
    await ask(store, "s", "x")
    await end(store, "s", "x", status="failed")
    await ask(store, "s", "b")
    await end(store, "s", "b")
    for after in ("b", None):
        with raises_code("conflict"):
            await ask(store, "s", "x", after=after)
    assert (await ask(store, "s", "x", after="a")).outcome == "retried"
    assert await turn_ids(store, "s") == ["a", "x", "b"]


async def test_an_edit_that_is_refused_changes_nothing(store: SessionStore) -> None:
    """An unknown `after`, one in another session, and a turn after itself leave the session as it was."""
    await chat(store, "s", "a", "b")
    await chat(store, "other", "z")
    before = await store.get_session("ann", "s")
    for after in ("nobody", "z"):
        with raises_code("not_found"):
            await ask(store, "s", "c", after=after)
    with raises_code("bad_request"):
        await ask(store, "s", "c", after="c")
    assert await store.get_session("ann", "s") == before


async def test_history_leaves_out_what_came_to_nothing(store: SessionStore) -> None:
    """Done, stopped, and failed with some text are history; failed without text is not."""
    await store.create_session("ann", session_id="s", now=NOW)
    for turn, status, answer in (
        ("a", "done", "x"),
        ("b", "stopped", ""),
        ("c", "failed", ""),
        ("d", "failed", "part"),
    ):
        await ask(store, "s", turn)
        await end(store, "s", turn, answer, status=status)
    assert [turn.id for turn in (await ask(store, "s", "e")).history] == ["a", "b", "d"]
    await store.record_turn("ann", "s", "f", "q", answer="a", response_id="r", now=NOW)
    await store.record_turn("ann", "s", "g", "later", answer="a", now=NOW)
    found = await store.responses.history("ann", "r")
    assert found is not None and [turn.id for turn, _ in found.turns] == ["a", "b", "d", "f"]


async def test_finishing_twice_changes_nothing(store: SessionStore) -> None:
    """The first end stands."""
    await chat(store, "s", "t")
    assert (await end(store, "s", "t", "other", status="failed")).answer == "re: t"
    with pytest.raises(ValueError):
        await end(store, "s", "t", status="running")


async def test_finishing_what_was_deleted_resurrects_nothing(store: SessionStore) -> None:
    """None for an unknown turn, a deleted session and a purged one; a session restored in time has the answer and is not stuck."""
    await store.create_session("ann", session_id="s", now=NOW)
    assert await end(store, "s", "never") is None
    await ask(store, "s", "t")
    await store.delete("ann", "s", NOW)
    assert await end(store, "s", "t", "late") is None
    with raises_code("not_found"):
        await store.get_session("ann", "s")
    restored = await store.restore("ann", "s", NOW + 1)
    assert [(turn.status, turn.answer) for turn in restored.turns] == [("done", "late")]
    await ask(store, "s", "u")
    await store.delete("ann", "s", NOW)
    await store.purge(NOW + 31)
    assert await end(store, "s", "u") is None
    assert await store.list_sessions("ann") == ([], None)


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


async def test_record_turn_is_idempotent_and_found_by_its_response(store: SessionStore) -> None:
    """A recorded turn stands at the end, names an untitled session, and is found as long as the session is there, shown or not."""
    await store.create_session("ann", session_id="s", now=NOW)
    for _ in range(2):
        turn = await store.record_turn(
            "ann",
            "s",
            "t",
            "ping",
            answer="pong",
            adapter="poet",
            usage={"prompt_tokens": 1},
            response_id="resp_1",
            now=NOW + 5,
        )
        assert turn is not None and (turn.status, turn.answer, turn.usage) == (
            "done",
            "pong",
            {"prompt_tokens": 1},
        )
    with raises_code("conflict"):
        await store.record_turn("ann", "s", "t", "other", answer="pong", now=NOW)
    session = await store.get_session("ann", "s")
    assert (session.title, session.adapter, session.updated_at, len(session.turns)) == (
        "ping",
        "poet",
        NOW + 5,
        1,
    )
    assert await store.responses.find("ann", "resp_1") == ("s", "t")
    assert await store.responses.find("ann", "resp_\ud800\0") is None
    await store.delete("ann", "s", NOW)
    assert await store.responses.find("ann", "resp_1") is None
    assert await store.record_turn("ann", "s", "u", "x", answer="y", now=NOW) is None
    await store.restore("ann", "s", NOW)
    await ask(store, "s", "v", after=None)
    assert await store.responses.find("ann", "resp_1") == ("s", "t")


async def test_record_turn_beside_a_running_one(store: SessionStore) -> None:
    """API requests may overlap a chat turn; the one that runs is finished in its own place."""
    await store.create_session("ann", session_id="s", now=NOW)
    await ask(store, "s", "a")
    await store.record_turn("ann", "s", "b", "x", answer="y", now=NOW)
    await end(store, "s", "a")
    assert await turn_ids(store, "s") == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("", None),
        (" \n\t\n", None),
        ("\n  What  is\tthis? \nMore", "What is this?"),
        ("x" * 60, "x" * 60),
        ("x" * 61, "x" * 59 + "…"),
        ("word " * 20, "word " * 11 + "word…"),
        ("a" * 59 + " tail", "a" * 59 + "…"),
        ("語" * 100, "語" * 59 + "…"),
        ("notes.py:\n```py\nx = 1\n```\n\nWhat does it do?", "What does it do?"),
        ("a.md:\n````md\n```\n````\n\nb.txt:\n```txt\ny\n```", "a.md, b.txt"),
        ("Read this:\n```\nnever closed", "Read this:"),
    ],
)
def test_title_from_the_first_line(content: str, title: str | None) -> None:
    """At most 60 characters, cut at a word's end where there is one."""
    assert title_from(content) == title
    assert title is None or len(title) <= 60


async def test_titles_come_once(store: SessionStore) -> None:
    """A title that is there stays; a session that was made untitled again is named by its next message."""
    await chat(store, "s", "a", "b")
    assert (await store.get_session("ann", "s")).title == "ask a"
    await store.patch("ann", "s", title=None)
    assert (await ask(store, "s", "c", "new start")).title == "new start"


async def test_text_that_sqlite_cannot_hold(store: SessionStore) -> None:
    """NUL and lone surrogates become U+FFFD everywhere; the same raw content is still the same message."""
    raw, kept = "a\0b\ud83dc", "a\ufffdb\ufffdc"
    session = await store.create_session("ann", title=raw, adapter=raw, session_id="s", now=NOW)
    assert (session.title, session.adapter) == (kept, kept)
    assert (await ask(store, "s", "t", raw, adapter=raw)).turn.content == kept
    assert not (await ask(store, "s", "t", raw)).is_new
    over = await end(store, "s", "t", raw)
    assert over is not None and (over.answer, over.adapter) == (kept, kept)
    assert (
        await store.record_turn("ann", "s", "u", raw, answer=raw, response_id=raw, now=NOW)
    ).answer == kept
    assert await store.responses.find("ann", raw) == ("s", "u")
    assert len((await store.list_sessions("ann", q=raw))[0]) == 1


async def test_a_megabyte(store: SessionStore) -> None:
    """A content and an answer of 1 MB come back whole and are searched to the end."""
    content, answer = "ä€𝄞 lorem " * 70_000 + "needle", "ipsum " * 170_000 + "haystack"
    await store.create_session("ann", session_id="s", now=NOW)
    await ask(store, "s", "t", content)
    await end(store, "s", "t", answer)
    turn = (await store.get_session("ann", "s")).turns[0]
    assert (turn.content, turn.answer) == (content, answer)
    for q in ("NEEDLE", "haystack"):
        assert len((await store.list_sessions("ann", q=q))[0]) == 1


# --- token ids ---------------------------------------------------------------------------------------------------------------------


async def talk_ids(store: SessionStore, turn: str, *token_ids: int, **options: Any) -> list[int]:
    """Ask and finish a turn of session s that came to these ids; returns the history's ids that it was asked with."""
    began = await ask(store, "s", turn, **options)
    status = "done" if token_ids else "failed"
    await store.finish_turn("ann", "s", turn, answer="", status=status, token_ids=pack(token_ids), now=NOW)
    return list(unpack_token_ids(began.history_token_ids))


def pack(token_ids: Iterable[int]) -> bytes:
    return pack_token_ids(list(token_ids))


async def test_a_session_knows_its_token_ids(store: SessionStore) -> None:
    """Each turn is asked with the ids that the one before it came to, also where its prompt repeated only some of those before."""
    await store.create_session("ann", session_id="s", now=NOW)
    assert await talk_ids(store, "a", 1, 2, 3) == []
    assert await talk_ids(store, "b", 1, 2, 3, 4, 2**32 - 1) == [1, 2, 3]
    assert await talk_ids(store, "c", 1, 2, 9, 9) == [1, 2, 3, 4, 2**32 - 1]
    assert await talk_ids(store, "d", 1, 2, 9, 9, 10) == [1, 2, 9, 9]


async def test_an_edit_goes_back_to_the_ids_before_it(store: SessionStore) -> None:
    """Whatever turn an edit or a regeneration keeps, its ids are the history's; `after` none leaves none."""
    await store.create_session("ann", session_id="s", now=NOW)
    await talk_ids(store, "a", 1, 2, 3)
    await talk_ids(store, "b", 1, 2, 4, 5)
    assert await talk_ids(store, "c", 1, 2, 3, 7, after="a") == [1, 2, 3]
    assert await talk_ids(store, "d", 1, 2, 3, 7, 8) == [1, 2, 3, 7]
    assert await talk_ids(store, "e", 1, after=None) == []


async def test_turns_without_ids_leave_those_before_them(store: SessionStore) -> None:
    """Failed turns and those of the API add nothing, and ids of turns that came after a failed one do not outlive its second try."""
    await store.create_session("ann", session_id="s", now=NOW)
    await talk_ids(store, "a", 1, 2, 3)
    await talk_ids(store, "x")
    await store.record_turn("ann", "s", "api", "q", answer="a", now=NOW)
    assert await talk_ids(store, "b", 1, 2, 3, 4) == [1, 2, 3]
    assert await talk_ids(store, "x", 1, 9, 9) == [1, 2, 3], "asked again in its old place"
    assert await talk_ids(store, "c", 1, 9, 9, 5) == [1, 9, 9]


async def test_a_long_session_keeps_each_id_once(store: SessionStore, path: Path) -> None:
    """200 turns that add 100 ids each take little more than 4 bytes an id; prompts that repeat nothing do not add up either."""
    await store.create_session("ann", session_id="s", now=NOW)
    for number in range(200):
        history = await talk_ids(store, f"t{number}", *range(100 * (number + 1)))
        assert history == list(range(100 * number))
    assert stored_bytes(path) == 200 * 100 * 4 + 200 * 4
    for number in range(20):
        ids = range(number, 20_000 + number)
        await talk_ids(store, f"u{number}", *ids)
        assert stored_bytes(path) <= 4 * (20_000 * 4)
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


async def test_a_session_touched_between_pages_is_not_shown_twice(store: SessionStore) -> None:
    """It moves in front of the cursor, and the rest of the walk is not disturbed."""
    for i in range(4):
        await store.create_session("ann", session_id=f"s{i}", now=NOW + i)
    first, cursor = await store.list_sessions("ann", limit=2)
    await ask(store, "s3", "t", now=NOW + 9)
    second, _ = await store.list_sessions("ann", limit=2, before=cursor)
    assert [s.id for s in first + second] == ["s3", "s2", "s1", "s0"]


async def test_summaries_count_turns(store: SessionStore) -> None:
    """A summary has the session's own facts and the number of its turns."""
    await chat(store, "s", "a", "b")
    ((summary,), after) = await store.list_sessions("ann")
    assert (summary.id, summary.title, summary.adapter, summary.num_turns, after) == (
        "s",
        "ask a",
        None,
        2,
        None,
    )


async def test_bad_list_arguments(store: SessionStore) -> None:
    """They are refused, not bent; among cursors what is not base64, not JSON, and JSON of another form."""
    cursors = ["", "x", "ä", "!!!!", "\ud800", "W10", "WzEsMl0", "bnVsbA"]
    for options in (
        {"limit": 0},
        {"limit": 201},
        {"q": "x" * 501},
        *({"before": cursor} for cursor in cursors),
    ):
        with raises_code("bad_request"):
            await store.list_sessions("ann", **options)


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
    "0%": {"percent"},
    "0% s": {"percent"},
    "e_c": {"under"},
    "snake_case": {"under"},
    "\\temp\\%": {"back"},
    '"no"': {"quotes"},
    "it's 'over'": {"quotes"},
    "🚀": {"emoji"},
    "🚀🚀🚀": {"emoji"},
    "👩‍🚀 in": {"emoji"},
    "title:x AND NOT (a OR b*) ^c": {"query"},
    "-- ; DROP TABLE": {"query"},
    "a OR b": {"query"},
    '" OR "': set(),
    "sure*": set(),
    "SURE": {"percent", "plain"},
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


async def test_search_follows_every_change(searchable: SessionStore) -> None:
    """What is renamed, asked again or deleted is no longer found under its old text; what another version hides is."""

    async def finds(q: str) -> bool:
        return bool((await searchable.list_sessions("ann", q=q))[0])

    await searchable.create_session("ann", session_id="s", title="first title", now=NOW)
    await ask(searchable, "s", "t", "some question")
    await end(searchable, "s", "t", "partial reply", status="failed")
    assert await finds("question") and await finds("partial") and await finds("first")
    await ask(searchable, "s", "t", "some question")
    assert not await finds("partial")
    await end(searchable, "s", "t", "whole reply")
    await searchable.patch("ann", "s", title="second title")
    assert await finds("whole") and await finds("second") and not await finds("first")
    await ask(searchable, "s", "u", "afresh", after=None)
    await end(searchable, "s", "u")
    assert await finds("whole") and await finds("afresh")
    await searchable.delete("ann", "s", NOW)
    await searchable.purge(NOW + 31)
    await chat(searchable, "s")
    assert not await finds("afresh") and not await finds("whole") and not await finds("second")


async def test_the_index_ignores_case_in_every_script(store: SessionStore) -> None:
    """Unlike the search without an index, which knows ASCII only."""
    await store.create_session("ann", session_id="s", title="Überraschung", now=NOW)
    assert len((await store.list_sessions("ann", q="üBERR"))[0]) == 1


async def test_the_index_comes_and_goes(path: Path) -> None:
    """A file from a run with the index works in one without, and what was written there is found once the index is back."""
    for full_text, word in ((True, "alpha"), (False, "beta"), (True, "gamma")):
        store = await SessionStore.open(path, full_text=full_text)
        await store.create_session("ann", session_id=word, title=f"title {word}", now=NOW)
        await ask(store, word, "t", f"content {word}")
        await end(store, word, "t", f"answer {word}")
        await store.patch("ann", "alpha", title=f"during {word}")
        await ask(store, word, "running", "cut off here")
        await store.close()
    store = await SessionStore.open(path)
    for word in ("alpha", "beta", "gamma"):
        assert [s.id for s in (await store.list_sessions("ann", q=f"answer {word}"))[0]] == [word]
    assert [s.id for s in (await store.list_sessions("ann", q="during gamma"))[0]] == ["alpha"]
    assert len((await store.list_sessions("ann", q="cut off"))[0]) == 3
    await store.close()
    check_index(path)


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


async def test_what_ran_when_the_store_went_away_has_failed(path: Path) -> None:
    """After a reopen the turn is failed without text and may be asked again with the same id."""
    store = await SessionStore.open(path)
    await chat(store, "s", "a")
    await ask(store, "s", "b")
    await store.close()
    store = await SessionStore.open(path)
    turns = (await store.get_session("ann", "s")).turns
    assert [(turn.status, turn.answer) for turn in turns] == [("done", "re: a"), ("failed", "")]
    assert (await ask(store, "s", "b")).outcome == "retried"
    await store.close()


def mode_of(path: Path | str) -> int:
    return os.stat(path).st_mode & 0o777


async def test_the_file_is_private_and_durable(store: SessionStore, path: Path) -> None:
    """Mode 0600, write-ahead log, synced commits, foreign keys, and the schema's version."""
    assert mode_of(path) == mode_of(f"{path}-wal") == 0o600
    pragmas = ("journal_mode", "synchronous", "foreign_keys", "user_version", "busy_timeout")
    values = [
        await store._writer.transact(lambda conn, p=pragma: conn.execute(f"PRAGMA {p}").fetchone()[0])
        for pragma in pragmas
    ]
    assert values == ["wal", 2, 1, SCHEMA_VERSION, 5000]


async def test_closing_twice_and_calling_afterwards(path: Path) -> None:
    """A closed store says that the server is going away; what was asked before the close is still done."""
    store = await SessionStore.open(path)
    made, _, _ = await asyncio.gather(store.create_session("ann", now=NOW), store.close(), store.close())
    for call in (store.get_session("ann", made.id), store.create_session("ann", now=NOW)):
        with raises_code("draining", retryable=True):
            await call
    store = await SessionStore.open(path)
    assert (await store.get_session("ann", made.id)).id == made.id
    await store.close()


def made_by(path: Path, statement: str) -> bytes:
    """Make a database with one statement; returns the bytes of the file."""
    conn = sqlite3.connect(path)
    conn.execute(statement)
    conn.close()
    return path.read_bytes()


async def test_a_newer_schema_is_refused_untouched(path: Path) -> None:
    """The message says which schema, and the file is as it was."""
    before = made_by(path, "PRAGMA user_version = 99")
    with pytest.raises(StartupError, match=r"sessions\.db was written by a newer version .*schema 99"):
        await SessionStore.open(path)
    assert await asyncio.to_thread(path.read_bytes) == before


async def test_a_file_of_another_program_is_refused_untouched(path: Path) -> None:
    """An SQLite database that is not ours gets no tables of ours."""
    before = made_by(path, "CREATE TABLE bookmarks (url)")
    with pytest.raises(StartupError, match="another program"):
        await SessionStore.open(path)
    assert await asyncio.to_thread(path.read_bytes) == before


def overwrite(path: Path, where: str) -> bytes:
    """Put 16 kB of rubbish at the start or in the middle of the file; returns what was in the file."""
    good = path.read_bytes()
    at = 0 if where == "start" else len(good) // 2
    path.write_bytes(good[:at] + b"\xa5" * 16384 + good[at + 16384 :])
    return good


@pytest.mark.parametrize("where", ["start", "middle"])
async def test_a_damaged_file_is_refused_with_advice(path: Path, where: str) -> None:
    """The message names the file and says what to do; a good file in its place then opens, so nothing is left locked."""
    store = await SessionStore.open(path)
    await chat(store, "s", *(f"t{i}" for i in range(20)))
    await store.close()
    good = overwrite(path, where)
    with pytest.raises(StartupError, match=r"sessions\.db is damaged .*recover"):
        await SessionStore.open(path)
    await asyncio.to_thread(path.write_bytes, good)
    store = await SessionStore.open(path)
    assert len(await turn_ids(store, "s")) == 20
    await store.close()


async def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    """A missing folder and a folder in the file's place are said to be that."""
    for bad in (tmp_path / "no" / "sessions.db", tmp_path):
        with pytest.raises(StartupError, match="cannot be opened"):
            await SessionStore.open(bad)


async def test_a_full_disk_is_said_and_leaves_nothing_half_written(store: SessionStore) -> None:
    """SQLite's own limit stands in for the disk's: begin, finish and record fail whole, and work once there is room."""

    async def set_limit(pages: int) -> None:
        await store._writer.transact(lambda conn: conn.execute(f"PRAGMA max_page_count = {pages}").fetchone())

    await chat(store, "s", "a", "b")
    await ask(store, "s", "c", "x")
    before = await store.get_session("ann", "s")
    big = "x" * 300_000
    await set_limit(1)
    with raises_code("overloaded", retryable=True):
        await end(store, "s", "c", big)
    with raises_code("overloaded", retryable=True):
        await store.record_turn("ann", "s", "d", big, answer="", now=NOW)
    assert await store.get_session("ann", "s") == before
    await set_limit(2**30)
    assert (await end(store, "s", "c", "short")).answer == "short"
    await set_limit(1)
    with raises_code("overloaded", retryable=True):
        await ask(store, "s", "e", big, after="a")
    assert await turn_ids(store, "s") == ["a", "b", "c"]
    await set_limit(2**30)
    await ask(store, "s", "e", big, after="a")
    assert await turn_ids(store, "s") == ["a", "e"]


async def test_a_file_locked_by_another_program(store: SessionStore, path: Path) -> None:
    """Writers say so after the busy timeout, readers do not notice."""
    await chat(store, "s", "a")
    await store._writer.transact(lambda conn: None)
    await store._writer._execute(lambda: store._writer._conn.execute("PRAGMA busy_timeout = 1"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with raises_code("overloaded", retryable=True):
        await ask(store, "s", "b")
    assert await turn_ids(store, "s") == ["a"]
    other.close()
    assert (await ask(store, "s", "b")).is_new


async def test_a_file_that_goes_bad_under_a_running_store(
    store: SessionStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The client hears no detail, the log has it."""
    await store._writer.transact(lambda conn: conn.execute("DROP TABLE turns"))
    with raises_code("storage_failed"):
        await chat(store, "s", "a")
    assert "no such table" in caplog.text


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
        # In memory where there is such a folder: this test is about what is stored, and syncing a disk takes most of its time.
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
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
