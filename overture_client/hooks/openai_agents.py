"""OpenAI Agents SDK: run hooks. Handoffs are the edges of the call graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overture_client.advisor import Advisor


def attach(agent: Any, advisor: Advisor) -> Any:
    """Return the hooks for ``Runner.run(agent, …, hooks=attach(agent, advisor))``.

    When an agent starts, its `model_settings` get the headers of its session. Runs at the same time therefore need copies of their agents
    (``agent.clone()``), or the requests of one would go into the sessions of another.
    """
    from agents import RunHooks

    _add_handoffs(agent, advisor)

    class OvertureHooks(RunHooks):
        """Tells the advisor which agents start, hand over and end."""

        async def on_agent_start(self, context: Any, agent: Any) -> None:
            """Put the session's headers into the agent's settings, and note its start."""
            headers = (agent.model_settings.extra_headers or {}) | advisor.headers(agent.name)
            agent.model_settings = replace(agent.model_settings, extra_headers=headers)
            advisor.agent_started(agent.name)

        async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
            """Note that an agent has ended and which one comes next."""
            # No `on_agent_end` comes for an agent that hands over.
            advisor.agent_ended(from_agent.name)
            advisor.will_act(to_agent.name)

        async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
            """Note that an agent has ended."""
            advisor.agent_ended(agent.name)

    return OvertureHooks()


def _add_handoffs(agent: Any, advisor: Advisor) -> None:
    """Add edges to the agents that `agent` may hand over to, and on from there. Handoffs in a circle are common."""
    seen: set[str] = set()
    agents = [agent]
    while agents:
        source = agents.pop()
        seen.add(source.name)
        for handoff in source.handoffs:
            # Agents, or `Handoff` objects, which tell a name only.
            target = getattr(handoff, "agent_name", None) or handoff.name
            advisor.graph.add_edge(source.name, target)
            if hasattr(handoff, "handoffs") and target not in seen:
                agents.append(handoff)
