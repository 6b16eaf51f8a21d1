"""`agno`: agents by chat completions, by responses: runs, streams, tools, several turns and structured output."""

from __future__ import annotations

from functools import partial

from agno.agent import Agent
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from agno.tools.function import Function
from harness import KEY, MODEL, QUESTION, V1_URL, WEATHER_SCHEMA, call
from weather import Weather

asked = []


def get_weather(city: str) -> str:
    """Today's weather in a city."""
    asked.append(city)
    return f"Sunny in {city}."


def chat():
    return OpenAILike(id=MODEL, base_url=V1_URL, api_key=KEY, max_tokens=64, max_retries=0)


def responses():
    return OpenAIResponses(id=MODEL, base_url=V1_URL, api_key=KEY, max_output_tokens=64, max_retries=0)


def agent(model, **more):
    return Agent(model=model(), telemetry=False, **more)


def content(reply):
    assert reply.status == "COMPLETED", reply
    return reply.content


def run(model):
    assert content(agent(model).run("Hello!"))


def streamed(model):
    parts = [
        event.content or ""
        for event in agent(model).run("Hello!", stream=True)
        if event.event == "RunContent"
    ]
    assert "".join(parts)


def several_turns(model):
    first = agent(model).run("Hello! My name is Ada.")
    messages = [message for message in first.messages if message.role != "system"]
    last = agent(model).run([*messages, {"role": "user", "content": "Who am I?"}])
    assert content(last) and last.metrics.input_tokens > first.metrics.input_tokens


def tool(model, stream):
    asked.clear()
    weather = Function(
        name="get_weather",
        description="Today's weather in a city.",
        parameters=WEATHER_SCHEMA,
        entrypoint=get_weather,
        skip_entrypoint_processing=True,
        stop_after_tool_call=True,
    )
    made = agent(model, tools=[weather], tool_choice="required")
    reply = made.run(QUESTION, stream=stream, stream_events=stream)
    called = [event.tool for event in reply if event.event == "ToolCallCompleted"] if stream else reply.tools
    assert called[0].tool_name == "get_weather" and list(called[0].tool_args) == ["city"], called
    assert asked[0] == called[0].tool_args["city"] and called[0].result == f"Sunny in {asked[0]}."


def structured(model):
    assert isinstance(content(agent(model, output_schema=Weather).run(QUESTION)), Weather)


if __name__ == "__main__":
    for name, model in {"chat completions": chat, "responses": responses}.items():
        for check in (run, streamed, several_turns, structured):
            call(f"{check.__name__.replace('_', ' ')}, {name}", partial(check, model))
        for stream in (False, True):
            call(f"tool, required{' and streamed' * stream}, {name}", partial(tool, model, stream))
