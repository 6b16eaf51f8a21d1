"""An architect, an engineer and a tester in MetaGPT.

    pip install metagpt==0.8.2
    python demo/agents/metagpt_example.py --base-url http://127.0.0.1:8000/v1 --model NAME

The engineer watches the architect and the tester, the tester watches the engineer: a review and a revision each round.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from shared import MAX_TOKENS, ROUNDS, arguments, needs, print_report

from overture_client.advisor import Advisor
from overture_client.client import OvertureClient
from overture_client.hooks import metagpt as overture


def configure(args: Namespace, folder: str) -> None:
    """Write MetaGPT's settings into `folder` and point it there, so that your own are left alone. It reads them when it is imported."""
    llm = {
        "api_type": "openai",
        "api_key": args.api_key or "none",
        "base_url": args.base_url,
        "model": args.model,
        "max_token": MAX_TOKENS,
        "stream": False,
    }
    (Path(folder) / "config").mkdir()
    # JSON is YAML.
    (Path(folder) / "config" / "config2.yaml").write_text(json.dumps({"llm": llm}))
    os.environ["METAGPT_PROJECT_ROOT"] = folder


def hire() -> Any:
    """The environment with its three roles."""
    from metagpt.actions import Action
    from metagpt.actions.add_requirement import UserRequirement
    from metagpt.context import Context
    from metagpt.environment import Environment
    from metagpt.roles import Role

    class Talk(Action):
        async def run(self, history: Any) -> str:
            said = "\n".join(message.content for message in history)
            return await self._aask(said)

    class Design(Talk):
        name: str = "design"

    class Code(Talk):
        name: str = "code"

    class Review(Talk):
        name: str = "review"

    context = Context()
    environment = Environment(context=context)

    def role(name: str, action: type[Action], watched: list[type[Action]]) -> Role:
        made = Role(name=name, profile=name, goal="good software", context=context)
        made.set_actions([action])
        made._watch(watched)
        return made

    environment.add_roles(
        [
            role("architect", Design, [UserRequirement]),
            role("engineer", Code, [Design, Review]),
            role("tester", Review, [Code]),
        ]
    )
    return environment


async def run(args: Namespace) -> None:
    from metagpt.actions.add_requirement import UserRequirement
    from metagpt.schema import Message

    async with OvertureClient(args.base_url, args.api_key) as client:
        with Advisor(client, run_id=args.run_id, model=args.model) as advisor:
            environment = hire()
            overture.attach(environment, advisor)
            environment.publish_message(Message(content=args.task, cause_by=UserRequirement))
            for _ in range(1 + 2 * ROUNDS):
                await environment.run()
            print_report(await advisor.report_async())


if __name__ == "__main__":
    args = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        configure(args, folder)
        needs("metagpt", "metagpt==0.8.2")
        asyncio.run(run(args))
