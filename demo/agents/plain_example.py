"""An architect, two engineers and a tester, with reviews and revisions, on nothing but Overture's client.

    python demo/agents/plain_example.py --base-url http://127.0.0.1:8000/v1 --model NAME

Each agent's conversation grows from round to round; while one agent is answered, the sessions of those who come next are made ready.
Source of the workflow: SYMPHONY §4.4 (MetaGPT: three rounds of review and revision).
"""

from __future__ import annotations

import asyncio
from argparse import Namespace

from shared import MAX_TOKENS, ROUNDS, arguments, print_report

from overture_client.advisor import Advisor
from overture_client.call_graph import CallGraph
from overture_client.client import OvertureClient

ENGINEERS = ("engineer-1", "engineer-2")
EDGES = [
    *(("architect", name) for name in ENGINEERS),
    *((name, "tester") for name in ENGINEERS),
    *(("tester", name) for name in ENGINEERS),
]


class Agent:
    """Remembers its conversation, and tells the advisor when it works."""

    def __init__(self, name: str, role: str, advisor: Advisor, model: str) -> None:
        self.name = name
        self._advisor = advisor
        self._model = model
        self._messages = [{"role": "system", "content": role}]

    async def work_on(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        self._advisor.agent_started(self.name)
        answer = await self._advisor.client.chat(
            self._messages,
            model=self._model,
            session_id=self._advisor.session_of(self.name),
            agent=self.name,
            max_tokens=MAX_TOKENS,
        )
        self._advisor.agent_ended(self.name)
        content: str = answer["choices"][0]["message"]["content"] or ""
        self._messages.append({"role": "assistant", "content": content})
        print(f"{self.name}: {content}")
        return content


async def run(args: Namespace) -> None:
    async with OvertureClient(args.base_url, args.api_key) as client:
        with Advisor(client, CallGraph(EDGES), args.run_id, model=args.model) as advisor:
            architect = Agent("architect", "You design software.", advisor, args.model)
            engineers = [Agent(name, "You write code.", advisor, args.model) for name in ENGINEERS]
            tester = Agent("tester", "You review code.", advisor, args.model)
            note = await architect.work_on(args.task)
            for _ in range(ROUNDS):
                drafts = await asyncio.gather(*(engineer.work_on(note) for engineer in engineers))
                note = await tester.work_on("\n".join(drafts))
            print_report(await advisor.report_async())


if __name__ == "__main__":
    asyncio.run(run(arguments(__doc__ or "")))
