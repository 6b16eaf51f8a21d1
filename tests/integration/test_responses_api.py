"""Responses that are read, listed, deleted and cancelled by their ids, and those that run in the background."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from gateway.app import Server

from .conftest import Gateways, SharedNode, engine_is_empty, settle
from .facts import KEYS, MODEL

LONG: Any = {"input": "Tell me a story.", "max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}
OVER = ("completed", "incomplete", "cancelled", "failed")


class Client:
    """The SDK's calls about responses; those that make one are greedy and ask the demo model."""

    def __init__(self, server: Server, key: str = "none") -> None:
        http = openai.DefaultAsyncHttpxClient(verify=False)  # which reads no certificates
        self.sdk = openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key=key, max_retries=0, http_client=http
        )
        self.all = self.sdk.responses

    async def say(self, said: Any, **wish: Any) -> Any:
        return await self.all.create(**{"model": MODEL, "temperature": 0} | wish, input=said)

    async def events(self, said: Any, **wish: Any) -> list[Any]:
        return [event async for event in await self.say(said, stream=True, **wish)]

    async def ended(self, response_id: str) -> Any:
        async def look() -> Any:
            response = await self.all.retrieve(response_id)
            return response if response.status in OVER else None

        return await settle(look)


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: Server) -> AsyncIterator[Client]:
    client = Client(server)
    yield client
    await client.sdk.close()


async def test_a_stored_response_is_read_listed_and_deleted(client: Client) -> None:
    made = await client.say("My secret word is Fezin.")
    after = await client.say("What is my secret word?", previous_response_id=made.id)
    assert after.previous_response_id == made.id and "Fezin" in after.output_text
    read = await client.all.retrieve(made.id)
    assert (read.id, read.output_text, read.status) == (made.id, made.output_text, "completed")
    assert read.usage == made.usage
    (item,) = (await client.all.input_items.list(made.id)).data
    assert item.content[0].text == "My secret word is Fezin."
    await client.all.delete(made.id)
    for call in (client.all.retrieve, client.all.delete, client.all.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)
    assert (await client.all.retrieve(after.id)).output_text == after.output_text
    with pytest.raises(openai.NotFoundError):
        await client.say("Hello", previous_response_id="resp_nope")


async def test_what_is_not_to_be_stored_is_not_stored_where_it_goes_on_from_a_response_either(
    client: Client, server: Server
) -> None:
    made = await client.say("My secret word is Fezin.")
    for is_streamed in (False, True):
        wish: Any = {"previous_response_id": made.id, "store": False}
        if is_streamed:
            aside = (await client.events("What is my secret word?", **wish))[-1].response
        else:
            aside = await client.say("What is my secret word?", **wish)
        assert "Fezin" in aside.output_text and aside.previous_response_id == made.id
        with pytest.raises(openai.NotFoundError):
            await client.all.retrieve(aside.id)
    session = (
        await client.all.with_raw_response.create(
            model=MODEL,
            input="Hello!",
            previous_response_id=made.id,
            extra_headers={"X-Session-Id": "kept"},
            store=False,
        )
    ).headers["X-Session-Id"]
    async with aiohttp.ClientSession(server.url) as http, http.get(f"/api/sessions/{session}") as response:
        assert [turn["content"] for turn in (await response.json())["turns"]] == ["Hello!"], (
            "whose client named it"
        )


async def test_log_probabilities_are_those_of_the_text(client: Client) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"]}
    made = await client.say("Hello!", **asked)
    events = await client.events("Hello!", **asked)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(token.token for event in deltas for token in event.logprobs) == made.output_text != ""
    for response in (made, events[-1].response):
        logprobs = response.output[0].content[0].logprobs
        assert "".join(token.token for token in logprobs or ()) == made.output_text


async def test_results_of_tools_go_on_from_the_calls_that_were_stored(client: Client) -> None:
    """What a call of a tool looked like is known only to the response: a follow-up names it, and is understood."""
    calls: Any = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
    ]
    first = await client.say(calls)
    listed = (await client.all.input_items.list(first.id, order="asc")).data
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    second = await client.say("Thanks.", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens - 5


async def test_tokens_are_counted_as_a_response_has_them(client: Client) -> None:
    wish: Any = {"instructions": "You are terse."}
    first = await client.say("Hello!", **wish)
    for asked, reply in (
        (wish, first),
        (wish | {"previous_response_id": first.id}, None),
    ):
        counted = await client.all.input_tokens.count(model=MODEL, input="Hello!", **asked)
        reply = reply or await client.say("Hello!", **asked)
        assert counted.object == "response.input_tokens" and counted.input_tokens == reply.usage.input_tokens
    assert len((await client.all.input_items.list(first.id)).data) == 1, "counting leaves nothing behind"
    with pytest.raises(openai.NotFoundError):
        await client.all.input_tokens.count(model=MODEL, input="Hello!", previous_response_id="resp_none")


async def test_one_in_the_background_is_answered_at_once_and_read_later(client: Client) -> None:
    made = await client.say("Hello!", background=True)
    assert made.status == "queued" and made.background and not made.output
    read = await client.ended(made.id)
    assert read.status == "completed" and read.background
    whole = await client.say("Hello!")
    assert read.output_text == whole.output_text != ""
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.all.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match="stored"):
        await client.say("Hello!", background=True, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.say("Hello!", background=True, model="nope")


async def test_one_that_is_cancelled_keeps_its_beginning(
    client: Client, node: SharedNode, gateways: Gateways
) -> None:
    """By its own key alone; another finds nothing."""
    made = await client.all.create(model=MODEL, **LONG, background=True)
    assert (await client.all.retrieve(made.id)).status == "in_progress"
    for _ in range(2):  # once more changes nothing
        assert (await client.all.cancel(made.id)).status == "cancelled"
        await engine_is_empty(node)
    assert (await client.all.retrieve(made.id)).status == "cancelled"
    server = await gateways(api_keys=KEYS)
    own, other = (Client(server, key) for key in KEYS)
    async with own.sdk, other.sdk:
        made = await own.all.create(model=MODEL, **LONG, background=True)
        for call in (other.all.retrieve, other.all.cancel, other.all.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        await own.all.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await own.all.retrieve(made.id)


async def test_a_stream_in_the_background_goes_on_where_its_client_left_it(client: Client) -> None:
    stream = await client.say("Hello!", background=True, stream=True)
    seen = [await anext(aiter(stream)) for _ in range(3)]
    await stream.response.aclose()
    response_id, last = seen[0].response.id, seen[-1].sequence_number
    following = await client.all.retrieve(response_id, stream=True, starting_after=last)
    rest = [event async for event in following]
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert rest[-1].type == "response.completed"
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await client.all.retrieve(response_id, stream=True, starting_after=-5)
    await client.all.delete(response_id)
    for gone in (response_id, "resp_nope"):
        with pytest.raises(openai.NotFoundError, match="no response"):
            await client.all.retrieve(gone, stream=True)


async def test_what_a_response_goes_on_from_stands_in_every_form_of_it(client: Client) -> None:
    first = await client.say("Hello!")
    wish: Any = {"previous_response_id": first.id}
    forms = [await client.say("And again?", **wish, background=is_behind) for is_behind in (False, True)]
    for options in ({}, {"background": True}):
        events = await client.events("And again?", **wish, **options)
        forms += [event.response for event in events if hasattr(event, "response")]
    forms.append(await client.ended(forms[1].id))
    assert len(forms) >= 7 and {form.previous_response_id for form in forms} == {first.id}


async def test_a_response_of_a_session_that_was_just_deleted_is_kept(client: Client, server: Server) -> None:
    """Its client may go on from it; the deleted conversation stays as it was, so that it can be restored."""
    store, named = server.services.store, {"extra_headers": {"X-Session-Id": "gone"}}
    await client.say("Hello!", **named)
    await store.delete("local", "gone", time.time())
    made = await client.say("My secret word is Fezin.", **named)
    after = await client.say("What is my secret word?", previous_response_id=made.id)
    assert "Fezin" in after.output_text
    restored = await store.restore("local", "gone", time.time())
    assert [turn.content for turn in restored.turns] == ["Hello!"]


async def test_a_message_of_the_assistant_needs_no_type_and_all_of_its_text_is_read(client: Client) -> None:
    named, asked = (
        {"role": "user", "content": [{"type": "input_text", "text": text}]}
        for text in ("My name is Ann.", "What is my name?")
    )

    def answer(*texts: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "output_text", "text": text} for text in texts]}

    plain = await client.say([named, answer("Nice to meet you, Ann!"), asked], store=False)
    assert "Ann" in plain.output_text
    split = await client.say([named, {"type": "message"} | answer("Nice to ", "meet you, Ann!"), asked])
    assert (split.output_text, split.usage.input_tokens) == (plain.output_text, plain.usage.input_tokens)


async def test_the_details_of_usage_are_numbers(client: Client) -> None:
    """The OpenAI Agents SDK for JavaScript refuses a stream that ends with lists there."""
    replies = [await client.say("Hello!"), (await client.events("Hello!"))[-1].response]
    for usage in (reply.usage for reply in replies):
        for details in (usage.input_tokens_details, usage.output_tokens_details):
            assert all(type(value) is int for value in details.model_dump(exclude_unset=True).values()), (
                details
            )


async def test_items_are_named_by_their_ids(client: Client) -> None:
    """As the Vercel AI SDK does by default, and opencode with it."""
    first = await client.say("My name is Ann.")
    name = first.output[0].id
    named, asked = ({"role": "user", "content": text} for text in ("My name is Ann.", "What is my name?"))
    same = await client.say([named, {"role": "assistant", "content": first.output_text}, asked])
    for reference in ({"type": "item_reference", "id": name}, {"id": name}):
        second = await client.say([named, reference, asked])
        assert second.usage.input_tokens == same.usage.input_tokens
        assert second.output_text == same.output_text
    third = await client.say("And now?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens
    await client.all.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no item"):
        await client.say([named, reference, asked])


async def test_calls_of_tools_are_named_by_their_ids(client: Client) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    described = {"name": "get_weather", "description": "The weather of a city.", "parameters": city}
    wish: Any = {"tools": [{"type": "function"} | described], "max_output_tokens": 96}
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    events = await client.events([asked], **wish)
    (call,) = events[-1].response.output
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments and json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    for item in ({"type": "item_reference", "id": call.id}, call.model_dump(exclude_none=True)):
        answer = await client.say([asked, item, result], **wish)
        assert "Paris" in answer.output_text and "sunny" in answer.output_text


async def test_a_conversation_is_a_session_whose_turns_come_first(client: Client) -> None:
    first = await client.say("My name is Ann.", extra_headers={"X-Session-Id": "talk"})
    asked = "What is my name?"
    num_tokens = (await client.say(asked, previous_response_id=first.id)).usage.input_tokens
    for conversation in ("talk", {"id": "talk"}):
        named = await client.say(asked, conversation=conversation)
        assert named.usage.input_tokens > num_tokens
        num_tokens = named.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="no conversation"):
        await client.say(asked, conversation="conv_nope")
    with pytest.raises(openai.BadRequestError, match="not both"):
        await client.say(asked, conversation="talk", previous_response_id=first.id)


async def test_a_conversation_is_begun_read_listed_and_deleted(client: Client) -> None:
    all_ = client.sdk.conversations
    begun = await all_.create(metadata={"topic": "names"})
    assert begun.object == "conversation" and begun.metadata == {"topic": "names"}
    assert (await all_.retrieve(begun.id)).created_at == begun.created_at
    assert not (await all_.items.list(begun.id)).data
    alone = (await client.say("What is my name?")).usage.input_tokens
    await client.say("My name is Ann.", conversation=begun.id)
    said = await client.say("What is my name?", conversation=begun.id)
    assert said.usage.input_tokens > alone
    items = [item async for item in all_.items.list(begun.id, order="asc", limit=3)]
    assert [item.role for item in items] == ["user", "assistant"] * 2 and len(
        {item.id for item in items}
    ) == 4
    assert items[-1].content[0].text == said.output_text
    (last,) = (await all_.items.list(begun.id, limit=1)).data
    assert last.id == items[-1].id
    with pytest.raises(openai.BadRequestError, match="first response"):
        await all_.create(items=[{"type": "message", "role": "user", "content": "Hello"}])
    assert (await all_.delete(begun.id)).deleted
    for call in (all_.retrieve(begun.id), all_.items.list(begun.id), all_.delete("conv_nope")):
        with pytest.raises(openai.NotFoundError):
            await call


async def test_a_stream_that_runs_out_of_tokens_says_so(client: Client) -> None:
    cut = await client.events("Hello!", max_output_tokens=2)
    assert [event.type for event in cut if event.type.startswith("response.i")][-1] == "response.incomplete"
    last = cut[-1]
    assert last.type == "response.incomplete" and last.response.incomplete_details is not None
    assert last.response.output_text and last.sequence_number == len(cut) - 1
    assert (await client.all.retrieve(last.response.id)).status == "incomplete"
    assert (await client.events("Hello!"))[-1].type == "response.completed"
