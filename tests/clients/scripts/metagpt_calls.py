"""`metagpt`: its LLM, actions, roles and an environment of roles."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from harness import KEY, MODEL, V1_URL, call

LLM_SETTINGS = {"api_type": "openai", "api_key": KEY, "base_url": V1_URL}
LLM_SETTINGS |= {"model": MODEL, "max_token": 32, "stream": False}


def main():
    from metagpt.actions import Action
    from metagpt.actions.add_requirement import UserRequirement
    from metagpt.context import Context
    from metagpt.environment import Environment
    from metagpt.roles import Role
    from metagpt.schema import Message

    class Greet(Action):
        name: str = "greet"

        async def run(self, history=None):
            return await self._aask("Hello!")

    def role(context):
        made = Role(name="writer", profile="writer", goal="greet", context=context)
        made.set_actions([Greet])
        made._watch([UserRequirement])
        return made

    async def ask():
        assert await Context().llm().aask("Hello!", stream=False)

    async def ask_streamed():
        assert await Context().llm().aask("Hello!", stream=True)

    async def with_system_prompt():
        assert await Context().llm().aask("Hello!", system_msgs=["You are terse."], stream=False)

    async def raw_completion():
        reply = await Context().llm().acompletion([{"role": "user", "content": "Hello!"}])
        assert reply.choices[0].message.content

    async def action():
        assert await Greet(context=Context()).run()

    async def one_role():
        assert (await role(Context()).run(with_message="Hello!")).content

    async def environment():
        context = Context()
        made = Environment(context=context)
        made.add_roles([role(context)])
        made.publish_message(Message(content="Hello!", cause_by=UserRequirement))
        await made.run()
        assert len(made.history.strip().splitlines()) >= 2  # the question and the role's answer

    call("LLM.aask", ask)
    call("LLM.aask, streamed", ask_streamed)
    call("LLM.aask with a system prompt", with_system_prompt)
    call("LLM.acompletion", raw_completion)
    call("Action.run", action)
    call("Role.run", one_role)
    call("Environment.run", environment)


if __name__ == "__main__":
    # It reads its settings when it is imported. JSON is YAML.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config").mkdir()
        Path(folder, "config", "config2.yaml").write_text(json.dumps({"llm": LLM_SETTINGS}))
        os.environ["METAGPT_PROJECT_ROOT"] = folder
        os.chdir(folder)  # it writes its logs and its storage there
        main()
