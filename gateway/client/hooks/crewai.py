"""CrewAI: its event bus. In a sequential crew each task's agent follows that of the task before."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import pairwise
from typing import Any

from gateway.client.advisor import Advisor


def attach(crew: Any, advisor: Advisor) -> Callable[[], None]:
    """Advise as `crew` runs, until the function that this returns is called: the bus is one for the whole process.

    Agents go by their roles as they stand now. Each agent gets a copy of its LLM that names the agent's session.
    """
    from crewai.events import (
        AgentExecutionCompletedEvent,
        AgentExecutionErrorEvent,
        AgentExecutionStartedEvent,
        crewai_event_bus,
    )

    # Placeholders in a role are filled in when the crew starts; the id stays.
    roles = {agent.id: agent.role.strip() for agent in crew.agents}
    for agent in crew.agents:
        _name_session(agent, advisor.headers(roles[agent.id]))
    if crew.process.value == "sequential":
        for task, following in pairwise(crew.tasks):
            advisor.graph.add_edge(roles[task.agent.id], roles[following.agent.id])

    def on(event_type: Any, tell: Callable[[str], None]) -> Callable[[], None]:
        def handler(source: Any, event: Any) -> None:
            # The bus brings the events of other crews too.
            if event.agent.id in roles:
                tell(roles[event.agent.id])

        crewai_event_bus.on(event_type)(handler)
        return lambda: crewai_event_bus.off(event_type, handler)

    undo = [
        on(AgentExecutionStartedEvent, advisor.agent_started),
        on(AgentExecutionCompletedEvent, advisor.agent_ended),
        on(AgentExecutionErrorEvent, advisor.agent_failed),
    ]

    def detach() -> None:
        for each in undo:
            each()

    return detach


def _name_session(agent: Any, headers: dict[str, str]) -> None:
    """Requests of this agent carry `headers`. Its LLM may be shared with other agents, so it is copied."""
    if not hasattr(agent.llm, "additional_params"):
        return
    agent.llm = copy(agent.llm)
    given = agent.llm.additional_params
    agent.llm.additional_params = given | {"extra_headers": given.get("extra_headers", {}) | headers}
