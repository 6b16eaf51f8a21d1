"""A writer and a critic in LangGraph, three rounds.

pip install langgraph langchain-openai
python demo/agents/langgraph_example.py --base-url http://127.0.0.1:8000/v1 --model NAME
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from shared import MAX_TOKENS, ROUNDS, arguments, needs, print_report

from overture_client.advisor import Advisor
from overture_client.client import OvertureClient
from overture_client.hooks import langgraph as overture


def build(args: Namespace) -> Any:
    """The graph: write, criticise, and again until the rounds are over."""
    from langchain_core.messages import AnyMessage, HumanMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    llm = ChatOpenAI(
        base_url=args.base_url, api_key=args.api_key or "none", model=args.model, max_tokens=MAX_TOKENS
    )

    def node(name: str, instruction: str) -> Any:
        history: list[AnyMessage] = [HumanMessage(instruction)]

        async def act(state: dict[str, Any]) -> dict[str, Any]:
            history.append(HumanMessage(state["messages"][-1].content))
            answer = await llm.ainvoke(history)
            history.append(answer)
            print(f"{name}: {answer.content}")
            return {"messages": [answer]}

        return act

    def is_over(state: dict[str, Any]) -> str:
        return END if len(state["messages"]) > 2 * ROUNDS else "writer"

    graph = StateGraph(MessagesState)
    graph.add_node("writer", node("writer", "You write short texts."))
    graph.add_node("critic", node("critic", "You say what to change."))
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "critic")
    graph.add_conditional_edges("critic", is_over, ["writer", END])
    return graph.compile()


async def run(args: Namespace) -> None:
    async with OvertureClient(args.base_url, args.api_key) as client:
        with Advisor(client, run_id=args.run_id, model=args.model) as advisor:
            app = overture.attach(build(args), advisor)
            await app.ainvoke({"messages": [("user", args.task)]})
            print_report(await advisor.report_async())


if __name__ == "__main__":
    args = arguments(__doc__ or "")
    needs("langgraph", "langgraph langchain-openai")
    needs("langchain_openai", "langchain-openai")
    asyncio.run(run(args))
