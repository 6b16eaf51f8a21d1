"""A framework's loop, unmodified: agents of the OpenAI Agents SDK, in an environment that has it.

    PYTHON bench/live/agents/framework.py < PLAY

PLAY is JSON: `{url, model, max_tokens, is_named, programs}`. It prints one JSON line of what was seen of each call. It runs without Overture's
packages, so it imports none.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Annotated, Any

import agents
import openai
from pydantic import Field


async def play(program: dict[str, Any], wish: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one agent to its end; return the observations of its calls."""
    seen: list[dict[str, Any]] = []
    steps = iter(program["steps"])

    async def note(response: Any) -> None:
        """Note the session that a reply names."""
        seen.append(
            {"session": response.headers.get("X-Overture-Session", ""), "began_s": time.perf_counter()}
        )

    @agents.function_tool
    async def read_file(name: Annotated[str, Field(max_length=12)]) -> str:
        """Reads a file of the program."""
        step = next(steps)
        await asyncio.sleep(step["pause_s"])
        return str(step["result"])

    def until_read(context: Any, results: list[Any]) -> agents.ToolsToFinalOutputResult:
        """End the run once all files are read."""
        is_over = len(seen) >= len(program["steps"])
        return agents.ToolsToFinalOutputResult(is_final_output=is_over, final_output="done")

    await asyncio.sleep(program["at_s"])
    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    headers = {"X-Session-Id": program["name"]} if wish["is_named"] else {}
    async with openai.AsyncOpenAI(
        base_url=f"{wish['url']}/v1", api_key="none", max_retries=0, default_headers=headers, http_client=http
    ) as client:
        agent = agents.Agent(
            name="mender",
            instructions=program["system"],
            model=agents.OpenAIChatCompletionsModel(model=wish["model"], openai_client=client),
            model_settings=agents.ModelSettings(
                temperature=0,
                max_tokens=wish["max_tokens"],
                tool_choice="required",
                parallel_tool_calls=False,
            ),
            tools=[read_file],
            tool_use_behavior=until_read,
            reset_tool_choice=False,
        )
        result = await agents.Runner.run(agent, program["first"], max_turns=len(program["steps"]) + 1)
    return [
        {
            "thread": program["name"],
            "after": "",
            "number": number,
            "ttft_s": None,
            "num_prompt": reply.usage.input_tokens,
            "num_cached": reply.usage.input_tokens_details.cached_tokens,
            **head,
        }
        for number, (reply, head) in enumerate(zip(result.raw_responses, seen, strict=True))
    ]


async def main() -> None:
    """Play all programs at once."""
    wish = json.load(sys.stdin)
    agents.set_tracing_disabled(True)
    for calls in await asyncio.gather(*(play(program, wish) for program in wish["programs"])):
        for call in calls:
            print(json.dumps(call))


if __name__ == "__main__":
    asyncio.run(main())
