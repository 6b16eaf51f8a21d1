"""`openai-agents`: runs, streams, tools, handoffs and structured output, by chat completions and by responses."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import agents
from agents import Agent, ModelSettings, Runner, function_tool
from harness import KEY, MODEL, QUESTION, V1_URL, call, call_all
from openai import AsyncOpenAI
from pydantic import Field
from weather import Weather

agents.set_tracing_disabled(True)


@function_tool
def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """Today's weather in a city."""
    return f"Sunny in {city}."


def model(kind):
    return kind(model=MODEL, openai_client=AsyncOpenAI(base_url=V1_URL, api_key=KEY, max_retries=0))


def agent(kind=agents.OpenAIChatCompletionsModel, choice=None, **more):
    settings = ModelSettings(max_tokens=64, tool_choice=choice)
    return Agent(name="helper", instructions="Help.", model=model(kind), model_settings=settings, **more)


async def run(kind):
    assert (await Runner.run(agent(kind), "Hello!")).final_output


async def streamed(kind):
    result = Runner.run_streamed(agent(kind), "Hello!")
    assert [event async for event in result.stream_events()] and result.final_output


async def tool(kind):
    made = agent(kind, "required", tools=[get_weather], tool_use_behavior="stop_on_first_tool")
    assert (await Runner.run(made, QUESTION)).final_output.startswith("Sunny in ")


async def structured(kind):
    assert isinstance((await Runner.run(agent(kind, output_type=Weather), QUESTION)).final_output, Weather)


async def handoff():
    writer = agent()
    first = agent(
        choice="transfer_to_writer",
        handoffs=[agents.handoff(writer, tool_name_override="transfer_to_writer")],
    )
    result = await Runner.run(first, "Hello!")
    assert result.last_agent is writer and result.final_output


async def several_turns():
    first = await Runner.run(agent(), "Hello! My name is Ada.")
    assert (
        await Runner.run(agent(), [*first.to_input_list(), {"role": "user", "content": "Who am I?"}])
    ).final_output


if __name__ == "__main__":
    call_all()
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        for check in (run, streamed, tool, structured):
            call(f"{check.__name__}, {kind.__name__}", partial(check, kind))
