"""The hooks: each with its real framework where that is installed, and none of them loads one before it is attached.

No framework is installed with Overture: they fight over versions. `make clients` runs these in an environment of each framework.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overture_client.advisor import Advisor
from overture_client.client import OvertureClient

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "demo" / "agents"


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, str(EXAMPLES / f"{name}_example.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def advised_first(server: Any) -> set[str]:
    """Sessions whose last request came after an advisory."""
    advised: set[str] = set()
    found: set[str] = set()
    for kind, session_id in list(server.log):
        if kind == "advisory":
            advised.add(session_id)
        elif session_id in advised:
            found.add(session_id)
    return found


MODULES = {"langgraph": "langgraph", "openai_agents": "agents", "crewai": "crewai", "metagpt": "metagpt"}


def test_an_example_without_its_framework_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # An example may switch off what its framework sends elsewhere, for its whole process.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", ["x", "--model", "m"])
    monkeypatch.syspath_prepend(EXAMPLES)
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(SystemExit, match="Install it with: pip install"):
            runpy.run_path(str(EXAMPLES / f"{name}_example.py"), run_name="__main__")


def test_the_plain_example_finds_its_sessions_warm_from_the_first_round_on(server: Any) -> None:
    report = last_line(
        run_example("plain", "--base-url", f"{server.url}/v1", "--model", "base", "--run-id", "r")
    )
    # One architect, then three rounds of two engineers and a tester.
    assert report["num_agents_run"] == 10
    assert report["num_advisories_failed"] == 0
    # All but the architect's could be; two in three leave room for a busy machine.
    assert report["num_hits"] >= 6
    assert advised_first(server) == {"r:engineer-1", "r:engineer-2", "r:tester"}
    assert {agent for _, agent, _ in server.requests} == {"architect", "engineer-1", "engineer-2", "tester"}


@pytest.mark.parametrize(
    ("name", "agents", "num_agents_run"),
    [
        # writer and critic in turn, three rounds
        ("langgraph", {"writer", "critic"}, 6),
        ("openai_agents", {"planner", "writer"}, 6),
        ("crewai", {"researcher", "writer"}, 6),
        # architect, then three rounds of engineer and tester
        ("metagpt", {"architect", "engineer", "tester"}, 7),
    ],
)
def test_each_example_advises_ahead_of_its_requests(
    server: Any, name: str, agents: set[str], num_agents_run: int
) -> None:
    pytest.importorskip(MODULES[name])
    done = run_example(name, "--base-url", f"{server.url}/v1", "--model", "base", "--run-id", "r")
    report = last_line(done)
    assert report["num_agents_run"] == num_agents_run
    assert report["num_hits"] >= num_agents_run // 2
    assert {agent for _, agent, _ in server.requests} == agents, "every request names its agent"
    assert {session for session, _, _ in server.requests} == {f"r:{agent}" for agent in agents}
    assert len(advised_first(server)) >= len(agents) - 1


async def test_langgraph_tells_nodes_from_what_runs_inside_them(server: Any) -> None:
    pytest.importorskip("langgraph")
    from langchain_core.runnables import RunnableLambda
    from langgraph.graph import END, START, StateGraph

    from overture_client.hooks import langgraph as hook

    def write(state: dict[str, Any]) -> dict[str, Any]:
        return RunnableLambda(lambda s: s).invoke(state) | {"text": "draft"}

    def fail(state: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no model")

    graph = StateGraph(dict)
    graph.add_node("write", write)
    graph.add_node("check", fail)
    graph.add_edge(START, "write")
    graph.add_edge("write", "check")
    graph.add_edge("check", END)
    async with OvertureClient(server.url) as client:
        advisor = Advisor(client, run_id="r")
        app = hook.attach(graph.compile(), advisor)
        for run in (app.invoke, app.ainvoke):
            with pytest.raises(RuntimeError, match="no model"):
                result = run({"text": ""})
                await result  # the synchronous one has failed by now
        report = await advisor.report_async()
    assert report["num_agents_run"] == 4
    assert {body["session_id"] for body in server.advisories} == {"r:check"}
    assert advisor.graph.lower_bound_s("write") is not None
    assert advisor.graph.lower_bound_s("check") is None, "what failed is not measured"


async def test_langgraph_names_the_session_of_each_request_from_within_a_node(server: Any) -> None:
    pytest.importorskip("langgraph")
    import httpx
    from langgraph.graph import END, START, StateGraph

    from overture_client.hooks import langgraph as hook

    State = dict[str, Any]

    async def ask(state: State) -> State:
        body = {"model": "base", "messages": [{"role": "user", "content": "Hello!"}]}
        async with httpx.AsyncClient() as client:
            await client.post(f"{server.url}/v1/chat/completions", json=body)
            await client.post(
                f"{server.url}/v1/chat/completions", json=body, headers={"X-Session-Id": "by hand"}
            )
        return state

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", END)
    inner = graph.compile()
    outer = StateGraph(State)
    outer.add_node("team", inner)
    outer.add_edge(START, "team")
    outer.add_edge("team", END)
    async with OvertureClient(server.url) as client:
        for app in (graph.compile(), outer.compile()):
            await hook.attach(app, Advisor(client, run_id="r")).ainvoke({"text": ""})
        await ask({})
    named = [session for session, _, _ in server.requests]
    assert named[:4] == ["r:ask", "by hand", "r:team", "by hand"]
    assert named[4] is None, "outside of a graph"
