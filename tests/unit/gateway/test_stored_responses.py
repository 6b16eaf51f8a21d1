"""Responses calls as they are stored, and what a follow-up makes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine_bridge.protocol.node import pack_token_ids, token_ids_event, unpack_token_ids
from gateway.errors import GatewayError
from gateway.sessions import SessionStore, StoredResponse, Turn
from gateway.turns.replies import AnswerReader, items_of, listed_items

NOW = 1_700_000_000.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = await SessionStore.open(tmp_path / "sessions.db", max_owner_bytes=100_000)
    yield store
    await store.close()


def response(text: str, answer: str, previous: str | None = None) -> StoredResponse:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]}]
    items = [{"role": "user", "content": text}]
    return StoredResponse(
        reply=orjson.dumps({"output": output}), items=orjson.dumps(items), previous=previous
    )


async def record(store: SessionStore, name: str, ids: list[int], session: str = "s", **options: Any) -> None:
    await store.record_turn(
        "ann",
        session,
        name,
        f"question {name}",
        answer=f"answer {name}",
        token_ids=pack_token_ids(ids),
        response_id=f"resp_{name}",
        response=response(f"question {name}", f"answer {name}", **options),
        makes_session=True,
        now=NOW,
    )


async def ids_of(store: SessionStore) -> list[int]:
    return list(unpack_token_ids(await store.token_ids("ann", "s")))


async def test_a_session_has_the_ids_of_its_last_call_and_a_response_those_up_to_its_own(
    store: SessionStore,
) -> None:
    await record(store, "a", [1, 2, 3])
    await record(store, "b", [1, 2, 3, 4, 5], previous="resp_a")
    assert await ids_of(store) == [1, 2, 3, 4, 5]
    found = await store.responses.history("ann", "resp_a")
    assert found is not None and list(unpack_token_ids(found.token_ids)) == [1, 2, 3]
    assert await store.token_ids("bob", "s") == b"" == await store.token_ids("ann", "nowhere")
    assert await store.responses.history("bob", "resp_a") is None


async def test_a_deleted_response_takes_its_turn_along_and_the_last_one_its_session(
    store: SessionStore,
) -> None:
    await record(store, "a", [1, 2, 3])
    await record(store, "b", [1, 2, 3, 4, 5], previous="resp_a")
    assert not await store.responses.delete("bob", "resp_a", NOW)
    assert await store.responses.delete("ann", "resp_a", NOW)
    assert await store.responses.read("ann", "resp_a") is None
    assert await ids_of(store) == [], (
        "what was added to the ids of the turn that is gone means nothing without it"
    )
    assert [turn.id for turn in (await store.get_session("ann", "s")).turns] == ["b"]
    assert await store.responses.delete("ann", "resp_b", NOW)
    with pytest.raises(GatewayError):
        await store.get_session("ann", "s")


async def test_what_a_response_holds_counts_as_its_owners_bytes(store: SessionStore) -> None:
    await record(store, "a", [], session="other")
    for number in range(20):
        kept = StoredResponse(reply=b"x" * 20_000, items=b"[]", previous=None)
        try:
            await store.record_turn(
                "ann",
                "s",
                f"t{number}",
                "q",
                answer="a",
                response_id=f"r{number}",
                response=kept,
                makes_session=True,
                now=NOW,
            )
        except GatewayError as error:
            assert error.code == "quota_exceeded" and 3 <= number <= 5
            break
    else:
        pytest.fail("nothing was refused")
    for freed in range(number):
        assert await store.responses.delete("ann", f"r{freed}", NOW)
    await record(store, "b", [], session="other")


def turn(name: str) -> Turn:
    return Turn(
        id=name,  # type: ignore[arg-type]
        content=f"question {name}",
        answer=f"answer {name}",
        status="done",
        adapter=None,
        finish_reason="stop",
        usage=None,
        timings=None,
        created_at=NOW,
    )


def said(name: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"question {name}"},
        {"role": "assistant", "content": f"answer {name}"},
    ]


def test_a_follow_up_reads_the_chain_and_nothing_that_stood_before_its_beginning() -> None:
    chat, first, second = turn("chat"), turn("a"), turn("b")
    beginning = response("question a", "answer a")
    following = response("question b", "answer b", "resp_a")
    assert items_of([(chat, None), (first, beginning), (second, following)]) == said("a") + said("b")
    assert items_of([(first, beginning), (chat, None), (second, following)]) == said("a") + said(
        "chat"
    ) + said("b")


def test_calls_of_tools_are_handed_on_as_they_were() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    made = StoredResponse(reply=orjson.dumps({"output": [call]}), items=b"[]", previous=None)
    assert items_of([(turn("a"), made)]) == [call]


def test_listed_items_have_types_and_ids() -> None:
    listed = listed_items([{"role": "user", "content": "hi"}, {"type": "function_call", "id": "x"}], "resp_1")
    assert listed[0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert [(item["type"], item["id"]) for item in listed] == [
        ("message", "item_resp_1_0"),
        ("function_call", "x"),
    ]


def test_a_stream_that_was_cut_off_is_an_incomplete_response_with_its_beginning() -> None:
    reader = AnswerReader("responses")
    reader.feed(
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1","status":"in_progress"}}\n\n'
    )
    reader.feed(b'data: {"type":"response.output_text.delta","delta":"Onc"}\n\n')
    reader.feed(token_ids_event(b"1234"))
    assert reader.reply is not None and reader.token_ids == b"1234"
    assert (reader.reply["id"], reader.reply["status"]) == ("resp_1", "incomplete")
    assert reader.reply["output"][0]["content"][0]["text"] == "Onc"
