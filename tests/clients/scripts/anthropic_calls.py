"""The `anthropic` package: messages, streams, tools, token counts and errors."""

from __future__ import annotations

from functools import partial

import anthropic
from harness import (
    BASE_URL,
    KEY,
    LONG,
    MODEL,
    QUESTION,
    SESSION_HEADER,
    WEATHER_SCHEMA,
    call,
    call_all,
    has_city,
    raises,
)

client = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY, max_retries=0)
TOOL = {"name": "get_weather", "description": "Today's weather in a city.", "input_schema": WEATHER_SCHEMA}
HELLO = [{"role": "user", "content": "Hello! My name is Ada."}]
ASK = [{"role": "user", "content": QUESTION}]
BODIES = {
    "a system prompt": {"system": "You are terse."},
    "content blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]},
    "several turns": {"messages": [*HELLO, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Who am I?"}]},
}  # fmt: skip


def message_with(more):
    assert message(**more).content[0].text


def message(**more):
    return client.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 32} | more)


def messages():
    reply = message()
    assert reply.content[0].text and reply.usage.output_tokens > 0 and reply.role == "assistant"


def stop_sequences():
    greedy = {"temperature": 0}  # the package has no parameter of this name any more
    word = message(extra_body=greedy).content[0].text.split()[1]
    assert word not in message(extra_body=greedy, stop_sequences=[word]).content[0].text


def max_tokens():
    assert message(max_tokens=3).stop_reason == "max_tokens"


def messages_stream():
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=16) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and final.content[0].text == text


def streamed_events():
    kinds = [event.type for event in message(stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds


def forced(choice):
    reply = message(messages=ASK, tools=[TOOL], tool_choice=choice, max_tokens=64)
    used = next(block for block in reply.content if block.type == "tool_use")
    assert used.name == "get_weather" and has_city(used.input)
    return reply, used


def tools_streamed():
    with client.messages.stream(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=64
    ) as stream:
        final = stream.get_final_message()
    used = next(block for block in final.content if block.type == "tool_use")
    assert has_city(used.input)


def tools_with_a_result():
    reply, used = forced({"type": "any"})
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "Sunny."}
    content = [block.model_dump(exclude_none=True) for block in reply.content]
    turns = [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert message(messages=turns, tools=[TOOL]).content


def tool_runner():
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Today's weather in a city."""
        return f"Sunny in {city}."

    for stream in (False, True):
        runner = client.beta.messages.tool_runner(
            model=MODEL, messages=ASK, tools=[get_weather], max_tokens=64, stream=stream
        )
        reply = runner.until_done()
        assert "unny" in reply.content[0].text, reply.content


def _prompt_tokens(usage):
    """All tokens of a prompt: `input_tokens` are those that a cache neither gave nor took."""
    return (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )


def cache_control_in_system_tools_and_blocks():
    marked = {"cache_control": {"type": "ephemeral"}}
    prompt = {
        "system": [{"type": "text", "text": LONG} | marked],
        "tools": [TOOL | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION} | marked]}],
    }
    first, second = (message(**prompt, tool_choice={"type": "any"}, max_tokens=64).usage for _ in range(2))
    assert second.cache_read_input_tokens > 0 and _prompt_tokens(first) == _prompt_tokens(second)
    bare = prompt | {"system": LONG, "tools": [TOOL], "messages": ASK}
    assert _prompt_tokens(
        message(**bare, tool_choice={"type": "any"}, max_tokens=64).usage
    ) == _prompt_tokens(first)


def cache_control_at_the_top():
    assert message(cache_control={"type": "ephemeral", "ttl": "1h"}).content[0].text


def cache_control_that_moves_with_a_loop():
    """The last message is marked in each call, as coding agents do: it stays one session, whose prompts are found in a cache."""
    turns, sessions = [{"role": "user", "content": [{"type": "text", "text": f"{LONG}\n{QUESTION}"}]}], []
    for number in range(3):
        last = turns[-1]["content"][-1]
        last["cache_control"] = {"type": "ephemeral"}
        raw = client.messages.with_raw_response.create(
            model=MODEL, messages=turns, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=64
        )
        del last["cache_control"]
        reply = raw.parse()
        sessions.append(raw.headers[SESSION_HEADER])
        assert not number or reply.usage.cache_read_input_tokens > 0
        used = [block for block in reply.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."} for block in used]
        content = [block.model_dump(exclude_none=True) for block in reply.content]
        turns += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    assert len(set(sessions)) == 1


def count_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    assert counted == message().usage.input_tokens
    more = client.messages.count_tokens(model=MODEL, messages=HELLO, system="You are terse.").input_tokens
    assert more > counted


def cache_control():
    """Marks on a block and on a tool: what the first call has written, the second one finds."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    text = {"type": "text", "text": "My name is Ada and my city is Trondar. " * 8, "cache_control": mark}
    wish = {"messages": [{"role": "user", "content": [text]}], "tools": [TOOL | {"cache_control": mark}]}
    first, second = message(**wish).usage, message(**wish).usage
    written = first.cache_read_input_tokens + first.cache_creation_input_tokens
    assert second.cache_read_input_tokens == written > 0 and second.cache_creation_input_tokens == 0
    assert second.input_tokens == first.input_tokens


def unknown_model():
    raises(anthropic.NotFoundError, lambda: message(model="nothing"))


def value_out_of_range():
    raises(anthropic.BadRequestError, lambda: message(max_tokens=-1))


async def async_anthropic():
    async with anthropic.AsyncAnthropic(base_url=BASE_URL, api_key=KEY, max_retries=0) as other:
        reply = await other.messages.create(model=MODEL, messages=HELLO, max_tokens=8)
        assert reply.content[0].text


if __name__ == "__main__":
    call_all()
    for name, more in BODIES.items():
        call(f"messages with {name}", partial(message_with, more))
    call("tools named", partial(forced, {"type": "tool", "name": "get_weather"}))
