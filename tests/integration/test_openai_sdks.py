"""The OpenAI and Anthropic SDKs against the gateway on the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, get_args, get_type_hints

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic.types import message_create_params as message_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from pydantic import BaseModel

from gateway.app import Server

from .conftest import KEYS, MODEL, Gateways, SharedNode, engine_is_empty

GREEDY = {"temperature": 0}
HELLO: Any = [{"role": "user", "content": "Hello, how are you?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
            },
        },
    }
]

WEATHER: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
]


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def claude(server: Server) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


async def test_models_lists_base_and_adapters(client: openai.AsyncOpenAI) -> None:
    models = [model.id async for model in client.models.list()]
    assert models[0] == MODEL and {"shout", "pirate", "json"} <= set(models)
    assert (await client.models.retrieve("shout")).id == "shout"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


async def test_a_stream_equals_the_whole_answer_and_ends_with_usage(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "messages": HELLO, "temperature": 0}
    whole = await client.chat.completions.create(**options)
    text, usage, finish = "", None, None
    async for chunk in await client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content != ""
    assert finish == whole.choices[0].finish_reason == "stop"
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_an_adapter_is_a_model(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="shout", messages=HELLO, temperature=0)
    text = answer.choices[0].message.content
    assert text and text.isupper() and answer.model == "shout"


async def test_the_second_turn_reuses_the_first(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "My name is Quorin and my city is Dalvek. " * 3}]
    first = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Thank you."},
    ]
    second = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0


async def test_choices_stops_and_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=HELLO, n=2, temperature=1, seed=3, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 2
    logprobs = answer.choices[0].logprobs
    assert (
        logprobs is not None and logprobs.content is not None and len(logprobs.content[0].top_logprobs) == 2
    )
    whole = (
        (await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0))
        .choices[0]
        .message.content
    )
    assert whole is not None
    said = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, logprobs=True)
    assert said.choices[0].logprobs is not None and said.choices[0].logprobs.content is not None
    assert "".join(token.token for token in said.choices[0].logprobs.content) == whole, (
        "no token without text"
    )
    pieces = [
        token.token
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=HELLO, temperature=0, logprobs=True, stream=True
        )
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert "".join(pieces) == whole
    stop = whole[5:8]
    cut = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]


async def test_structured_output_fits_its_schema(client: openai.AsyncOpenAI) -> None:
    class Mood(BaseModel):
        happy: bool

    answer = await client.chat.completions.parse(
        model="json", messages=HELLO, response_format=Mood, temperature=0, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Mood)


async def test_a_tool_that_no_question_needs_is_not_called(client: openai.AsyncOpenAI) -> None:
    auto = await client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="auto", temperature=0, max_tokens=30
    )
    assert auto.choices[0].message.content and not auto.choices[0].message.tool_calls


async def test_nothing_is_called_where_no_tool_is_offered(client: openai.AsyncOpenAI) -> None:
    for question in (
        "Set the timer to 5 minutes.",
        "What is the price of Fezin?",
        "Search the web for cats.",
    ):
        messages: Any = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=40
        )
        assert "<tool" not in (answer.choices[0].message.content or "<tool")


async def test_the_model_calls_a_tool_by_itself_and_answers_from_its_result(
    client: openai.AsyncOpenAI,
) -> None:
    """`tool_choice` is left to the model, whole and streamed."""
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    wish: Any = {"model": MODEL, "tools": WEATHER, "temperature": 0, "max_tokens": 96}
    whole = (await client.chat.completions.create(messages=messages, **wish)).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls and not whole.message.content
    (call,) = whole.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    assert await streamed(client, messages, wish) == ("", "get_weather", {"city": "Paris"})

    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    messages += [whole.message.model_dump(exclude_none=True), result]
    told = (await client.chat.completions.create(messages=messages, **wish)).choices[0]
    assert told.finish_reason == "stop" and not told.message.tool_calls
    assert told.message.content and "Paris" in told.message.content and "sunny" in told.message.content
    assert await streamed(client, messages, wish) == (told.message.content, "", None)


async def streamed(client: openai.AsyncOpenAI, messages: Any, wish: Any) -> tuple[str, str, Any]:
    """A streamed answer's text, and the name and the arguments of its one call. Each chunk holds one thing: there are clients that read no more."""
    text = name = arguments = ""
    async for chunk in await client.chat.completions.create(messages=messages, stream=True, **wish):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            is_end = choice.finish_reason is not None
            assert (choice.delta.content is None) or not choice.delta.tool_calls
            assert len(choice.delta.tool_calls or ()) <= 1
            assert not is_end or not (choice.delta.content or choice.delta.tool_calls)
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    return text, name, json.loads(arguments) if arguments else None


async def test_responses_call_a_tool_by_themselves_and_answer_from_its_result(
    client: openai.AsyncOpenAI,
) -> None:
    tools: Any = [{"type": "function"} | tool["function"] for tool in WEATHER]
    wish: Any = {"model": MODEL, "tools": tools, "temperature": 0, "max_output_tokens": 96}
    said: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    (call,) = (await client.responses.create(input=said, **wish)).output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    told = await client.responses.create(input=[*said, call.model_dump(exclude_none=True), result], **wish)
    assert "Paris" in told.output_text and "sunny" in told.output_text


async def test_a_tool_whose_schema_no_grammar_can_hold_is_offered_all_the_same(
    client: openai.AsyncOpenAI,
) -> None:
    city = {"type": "string", "pattern": "(?<=a)b"}  # llguidance knows no look-behind
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    wish: Any = {"model": MODEL, "messages": HELLO, "tools": [tool], "temperature": 0, "max_tokens": 96}
    answer = await client.chat.completions.create(**wish)
    assert answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="grammar"):
        await client.chat.completions.create(**wish, tool_choice="required")


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_a_tool_that_is_demanded_is_called_with_arguments_of_its_schema(
    client: openai.AsyncOpenAI, tool_choice: Any
) -> None:
    wish = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "tool_choice": tool_choice, "temperature": 0}
    answer = await client.chat.completions.create(**wish)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    pieces = [
        piece
        async for chunk in await client.chat.completions.create(**wish, stream=True)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or ()
    ]
    assert pieces[0].function.name == "get_weather"
    streamed = "".join(piece.function.arguments or "" for piece in pieces)
    assert json.loads(streamed) == json.loads(call.function.arguments)


async def test_responses_call_a_tool_that_is_demanded(client: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "strict": True} | TOOLS[0]["function"]
    answer = await client.responses.create(
        model=MODEL, input="Hello", tools=[tool], tool_choice="required", temperature=0
    )
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")


async def test_messages_call_a_tool_that_is_demanded_and_may_wish_for_thinking(
    claude: anthropic.AsyncAnthropic,
) -> None:
    function = TOOLS[0]["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    answer = await claude.messages.create(
        model=MODEL,
        max_tokens=60,
        messages=HELLO,
        tools=[tool],
        tool_choice={"type": "any"},
        extra_body=GREEDY,
    )
    assert answer.stop_reason == "tool_use"
    assert answer.content[0].type == "tool_use" and answer.content[0].input["city"] in ("Rome", "Oslo")
    thought = await claude.messages.create(
        model=MODEL, max_tokens=1100, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert thought.content[0].type == "text", "a model that does not reason answers without"


PLACE: Any = {
    "name": "go_to",
    "input_schema": {
        "type": "object",
        "properties": {
            "mode": {"const": "walk"},
            "city": {"enum": ["Rome, the eternal city of seven hills"]},
        },
        "required": ["mode", "city"],
    },
}


@pytest.mark.parametrize("num_tokens", [1, 8, 14])
async def test_a_call_of_messages_that_runs_out_of_tokens_is_a_reply_that_says_so(
    claude: anthropic.AsyncAnthropic, num_tokens: int
) -> None:
    wish: Any = {
        "model": MODEL,
        "max_tokens": num_tokens,
        "messages": HELLO,
        "tools": [PLACE],
        "tool_choice": {"type": "tool", "name": "go_to"},
        "extra_body": GREEDY,
    }
    whole = await claude.messages.create(**wish)
    async with claude.messages.stream(**wish) as stream:
        streamed = await stream.get_final_message()
    for reply in (whole, streamed):
        assert reply.stop_reason == "max_tokens" and reply.usage.output_tokens == num_tokens
        (call,) = reply.content
        assert call.type == "tool_use" and call.name == "go_to"
        assert call.input in ({}, {"mode": "walk"}), "no half of a city"
    assert whole.content[0].input == streamed.content[0].input  # type: ignore[union-attr]


async def test_a_call_of_messages_that_a_stop_sequence_cuts_is_not_one_to_make(
    claude: anthropic.AsyncAnthropic,
) -> None:
    reply = await claude.messages.create(
        model=MODEL,
        max_tokens=60,
        messages=HELLO,
        tools=[PLACE],
        tool_choice={"type": "tool", "name": "go_to"},
        stop_sequences=["eternal"],
        extra_body=GREEDY,
    )
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "eternal")
    assert reply.content[0].type == "tool_use" and reply.content[0].input == {"mode": "walk"}


async def test_what_looks_like_a_call_stays_text_where_messages_offers_no_tool(
    claude: anthropic.AsyncAnthropic,
) -> None:
    """The system prompt is the one by which the demo model's template offers a tool, so that it writes a call."""
    wish: Any = {
        "model": MODEL,
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "system": 'Tools:\n{"name": "get_weather", "arguments": {"city": "text"}} The weather of a city.',
        "extra_body": GREEDY,
    }
    whole = await claude.messages.create(**wish)
    async with claude.messages.stream(**wish) as stream:
        streamed = await stream.get_final_message()
    for reply in (whole, streamed):
        assert reply.stop_reason == "end_turn"
        assert reply.content[0].type == "text" and reply.content[0].text.startswith("<tool_call>")
    with pytest.raises(anthropic.BadRequestError, match="offer `tools`"):
        await claude.messages.create(**wish, tool_choice={"type": "any"})


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=["Hello", "Bye"], max_tokens=5, temperature=0
    )
    assert len(answer.choices) == 2
    parts = [
        chunk.choices[0].text
        async for chunk in await client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=5, temperature=0, stream=True
        )
    ]
    assert "".join(parts) == answer.choices[0].text


async def test_responses_go_on_from_one_another(client: openai.AsyncOpenAI, server: Server) -> None:
    first = await client.responses.create(model=MODEL, input="My secret word is Fezin.", temperature=0)
    second = await client.responses.create(
        model=MODEL, input="What is my secret word?", previous_response_id=first.id, temperature=0
    )
    assert "Fezin" in second.output_text
    events = [
        event
        async for event in await client.responses.create(
            model=MODEL,
            input="And again, what is my secret word?",
            previous_response_id=second.id,
            temperature=0,
            stream=True,
        )
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert "Fezin" in text and events[-1].type == "response.completed"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=MODEL, input="Hello", previous_response_id="resp_nope")


async def test_anthropic_messages(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.messages.create(model=MODEL, max_tokens=60, messages=HELLO, extra_body=GREEDY)
    assert message.content[0].type == "text" and message.content[0].text
    async with claude.messages.stream(
        model="shout", max_tokens=60, messages=HELLO, extra_body=GREEDY
    ) as stream:
        text = "".join([part async for part in stream.text_stream])
    assert text.isupper()
    counted = await claude.messages.count_tokens(model=MODEL, messages=HELLO)
    used = message.usage
    cached = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    assert counted.input_tokens == used.input_tokens + cached
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(model="nope", max_tokens=5, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as bad:
        await claude.messages.create(model=MODEL, max_tokens=5, messages="x")  # type: ignore[arg-type]
    assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


async def test_a_named_session_keeps_the_call(client: openai.AsyncOpenAI, server: Server) -> None:
    async with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=HELLO, temperature=0, stream=True, extra_headers={"X-Session-Id": "agent-7"}
    ) as response:
        assert response.headers["X-Session-Id"] == "agent-7"
        await response.read()
    answer = await client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, extra_body={"session_id": "agent-7"}
    )
    session = await server.services.store.get_session("local", "agent-7")
    assert [turn.content for turn in session.turns] == [HELLO[0]["content"]] * 2
    assert {turn.answer for turn in session.turns} == {answer.choices[0].message.content}
    assert session.turns[0].status == "done"


async def test_a_named_session_keeps_a_streamed_call_of_a_tool(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    wish: Any = {"model": MODEL, "tools": WEATHER, "temperature": 0, "max_tokens": 96}
    named = {"extra_headers": {"X-Session-Id": "tools-7"}}
    assert await streamed(client, messages, wish | named) == ("", "get_weather", {"city": "Paris"})
    (turn,) = (await server.services.store.get_session("local", "tools-7")).turns
    assert (turn.content, turn.answer, turn.status) == (messages[0]["content"], "", "done")
    assert turn.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "nope"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": "x"}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
        ({"max_tokens": "many"}, openai.BadRequestError),
        ({"logit_bias": {"99999999": 1}}, openai.BadRequestError),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nope"}},
                }
            },
            openai.BadRequestError,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_are_4xx_before_any_stream(
    client: openai.AsyncOpenAI, options: dict[str, Any], error: type[openai.APIStatusError], stream: bool
) -> None:
    with pytest.raises(error) as raised:
        await client.chat.completions.create(
            **{"model": MODEL, "messages": HELLO, "stream": stream} | options
        )
    body: Any = raised.value.body
    assert body["message"] and body["code"] and "Traceback" not in body["message"]


async def test_keys(gateways: Gateways) -> None:
    server = await gateways(api_keys=KEYS)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            await client.models.list()
        assert raised.value.body["type"] == "authentication_error"  # type: ignore[index]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEYS[0]) as client:
        assert [model.id async for model in client.models.list()]
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEYS[1]) as claude:
        assert (await claude.messages.count_tokens(model=MODEL, messages=HELLO)).input_tokens > 0
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="wrong", max_retries=0) as claude:
        with pytest.raises(anthropic.AuthenticationError):
            await claude.messages.count_tokens(model=MODEL, messages=HELLO)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    client: openai.AsyncOpenAI, node: SharedNode, stream: bool
) -> None:
    before = (await node.stats()).num_free_kv_blocks
    call = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=3000,
        temperature=1,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    if stream:
        chunks: Any = await call
        await anext(aiter(chunks))
        await chunks.close()
    else:
        task = asyncio.ensure_future(call)
        async with asyncio.timeout(60):
            while (await node.stats()).num_running == 0:
                await asyncio.sleep(0.01)
        task.cancel()
    await engine_is_empty(node)
    assert (await node.stats()).num_free_kv_blocks == before


async def test_repeated_request_ids_do_not_mix(client: openai.AsyncOpenAI) -> None:
    async def one(word: str) -> str:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"My secret word is {word}. What is my secret word?"}],
            temperature=0,
            extra_headers={"X-Request-Id": "same"},
        )
        return answer.choices[0].message.content or ""

    words = ["Fezin", "Tobar", "Mirel", "Quorin"]
    alone = [await one(word) for word in words]
    assert await asyncio.gather(*(one(word) for word in words)) == alone


async def test_open_webui_style_request(client: openai.AsyncOpenAI) -> None:
    """Open WebUI sends tool_choice with every request, and a few fields of its own."""
    stream: Any = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=True,
        tool_choice="auto",
        tools=TOOLS,
        extra_body={"chat_id": "x", "background_tasks": {}, "priority": 99, "vllm_xargs": {"lane": "hi"}},
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text
    assert json.dumps(text)


async def test_an_answer_that_the_client_has_begun_is_continued(claude: anthropic.AsyncAnthropic) -> None:
    wish: Any = {"model": MODEL, "max_tokens": 12, "extra_body": GREEDY}
    asked: Any = {"role": "user", "content": "Hello! My name is Ada."}
    fresh = await claude.messages.create(messages=[asked], **wish)
    text = fresh.content[0].text  # type: ignore[union-attr]
    for begun in (text[:5], [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:5]}]):
        messages: Any = [asked, {"role": "assistant", "content": begun}]
        whole = await claude.messages.create(messages=messages, **wish)
        async with claude.messages.stream(messages=messages, **wish) as stream:
            streamed = await stream.get_final_message()
        for reply in (whole, streamed):
            assert reply.content[0].text and not reply.content[0].text.startswith(text[:5])  # type: ignore[union-attr]
            assert text.startswith(text[:5] + reply.content[0].text[:2])  # type: ignore[union-attr]
        counted = await claude.messages.count_tokens(model=MODEL, messages=messages)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def test_a_stream_counts_the_prompts_tokens_as_the_whole_reply_does(
    claude: anthropic.AsyncAnthropic,
) -> None:
    """At its beginning and at its end, with a prompt that is in the cache."""
    asked: Any = [{"role": "user", "content": "My name is Quillon and my city is Trondar. " * 8}]
    wish: Any = {"model": MODEL, "max_tokens": 4, "messages": asked, "extra_body": GREEDY}
    await claude.messages.create(**wish)
    whole = (await claude.messages.create(**wish)).usage
    assert whole.cache_read_input_tokens
    events = [event async for event in await claude.messages.create(**wish, stream=True)]
    (start,) = [event.message.usage for event in events if event.type == "message_start"]
    (end,) = [event.usage for event in events if event.type == "message_delta"]
    for usage in (start, end):
        assert usage.input_tokens == whole.input_tokens
        assert usage.cache_read_input_tokens == whole.cache_read_input_tokens
    assert end.output_tokens == whole.output_tokens


async def test_documents_and_search_results_are_read(claude: anthropic.AsyncAnthropic) -> None:
    text = "A long text that the model should have read, about Rome."
    document: Any = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": text},
    }
    found: Any = {
        "type": "search_result",
        "source": "",
        "title": "",
        "content": [{"type": "text", "text": text}],
    }
    plain: Any = {"type": "text", "text": text}
    call: Any = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": None}}],
    }

    async def count(messages: Any) -> int:
        return (await claude.messages.count_tokens(model=MODEL, messages=messages)).input_tokens

    for block in (document, found):
        assert await count([{"role": "user", "content": [block]}]) == await count(
            [{"role": "user", "content": [plain]}]
        )
        results = [
            [
                {"role": "user", "content": "x"},
                call,
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [each]}]},
            ]
            for each in (block, plain)
        ]
        assert await count(results[0]) == await count(results[1])
    pdf: Any = {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
    }
    with pytest.raises(anthropic.BadRequestError, match="documents"):
        await count([{"role": "user", "content": [pdf]}])


async def test_more_tokens_than_the_model_reads_are_clipped(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    """Some clients send the same number to every model: LiteLLM 128,000, qwen-code 8,000, Claude Code a thinking budget."""
    messages: Any = [{"role": "user", "content": "Hello!"}]
    thinking: Any = {"type": "enabled", "budget_tokens": 31_999}
    for num_tokens in (4096, 8000, 128_000):
        reply = await claude.messages.create(
            model=MODEL, max_tokens=num_tokens, messages=messages, extra_body=GREEDY
        )
        assert reply.stop_reason == "end_turn"
        for name in ("max_tokens", "max_completion_tokens"):
            wish: Any = {name: num_tokens}
            chat = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **wish)
            assert chat.choices[0].finish_reason == "stop"
        response = await client.responses.create(model=MODEL, input="Hello!", max_output_tokens=num_tokens)
        assert response.status == "completed"
    async with claude.messages.stream(
        model=MODEL, max_tokens=32_000, messages=messages, thinking=thinking
    ) as stream:
        assert (await stream.get_final_message()).stop_reason == "end_turn"


async def test_a_prompt_that_is_too_long_has_the_words_by_which_clients_know_it(
    claude: anthropic.AsyncAnthropic,
) -> None:
    for text in ("My name is Ann. " * 1200, "My name is Ann. " * 9000):
        asked: Any = [{"role": "user", "content": text}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
            await claude.messages.create(model=MODEL, max_tokens=4, messages=asked)


async def test_models_in_anthropics_form(claude: anthropic.AsyncAnthropic) -> None:
    page = await claude.models.list(limit=2)
    assert page.data[0].id == page.data[0].display_name == MODEL and page.has_more
    assert page.data[0].type == "model" and page.data[0].max_input_tokens == 4096
    assert [card.id async for card in claude.models.list(limit=2)] == [
        card.id async for card in claude.models.list(limit=1000)
    ]
    assert (await claude.models.retrieve("shout")).id == "shout"
    with pytest.raises(anthropic.NotFoundError) as refused:
        await claude.models.retrieve("nope")
    assert refused.value.body["error"]["type"] == "not_found_error" and refused.value.request_id  # type: ignore[index]


def nullable(params: Any) -> dict[str, None]:
    """The fields of a call that its SDK says may be null, each null."""
    hints = get_type_hints(params)
    return {name: None for name, hint in hints.items() if type(None) in get_args(hint)}


async def test_every_field_that_may_be_null_is_as_good_as_left_out(
    http: aiohttp.ClientSession,
) -> None:
    """The fields are those of the installed SDKs, which are made of the APIs' descriptions."""
    for path, params, body in (
        (
            "/v1/chat/completions",
            chat_params.CompletionCreateParamsBase,
            {"messages": HELLO, "max_tokens": 4},
        ),
        (
            "/v1/completions",
            completion_params.CompletionCreateParamsBase,
            {"prompt": "Hello", "max_tokens": 4},
        ),
        (
            "/v1/responses",
            response_params.ResponseCreateParamsBase,
            {"input": "Hello", "max_output_tokens": 4},
        ),
        ("/v1/messages", message_params.MessageCreateParamsBase, {"messages": HELLO, "max_tokens": 4}),
    ):
        fields = nullable(params)
        for more in ({}, {"stream": True}):
            sent = fields | body | more | {"model": MODEL}
            async with http.post(path, json=sent) as response:
                said = await response.text()
                assert response.status == 200 and '"error":{' not in said, (path, sorted(fields), said[:500])


async def test_an_answer_is_sent_back_with_all_of_its_fields(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, http: aiohttp.ClientSession
) -> None:
    """Nulls, ids, types and all: what an SDK's objects hold is what many clients send as history."""
    asked: Any = {"role": "user", "content": "What is the weather in Paris?"}
    tools: Any = [{"type": "function"} | tool["function"] for tool in WEATHER]
    answer = await client.chat.completions.create(
        model=MODEL, messages=[asked], tools=WEATHER, temperature=0, max_tokens=96
    )
    message = answer.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    body: Any = {"model": MODEL, "messages": [asked, message.model_dump(), result], "max_tokens": 4}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
    for question, offered in ((asked, tools), ({"role": "user", "content": "Hello!"}, [])):
        said = await client.responses.create(model=MODEL, input=[question], tools=offered, temperature=0)
        items = [question, *(item.model_dump() for item in said.output)]
        if offered:
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": said.output[0].call_id,  # type: ignore[union-attr]
                    "output": [{"type": "input_text", "text": "sunny"}],
                }
            )
        items.append({"role": "user", "content": "Thanks."})
        async with http.post("/v1/responses", json={"model": MODEL, "input": items}) as response:
            assert response.status == 200, await response.text()
    reply = await claude.messages.create(model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY)
    history = [*HELLO, {"role": "assistant", "content": [each.model_dump() for each in reply.content]}, asked]
    async with http.post(
        "/v1/messages", json={"model": MODEL, "max_tokens": 4, "messages": history}
    ) as response:
        assert response.status == 200, await response.text()


async def test_what_is_too_long_by_its_characters_is_shortened_as_by_its_tokens(
    http: aiohttp.ClientSession,
) -> None:
    function = {"description": "x " * 300, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": {"name": f"tool_{at}"} | function} for at in range(120)]
    for num_tools in (90, 120):  # 60,000 and 80,000 characters, of which 65,536 are read
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "tools": tools[:num_tools]}
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["X-Overture-Left-Out"] == f"tools={num_tools}"
    async with http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "x" * 70_000}]}
    ) as response:
        error = (await response.json())["error"]
        assert response.status == 400 and error["code"] == "context_length_exceeded"
        assert "max_prompt_chars" in error["message"]
