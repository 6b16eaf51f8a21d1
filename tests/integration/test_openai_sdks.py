"""The OpenAI and Anthropic SDKs against the gateway on the real engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, get_args, get_type_hints

import openai
import pytest
import pytest_asyncio
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from gateway.app import Server
from gateway.errors import GatewayError

from .conftest import Gateways, SharedNode, engine_has, engine_is_empty, num_free_blocks, settle, told
from .facts import CHAT, COMPLETIONS, HELLO, KEYS, MESSAGES, MODEL, RESPONSES, Http

OpenAI = openai.AsyncOpenAI
GREEDY = {"temperature": 0}
PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def function(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"name": name, "description": description, "parameters": parameters}


def tools(*functions: dict[str, Any]) -> Any:
    return [{"type": "function", "function": each} for each in functions]


CITY = function("get_weather", "The weather of a city", city={"enum": ["Rome", "Oslo"]})
ADD = function("add", "Adds two numbers.", a={"type": "number"}, b={"type": "number"})
WEATHER = tools(function("get_weather", "The weather of a city.", city={"type": "string"}), ADD)
# A question that the model answers by a call of its own accord.
ASKS_WEATHER: Any = {"tools": WEATHER, "max_tokens": 96}


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: Server) -> AsyncIterator[OpenAI]:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # which reads no certificates
    async with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The SDK of 3,000 modules, which tests of other files do without."""
    import anthropic

    return anthropic


@pytest_asyncio.fixture(loop_scope="session")
async def claude(anthropic: Any, server: Server) -> AsyncIterator[Any]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    options = {"api_key": "none", "max_retries": 0, "timeout": 120, "http_client": http}
    async with anthropic.AsyncAnthropic(base_url=server.url, **options) as client:
        yield client


async def said_twice(claude: Any, **wish: Any) -> list[Any]:
    """A message, whole and streamed, greedily."""
    wish = {"model": MODEL, "max_tokens": 60, "messages": HELLO, "extra_body": GREEDY} | wish
    whole = await claude.messages.create(**wish)
    async with claude.messages.stream(**wish) as stream:
        return [whole, await stream.get_final_message()]


async def say(client: OpenAI, messages: Any = HELLO, **wish: Any) -> Any:
    """A chat completion, greedy if nothing else is said."""
    wish = {"model": MODEL, "temperature": 0} | wish
    return await client.chat.completions.create(messages=messages, **wish)


# -- chat completions ------------------------------------------------------------------------------------------------


async def test_models_and_keys(anthropic: Any, client: OpenAI, gateways: Gateways) -> None:
    models = [model.id async for model in client.models.list()]
    assert models[0] == MODEL and {"shout", "pirate", "json"} <= set(models)
    assert (await client.models.retrieve("shout")).id == "shout"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")
    server = await gateways(api_keys=KEYS)
    for key, is_right in ((KEYS[0], True), ("wrong", False)):
        async with (
            OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0) as other,
        ):
            if is_right:
                assert [model.id async for model in one.models.list()]
                assert (await other.messages.count_tokens(model=MODEL, messages=HELLO)).input_tokens > 0
                continue
            with pytest.raises(openai.AuthenticationError) as raised:
                await one.models.list()
            assert raised.value.body["type"] == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.count_tokens(model=MODEL, messages=HELLO)


async def test_a_stream_equals_the_whole_answer_and_ends_with_usage(client: OpenAI) -> None:
    whole = await say(client, model="shout")
    text, usage, finish = "", None, None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await say(client, model="shout", **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content != ""
    assert text.isupper() and whole.model == "shout", "an adapter is a model"
    assert finish == whole.choices[0].finish_reason == "stop"
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_choices_stops_and_logprobs(client: OpenAI) -> None:
    answer = await say(client, temperature=1, n=2, seed=3, max_tokens=8, logprobs=True, top_logprobs=2)
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    said = (await say(client, logprobs=True)).choices[0]
    whole = said.message.content
    assert whole and "".join(token.token for token in said.logprobs.content) == whole, "no token without text"
    pieces = [
        token.token
        async for chunk in await say(client, logprobs=True, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert "".join(pieces) == whole
    stop = whole[5:8]
    cut = await say(client, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]


async def test_completions(client: OpenAI) -> None:
    wish: Any = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    answer = await client.completions.create(prompt=["Hello", "Bye"], **wish)
    assert len(answer.choices) == 2
    stream = await client.completions.create(prompt="Hello", stream=True, **wish)
    parts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(parts) == answer.choices[0].text


async def test_a_client_that_leaves_frees_the_engine(client: OpenAI, node: SharedNode) -> None:
    """Also one that waits for the whole answer; tests of keys and traces leave a stream."""
    before = await num_free_blocks(node)
    task = asyncio.create_task(say(client, max_tokens=3000, extra_body={"ignore_eos": True}))
    await engine_has(node, 1)
    task.cancel()
    await engine_is_empty(node)
    assert await num_free_blocks(node) == before


async def test_repeated_request_ids_do_not_mix(client: OpenAI) -> None:
    async def one(word: str) -> str:
        asked = [{"role": "user", "content": f"My secret word is {word}. What is my secret word?"}]
        answer = await say(client, asked, extra_headers={"X-Request-Id": "same"})
        return answer.choices[0].message.content or ""

    words = ["Fezin", "Tobar", "Mirel", "Quorin"]
    alone = [await one(word) for word in words]
    assert await asyncio.gather(*(one(word) for word in words)) == alone


async def test_a_named_session_keeps_the_call(client: OpenAI, server: Server) -> None:
    """And a streamed call of a tool."""
    store = server.services.store
    async with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=HELLO, temperature=0, stream=True, extra_headers={"X-Session-Id": "agent-7"}
    ) as response:
        assert response.headers["X-Session-Id"] == "agent-7"
        await response.read()
    answer = await say(client, extra_body={"session_id": "agent-7"})
    turns = (await store.get_session("local", "agent-7")).turns
    assert [turn.content for turn in turns] == [HELLO[0]["content"]] * 2
    assert {turn.answer for turn in turns} == {answer.choices[0].message.content}
    assert turns[0].status == "done"
    named = {"extra_headers": {"X-Session-Id": "tools-7"}}
    assert await streamed(client, PARIS, ASKS_WEATHER | named) == ("", "get_weather", {"city": "Paris"})
    (turn,) = await settle(lambda: turns_of(server, "tools-7"))
    assert (turn.content, turn.answer, turn.status) == (PARIS[0]["content"], "", "done")
    assert turn.finish_reason == "tool_calls"


async def turns_of(server: Server, session_id: str) -> list[Any]:
    """Of a session, which is kept a moment after its client has seen the end of an answer; none before."""
    with contextlib.suppress(GatewayError):
        return (await server.services.store.get_session("local", session_id)).turns
    return []


async def test_an_answer_that_is_cut_is_kept_as_one_that_can_go_on(http: Http, server: Server) -> None:
    """By each API, whole and streamed."""
    chat = {"messages": HELLO, "max_tokens": 1}
    for path, body in (
        (CHAT, chat),
        (COMPLETIONS, {"prompt": "Hello", "max_tokens": 1}),
        (RESPONSES, {"input": "Hello!", "max_output_tokens": 1}),
        (MESSAGES, chat),
    ):
        for stream in (False, True):
            name = f"cut{path.replace('/', '-')}-{stream}"
            cut = {"model": MODEL, "session_id": name, "stream": stream}
            await told(http.post(path, json=body | cut))
            (turn,) = (await server.services.store.get_session("local", name)).turns
            assert (turn.finish_reason, turn.can_go_on) == ("length", True), name
    whole = {"model": MODEL, "session_id": "whole", "max_tokens": 60, "messages": HELLO}
    await told(http.post(MESSAGES, json=whole))
    assert (await server.services.store.get_session("local", "whole")).turns[0].finish_reason == "stop"


# -- tools -----------------------------------------------------------------------------------------------------------


async def test_a_tool_that_is_not_needed_or_not_offered_is_not_called(client: OpenAI) -> None:
    auto = await say(client, tools=tools(CITY), tool_choice="auto", max_tokens=40)
    assert auto.choices[0].message.content and not auto.choices[0].message.tool_calls
    for question in ("Set the timer to 5 minutes.", "What is the price of Fezin?", "Search the web."):
        answer = await say(client, [{"role": "user", "content": question}], max_tokens=40)
        assert "<tool" not in (answer.choices[0].message.content or "<tool")


async def test_a_model_that_is_asked_to_call_no_tool_answers_in_text(client: OpenAI, claude: Any) -> None:
    """By each API; it would call the tool by itself."""
    answer = (await say(client, PARIS, **ASKS_WEATHER, tool_choice="none")).choices[0]
    assert answer.finish_reason == "stop" and not answer.message.tool_calls
    said = answer.message.content
    assert said and "tool_call" not in said
    assert await streamed(client, PARIS, ASKS_WEATHER | {"tool_choice": "none"}) == (said, "", None)
    given = {"name": "get_weather", "description": "The weather of a city."}
    schema: Any = WEATHER[0]["function"]["parameters"]
    tool: Any = {"type": "function", "strict": True, "parameters": schema} | given
    response = await client.responses.create(
        model=MODEL,
        input=PARIS[0]["content"],
        tools=[tool],
        tool_choice="none",
        temperature=0,
        max_output_tokens=96,
    )
    assert response.output_text and "tool_call" not in response.output_text
    for reply in await said_twice(
        claude,
        messages=PARIS,
        max_tokens=96,
        tools=[given | {"input_schema": schema}],
        tool_choice={"type": "none"},
    ):
        assert reply.content[0].type == "text" and "tool_call" not in reply.content[0].text


async def test_open_webui_style_request(client: OpenAI) -> None:
    """Open WebUI sends tool_choice with every request, and a few fields of its own."""
    own = {"chat_id": "x", "background_tasks": {}, "priority": 99, "vllm_xargs": {"lane": "hi"}}
    stream = await say(client, stream=True, tool_choice="auto", tools=tools(CITY), extra_body=own)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def streamed(client: OpenAI, messages: Any, wish: Any) -> tuple[str, str, Any]:
    """A streamed answer's text, and the name and the arguments of its one call. Each chunk holds one thing: there are clients that read no more."""
    text = name = arguments = ""
    async for chunk in await say(client, messages, stream=True, **wish):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            is_end = choice.finish_reason is not None
            assert (choice.delta.content is None) or not choice.delta.tool_calls
            assert len(choice.delta.tool_calls or ()) <= 1
            assert not is_end or not (choice.delta.content or choice.delta.tool_calls)
            for piece in choice.delta.tool_calls or ():
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    return text, name, json.loads(arguments) if arguments else None


async def test_the_model_calls_a_tool_by_itself_and_answers_from_its_result(client: OpenAI) -> None:
    """`tool_choice` is left to the model, whole and streamed."""
    whole = (await say(client, PARIS, **ASKS_WEATHER)).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls and not whole.message.content
    (call,) = whole.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert await streamed(client, PARIS, ASKS_WEATHER) == ("", "get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    messages: Any = [*PARIS, whole.message.model_dump(exclude_none=True), result]
    answer = (await say(client, messages, **ASKS_WEATHER)).choices[0]
    assert answer.finish_reason == "stop" and not answer.message.tool_calls
    said = answer.message.content
    assert said and "Paris" in said and "sunny" in said
    assert await streamed(client, messages, ASKS_WEATHER) == (said, "", None)


async def test_a_tool_whose_schema_no_grammar_can_hold_is_offered_and_called_with_any_object(
    client: OpenAI, claude: Any
) -> None:
    """A pattern of another program, types of another API, a reference to another server. Another tool is held to its own."""
    city: Any
    for city in (
        {"type": "string", "pattern": "("},
        {"type": "STRING"},
        {"$ref": "https://a.example/b.json"},
    ):
        broken = function("get_weather", "The weather of a city.", city=city)
        wish: Any = {"tools": tools(broken), "max_tokens": 96}
        answer = await say(client, **wish)
        assert answer.choices[0].message.content
        for messages, offered in ((PARIS, [broken]), (PARIS, [broken, CITY | {"name": "other"}])):
            wish |= {"tools": tools(*offered), "tool_choice": "required"}
            _, name, arguments = await streamed(client, messages, wish)
            assert name == "get_weather" and isinstance(arguments, dict)
    strict = broken | {"strict": True}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        await say(client, PARIS, tools=tools(strict), tool_choice="required")


async def test_the_input_of_a_call_of_messages_is_an_object_whatever_its_tool_s_schema_says(
    claude: Any,
) -> None:
    tool: Any = {"name": "get_weather", "input_schema": {"type": "string", "maxLength": 4}}
    for reply in await said_twice(claude, tools=[tool], tool_choice={"type": "any"}):
        assert reply.content[0].type == "tool_use" and isinstance(reply.content[0].input, dict)


async def test_the_form_of_an_answer_is_held_as_far_as_a_grammar_can_unless_it_is_strict(
    client: OpenAI,
) -> None:
    rule = {"type": "string", "maxLength": 8, "pattern": "^(?!x)"}
    schema = {"type": "object", "properties": {"city": rule}, "required": ["city"], "not": {}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = await say(client, PARIS, response_format=form)
    assert len(json.loads(answer.choices[0].message.content or "")["city"]) <= 8
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    response = await client.responses.create(model=MODEL, input="Hello", text=text, temperature=0)
    assert json.loads(response.output_text).keys() == {"city"}
    form["json_schema"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="grammar"):
        await say(client, PARIS, response_format=form)


async def test_a_tool_with_a_rule_that_no_grammar_can_hold_is_called_unless_it_is_strict(
    client: OpenAI,
) -> None:
    # llguidance knows no look-behind.
    (tool,) = tools(function("get_weather", city={"type": "string", "pattern": "(?<=a)b"}))
    answer = await say(client, PARIS, tools=[tool], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments).keys() == {"city"}
    strict = tool | {"function": tool["function"] | {"strict": True}}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        await say(client, PARIS, tools=[strict], tool_choice="required")


async def test_a_tool_that_is_demanded_is_called_with_arguments_of_its_schema(
    client: OpenAI, claude: Any
) -> None:
    """By each API."""
    meant = await say(client, PARIS, **ASKS_WEATHER, tool_choice="required")
    (call,) = meant.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Paris"}, "as where the model is free to call"
    for tool_choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        wish: Any = {"tools": tools(CITY), "tool_choice": tool_choice}
        answer = await say(client, **wish)
        (call,) = answer.choices[0].message.tool_calls or ()
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Rome", "Oslo")
        assert (await streamed(client, HELLO, wish))[1:] == ("get_weather", arguments)
    tool: Any = {"type": "function", "strict": True} | CITY
    response = await client.responses.create(
        model=MODEL, input="Hello", tools=[tool], tool_choice="required", temperature=0
    )
    (made,) = response.output
    assert made.type == "function_call" and made.name == "get_weather"
    assert json.loads(made.arguments)["city"] in ("Rome", "Oslo")
    assert response.text is None, "the form by which the server demands a call was not asked for"
    schema: Any = {"name": CITY["name"], "input_schema": CITY["parameters"]}
    for reply in await said_twice(claude, tools=[schema], tool_choice={"type": "any"}):
        assert reply.stop_reason == "tool_use" and reply.content[0].type == "tool_use"
        assert reply.content[0].input["city"] in ("Rome", "Oslo")


# -- messages --------------------------------------------------------------------------------------------------------


async def test_anthropic_messages(anthropic: Any, claude: Any) -> None:
    message, _ = await said_twice(claude)
    assert message.content[0].type == "text" and message.content[0].text
    for reply in await said_twice(claude, model="shout"):
        assert reply.content[0].text.isupper()
    counted = await claude.messages.count_tokens(model=MODEL, messages=HELLO)
    used = message.usage
    cached = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    assert counted.input_tokens == used.input_tokens + cached
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(model="nope", max_tokens=5, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    for text in ("My name is Ann. " * 1200, "My name is Ann. " * 9000):
        asked: Any = [{"role": "user", "content": text}]
        # The words by which clients know it.
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
            await claude.messages.create(model=MODEL, max_tokens=4, messages=asked)


PLACE: Any = function(
    "go_to", mode={"const": "walk"}, city={"enum": ["Rome, the eternal city of seven hills"]}
)
GO: Any = {
    "tools": [{"name": "go_to", "input_schema": PLACE["parameters"]}],
    "tool_choice": {"type": "tool", "name": "go_to"},
}


async def test_a_call_of_messages_that_is_cut_off_says_so(claude: Any) -> None:
    """By its tokens, with no half of a city in it; or by a stop sequence, and then it is not one to make."""
    for num_tokens in (1, 8, 14):
        replies = await said_twice(claude, max_tokens=num_tokens, **GO)
        for reply in replies:
            assert reply.stop_reason == "max_tokens" and reply.usage.output_tokens == num_tokens
            (call,) = reply.content
            assert call.type == "tool_use" and call.name == "go_to"
            assert call.input in ({}, {"mode": "walk"}) and call.input == replies[0].content[0].input
    cut, _ = await said_twice(claude, stop_sequences=["eternal"], **GO)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "eternal")
    assert cut.content[0].type == "tool_use" and cut.content[0].input == {"mode": "walk"}


async def test_what_looks_like_a_call_stays_text_where_no_tool_is_offered(
    anthropic: Any, claude: Any
) -> None:
    """The system prompt is the one by which the demo model's template offers a tool, so that it writes a call."""
    tool = 'Tools:\n{"name": "get_weather", "arguments": {"city": "text"}} The weather of a city.'
    wish: Any = {"messages": PARIS, "system": tool}
    for reply in await said_twice(claude, **wish):
        assert reply.stop_reason == "end_turn"
        assert reply.content[0].type == "text" and reply.content[0].text.startswith("<tool_call>")
    with pytest.raises(anthropic.BadRequestError, match="offer `tools`"):
        await said_twice(claude, **wish, tool_choice={"type": "any"})


async def test_a_tool_runner_sends_whole_conversations_as_the_server_holds_none(
    anthropic: Any, claude: Any
) -> None:
    """A runner of Anthropic's SDK asks the server first to hold its conversation, and then sends new messages alone."""

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}, 21 degrees"

    wish: Any = {"model": MODEL, "max_tokens": 96, "messages": PARIS, "extra_body": GREEDY}
    runner = claude.beta.messages.tool_runner(**wish, tools=[get_weather])
    reply = await runner.until_done()
    assert "Paris" in reply.content[0].text and "sunny" in reply.content[0].text
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) > 80, "it has the question"
    with pytest.raises(anthropic.BadRequestError, match="without `thread`"):
        await claude.beta.messages.thread(model=MODEL, max_tokens=9).send(HELLO[0])


async def test_an_answer_that_the_client_has_begun_is_continued(claude: Any) -> None:
    asked: Any = {"role": "user", "content": "Hello! My name is Ada."}
    fresh, _ = await said_twice(claude, messages=[asked], max_tokens=12)
    text = fresh.content[0].text
    for begun in (text[:5], [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:5]}]):
        messages: Any = [asked, {"role": "assistant", "content": begun}]
        replies = await said_twice(claude, messages=messages, max_tokens=12)
        for reply in replies:
            assert reply.content[0].text and not reply.content[0].text.startswith(text[:5])
            assert text.startswith(text[:5] + reply.content[0].text[:2])
        counted, used = await claude.messages.count_tokens(model=MODEL, messages=messages), replies[0].usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


async def test_a_stream_counts_prompt_tokens_as_the_whole_reply_does(claude: Any) -> None:
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


async def test_documents_and_search_results_are_read(anthropic: Any, claude: Any, client: OpenAI) -> None:
    """Where else they may stand is tested without a server."""
    text = "A long text that the model should have read, about Rome."
    plain = {"type": "text", "text": text}
    source = {"type": "text", "media_type": "text/plain", "data": text}

    async def count(*blocks: Any) -> int:
        messages: Any = [{"role": "user", "content": blocks}]
        return (await claude.messages.count_tokens(model=MODEL, messages=messages)).input_tokens

    found = {"type": "search_result", "source": "", "title": "", "content": [plain]}
    assert await count({"type": "document", "source": source}, found) == await count(plain, plain)
    data = base64.b64encode(text.encode()).decode()
    own = {"type": "base64", "media_type": "text/plain", "data": data}
    assert await count({"type": "document", "source": own}) == await count(plain)
    for source in (
        {"type": "url", "url": "https://a.example/b.pdf"},
        own | {"media_type": "application/pdf"},
    ):
        with pytest.raises(anthropic.BadRequestError, match="document"):
            await count({"type": "document", "source": source})
    file: Any = {"type": "file", "file": {"file_data": f"data:text/plain;base64,{data}"}}
    read = await say(client, [{"role": "user", "content": [file]}], max_tokens=8)
    told = await say(client, [{"role": "user", "content": text}], max_tokens=8)
    assert read.usage == told.usage and read.choices[0].message == told.choices[0].message
    with pytest.raises(openai.BadRequestError, match="file_data"):
        await say(client, [{"role": "user", "content": [file | {"file": {"file_id": "x"}}]}])


async def test_models_in_anthropics_form(anthropic: Any, claude: Any) -> None:
    page = await claude.models.list(limit=2)
    assert page.data[0].id == page.data[0].display_name == MODEL and page.has_more
    assert page.data[0].type == "model" and page.data[0].max_input_tokens == 4096
    paged, whole = [[card.id async for card in claude.models.list(limit=limit)] for limit in (2, 1000)]
    assert paged == whole
    assert (await claude.models.retrieve("shout")).id == "shout"
    with pytest.raises(anthropic.NotFoundError) as refused:
        await claude.models.retrieve("nope")
    assert refused.value.body["error"]["type"] == "not_found_error" and refused.value.request_id


# -- what clients send to all ----------------------------------------------------------------------------------------


async def test_more_tokens_than_the_model_reads_are_clipped(client: OpenAI, claude: Any) -> None:
    """Some clients send the same number to every model: LiteLLM 128,000, qwen-code 8,000, Claude Code a thinking budget.

    A model that does not reason goes without thinking.
    """
    for num_tokens in (4096, 128_000):
        reply = await claude.messages.create(
            model=MODEL, max_tokens=num_tokens, messages=HELLO, extra_body=GREEDY
        )
        assert reply.stop_reason == "end_turn"
        for name in ("max_tokens", "max_completion_tokens"):
            chat = await say(client, **{name: num_tokens})
            assert chat.choices[0].finish_reason == "stop"
        response = await client.responses.create(
            model=MODEL, input="Hello!", max_output_tokens=num_tokens, temperature=0
        )
        assert response.status == "completed"
    thinking: Any = {"type": "enabled", "budget_tokens": 31_999}
    for reply in await said_twice(claude, max_tokens=32_000, thinking=thinking):
        assert reply.stop_reason == "end_turn" and reply.content[0].type == "text"


def nullable(params: Any) -> dict[str, None]:
    """The fields of a call that its SDK says may be null, each null."""
    hints = get_type_hints(params)
    return {name: None for name, hint in hints.items() if type(None) in get_args(hint)}


async def test_every_field_that_may_be_null_is_as_good_as_left_out(anthropic: Any, http: Http) -> None:
    """The fields are those of the installed SDKs, which are made of the APIs' descriptions."""
    messages = {"messages": HELLO, "max_tokens": 4}
    for path, params, body in (
        (CHAT, chat_params.CompletionCreateParamsBase, messages),
        (COMPLETIONS, completion_params.CompletionCreateParamsBase, {"prompt": "Hello", "max_tokens": 4}),
        (RESPONSES, response_params.ResponseCreateParamsBase, {"input": "Hello", "max_output_tokens": 4}),
        (MESSAGES, anthropic.types.message_create_params.MessageCreateParamsBase, messages),
    ):
        sent = nullable(params) | body | {"model": MODEL}
        await told(http.post(path, json=sent))
        assert '"error":{' not in await told(http.post(path, json=sent | {"stream": True}))


async def test_an_answer_is_sent_back_with_all_its_fields(client: OpenAI, claude: Any, http: Http) -> None:
    """Nulls, ids, types and all: what an SDK's objects hold is what many clients send as history."""
    answer = await say(client, PARIS, **ASKS_WEATHER)
    message = answer.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    body: Any = {"model": MODEL, "messages": [*PARIS, message.model_dump(), result], "max_tokens": 4}
    await told(http.post(CHAT, json=body))
    offered: Any = [{"type": "function"} | tool["function"] for tool in WEATHER]
    for question, given in ((PARIS, offered), (HELLO, [])):
        said = await client.responses.create(model=MODEL, input=question, tools=given, temperature=0)
        items = [*question, *(item.model_dump() for item in said.output)]
        if given:
            output = [{"type": "input_text", "text": "sunny"}]
            call_id = said.output[0].call_id
            items.append({"type": "function_call_output", "call_id": call_id, "output": output})
        items.append({"role": "user", "content": "Thanks."})
        await told(http.post(RESPONSES, json={"model": MODEL, "input": items}))
    reply, _ = await said_twice(claude, max_tokens=8)
    said_before = {"role": "assistant", "content": [each.model_dump() for each in reply.content]}
    body = {"model": MODEL, "max_tokens": 4, "messages": [*HELLO, said_before, *PARIS]}
    await told(http.post(MESSAGES, json=body))


async def test_what_is_too_long_by_its_characters_is_shortened_as_by_its_tokens(http: Http) -> None:
    one = {"description": "x " * 300, "parameters": {"type": "object", "properties": {}}}
    many = tools(*({"name": f"tool_{at}"} | one for at in range(120)))
    body: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    for num_tools in (90, 120):  # 60,000 and 80,000 characters, of which 65,536 are read
        async with http.post(CHAT, json=body | {"tools": many[:num_tools]}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["X-Overture-Left-Out"] == f"tools={num_tools}"
    long = body | {"messages": [{"role": "user", "content": "x" * 70_000}]}
    error = (await told(http.post(CHAT, json=long), 400))["error"]
    assert error["code"] == "context_length_exceeded" and "max_prompt_chars" in error["message"]


async def test_who_offers_functions_gets_the_call_of_one_and_gives_back_its_result(client: OpenAI) -> None:
    """As programs of 2023 do: by themselves, by name, whole and streamed."""
    functions: Any = [tool["function"] for tool in WEATHER]
    for more in ({}, {"function_call": {"name": "get_weather"}}):
        wish: Any = {"functions": functions, "max_tokens": 96} | more
        (choice,) = (await say(client, PARIS, **wish)).choices
        called = choice.message.function_call
        assert called and not choice.message.tool_calls and not choice.message.content
        assert (called.name, json.loads(called.arguments)) == ("get_weather", {"city": "Paris"})
        assert choice.finish_reason == ("stop" if more else "function_call")
        name = arguments = reason = ""
        async for chunk in await say(client, PARIS, stream=True, **wish):
            delta = chunk.choices[0].delta
            assert not delta.tool_calls
            reason = chunk.choices[0].finish_reason or reason
            if delta.function_call is not None:
                name += delta.function_call.name or ""
                arguments += delta.function_call.arguments or ""
        assert (name, json.loads(arguments), reason) == (
            "get_weather",
            {"city": "Paris"},
            choice.finish_reason,
        )
    back = choice.message.model_dump(exclude_none=True)
    result = {"role": "function", "name": "get_weather", "content": "sunny in Paris, 21 degrees"}
    answer = await say(client, [*PARIS, back, result], functions=functions, max_tokens=96)
    assert "sunny" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
