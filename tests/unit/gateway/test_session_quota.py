"""What each key may store, and what a person sets for one conversation: counted as texts come and go, in front of every prompt."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from engine_bridge.protocol.engine_request import Sampling
from engine_bridge.protocol.node import pack_token_ids
from gateway.errors import GatewayError
from gateway.sessions import RESTORE_WINDOW_S, SessionSettings, SessionStore, SettingsPatch
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES

from .front import Gateway, Gateways
from .parts import Parts, refused

NOW = 1_700_000_000.0
LIMIT = 1 << 20
HALF = "x" * (LIMIT // 2)


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


def counted(path: Path, owner: str) -> int:
    with contextlib.closing(sqlite3.connect(path)) as conn:
        return conn.execute("SELECT num_bytes FROM owners WHERE name = ?", (owner,)).fetchone()[0]


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


async def test_an_answer_under_way_is_kept_whole(store: SessionStore) -> None:
    """What was accepted is finished, above the limit if it must be; the next message is refused, a known one is still answered."""
    over = await say(store, "t", "question", answer="y" * (2 * LIMIT))
    assert over is not None and len(over.answer) == 2 * LIMIT
    for options in ({}, {"after": "t"}):
        error = await refused(store.begin_turn("ann", "s", "u", "more", now=NOW, **options))
        assert (error.code, error.http_status, error.retryable) == ("quota_exceeded", 429, False)
        assert "1 MiB" in error.message and "Delete conversations" in error.message
    assert not (await store.begin_turn("ann", "s", "t", "question", now=NOW)).is_new


async def test_what_is_deleted_is_free_once_it_can_no_longer_be_restored(
    store: SessionStore, path: Path
) -> None:
    await say(store, "t", HALF, answer=HALF)
    await store.delete("ann", "s", NOW)
    with pytest.raises(GatewayError, match="30 s later"):
        await store.create_session("ann", session_id="new", now=NOW + RESTORE_WINDOW_S)
    later = NOW + RESTORE_WINDOW_S + 1
    await store.create_session("ann", session_id="new", now=later)
    await store.begin_turn("ann", "new", "u", HALF, now=later)
    await store.purge(later)
    assert counted(path, "ann") == SESSION_BYTES + TURN_BYTES + len(HALF)


PATIENT = "You are patient."


async def settle(store: SessionStore, session: str = "s", **changes: Any) -> SessionSettings:
    """Change settings of ann's session; returns what it has then."""
    await store.patch("ann", session, settings=SettingsPatch(**changes), now=NOW)
    return (await store.get_session("ann", session)).settings


async def asked(store: SessionStore, turn: str, *token_ids: int) -> None:
    await store.begin_turn("ann", "s", turn, "hi", now=NOW)
    await end(store, turn, *token_ids)


async def end(store: SessionStore, turn: str, *token_ids: int) -> None:
    ids = pack_token_ids(token_ids)
    await store.finish_turn("ann", "s", turn, answer="ho", status="done", token_ids=ids, now=NOW)


async def test_each_setting_is_changed_by_itself_and_null_unsets_it(store: SessionStore) -> None:
    created = await store.create_session(
        "ann", session_id="s", settings=SettingsPatch(temperature=0.5), now=NOW
    )
    assert created.settings == SessionSettings(temperature=0.5)
    assert await settle(store, system_prompt=PATIENT) == SessionSettings(
        system_prompt=PATIENT, temperature=0.5
    )
    assert await settle(store, temperature=None, max_tokens=9) == SessionSettings(
        system_prompt=PATIENT, max_tokens=9
    )
    assert await settle(store, system_prompt=" \n") == SessionSettings(max_tokens=9)
    assert (await store.create_session("ann", session_id="t", now=NOW)).settings == SessionSettings()


async def test_a_system_prompt_counts_as_its_sessions_bytes_until_it_or_the_session_goes(
    store: SessionStore, path: Path
) -> None:
    await store.create_session("ann", session_id="s", now=NOW)
    empty = counted(path, "ann")
    for prompt, num_bytes in (("ä€", 5), (PATIENT, 16), (None, 0), (PATIENT, 16)):
        await settle(store, system_prompt=prompt)
        assert counted(path, "ann") == empty + num_bytes
    await store.delete("ann", "s", NOW)
    await store.purge(NOW + 100)
    assert counted(path, "ann") == 0


async def test_token_ids_go_with_the_system_prompt_that_they_began_with(store: SessionStore) -> None:
    await store.create_session("ann", session_id="s", now=NOW)
    await asked(store, "a", 1, 2, 3)
    await settle(store, temperature=1.0)
    assert (await store.outlook("ann", "s")).token_ids == pack_token_ids([1, 2, 3])
    await store.begin_turn("ann", "s", "b", "hi", now=NOW)
    await settle(store, system_prompt=PATIENT)
    await end(store, "b", 1, 2, 3, 4)
    outlook = await store.outlook("ann", "s")
    assert (outlook.token_ids, outlook.settings.system_prompt) == (b"", PATIENT)
    await asked(store, "c", 9, 1, 2)
    await settle(store, system_prompt=PATIENT)
    assert (await store.outlook("ann", "s")).token_ids == pack_token_ids([9, 1, 2]), "nothing was changed"


async def test_prompts_and_what_is_computed_ahead_begin_with_the_system_prompt(parts: Parts) -> None:
    first = await parts.answered("a", "Hello.")
    wanted = SettingsPatch(system_prompt=PATIENT, temperature=0.2, max_tokens=50)
    await parts.store.patch("ann", first.session_id, settings=wanted, now=NOW)
    parts.drafts.warm_history("ann", first.session_id, None, lambda: None)
    prefilled = await parts.node.prefilled()
    await parts.ask("b", session_id=first.session_id, sampling=Sampling(temperature=1.0))
    answer = await parts.node.asked(1)
    for request in (prefilled, answer.request):
        assert [m.role for m in request.messages] == ["system", "user", "assistant", "user"]
        assert (request.messages[0].content, request.history_token_ids) == (PATIENT, b"")
    assert answer.request.sampling == Sampling(temperature=1.0, max_tokens=50), (
        "the message has the last word"
    )
    answer.finish("Well.")


async def test_settings_are_set_over_http_and_told_on_the_socket(gateways: Gateways) -> None:
    """A new system prompt ends what nodes keep for the session; settings that cannot be are refused by name."""
    gateway: Gateway = await gateways()
    turn = await gateway.answered("a", "Hello.", owner="local")
    path = f"/api/sessions/{turn.session_id}"
    async with aiohttp.ClientSession(gateway.server.url) as http:
        async with http.patch(path, json={"settings": {"temperature": 0.5}}) as reply:
            assert reply.status == 200
        assert gateway.node.ended_sessions == []
        async with http.patch(path, json={"settings": {"system_prompt": PATIENT}}) as reply:
            assert reply.status == 200
        assert gateway.node.ended_sessions == [("", turn.session_id)]
        for bad in (
            {"temperature": 3},
            {"max_tokens": 0},
            {"system_prompt": "x" * 32_001},
            {"system": "x"},
        ):
            async with http.patch(path, json={"settings": bad}) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["code"]) == (400, "bad_request") and "settings" in error[
                    "message"
                ]
        async with http.post("/api/sessions", json={"settings": {"max_tokens": 7}}) as reply:
            assert (await reply.json())["settings"]["max_tokens"] == 7
    async with gateway.socket() as socket:
        await socket.send(type="hello", session_id=turn.session_id)
        settings = (await socket.next())["session"]["settings"]
    assert settings == {"system_prompt": PATIENT, "temperature": 0.5, "max_tokens": None}
