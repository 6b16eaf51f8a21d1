"""An agent with one tool, by the OpenAI Agents SDK alone: `python agent.py BASE_URL`. The last line says whether the tool was called.

The tool takes one of three cities: a model of 2.3 million parameters may write a city without end where any text will do.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal


async def main(base_url: str) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    cities: list[str] = []

    @function_tool
    def get_weather(city: Literal["London", "Paris", "Rome"]) -> str:
        """Today's weather in a city."""
        cities.append(city)
        return f"Sunny in {city}."

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    agent = Agent(
        name="forecaster",
        instructions="Use the tool to answer questions about the weather.",
        model=OpenAIChatCompletionsModel(model="overture-demo", openai_client=client),
        model_settings=ModelSettings(tool_choice="required", max_tokens=128),
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(agent, "What is the weather like in Paris?")
    await client.close()
    was_called = bool(cities) and result.final_output == f"Sunny in {cities[0]}."
    print(json.dumps({"tool_call": was_called, "cities": cities}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
