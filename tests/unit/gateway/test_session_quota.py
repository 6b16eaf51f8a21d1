"""What each key may store, and what a person sets for one conversation: counted as texts come and go, in front of every prompt."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.protocol.engine_request import Sampling
from engine_bridge.protocol.node import pack_token_ids
from gateway.errors import GatewayError
from gateway.sessions import RESTORE_WINDOW_S, SessionSettings, SessionStore, SettingsPatch
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES

from .front import Gateway
from .parts import NOW, Parts, refused
from .stores import ask, end, rows_of, talk

LIMIT = 1 << 20
HALF = "x" * (LIMIT // 2)


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(path, max_bytes_of=lambda owner: LIMIT)
    yield store
    await store.close()


def counted(path: Path, owner: str = "ann") -> int:
    return rows_of(path, "SELECT num_bytes FROM owners WHERE name = ?", owner)[0][0]


async def test_an_answer_under_way_is_kept_whole(store: SessionStore) -> None:
    """What was accepted is finished, above the limit if it must be; the next message is refused, a known one is still answered."""
    await store.create_session("ann", session_id="s", now=NOW)
    await ask(store, "s", "t", "question")
    over = await end(store, "s", "t", "y" * (2 * LIMIT), finish_reason="length")
    assert over is not None and len(over.answer) == 2 * LIMIT
    asks = [("u", "more", {}), ("u", "more", {"after": "t"}), ("t", "question", {"continues": True})]
    for turn, content, options in asks:
        error = await refused(ask(store, "s", turn, content, **options))
        assert (error.code, error.http_status, error.retryable) == ("quota_exceeded", 429, False)
        assert "1 MiB" in error.message and "Delete conversations" in error.message
    assert not (await ask(store, "s", "t", "question")).is_new


async def test_each_owner_has_a_room_of_its_own(path: Path) -> None:
    rooms = {"bob": 0, "eve": LIMIT}
    store = await SessionStore.open(path, max_bytes_of=lambda owner: rooms.get(owner, 1))
    for owner in rooms:
        await store.create_session(owner, session_id="s", now=NOW)
    await store.begin_turn("bob", "s", "t", HALF * 4, now=NOW)
    assert (await refused(store.begin_turn("eve", "s", "t", HALF * 4, now=NOW))).code == "quota_exceeded"
    assert (await refused(store.create_session("ann", session_id="s", now=NOW))).code == "quota_exceeded"
    rooms["eve"] = 0
    await store.begin_turn("eve", "s", "t", HALF * 4, now=NOW)
    await store.close()


async def test_what_is_deleted_is_free_once_nobody_can_restore_it(store: SessionStore, path: Path) -> None:
    await store.create_session("ann", session_id="s", now=NOW)
    await ask(store, "s", "t", HALF)
    await end(store, "s", "t", HALF)
    await store.delete("ann", "s", NOW)
    with pytest.raises(GatewayError, match="30 s later"):
        await store.create_session("ann", session_id="new", now=NOW + RESTORE_WINDOW_S)
    later = NOW + RESTORE_WINDOW_S + 1
    await store.create_session("ann", session_id="new", now=later)
    await store.begin_turn("ann", "new", "u", HALF, now=later)
    await store.purge(later)
    assert counted(path) == SESSION_BYTES + TURN_BYTES + len(HALF)


PATIENT = "You are patient."


async def settle(store: SessionStore, session: str = "s", **changes: Any) -> SessionSettings:
    """Change settings of ann's session; returns what it has then."""
    await store.patch("ann", session, settings=SettingsPatch(**changes), now=NOW)
    return (await store.get_session("ann", session)).settings


async def test_a_system_prompt_counts_as_bytes_while_it_is_there(store: SessionStore, path: Path) -> None:
    await store.create_session("ann", session_id="s", now=NOW)
    empty = counted(path)
    for prompt, num_bytes in (("ä€", 5), (PATIENT, 16), (None, 0), (PATIENT, 16)):
        await settle(store, system_prompt=prompt)
        assert counted(path) == empty + num_bytes
    await store.delete("ann", "s", NOW)
    await store.purge(NOW + 100)
    assert counted(path) == 0


async def test_token_ids_go_with_the_system_prompt_that_they_began_with(store: SessionStore) -> None:
    await store.create_session("ann", session_id="s", now=NOW)
    await talk(store, "a", 1, 2, 3)
    await settle(store, temperature=1.0)
    assert (await store.outlook("ann", "s")).token_ids == pack_token_ids([1, 2, 3])
    await ask(store, "s", "b")
    await settle(store, system_prompt=PATIENT)
    await end(store, "s", "b", token_ids=pack_token_ids([1, 2, 3, 4]))
    outlook = await store.outlook("ann", "s")
    assert (outlook.token_ids, outlook.settings.system_prompt) == (b"", PATIENT)
    await talk(store, "c", 9, 1, 2)
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


async def test_settings_are_set_over_http_and_told_on_the_socket(gateway: Gateway) -> None:
    """A new system prompt ends what nodes keep for the session; settings that cannot be are refused by name."""
    turn = await gateway.answered("a", "Hello.", owner="local")
    path = f"/api/sessions/{turn.session_id}"
    assert (await gateway.call("PATCH", path, {"settings": {"temperature": 0.5}})).status == 200
    assert gateway.node.ended_sessions == []
    assert (await gateway.call("PATCH", path, {"settings": {"system_prompt": PATIENT}})).status == 200
    assert gateway.node.ended_sessions == [("", turn.session_id)]
    for bad in (
        {"temperature": 3},
        {"max_tokens": 0},
        {"top_p": 0},
        {"stop": [""]},
        {"seed": 0.5},
        {"system_prompt": "x" * 32_001},
        {"system": "x"},
    ):
        reply = await gateway.call("PATCH", path, {"settings": bad})
        assert (reply.status, reply.body["error"]["code"]) == (400, "bad_request")
        assert "settings" in reply.body["error"]["message"]
    reply = await gateway.call("POST", "/api/sessions", {"settings": {"max_tokens": 7}})
    assert reply.body["settings"]["max_tokens"] == 7
    more = {"top_p": 0.9, "stop": ["END", "\n\n"], "seed": 7}
    assert (await gateway.call("PATCH", path, {"settings": more})).status == 200
    others = {"max_tokens": None, "tools": None, "allowed_tools": None}
    whole = {"system_prompt": PATIENT, "temperature": 0.5, **others, **more}
    async with gateway.socket() as socket:
        await socket.send(type="hello", session_id=turn.session_id)
        assert (await socket.next())["session"]["settings"] == whole
    for unset in ({"system_prompt": " \n"}, {"temperature": None}):
        whole |= dict.fromkeys(unset)
        await gateway.call("PATCH", path, {"settings": unset})
        assert (await gateway.call("GET", path)).body["settings"] == whole
