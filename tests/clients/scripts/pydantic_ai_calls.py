"""`pydantic-ai`: agents with text, tools, native output and tool output, and streams."""

from __future__ import annotations

from harness import KEY, MODEL, QUESTION, V1_URL, call, call_all
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import Weather, get_weather

provider = OpenAIProvider(base_url=V1_URL, api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)
SETTINGS = {"max_tokens": 64}


async def run():
    reply = await Agent(model, instructions="You are terse.", model_settings=SETTINGS).run("Hello!")
    assert reply.output and reply.usage.output_tokens > 0


async def run_stream():
    async with Agent(model, model_settings=SETTINGS).run_stream("Hello!") as stream:
        assert "".join([piece async for piece in stream.stream_text(delta=True)])


def message_history():
    agent = Agent(model, model_settings=SETTINGS)
    first = agent.run_sync("Hello! My name is Ada.")
    assert agent.run_sync("What is my name?", message_history=first.all_messages()).output


def output_of(kind):
    agent = Agent(model, output_type=kind, model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Weather)


def tool_at_hand():
    agent = Agent(model, model_settings=SETTINGS)
    agent.tool_plain(get_weather)
    assert agent.run_sync("Hello!").output


def responses_model():
    made = OpenAIResponsesModel(MODEL, provider=provider)
    assert Agent(made, model_settings=SETTINGS).run_sync("Hello!").output


if __name__ == "__main__":
    call_all()
    call("output_type, the default (a tool)", lambda: output_of(Weather))
    call("ToolOutput", lambda: output_of(ToolOutput(Weather)))
    call("NativeOutput", lambda: output_of(NativeOutput(Weather)))
