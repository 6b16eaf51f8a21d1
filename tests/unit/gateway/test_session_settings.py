"""What a person sets for one conversation: kept, counted, in front of every prompt of it, and gone from no prompt's KV unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from engine_bridge.protocol.node import Sampling, pack_token_ids
from gateway.errors import GatewayError
from gateway.sessions import SessionSettings, SessionStore, SettingsPatch
from tests.unit.gateway.test_session_quota import NOW, counted

from .front import Gateway, Gateways
from .parts import Parts

LIMIT = 1 << 20
PATIENT = "You are patient."


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(tmp_path / "sessions.db", max_owner_bytes=LIMIT)
    yield store
    await store.close()


async def settle(store: SessionStore, session: str = "s", **changes: Any) -> SessionSettings:
    """Change settings of ann's session; returns what it has then."""
    await store.patch("ann", session, settings=SettingsPatch(**changes), now=NOW)
    return (await store.get_session("ann", session)).settings


async def say(store: SessionStore, turn: str, *token_ids: int) -> None:
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
    store: SessionStore, tmp_path: Path
) -> None:
    path = tmp_path / "sessions.db"
    await store.create_session("ann", session_id="s", now=NOW)
    empty = counted(path, "ann")
    for prompt, num_bytes in (("ä€", 5), (PATIENT, 16), (None, 0), (PATIENT, 16)):
        await settle(store, system_prompt=prompt)
        assert counted(path, "ann") == empty + num_bytes
    await store.delete("ann", "s", NOW)
    await store.purge(NOW + 100)
    assert counted(path, "ann") == 0


async def test_a_system_prompt_above_the_quota_is_refused_and_nothing_of_the_change_is_stored(
    store: SessionStore,
) -> None:
    await store.create_session("ann", session_id="s", now=NOW)
    await store.begin_turn("ann", "s", "t", "x" * (LIMIT - 10_000), now=NOW)
    with pytest.raises(GatewayError) as refused:
        wanted = SettingsPatch(system_prompt="y" * 20_000, temperature=1.0)
        await store.patch("ann", "s", title="new", settings=wanted, now=NOW)
    assert refused.value.code == "quota_exceeded"
    session = await store.get_session("ann", "s")
    assert session.settings == SessionSettings() and session.title != "new"


async def test_token_ids_go_with_the_system_prompt_that_they_began_with(store: SessionStore) -> None:
    """Also those of a turn that ran while it was changed; other settings leave them alone."""
    await store.create_session("ann", session_id="s", now=NOW)
    await say(store, "a", 1, 2, 3)
    await settle(store, temperature=1.0)
    assert (await store.outlook("ann", "s")).token_ids == pack_token_ids([1, 2, 3])
    await store.begin_turn("ann", "s", "b", "hi", now=NOW)
    await settle(store, system_prompt=PATIENT)
    await end(store, "b", 1, 2, 3, 4)
    outlook = await store.outlook("ann", "s")
    assert (outlook.token_ids, outlook.settings.system_prompt) == (b"", PATIENT)
    await say(store, "c", 9, 1, 2)
    await settle(store, system_prompt=PATIENT)
    assert (await store.outlook("ann", "s")).token_ids == pack_token_ids([9, 1, 2]), "nothing was changed"


async def test_a_file_of_version_5_takes_settings(store: SessionStore, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    await store.create_session("ann", session_id="s", now=NOW)
    await store.close()

    def back_to_version_5() -> None:
        with contextlib.closing(sqlite3.connect(path)) as conn:
            conn.execute("DROP TABLE response_items")
            conn.execute("DROP TRIGGER responses_items")
            conn.execute("DROP TABLE session_settings")
            conn.execute("DROP INDEX sessions_pinned")
            conn.execute("ALTER TABLE sessions DROP COLUMN pinned_at")
            conn.execute("ALTER TABLE sessions DROP COLUMN origin")
            conn.execute("DROP TRIGGER turns_reasoning")
            conn.execute("DROP TRIGGER turns_delete_reasoning")
            conn.execute("ALTER TABLE turns DROP COLUMN reasoning")
            conn.execute("PRAGMA user_version = 5")
            conn.commit()

    await asyncio.to_thread(back_to_version_5)
    again = await SessionStore.open(path)
    assert await settle(again, temperature=0.1) == SessionSettings(temperature=0.1)
    await again.close()


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
