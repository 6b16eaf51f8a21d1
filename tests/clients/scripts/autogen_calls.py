"""`autogen-ext` and `autogen-agentchat`: the OpenAI client, agents, teams and tools."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from harness import KEY, MODEL, QUESTION, V1_URL, call_all, has_city
from weather import Weather, get_weather

CAN = ("function_calling", "json_output", "structured_output", "multiple_system_messages")
INFO = {"vision": False, "family": "unknown"} | dict.fromkeys(CAN, True)


TOOL = FunctionTool(get_weather, description="Today's weather in a city.")


def _client():
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=V1_URL, api_key=KEY, model_info=INFO, max_tokens=64, max_retries=0
    )


def said(text):
    return [UserMessage(content=text, source="user")]


async def create():
    reply = await _client().create(said("Hello!"))
    assert reply.content and reply.usage.completion_tokens > 0


async def create_stream():
    pieces = [piece async for piece in _client().create_stream(said("Hello!"))]
    assert pieces[-1].content == "".join(pieces[:-1])


async def json_output():
    reply = await _client().create(said(QUESTION), json_output=Weather)
    Weather.model_validate_json(reply.content)


async def tools_required():
    reply = await _client().create(said(QUESTION), tools=[TOOL], tool_choice="required")
    assert reply.content[0].name == "get_weather" and has_city(reply.content[0].arguments)


async def assistant_agent_with_a_tool():
    made = AssistantAgent("helper", model_client=_client(), tools=[get_weather])
    assert (await made.run(task="Hello!")).messages[-1].content


async def assistant_agent_run_stream():
    made = AssistantAgent("helper", model_client=_client(), model_client_stream=True)
    assert [event async for event in made.run_stream(task="Hello!")][-1].messages


async def round_robin_group_chat():
    both = [AssistantAgent(name, model_client=_client()) for name in ("writer", "critic")]
    made = RoundRobinGroupChat(both, termination_condition=MaxMessageTermination(3))
    assert len((await made.run(task="Hello!")).messages) == 3


if __name__ == "__main__":
    call_all()
