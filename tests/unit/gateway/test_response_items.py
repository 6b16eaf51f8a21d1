"""Items of stored responses by their ids."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.doors.api.recording import recording_of
from gateway.errors import GatewayError
from gateway.sessions import SessionStore, StoredResponse
from gateway.settings.config import Config

NOW = 1000.0


async def stored(store: SessionStore, owner: str, name: str, output: Any, items: Any = ()) -> None:
    response = StoredResponse(
        reply=json.dumps({"id": f"resp_{name}", "output": output}).encode(),
        items=json.dumps(list(items)).encode(),
        previous=None,
    )
    await store.record_turn(
        owner,
        f"session-{name}",
        f"turn-{name}",
        "hello",
        answer="hi",
        response_id=f"resp_{name}",
        response=response,
        makes_session=True,
        now=NOW,
    )


def message(item_id: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "content": [{"type": "output_text", "text": item_id}],
    }


async def test_items_are_found_by_their_owner_alone_and_go_with_their_response(tmp_path: Path) -> None:
    store = await SessionStore.open(tmp_path / "sessions.db")
    given = [{"role": "user", "content": "x"}, {"type": "function_call_output", "id": "fco_1"}, "text", 7]
    await stored(store, "ann", "a", [message("msg_1"), {"type": "reasoning", "id": None}], given)
    await stored(store, "ann", "b", [message("msg_2")])
    await stored(store, "bob", "c", [message("msg_1")])
    found = await store.responses.items("ann", ["msg_1", "msg_2", "fco_1", "nope", "'; --", "\0"])
    assert found == {"msg_1": message("msg_1"), "msg_2": message("msg_2"), "fco_1": given[1]}
    assert await store.responses.items("eve", ["msg_1"]) == {}
    assert await store.responses.delete("ann", "resp_a", NOW)
    assert await store.responses.items("ann", ["msg_1", "msg_2"]) == {"msg_2": message("msg_2")}
    assert list(await store.responses.items("bob", ["msg_1"])) == ["msg_1"]
    await store.delete("ann", "session-b", NOW)
    assert await store.responses.items("ann", ["msg_2"]) == {}
    await store.close()


async def test_items_of_a_file_of_version_9_are_found(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    store = await SessionStore.open(path)
    await stored(store, "ann", "a", [message("msg_1")])
    await store.close()

    def back_to_version_9() -> None:
        with contextlib.closing(sqlite3.connect(path)) as conn:
            conn.execute("DROP TRIGGER responses_items")
            conn.execute("DROP TABLE response_items")
            conn.execute("PRAGMA user_version = 9")
            conn.commit()

    await asyncio.to_thread(back_to_version_9)
    store = await SessionStore.open(path)
    assert list(await store.responses.items("ann", ["msg_1"])) == ["msg_1"]
    await stored(store, "ann", "b", [message("msg_2")])
    assert list(await store.responses.items("ann", ["msg_2"])) == ["msg_2"]
    await store.close()


async def test_items_that_are_named_often_are_no_way_around_the_bounds_of_a_body(tmp_path: Path) -> None:
    store = await SessionStore.open(tmp_path / "sessions.db")
    config = Config(data_dir=tmp_path, max_body_bytes=10_000, max_messages=100)
    services: Any = SimpleNamespace(store=store, config=config)
    long = message("msg_1") | {"content": [{"type": "output_text", "text": "x" * 500}]}
    await stored(store, "ann", "a", [long])

    def naming(num: int) -> dict[str, Any]:
        return {"input": [{"type": "item_reference", "id": "msg_1"}] * num}

    body = naming(3)
    assert await recording_of(services, "ann", "responses", body, None) is not None
    assert [item["content"] for item in body["input"]] == ["x" * 500] * 3
    with pytest.raises(GatewayError, match="longer"):
        await recording_of(services, "ann", "responses", naming(50), None)
    body = naming(101)
    await recording_of(services, "ann", "responses", body, None)
    assert body == naming(101), "too many items are refused by their number"
    await store.close()
