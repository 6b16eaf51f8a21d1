"""CrewAI: its event bus. In a sequential crew each task's agent follows that of the task before."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import pairwise
from typing import Any

from overture_client.advisor import Advisor
from overture_client.hooks.naming import warn_unnamed

REMEDY = 'Give them `crewai.LLM(model=…, provider="openai", base_url=…)`, or have the LLM send the headers that `advisor.headers(role)` returns.'


def attach(crew: Any, advisor: Advisor) -> Callable[[], None]:
    """Advise as `crew` runs, until the function that this returns is called: the bus is one for the whole process.

    Agents go by their roles as they stand now. Each agent gets a copy of its LLM that names the agent's session. Warns of agents whose LLM is of
    a class that takes no headers.
    """
    from crewai.events import (
        AgentExecutionCompletedEvent,
        AgentExecutionErrorEvent,
        AgentExecutionStartedEvent,
        crewai_event_bus,
    )

    # Placeholders in a role are filled in when the crew starts; the id stays.
    roles = {agent.id: agent.role.strip() for agent in crew.agents}
    unnamed = [
        role for agent in crew.agents if not _name_session(agent, advisor.headers(role := roles[agent.id]))
    ]
    warn_unnamed("CrewAI", unnamed, REMEDY)
    if crew.process.value == "sequential":
        for task, following in pairwise(crew.tasks):
            advisor.graph.add_edge(roles[task.agent.id], roles[following.agent.id])

    def on(event_type: Any, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell` with the role of each agent that such an event is about; return a function that ends this."""

        def handler(source: Any, event: Any) -> None:
            """Pass the event's agent on, if it is of this crew."""
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
        """Stop advising."""
        for each in undo:
            each()

    return detach


def _name_session(agent: Any, headers: dict[str, str]) -> bool:
    """Let requests of this agent carry `headers`, if its LLM can do so. The LLM may be shared with other agents, so it is copied."""
    if not _takes_headers(agent.llm):
        return False
    agent.llm = copy(agent.llm)
    given = agent.llm.additional_params
    agent.llm.additional_params = given | {"extra_headers": given.get("extra_headers", {}) | headers}
    return True


def _takes_headers(llm: Any) -> bool:
    """Return whether `additional_params` reach the request as arguments of the OpenAI SDK or of LiteLLM; other classes ignore the field."""
    from crewai import LLM

    try:
        from crewai.llms.providers.openai.completion import OpenAICompletion
    except ImportError:  # before CrewAI 1.0 all went by LiteLLM
        return isinstance(llm, LLM)
    return isinstance(llm, LLM | OpenAICompletion)
