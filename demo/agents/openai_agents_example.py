"""A planner and a writer in the OpenAI Agents SDK, three rounds.

    pip install openai-agents
    python demo/agents/openai_agents_example.py --base-url http://127.0.0.1:8000/v1 --model NAME

A model that calls tools hands over from the planner to the writer by itself. So that a small model will do, the example runs the two in turn.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from shared import MAX_TOKENS, ROUNDS, arguments, needs, print_report

from overture_client.advisor import Advisor
from overture_client.call_graph import CallGraph
from overture_client.client import OvertureClient
from overture_client.hooks import openai_agents as overture


async def run(args: Namespace) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    sdk = AsyncOpenAI(base_url=args.base_url, api_key=args.api_key or "none")
    model = OpenAIChatCompletionsModel(model=args.model, openai_client=sdk)
    settings = ModelSettings(max_tokens=MAX_TOKENS)
    writer = Agent(name="writer", instructions="You write.", model=model, model_settings=settings)
    planner = Agent(name="planner", instructions="You plan.", model=model, model_settings=settings)

    async with OvertureClient(args.base_url, args.api_key) as client:
        # The SDK knows handoffs only, so the order is told; without it, it is learned in the first round.
        graph = CallGraph([("planner", "writer"), ("writer", "planner")])
        with Advisor(client, graph, args.run_id, model=args.model) as advisor:
            hooks = {agent.name: overture.attach(agent, advisor) for agent in (planner, writer)}
            # Each agent goes on with its own conversation: that is what can be warmed.
            said: dict[str, list[Any]] = {agent.name: [] for agent in (planner, writer)}
            talk = args.task
            for _ in range(ROUNDS):
                for agent in (planner, writer):
                    question = [*said[agent.name], {"role": "user", "content": talk}]
                    result = await Runner.run(agent, question, hooks=hooks[agent.name])
                    said[agent.name] = result.to_input_list()
                    talk = str(result.final_output)
                    print(f"{agent.name}: {talk}")
            print_report(await advisor.report_async())
    await sdk.close()


if __name__ == "__main__":
    args = arguments(__doc__ or "")
    needs("agents", "openai-agents")
    asyncio.run(run(args))
