"""`litellm` as a client: chat, streams, tools, text completion, responses and Anthropic's messages."""

from __future__ import annotations

import litellm
from harness import (
    BASE_URL,
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

litellm.telemetry = False
ADDRESS = {"api_base": V1_URL, "api_key": KEY}
SETTINGS = ADDRESS | {"model": f"openai/{MODEL}", "max_tokens": 64, "num_retries": 0}
HELLO = [{"role": "user", "content": "Hello!"}]
ASK = [{"role": "user", "content": QUESTION}]


def chat(**more):
    return litellm.completion(**SETTINGS | {"messages": HELLO} | more)


def completion():
    reply = chat()
    assert reply.choices[0].message.content and reply.usage.completion_tokens > 0


def completion_streamed():
    assert "".join(c.choices[0].delta.content or "" for c in chat(stream=True) if c.choices)


def hosted_vllm():
    assert chat(model=f"hosted_vllm/{MODEL}").choices[0].message.content


def anthropic():
    reply = chat(model=f"anthropic/{MODEL}", api_base=BASE_URL)
    assert reply.choices[0].message.content


def response_format_json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER_SCHEMA}}
    assert has_city(chat(messages=ASK, response_format=form).choices[0].message.content)


def tools(choice):
    made = chat(messages=ASK, tools=[WEATHER_TOOL], tool_choice=choice).choices[0].message.tool_calls[0]
    assert made.function.name == "get_weather" and has_city(made.function.arguments)


def text_completion():
    model = f"text-completion-openai/{MODEL}"
    reply = litellm.text_completion(model=model, prompt="Hello", max_tokens=8, **ADDRESS)
    assert reply.choices[0].text


def responses():
    reply = litellm.responses(model=f"openai/{MODEL}", input="Hello!", max_output_tokens=16, **ADDRESS)
    assert reply.output[0].content[0].text


def prompt_that_is_too_long():
    raises(litellm.BadRequestError, lambda: chat(messages=[{"role": "user", "content": "word " * 6000}]))


if __name__ == "__main__":
    call_all()
    call("tools, required", lambda: tools("required"))
    call("tools, named", lambda: tools({"type": "function", "function": {"name": "get_weather"}}))
