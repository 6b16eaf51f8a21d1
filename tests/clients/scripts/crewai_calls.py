"""`crewai`: its LLM, agents, crews and structured tasks."""

from __future__ import annotations

import os

from harness import KEY, MODEL, QUESTION, V1_URL, call_all
from weather import Weather

# Before the import: nothing of the run leaves this machine.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM, Agent, Crew, Task


def llm(**more):
    return LLM(model=MODEL, provider="openai", base_url=V1_URL, api_key=KEY, max_tokens=64, **more)


def agent(role="researcher", **more):
    return Agent(role=role, goal="Find facts", backstory="Curious.", llm=llm(), max_iter=2, **more)


def llm_call():
    assert llm().call("Hello!")


def llm_call_streamed():
    assert llm(stream=True).call("Hello!")


def llm_call_with_response_format():
    made = llm(response_format=Weather).call(QUESTION)
    assert isinstance(made if isinstance(made, Weather) else Weather.model_validate_json(made), Weather)


def crew_kickoff():
    both = [agent(), agent("writer")]
    tasks = [Task(description="Say hello.", expected_output="a sentence", agent=each) for each in both]
    assert Crew(agents=both, tasks=tasks).kickoff().raw


def agent_kickoff():
    assert agent().kickoff("Say hello.").raw


if __name__ == "__main__":
    call_all()
