"""A researcher and a writer in CrewAI, three tasks each.

pip install crewai
python demo/agents/crewai_example.py --base-url http://127.0.0.1:8000/v1 --model NAME
"""

from __future__ import annotations

import os
from argparse import Namespace

from shared import MAX_TOKENS, ROUNDS, arguments, needs, print_report

from overture_client.advisor import Advisor
from overture_client.client import OvertureClient
from overture_client.hooks import crewai as overture


def run(args: Namespace) -> None:
    from crewai import LLM, Agent, Crew, Task

    llm = LLM(
        model=args.model,
        provider="openai",
        base_url=args.base_url,
        api_key=args.api_key or "none",
        max_tokens=MAX_TOKENS,
    )
    researcher = Agent(role="researcher", goal="Find facts", backstory="Curious.", llm=llm, max_iter=1)
    writer = Agent(role="writer", goal="Write", backstory="Terse.", llm=llm, max_iter=1)
    tasks = [
        Task(description=args.task, expected_output="a sentence", agent=agent)
        for _ in range(ROUNDS)
        for agent in (researcher, writer)
    ]
    crew = Crew(agents=[researcher, writer], tasks=tasks)
    with (
        OvertureClient(args.base_url, args.api_key) as client,
        Advisor(client, run_id=args.run_id, model=args.model) as advisor,
    ):
        detach = overture.attach(crew, advisor)
        print(crew.kickoff())
        detach()
        print_report(advisor.report())


if __name__ == "__main__":
    args = arguments(__doc__ or "")
    # Before the import: nothing of the run leaves this machine.
    os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}
    needs("crewai", "crewai")
    run(args)
