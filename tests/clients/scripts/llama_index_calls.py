"""`llama-index`: OpenAILike for chat, completion, streams, tools and structured output."""

from __future__ import annotations

from harness import KEY, MODEL, QUESTION, V1_URL, call_all, has_city
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from weather import Weather, get_weather

SETTINGS = {"model": MODEL, "api_base": V1_URL, "api_key": KEY, "max_tokens": 64, "max_retries": 0}
llm = OpenAILike(**SETTINGS, is_chat_model=True, is_function_calling_model=True, context_window=4096)
HELLO = [ChatMessage(role="user", content="Hello!")]


TOOL = FunctionTool.from_defaults(get_weather)


def chat():
    assert llm.chat(HELLO).message.content


def stream_chat():
    assert "".join(reply.delta or "" for reply in llm.stream_chat(HELLO))


def complete():
    assert llm.complete("Hello!").text


def complete_text_model():
    assert OpenAILike(**SETTINGS, is_chat_model=False).complete("Hello").text


async def astream_chat():
    assert "".join([reply.delta or "" async for reply in await llm.astream_chat(HELLO)])


def simple_chat_engine():
    engine = SimpleChatEngine.from_defaults(llm=llm)
    engine.chat("Hello! My name is Ada.")
    assert engine.chat("What is my name?").response


def chat_with_tools_required():
    reply = llm.chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    assert llm.get_tool_calls_from_response(reply)[0].tool_name == "get_weather"


def as_structured_llm():
    made = llm.as_structured_llm(Weather).chat([ChatMessage(role="user", content=QUESTION)])
    assert isinstance(made.raw, Weather)


async def function_agent():
    made = FunctionAgent(tools=[TOOL], llm=llm, streaming=False)
    assert str(await made.run("Hello!", max_iterations=4))


def stream_chat_with_tools_required():
    *_, last = llm.stream_chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    [made] = llm.get_tool_calls_from_response(last)
    assert made.tool_name == "get_weather" and has_city(made.tool_kwargs)


async def function_agent_streaming():
    """Its first call of the model has to call the tool, whose result is the answer."""
    asked = []

    def get_weather(city: str) -> str:
        """Today's weather in a city."""
        asked.append(city)
        return f"Sunny in {city}."

    tool = FunctionTool.from_defaults(get_weather, return_direct=True)
    made = FunctionAgent(tools=[tool], llm=llm, streaming=True, initial_tool_choice="get_weather")
    assert str(await made.run(QUESTION, max_iterations=4)) == f"Sunny in {asked[0]}."


if __name__ == "__main__":
    call_all()
