"""The `openai` package: chat, completions, responses, models and errors, synchronous and asynchronous."""

from __future__ import annotations

import json
from functools import partial

import openai
from harness import (
    KEY,
    MODEL,
    QUESTION,
    V1_URL,
    WEATHER_SCHEMA,
    WEATHER_TOOL,
    call,
    call_all,
    has_city,
    raises,
)
from weather import Weather

client = openai.OpenAI(base_url=V1_URL, api_key=KEY, max_retries=0)
other = openai.AsyncOpenAI(base_url=V1_URL, api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": "Hello! My name is Ada."}]
ASK = [{"role": "user", "content": QUESTION}]
CONVERSATIONS = {
    "a system prompt": [{"role": "system", "content": "You are terse."}, *HELLO],
    "several turns": [*HELLO, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Who am I?"}],
    "content parts": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
}  # fmt: skip
CHOICES = {"required": "required", "named": {"type": "function", "function": {"name": "get_weather"}}}
RESPONSES_TOOL = {"type": "function", "strict": True} | WEATHER_TOOL["function"]
SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": WEATHER_SCHEMA, "strict": True},
}


def chat(**more):
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 32} | more)


def chat_plain():
    reply = chat()
    assert reply.choices[0].message.content and reply.choices[0].finish_reason in {"stop", "length"}
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def chat_of(messages):
    assert chat(messages=messages).choices[0].message.content


def chat_streamed():
    chunks = list(chat(stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].choices[0].finish_reason


def chat_streamed_with_usage():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices


def chat_completions_stream():
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=16) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].message.content


def with_raw_response():
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=4)
    assert raw.headers["x-request-id"] and raw.parse().choices


def two_answers():
    assert len(chat(n=2, temperature=1).choices) == 2


def stop():
    whole = chat(temperature=0).choices[0].message.content
    word = whole.split()[1]
    assert word not in chat(temperature=0, stop=[word]).choices[0].message.content


def seed():
    one, two = (chat(seed=7, temperature=1).choices[0].message.content for _ in range(2))
    assert one == two


def max_completion_tokens():
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=3)
    assert reply.usage.completion_tokens == 3 and reply.choices[0].finish_reason == "length"


def logprobs():
    first = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content[0]
    assert first.logprob <= 0 and len(first.top_logprobs) >= 3


def logit_bias_penalties_top_p():
    assert chat(logit_bias={"5": -100}, presence_penalty=0.5, frequency_penalty=0.5, top_p=0.9).choices


def response_format_json_object():
    choice = chat(response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":  # a small model may write one object until its tokens are used up
        json.loads(choice.message.content)


def chat_completions_parse():
    reply = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather, max_tokens=64)
    assert isinstance(reply.choices[0].message.parsed, Weather)


def tool_call_of(**more):
    message = chat(messages=ASK, tools=[WEATHER_TOOL], max_tokens=64, **more).choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    assert has_city(message.tool_calls[0].function.arguments)
    return message


def tools_none():
    message = chat(messages=ASK, tools=[WEATHER_TOOL], tool_choice="none").choices[0].message
    assert message.content and not message.tool_calls


def tools_streamed():
    chunks = chat(messages=ASK, tools=[WEATHER_TOOL], tool_choice="required", stream=True, max_tokens=64)
    deltas = [d for c in chunks if c.choices for d in c.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "get_weather"
    assert has_city("".join(d.function.arguments or "" for d in deltas))


def tools_with_a_result():
    message = tool_call_of(tool_choice="required")
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
    reply = chat(messages=[*ASK, message.model_dump(exclude_none=True), answer], tools=[WEATHER_TOOL])
    assert reply.choices[0].message.content or reply.choices[0].message.tool_calls


def tools_parsed_arguments():
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    reply = client.chat.completions.parse(
        model=MODEL, messages=ASK, tools=[tool], tool_choice="required", max_tokens=64
    )
    assert isinstance(reply.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def completion(**more):
    return client.completions.create(**{"model": MODEL, "prompt": "Hello", "max_tokens": 16} | more)


def completions():
    assert len(completion(prompt=["Hello", "Good day"]).choices) == 2
    assert "".join(c.choices[0].text for c in completion(stream=True) if c.choices)


def completions_echo_and_logprobs():
    choice = completion(echo=True, logprobs=1).choices[0]
    assert choice.text.startswith("Hello") and choice.logprobs.tokens


def respond(**more):
    return client.responses.create(
        **{"model": MODEL, "input": "Hello! My name is Ada.", "max_output_tokens": 32} | more
    )


def responses():
    reply = respond()
    assert reply.output_text and reply.usage.output_tokens > 0


def responses_streamed():
    events = list(respond(stream=True))
    assert events[0].type == "response.created"
    assert any(e.type == "response.output_text.delta" for e in events)
    assert events[-1].type in {"response.completed", "response.incomplete"}


def responses_previous_response_id():
    first = respond(instructions="You are terse.")
    assert respond(input="Who am I?", previous_response_id=first.id).output_text


def responses_loop_of_previous_response_ids():
    last = respond(input="My name is Ada and my city is Trondar. " * 8, prompt_cache_retention="24h")
    for _ in range(2):
        last = respond(input="Who am I?", previous_response_id=last.id)
        assert last.usage.input_tokens_details.cached_tokens > 0


def chat_loop_with_a_prompt_cache_key():
    turns = [{"role": "user", "content": "My name is Ada and my city is Trondar. " * 8}]
    for number in range(3):
        reply = chat(messages=turns, prompt_cache_key="ada", prompt_cache_retention="in_memory")
        assert not number or reply.usage.prompt_tokens_details.cached_tokens > 0
        turns += [reply.choices[0].message, {"role": "user", "content": "Who am I?"}]


def responses_retrieve_input_items_delete():
    made = respond()
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert client.responses.input_items.list(made.id).data
    client.responses.delete(made.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(made.id))


def responses_parse():
    reply = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=64)
    assert isinstance(reply.output_parsed, Weather)


def responses_tools_required():
    reply = respond(input=QUESTION, tools=[RESPONSES_TOOL], tool_choice="required", max_output_tokens=64)
    made = next(item for item in reply.output if item.type == "function_call")
    assert made.name == "get_weather" and has_city(made.arguments)


def models():
    assert MODEL in {model.id for model in client.models.list()}
    assert client.models.retrieve(MODEL).id == MODEL


def unknown_model():
    error = raises(openai.NotFoundError, lambda: chat(model="nothing"))
    assert "nothing" in str(error)


def value_out_of_range():
    raises(openai.BadRequestError, lambda: chat(temperature=-1))


def prompt_that_is_too_long():
    error = raises(
        openai.BadRequestError, lambda: chat(messages=[{"role": "user", "content": "word " * 6000}])
    )
    assert "context" in str(error) or "maximum" in str(error)


async def async_openai_chat():
    reply = await other.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
    assert reply.choices[0].message.content
    stream = await other.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


async def async_openai_responses_stream():
    async with other.responses.stream(model=MODEL, input="Hello!", max_output_tokens=8) as stream:
        kinds = [event.type async for event in stream]
    assert "response.output_text.delta" in kinds


if __name__ == "__main__":
    call_all()
    for name, messages in CONVERSATIONS.items():
        call(f"chat with {name}", partial(chat_of, messages))
    for name, choice in CHOICES.items():
        call(f"tools {name}", partial(tool_call_of, tool_choice=choice))
