"""`strands-agents`: agents by chat completions, by responses and by messages: tools, streams, several turns and structured output."""

from __future__ import annotations

import asyncio
from functools import partial

from harness import BASE_URL, KEY, MODEL, QUESTION, V1_URL, call
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from weather import Weather

OPENAI = {"api_key": KEY, "base_url": V1_URL, "max_retries": 0}
# Each turn runs in a loop of its own and finds the connection of the last one's: the SDK tries again on another one.
ANTHROPIC = {"api_key": KEY, "base_url": BASE_URL}


@tool
def get_weather(city: str) -> str:
    """Today's weather in a city."""
    return f"Sunny in {city}."


def chat():
    return OpenAIModel(client_args=OPENAI, model_id=MODEL, params={"max_tokens": 64})


def responses():
    return OpenAIResponsesModel(client_args=OPENAI, model_id=MODEL, params={"max_output_tokens": 64})


def messages():
    return AnthropicModel(client_args=ANTHROPIC, model_id=MODEL, max_tokens=64)


def agent(model, **more):
    return Agent(model=model(), callback_handler=None, system_prompt="You are terse.", **more)


def run(model):
    reply = agent(model)("Hello!")
    assert reply.stop_reason == "end_turn" and str(reply).strip()


def streamed(model):
    async def pieces():
        return [event["data"] async for event in agent(model).stream_async("Hello!") if "data" in event]

    assert "".join(asyncio.run(pieces()))


def tools_and_a_second_turn(model):
    """The KV of what was said before is found again in each turn."""
    made = agent(model, tools=[get_weather])
    first = made(QUESTION)
    assert first.stop_reason == "end_turn" and "unny" in str(first), str(first)
    used = [part["toolUse"] for turn in made.messages for part in turn["content"] if "toolUse" in part]
    assert used[0]["name"] == "get_weather" and list(used[0]["input"]) == ["city"]
    before = first.metrics.accumulated_usage["cacheReadInputTokens"]
    assert made("Thank you!").metrics.accumulated_usage["cacheReadInputTokens"] > before > 0


def structured(model):
    reply = agent(model)(QUESTION, structured_output_model=Weather)
    assert isinstance(reply.structured_output, Weather)


def structured_without_tools(model):
    """Over chat completions this sends an empty list of tools."""
    assert isinstance(agent(model).structured_output(Weather, QUESTION), Weather)


if __name__ == "__main__":
    for name, model in {"chat completions": chat, "responses": responses, "messages": messages}.items():
        for check in (run, streamed, tools_and_a_second_turn, structured, structured_without_tools):
            call(f"{check.__name__.replace('_', ' ')}, {name}", partial(check, model))
