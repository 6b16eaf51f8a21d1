"""Responses that are read, listed, deleted and cancelled by their ids, and those that run in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from gateway.app import Server

from .conftest import KEYS, MODEL, Gateways, SharedNode, engine_is_empty

LONG: Any = {
    "model": MODEL,
    "input": "Tell me a story.",
    "max_output_tokens": 3000,
    "extra_body": {"ignore_eos": True},
}
OVER = ("completed", "incomplete", "cancelled", "failed")


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(60):
        while (response := await client.responses.retrieve(response_id)).status not in OVER:
            await asyncio.sleep(0.02)
    return response


async def test_a_stored_response_is_read_listed_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="My secret word is Fezin.", temperature=0)
    after = await client.responses.create(
        model=MODEL, input="What is my secret word?", previous_response_id=made.id, temperature=0
    )
    assert after.previous_response_id == made.id
    read = await client.responses.retrieve(made.id)
    assert (read.id, read.output_text, read.status) == (made.id, made.output_text, "completed")
    assert read.usage == made.usage
    (item,) = (await client.responses.input_items.list(made.id)).data
    assert item.content[0].text == "My secret word is Fezin."  # type: ignore[union-attr]
    await client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)
    assert (await client.responses.retrieve(after.id)).output_text == after.output_text


async def test_log_probabilities_are_those_of_the_text(client: openai.AsyncOpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "input": "Hello!",
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
    }
    made = await client.responses.create(**asked)
    streamed, last = "", None
    async for event in await client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            streamed += "".join(token.token for token in event.logprobs)
        elif event.type == "response.completed":
            last = event.response
    assert made.output_text and last is not None and streamed == made.output_text
    for response in (made, last):
        told = response.output[0].content[0].logprobs  # type: ignore[union-attr]
        assert "".join(token.token for token in told or ()) == made.output_text  # type: ignore[union-attr]


async def test_results_of_tools_go_on_from_the_calls_that_were_stored(client: openai.AsyncOpenAI) -> None:
    """What a call of a tool looked like is known only to the response: a follow-up names it, and is understood."""
    calls: Any = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
    ]
    first = await client.responses.create(model=MODEL, input=calls, temperature=0)
    listed = (await client.responses.input_items.list(first.id, order="asc")).data
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    second = await client.responses.create(
        model=MODEL, input="Thanks.", previous_response_id=first.id, temperature=0
    )
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens - 5


async def test_one_in_the_background_is_answered_at_once_and_read_later(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="Hello!", background=True, temperature=0)
    assert made.status == "queued" and made.background and not made.output
    read = await ended(client, made.id)
    assert read.status == "completed" and read.output_text and read.background
    whole = await client.responses.create(model=MODEL, input="Hello!", temperature=0)
    assert read.output_text == whole.output_text
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match="stored"):
        await client.responses.create(model=MODEL, input="Hello!", background=True, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nope", input="Hello!", background=True)


async def test_one_that_is_cancelled_ends_in_the_engine_and_keeps_its_beginning(
    client: openai.AsyncOpenAI, node: SharedNode
) -> None:
    made = await client.responses.create(**LONG, background=True)
    assert (await client.responses.retrieve(made.id)).status == "in_progress"
    cancelled = await client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    await engine_is_empty(node)
    assert (await client.responses.retrieve(made.id)).status == "cancelled"
    assert (await client.responses.cancel(made.id)).status == "cancelled", "once more changes nothing"


async def test_a_stream_in_the_background_goes_on_where_its_client_left_it(
    client: openai.AsyncOpenAI,
) -> None:
    stream = await client.responses.create(
        model=MODEL, input="Hello!", background=True, stream=True, temperature=0
    )
    seen = [await anext(aiter(stream)) for _ in range(3)]
    await stream.response.aclose()
    response_id = seen[0].response.id  # type: ignore[union-attr]
    last = seen[-1].sequence_number
    rest = [
        event
        async for event in await client.responses.retrieve(response_id, stream=True, starting_after=last)
    ]
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert rest[-1].type == "response.completed"
    with pytest.raises(openai.NotFoundError, match="no response"):
        await client.responses.retrieve("resp_nope", stream=True)


async def test_a_negative_number_is_refused(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(
        model=MODEL, input="Hello!", background=True, stream=True, temperature=0
    )
    events = [event async for event in made]
    response_id = events[0].response.id  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await client.responses.retrieve(response_id, stream=True, starting_after=-5)
    await client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        await client.responses.retrieve(response_id, stream=True)


async def test_what_a_response_goes_on_from_stands_in_every_form_of_it(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="Hello!", temperature=0)
    wish: Any = {
        "model": MODEL,
        "input": "And again?",
        "previous_response_id": first.id,
        "temperature": 0,
    }
    forms = [await client.responses.create(**wish), await client.responses.create(**wish, background=True)]
    for options in ({}, {"background": True}):
        stream = await client.responses.create(**wish, **options, stream=True)
        forms += [event.response async for event in stream if hasattr(event, "response")]
    forms.append(await ended(client, forms[1].id))
    assert len(forms) >= 7 and {form.previous_response_id for form in forms} == {first.id}


async def test_a_response_of_a_session_that_was_just_deleted_is_kept(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    """Its client may go on from it; the deleted conversation stays as it was, so that it can be restored."""
    named: Any = {"model": MODEL, "temperature": 0, "extra_headers": {"X-Session-Id": "gone"}}
    await client.responses.create(input="Hello!", **named)
    await server.services.store.delete("local", "gone", time.time())
    made = await client.responses.create(input="My secret word is Fezin.", **named)
    after = await client.responses.create(
        model=MODEL, input="What is my secret word?", previous_response_id=made.id, temperature=0
    )
    assert "Fezin" in after.output_text
    restored = await server.services.store.restore("local", "gone", time.time())
    assert [turn.content for turn in restored.turns] == ["Hello!"]


async def test_another_key_finds_nothing(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    url = server.url + "/v1"
    async with (
        openai.AsyncOpenAI(base_url=url, api_key=KEYS[0], max_retries=0) as own,
        openai.AsyncOpenAI(base_url=url, api_key=KEYS[1], max_retries=0) as other,
    ):
        made = await own.responses.create(**LONG, background=True)
        for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        await own.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await own.responses.retrieve(made.id)


NAMED: Any = [
    {"role": "user", "content": [{"type": "input_text", "text": "My name is Ann."}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Nice to meet you, Ann!"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]},
]


async def test_a_message_of_the_assistant_needs_no_type_and_all_of_its_text_is_read(
    client: openai.AsyncOpenAI,
) -> None:
    plain = await client.responses.create(model=MODEL, input=NAMED, temperature=0, store=False)
    assert "Ann" in plain.output_text
    first, _, third = NAMED
    parts = [{"type": "output_text", "text": text} for text in ("Nice to ", "meet you, Ann!")]
    typed: Any = [first, {"type": "message", "role": "assistant", "content": parts}, third]
    split = await client.responses.create(model=MODEL, input=typed, temperature=0)
    assert (split.output_text, split.usage.input_tokens) == (plain.output_text, plain.usage.input_tokens)  # type: ignore[union-attr]


async def test_items_are_named_by_their_ids(client: openai.AsyncOpenAI, gateways: Gateways) -> None:
    """As the Vercel AI SDK does by default, and opencode with it."""
    first = await client.responses.create(model=MODEL, input="My name is Ann.", temperature=0)
    name = first.output[0].id
    for reference in ({"type": "item_reference", "id": name}, {"id": name}):
        items: Any = [{"role": "user", "content": "My name is Ann."}, reference]
        items.append({"role": "user", "content": "What is my name?"})
        second = await client.responses.create(model=MODEL, input=items, temperature=0)
        whole: Any = [items[0], {"role": "assistant", "content": first.output_text}, items[2]]
        same = await client.responses.create(model=MODEL, input=whole, temperature=0)
        assert second.usage.input_tokens == same.usage.input_tokens  # type: ignore[union-attr]
        assert second.output_text == same.output_text
    third = await client.responses.create(
        model=MODEL, input="And now?", previous_response_id=second.id, temperature=0
    )
    assert third.usage.input_tokens > second.usage.input_tokens  # type: ignore[union-attr]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no item"):
        await client.responses.create(model=MODEL, input=items)


async def test_calls_of_tools_are_named_by_their_ids(client: openai.AsyncOpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    wish: Any = {"model": MODEL, "tools": [tool], "temperature": 0, "max_output_tokens": 96}
    asked: Any = {"role": "user", "content": "What is the weather in Paris?"}
    events = [event async for event in await client.responses.create(input=[asked], stream=True, **wish)]
    (call,) = events[-1].response.output
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    reference = {"type": "item_reference", "id": call.id}
    told = await client.responses.create(input=[asked, reference, result], **wish)
    assert "Paris" in told.output_text and "sunny" in told.output_text


async def test_a_conversation_is_a_session_whose_turns_come_first(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(
        model=MODEL, input="My name is Ann.", temperature=0, extra_headers={"X-Session-Id": "talk"}
    )
    wish: Any = {"model": MODEL, "input": "What is my name?", "temperature": 0}
    after = await client.responses.create(previous_response_id=first.id, **wish)
    num_tokens = after.usage.input_tokens  # type: ignore[union-attr]
    for conversation in ("talk", {"id": "talk"}):
        named = await client.responses.create(conversation=conversation, **wish)  # type: ignore[arg-type]
        assert named.usage.input_tokens > num_tokens  # type: ignore[union-attr]
        num_tokens = named.usage.input_tokens  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError, match="no conversation"):
        await client.responses.create(conversation="conv_nope", **wish)
    with pytest.raises(openai.BadRequestError, match="not both"):
        await client.responses.create(conversation="talk", previous_response_id=first.id, **wish)


async def test_a_stream_that_runs_out_of_tokens_says_so(client: openai.AsyncOpenAI) -> None:
    wish: Any = {"model": MODEL, "input": "Hello!", "stream": True, "temperature": 0}
    cut = [event async for event in await client.responses.create(max_output_tokens=2, **wish)]
    assert [event.type for event in cut if event.type.startswith("response.i")][-1] == "response.incomplete"
    assert cut[-1].type == "response.incomplete" and cut[-1].response.incomplete_details is not None
    assert cut[-1].response.output_text and cut[-1].sequence_number == len(cut) - 1
    stored = await client.responses.retrieve(cut[-1].response.id)
    assert stored.status == "incomplete"
    whole = [event async for event in await client.responses.create(**wish)]
    assert whole[-1].type == "response.completed"
