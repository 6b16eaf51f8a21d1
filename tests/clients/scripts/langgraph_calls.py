"""`langgraph`: graphs of nodes, streams, memory and agents with tools."""

from __future__ import annotations

from typing import Annotated

from harness import KEY, MODEL, QUESTION, V1_URL, call_all
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import Field

llm = ChatOpenAI(base_url=V1_URL, api_key=KEY, model=MODEL, max_tokens=64, max_retries=0)


@tool
def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """Today's weather in a city."""
    return f"Sunny in {city}."


def talk(state):
    return {"messages": [llm.invoke(state["messages"])]}


def graph(**more):
    made = StateGraph(MessagesState)
    made.add_node("talk", talk)
    made.add_edge(START, "talk")
    made.add_edge("talk", END)
    return made.compile(**more)


def invoke():
    assert graph().invoke({"messages": [("user", "Hello!")]})["messages"][-1].content


def stream_messages():
    pieces = graph().stream({"messages": [("user", "Hello!")]}, stream_mode="messages")
    assert "".join(chunk.content for chunk, _ in pieces)


def checkpointer():
    app = graph(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    app.invoke({"messages": [("user", "Hello! My name is Ada.")]}, thread)
    assert len(app.invoke({"messages": [("user", "What is my name?")]}, thread)["messages"]) == 4


def tool_node():
    bound = llm.bind_tools([get_weather], tool_choice="any")
    made = StateGraph(MessagesState)
    made.add_node("ask", lambda state: {"messages": [bound.invoke(state["messages"])]})
    made.add_node("tools", ToolNode([get_weather]))
    made.add_edge(START, "ask")
    made.add_edge("ask", "tools")
    made.add_edge("tools", END)
    last = made.compile().invoke({"messages": [("user", QUESTION)]})["messages"][-1]
    assert last.content.startswith("Sunny in ")


def agent():
    from langchain.agents import create_agent

    made = create_agent(llm, [get_weather]).invoke({"messages": [("user", "Hello!")]}, {"recursion_limit": 9})
    assert made["messages"][-1].content


if __name__ == "__main__":
    call_all()
