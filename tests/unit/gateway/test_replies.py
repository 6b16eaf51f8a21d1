"""What is read from API calls and their replies, so that they can be kept, followed in the background and gone on from."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from engine_bridge.protocol.node import (
    CallFigures,
    KvSources,
    SseReply,
    figures_event,
    pack_token_ids,
    token_ids_event,
)
from gateway.doors.api.recording import recording_of
from gateway.errors import GatewayError
from gateway.sessions import SessionStore, StoredResponse, Turn
from gateway.settings.config import Config
from gateway.turns.background_responses import BackgroundResponse, BackgroundResponses
from gateway.turns.replies import MAX_ARGUMENT_CHARS, AnswerReader, items_of, question_of, session_named

from .parts import NOW, settled

USER = {"role": "user", "content": "b"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "b"}, {}]}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", {"messages": [USER | {"content": "a"}, USER, {"role": "tool"}]}),
        ("messages", {"messages": [PARTS]}),
        ("completions", {"prompt": "b"}),
        ("responses", {"input": "b"}),
        ("responses", {"input": [PARTS]}),
    ],
)
def test_the_question_is_the_last_user_message(api: Any, body: dict[str, Any]) -> None:
    assert question_of(api, body) == "b"


def test_the_header_goes_before_the_body() -> None:
    named = [session_named(header, body) for header in ("h", None) for body in ({"session_id": "b"}, {})]
    assert named == ["h", "h", "b", None]
    with pytest.raises(GatewayError):
        session_named(None, {"session_id": 7})


def reading(api: Any, *events: object) -> AnswerReader:
    """A reader that was fed these events of a stream."""
    reader = AnswerReader(api)
    for event in events:
        reader.feed(b"event: x\ndata: " + orjson.dumps(event) + b"\n\n")
    return reader


def test_a_stream_is_read_to_its_end() -> None:
    delta = {"type": "content_block_delta", "delta": {"text": "hi"}}
    reader = reading("messages", delta, {"type": "message_stop"})
    assert (reader.answer, reader.is_complete) == ("hi", True)
    completed = {"type": "response.completed", "response": {"id": "r", "usage": {"input_tokens": 5}}}
    reader = reading("responses", {"type": "response.output_text.delta", "delta": "yo"}, completed)
    assert (reader.answer, reader.is_complete) == ("yo", True)
    assert reader.usage is not None and reader.usage["prompt_tokens"] == 5


def test_an_answer_that_is_only_the_call_of_a_tool_is_one_to_keep() -> None:
    begun = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    call = {"index": 0, "function": {"name": "weather", "arguments": "{}"}}
    called = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
    assert not reading("chat").has_begun
    assert not reading("chat", {"choices": [begun]}).has_begun
    reader = reading("chat", {"choices": [begun]}, {"choices": [called]})
    assert (reader.has_begun, reader.answer, reader.finish_reason) == (True, "", "tool_calls")


def response(text: str, answer: str, previous: str | None = None) -> StoredResponse:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]}]
    reply, items = orjson.dumps({"output": output}), orjson.dumps([{"role": "user", "content": text}])
    return StoredResponse(reply=reply, items=items, previous=previous)


async def test_a_response_is_gone_on_from_by_its_owner_alone(store: SessionStore) -> None:
    ids, kept = pack_token_ids([1, 2, 3]), response("hello", "hi")
    call = {"answer": "hi", "response_id": "resp_a", "response": kept, "makes_session": True}
    await store.record_turn("ann", "s", "a", "hello", token_ids=ids, now=NOW, **call)
    found = await store.responses.history("ann", "resp_a")
    assert found is not None and found.token_ids == ids == await store.token_ids("ann", "s")
    assert await store.token_ids("bob", "s") == b"" == await store.token_ids("ann", "nowhere")
    assert await store.responses.history("bob", "resp_a") is None


def turn(name: str) -> Turn:
    rest: Any = dict.fromkeys(("adapter", "finish_reason", "usage", "timings"))
    texts: Any = {"id": name, "content": f"question {name}", "answer": f"answer {name}"}
    return Turn(status="done", created_at=NOW, **texts, **rest)


def said(name: str) -> list[dict[str, str]]:
    texts = {"user": f"question {name}", "assistant": f"answer {name}"}
    return [{"role": role, "content": text} for role, text in texts.items()]


def test_a_follow_up_reads_the_chain_and_nothing_that_stood_before_its_beginning() -> None:
    chat, first, second = turn("chat"), turn("a"), turn("b")
    beginning = response("question a", "answer a")
    following = response("question b", "answer b", "resp_a")
    assert items_of([(chat, None), (first, beginning), (second, following)]) == [*said("a"), *said("b")]
    chain = [(first, beginning), (chat, None), (second, following)]
    assert items_of(chain) == [*said("a"), *said("chat"), *said("b")]


def test_a_stream_that_was_cut_off_is_an_incomplete_response_with_its_beginning() -> None:
    created = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}}
    reader = reading("responses", created, {"type": "response.output_text.delta", "delta": "Onc"})
    reader.feed(token_ids_event(b"1234"))
    reader.feed(figures_event(figures := CallFigures(KvSources(1, 2, 3, 4), 5)))
    assert reader.reply is not None and reader.token_ids == b"1234" and reader.figures == figures
    assert (reader.reply["id"], reader.reply["status"]) == ("resp_1", "incomplete")
    assert reader.reply["output"][0]["content"][0]["text"] == "Onc"


def event(number: int, kind: str) -> bytes:
    value = {"type": kind, "sequence_number": number, "response": {"id": "resp_1"}}
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


CREATED = event(0, "response.created")


class Call:
    """A response whose events and whose storing the test lets come."""

    def __init__(self) -> None:
        self.all = BackgroundResponses()
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.may_store = asyncio.Event()
        self.is_storing = asyncio.Event()
        self.stored: list[str] = []

    async def begin(self) -> BackgroundResponse:
        self.events.put_nowait(CREATED)
        calls = {"scope": self._scope, "record": self._record, "ended": lambda: None}
        return await self.all.start("ann", SseReply(self._events()), is_streamed=True, **calls)

    async def _events(self) -> AsyncIterator[bytes]:
        while (event := await self.events.get()) is not None:
            yield event

    async def _scope(self, reading: Awaitable[None]) -> None:
        await reading

    async def _record(self, job: BackgroundResponse) -> None:
        self.is_storing.set()
        await self.may_store.wait()
        self.stored.append(job.status)


@pytest.mark.parametrize("has_ended", [False, True], ids=["cancelled", "ended"])
async def test_who_cancels_one_that_is_being_stored_waits_for_it_and_changes_nothing(has_ended: bool) -> None:
    call = Call()
    job = await call.begin()
    if has_ended:
        call.events.put_nowait(event(1, "response.completed"))
        call.events.put_nowait(None)
    ends = [] if has_ended else [asyncio.create_task(call.all.cancel(job))]
    await call.is_storing.wait()
    ends += [asyncio.create_task(each) for each in (call.all.cancel(job), call.all.drain(0.0))]
    await settled(5)
    assert not any(end.done() for end in ends) and not job.is_over
    assert call.all.is_busy("ann") and not call.all.is_busy("bob"), "who erases ann waits"
    call.may_store.set()
    await asyncio.gather(*ends)
    assert call.stored == ["in_progress" if has_ended else "cancelled"] and job.is_over
    await settled(5)
    assert not call.all.is_busy("ann")
    assert job.reply()["id"] == "resp_1"


async def test_a_follower_goes_on_by_number_whatever_comments_stand_between() -> None:
    job = BackgroundResponse(is_streamed=True)
    waiting, later = b": keep-alive\n\n", b": left out\n\n"
    events = [waiting, CREATED, waiting, event(1, "x"), event(2, "y"), later, event(3, "z")]
    for each in events:
        job.add(each)
    job.end()
    assert [each async for each in job.follow()] == events
    assert [each async for each in job.follow(1)] == events[4:]
    assert [each async for each in job.follow(2)] == events[5:]
    assert [each async for each in job.follow(3)] == []


async def test_items_named_often_are_no_way_around_the_bounds(store: SessionStore, tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path, max_body_bytes=10_000, max_messages=100)
    services: Any = SimpleNamespace(store=store, config=config)
    text = {"type": "output_text", "text": "x" * 500}
    long = {"type": "message", "id": "msg_1", "role": "assistant", "content": [text]}
    reply = json.dumps({"id": "resp_a", "output": [long]}).encode()
    response = StoredResponse(reply=reply, items=b"[]", previous=None)
    call = {"answer": "hi", "response_id": "resp_a", "response": response, "makes_session": True}
    await store.record_turn("ann", "s", "t", "hello", now=NOW, **call)

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


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_what_is_handed_to_tools_is_read_from_pieces_and_from_whole_replies(api: Any) -> None:
    given = [{"task": "Read it."}, {"task": "Write it."}]
    whole = [orjson.dumps(each).decode() for each in given]
    pieces = [(number, part) for number, text in enumerate(whole) for part in (text[:7], text[7:])]
    calls = [{"id": f"c{number}", "function": {"arguments": text}} for number, text in enumerate(whole)]
    items = [{"type": "function_call", "call_id": f"c{n}", "arguments": text} for n, text in enumerate(whole)]
    blocks = [
        {"type": "tool_use", "id": f"c{n}", "name": "task", "input": each} for n, each in enumerate(given)
    ]
    events, reply = {
        "chat": (
            [
                {"choices": [{"delta": {"tool_calls": [{"index": n, "function": {"arguments": part}}]}}]}
                for n, part in pieces
            ],
            {"choices": [{"message": {"tool_calls": calls}}]},
        ),
        "messages": (
            [
                {"type": "content_block_delta", "index": n, "delta": {"partial_json": part}}
                for n, part in pieces
            ],
            {"content": blocks},
        ),
        "responses": ([{"type": "response.completed", "response": {"output": items}}], {"output": items}),
    }[api]
    reader = AnswerReader(api)
    reader.feed_json(orjson.dumps(reply))
    assert [orjson.loads(each) for each in reader.arguments] == given
    assert reading(api, *events).arguments == whole


def test_of_arguments_without_end_a_bounded_part_is_kept() -> None:
    piece = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "x" * 4096}}]}}]}
    (kept,) = reading("chat", *[piece] * 200).arguments
    assert MAX_ARGUMENT_CHARS - 4096 < len(kept) <= MAX_ARGUMENT_CHARS
