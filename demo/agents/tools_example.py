"""An agent with two tools in the OpenAI Agents SDK: it calls the one that fits, and answers in a sentence made of the result.

    pip install openai-agents
    python demo/agents/tools_example.py --base-url http://127.0.0.1:8000/v1 --model NAME

No call is forced (`tool_choice` is "auto"). The demo model has learned to call tools that it has never seen;
demo/README.md says how often it is right.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace

from shared import arguments, needs

MAX_TOKENS = 96
QUESTIONS = ("What is the weather in Paris?", "What is 17 plus 25?", "Hello!")


async def run(args: Namespace) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    calls: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        calls.append(f"get_weather({city})")
        return "sunny, 21 degrees"

    @function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        calls.append(f"add({a}, {b})")
        return a + b

    set_tracing_disabled(True)
    sdk = AsyncOpenAI(base_url=args.base_url, api_key=args.api_key or "none")
    agent = Agent(
        name="helper",
        instructions="Use the tools to answer questions.",
        model=OpenAIChatCompletionsModel(model=args.model, openai_client=sdk),
        model_settings=ModelSettings(temperature=0, max_tokens=MAX_TOKENS),
        tools=[get_weather, add],
    )
    for question in QUESTIONS:
        result = await Runner.run(agent, question, max_turns=4)
        print(f"{question} {result.final_output}")
    await sdk.close()
    print(json.dumps({"calls": calls}))


if __name__ == "__main__":
    args = arguments(__doc__ or "")
    needs("agents", "openai-agents")
    asyncio.run(run(args))
