"""`langchain-openai`: ChatOpenAI and OpenAI, streams, tools, structured output and the Responses API."""

from __future__ import annotations

from harness import KEY, MODEL, QUESTION, V1_URL, call, call_all
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from weather import Weather, get_weather

SETTINGS = {"base_url": V1_URL, "api_key": KEY, "model": MODEL, "max_retries": 0}
llm = ChatOpenAI(**SETTINGS, max_tokens=64)


def invoke():
    reply = llm.invoke("Hello!")
    assert reply.content and reply.usage_metadata["output_tokens"] > 0


def system_and_human_messages():
    assert llm.invoke([SystemMessage("You are terse."), HumanMessage("Hello!")]).content


def stream():
    assert "".join(chunk.content for chunk in llm.stream("Hello!"))


async def ainvoke():
    assert (await llm.ainvoke("Hello!")).content


async def astream_events():
    kinds = {event["event"] async for event in llm.astream_events("Hello!", version="v2")}
    assert "on_chat_model_stream" in kinds


def logprobs():
    assert llm.bind(logprobs=True).invoke("Hello!").response_metadata["logprobs"]["content"]


def tools_any():
    reply = llm.bind_tools([get_weather], tool_choice="any").invoke(QUESTION)
    assert reply.tool_calls[0]["name"] == "get_weather"
    return reply


def bind_tools_named():
    reply = llm.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION)
    assert "city" in reply.tool_calls[0]["args"]


def bind_tools_with_a_result():
    asked = tools_any()
    result = ToolMessage("Sunny.", tool_call_id=asked.tool_calls[0]["id"])
    reply = llm.bind_tools([get_weather]).invoke([HumanMessage(QUESTION), asked, result])
    assert reply.content or reply.tool_calls


def structured(method):
    made = llm.with_structured_output(Weather, method=method).invoke(QUESTION)
    assert isinstance(made, Weather)


def use_responses_api():
    reply = ChatOpenAI(**SETTINGS, max_tokens=32, use_responses_api=True).invoke("Hello!")
    assert reply.text


def openai_text_completion():
    assert OpenAI(**SETTINGS, max_tokens=16).invoke("Hello")


if __name__ == "__main__":
    call_all()
    call("with_structured_output, json_schema", lambda: structured("json_schema"))
    call("with_structured_output, function_calling", lambda: structured("function_calling"))
