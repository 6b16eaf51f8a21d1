"""Versions of messages: what an edit or another answer leaves behind is kept, and can be shown again with what followed it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine_bridge.protocol.node import pack_token_ids, unpack_token_ids
from gateway.sessions import SessionStore
from gateway.sessions.excerpt import Excerpt
from tests.unit.gateway.test_session_owners import NUM_TURNS, make_version_1
from tests.unit.gateway.test_sessions import NOW, ask, chat, end, raises_code, turn_ids


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(tmp_path / "sessions.db")
    yield store
    await store.close()


async def say(store: SessionStore, turn: str, **options: Any) -> list[str]:
    """A finished turn of session s; returns the ids of the history that it was asked with."""
    began = await ask(store, "s", turn, f"ask {turn}", **options)
    await end(store, "s", turn, f"re: {turn}")
    return [turn.id for turn in began.history]


async def versions(store: SessionStore) -> list[list[str]]:
    return [turn.versions for turn in (await store.get_session("ann", "s")).turns]


async def choose(store: SessionStore, turn: str) -> list[str]:
    return [turn.id for turn in (await store.choose_version("ann", "s", turn)).turns]


async def test_an_edit_hides_what_came_later_and_keeps_it(store: SessionStore) -> None:
    """`after` names the turn that the new one follows, None the start; its history is what it follows."""
    await chat(store, "s", "a", "b", "c")
    assert await say(store, "d", after="a") == ["a"]
    assert (await turn_ids(store, "s"), await versions(store)) == (["a", "d"], [["a"], ["b", "d"]])
    assert await say(store, "e", after=None) == []
    assert (await turn_ids(store, "s"), await versions(store)) == (["e"], [["a", "e"]])
    assert await say(store, "f", after="c") == ["a", "b", "c"], "also after a turn that is not shown"
    assert await turn_ids(store, "s") == ["a", "b", "c", "f"]


async def test_a_version_comes_back_with_what_followed_it_last(store: SessionStore) -> None:
    """That is what was shown last, which need not be the newest; nothing of it counts as activity."""
    await chat(store, "s", "a", "b", "c")
    await say(store, "d", after="a")
    assert await choose(store, "b") == ["a", "b", "c"]
    await say(store, "e", after=None)
    assert await choose(store, "a") == ["a", "b", "c"]
    assert await choose(store, "d") == ["a", "d"], "whatever leads to it is chosen, too"
    await choose(store, "e")
    assert await choose(store, "d") == ["a", "d"]
    assert await say(store, "f") == ["a", "d"]
    assert (await store.get_session("ann", "s")).updated_at == NOW


async def test_only_a_turn_of_the_session_can_be_chosen_and_not_while_one_runs(store: SessionStore) -> None:
    """A page that shows an answer as it is written would lose it from sight."""
    await chat(store, "s", "a")
    await chat(store, "other", "z")
    for turn in ("z", "never", "a b"):
        with raises_code("not_found"):
            await store.choose_version("ann", "s", turn)
    with raises_code("not_found"):
        await store.choose_version("bob", "s", "a")
    await ask(store, "s", "b", after=None)
    with raises_code("busy"):
        await store.choose_version("ann", "s", "a")
    await end(store, "s", "b", status="failed")
    assert await choose(store, "a") == ["a"]


async def test_a_failed_turn_that_is_asked_again_is_shown(store: SessionStore) -> None:
    """In its old place, with what followed it."""
    await chat(store, "s", "a")
    await ask(store, "s", "x")
    await end(store, "s", "x", status="failed")
    await say(store, "b")
    await say(store, "c", after="a")
    assert (await ask(store, "s", "x")).outcome == "retried"
    assert (await turn_ids(store, "s"), await versions(store)) == (
        ["a", "x", "b"],
        [["a"], ["x", "c"], ["b"]],
    )


async def test_each_version_goes_on_from_the_token_ids_before_it(store: SessionStore) -> None:
    """Of its own branch, whatever was computed on others meanwhile."""
    await store.create_session("ann", session_id="s", now=NOW)

    async def talk(turn: str, *token_ids: int, **options: Any) -> list[int]:
        began = await ask(store, "s", turn, **options)
        packed = pack_token_ids(list(token_ids))
        await store.finish_turn("ann", "s", turn, answer="", status="done", token_ids=packed, now=NOW)
        return list(unpack_token_ids(began.history_token_ids))

    await talk("a", 1, 2, 3)
    await talk("b", 1, 2, 3, 4, 5)
    assert await talk("c", 1, 2, 3, 6, 7, after="a") == [1, 2, 3]
    assert await talk("d", 1, 2, 3, 6, 7, 8) == [1, 2, 3, 6, 7]
    await choose(store, "b")
    assert list(unpack_token_ids(await store.token_ids("ann", "s"))) == [1, 2, 3, 4, 5]
    assert await talk("e", 9, 9, 9) == [1, 2, 3, 4, 5]
    assert [turn.id for turn in (await store.outlook("ann", "s")).history] == ["a", "b", "e"]
    assert await talk("f", 1, after="d") == [1, 2, 3, 6, 7, 8]
    # So little of what is stored on its path is repeated that only these ids are kept; no other turn may go on from what is gone.
    for turn in ("b", "c", "d", "f"):
        assert await talk(f"{turn}2", 5, after=turn) in ([], [1]), turn


async def test_responses_follow_the_one_that_they_go_on_from(store: SessionStore) -> None:
    """Two that go on from the same one are versions, and each one's history is its own branch, shown or not."""

    async def call(name: str, previous: str | None = None, session: str = "s") -> None:
        await store.record_turn(
            "ann",
            session,
            name,
            "q",
            answer="a",
            response_id=f"r_{name}",
            previous=previous,
            makes_session=True,
            now=NOW,
        )

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


async def test_a_list_counts_the_turns_that_are_shown(store: SessionStore) -> None:
    """Other versions make a conversation no longer."""
    await chat(store, "s", "a", "b", "c")
    await say(store, "d", after="a")
    assert [summary.num_turns for summary in (await store.list_sessions("ann"))[0]] == [2]
    await store.delete("ann", "s", NOW)
    assert (await store.purge(NOW + 31), await store.list_sessions("ann")) == (1, ([], None))


@pytest.mark.parametrize("full_text", [True, False])
async def test_a_search_names_the_turn_that_holds_the_text(tmp_path: Path, full_text: bool) -> None:
    """The newest that is shown, else the newest of those that are not; none where the title alone holds it, or nothing was searched for."""
    store = await SessionStore.open(tmp_path / "search.db", full_text=full_text)
    await chat(store, "s", "alpha", "beta", "gamma")
    await say(store, "delta", after="alpha")
    await store.create_session("ann", session_id="titled", title="alpha beta", now=NOW)
    await chat(store, "s", "alpha", owner="bob")

    async def found(q: str | None) -> dict[str, str | None]:
        return {summary.id: summary.found_in for summary in (await store.list_sessions("ann", q=q))[0]}

    assert await found("re: ") == await found("k") == {"s": "delta"}
    assert await found("alpha") == {"s": "alpha", "titled": None}
    assert await found("ta") == {"s": "delta", "titled": None}
    assert await found("beta") == {"s": "beta", "titled": None}
    assert await found("mm") == await found("gamma") == {"s": "gamma"}
    await choose(store, "beta")
    assert await found("ta") == {"s": "beta", "titled": None}
    assert await found(None) == {"s": None, "titled": None}
    await store.close()


@pytest.mark.parametrize("full_text", [True, False])
async def test_a_search_shows_the_words_around_what_it_found(tmp_path: Path, full_text: bool) -> None:
    """Of the turn that it names; none for a title."""
    store = await SessionStore.open(tmp_path / "search.db", full_text=full_text)
    await chat(store, "s", "a")
    await ask(store, "s", "b", "How far is the harbour of Lisbon from here?")
    await end(store, "s", "b", "Not far.")
    await store.create_session("ann", session_id="titled", title="Harbours", now=NOW)
    await chat(store, "far", "c")
    await ask(store, "far", "d", "Über " * 5000 + "harbour" + " Über" * 5000)
    await end(store, "far", "d", "Far.")
    found = {summary.id: summary.excerpt for summary in (await store.list_sessions("ann", q="HARBOUR"))[0]}
    far = found.pop("far")
    assert far is not None and (far.before[-9:], far.match, far.after[:6]) == (
        "Über Über "[-9:],
        "harbour",
        " Über ",
    )
    assert far.before.startswith("…") and far.after.endswith("…")
    assert found == {"s": Excerpt("How far is the ", "harbour", " of Lisbon from here?"), "titled": None}
    await store.close()


async def test_the_turns_of_an_older_file_follow_each_other(tmp_path: Path) -> None:
    """Each session of it is one line without versions, and can have some from then on."""
    path = tmp_path / "old.db"
    await asyncio.to_thread(make_version_1, path)
    store = await SessionStore.open(path)
    assert await versions(store) == [[f"t{number}"] for number in range(NUM_TURNS)]
    assert await say(store, "new", after="t3") == ["t0", "t1", "t2", "t3"]
    assert await choose(store, "t4") == [f"t{number}" for number in range(NUM_TURNS)]
    await store.close()
    with contextlib.closing(sqlite3.connect(path)) as conn:
        (problems,) = conn.execute("SELECT count(*) FROM pragma_foreign_key_check").fetchone()
        rows = conn.execute("SELECT (SELECT count(*) FROM turns), (SELECT count(*) FROM tree)").fetchone()
    assert problems == 0 and rows[0] == rows[1]
