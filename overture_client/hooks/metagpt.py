"""MetaGPT. It has no callbacks: published messages tell which role acts next, and roles are timed by wrapping the methods that run them.

From a role's own start to its LLM call it is 0.2 ms at most (measured on MetaGPT 0.8.2), while a message is published when its sender ends, and
its readers wait for the slowest role of the round: besides the edges, that wait is the time to prepare KV in.
"""

from __future__ import annotations

from typing import Any

from overture_client.advisor import Advisor
from overture_client.hooks.naming import warn_unnamed

REMEDY = "Set `api_type: openai` and `base_url` in MetaGPT's configuration, or have the LLM send the headers that `advisor.headers(name)` returns."


def attach(team: Any, advisor: Advisor) -> None:
    """Advise as `team`, a ``Team`` or an ``Environment`` with its roles hired, runs.

    A role that watches an action acts after the roles that have it. The client of each role's LLM gets the headers of the role's session. Warns
    of roles whose LLM has no such client.
    """
    from metagpt.utils.common import any_to_str, is_send_to

    environment = getattr(team, "env", team)
    roles = list(environment.roles.values())
    for source in roles:
        actions = {any_to_str(action) for action in source.actions}
        for target in roles:
            if actions & target.rc.watch:
                advisor.graph.add_edge(source.name, target.name)
    warn_unnamed("MetaGPT", [role.name for role in roles if not _name_session(role, advisor)], REMEDY)
    for role in roles:
        _watch(role, advisor)

    publish = environment.publish_message

    def publish_message(message: Any, *args: Any, **more: Any) -> Any:
        """Publish the message, and advise about the roles that read it."""
        is_found = publish(message, *args, **more)
        for role, addresses in environment.member_addrs.items():
            # As `Role._observe` picks its news.
            is_read = message.cause_by in role.rc.watch or role.name in message.send_to
            if is_read and is_send_to(message, addresses):
                advisor.will_act(role.name)
        return is_found

    # Past pydantic, which takes declared fields only.
    object.__setattr__(environment, "publish_message", publish_message)


def _name_session(role: Any, advisor: Advisor) -> bool:
    """Let the role's requests carry its session, if its LLM uses the OpenAI SDK."""
    client: Any = getattr(role.llm, "aclient", None)
    if not hasattr(client, "with_options"):
        return False
    role.llm.aclient = client.with_options(default_headers=advisor.headers(role.name))
    return True


def _watch(role: Any, advisor: Advisor) -> None:
    react = role.react

    async def timed_react() -> Any:
        """Run the role, and tell the advisor of its start and end."""
        advisor.agent_started(role.name)
        try:
            answer = await react()
        except BaseException:
            advisor.agent_failed(role.name)
            raise
        advisor.agent_ended(role.name)
        return answer

    object.__setattr__(role, "react", timed_react)
