"""Runs of agents of every temper: recorded ones from a CSV file, and made-up ones whose rules are written down here.

A run is a list of calls in the order of time. The made-up ones are not fitted to any recording; they stand for what frameworks do: pipelines of roles
with repairs (MetaGPT), loops with tools (ReAct), debates in rounds, a router with workers, agents at once, routing by chance, and rules that change.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

NUM_RUNS = 60


@dataclass(frozen=True, slots=True)
class Call:
    """One request: when it comes, from its run's start; when its answer is whole; whose it is."""

    at_s: float
    end_s: float
    agent: str


Run = list[Call]


def read(path: Path) -> list[Run]:
    """The runs of a CSV file with the columns `run`, `at_s` and `agent`, and perhaps `end_s`; without it a call ends shortly before the next one.

    Raises OSError, and ValueError where a column is missing or no number.
    """
    rows: dict[str, list[tuple[float, float | None, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if not {"run", "at_s", "agent"} <= row.keys():
                raise ValueError(f"{path} has no columns run, at_s and agent")
            end_s = float(row["end_s"]) if row.get("end_s") else None
            rows[row["run"]].append((float(row["at_s"]), end_s, row["agent"]))
    return [_ended(sorted(calls, key=lambda call: call[0])) for calls in rows.values()]


def _ended(calls: list[tuple[float, float | None, str]]) -> Run:
    found = []
    for place, (at_s, end_s, agent) in enumerate(calls):
        next_s = calls[place + 1][0] if place + 1 < len(calls) else at_s + 1.0
        found.append(Call(at_s, at_s + 0.9 * (next_s - at_s) if end_s is None else end_s, agent))
    return found


def timed(agents: Iterator[str], rng: random.Random, pause_s: float = 0.5, spread: float = 0.8) -> Run:
    """One after the other: each works for some seconds, and the next one comes after a pause."""
    now, run = 0.0, []
    for agent in agents:
        took_s = rng.lognormvariate(1.0, 0.5)
        run.append(Call(now, now + took_s, agent))
        now += took_s + pause_s * rng.lognormvariate(0.0, spread)
    return run


# -- what agents do ----------------------------------------------------------------------------------------------------


def roles(rng: random.Random) -> Iterator[str]:
    """A pipeline: documents first, then an engineer file by file, and tests that send some of it back."""
    yield from ("product_manager", "architect", "project_manager")
    for _ in range(rng.randint(1, 5)):
        yield "engineer"
    for _ in range(4):
        yield "tester"
        if rng.random() < 0.5:
            return
        yield "engineer"


def tools(rng: random.Random) -> Iterator[str]:
    """A loop of one agent with tools, looked at by a critic now and then; an editor ends it."""
    yield "planner"
    while True:
        yield "solver"
        if rng.random() < 0.12:
            yield "critic"
        if rng.random() < 0.1:
            break
    yield "editor"


def debate(rng: random.Random) -> Iterator[str]:
    """Three to five speakers in turn, three to five rounds, and a judge."""
    speakers = [f"speaker{i}" for i in range(rng.randint(3, 5))]
    for _ in range(rng.randint(3, 5)):
        yield from speakers
    yield "judge"


def router(rng: random.Random) -> Iterator[str]:
    """Every second call is the router's; it calls one of six workers, some of them oftener."""
    for _ in range(rng.randint(3, 15)):
        yield "router"
        yield f"worker{rng.choices(range(6), [6, 4, 3, 2, 1, 1])[0]}"
    yield "router"


def chance(rng: random.Random) -> Iterator[str]:
    """Any of six, each as likely as the others."""
    for _ in range(rng.randint(10, 40)):
        yield f"agent{rng.randrange(6)}"


def short(rng: random.Random) -> Iterator[str]:
    """One agent, four times at most, most often once or twice."""
    for _ in range(rng.choices([1, 2, 3, 4], [4, 3, 2, 1])[0]):
        yield "assistant"


def talk(rng: random.Random) -> Iterator[str]:
    """A person's turns, each answered by an assistant that may call itself again."""
    for _ in range(rng.randint(1, 8)):
        yield "user"
        yield "assistant"
        while rng.random() < 0.5:
            yield "assistant"


def at_once(rng: random.Random) -> Run:
    """A planner, three workers at the same time, one who puts their work together; up to four rounds."""
    now, run = 0.0, []
    for _ in range(rng.randint(1, 4)):
        run.append(Call(now, now + 3, "planner"))
        ends_s = [now + 3.1 + rng.lognormvariate(1.5, 0.5) for _ in range(3)]
        run += [Call(now + 3.1 + 0.05 * i, end_s, f"worker{i}") for i, end_s in enumerate(ends_s)]
        run.append(Call(max(ends_s) + 0.2, max(ends_s) + 4, "joiner"))
        now = max(ends_s) + 4.5
    return run


RULES: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "roles": roles,
    "tools": tools,
    "debate": debate,
    "router": router,
    "chance": chance,
    "short": short,
}


def _of(rule: Callable[[random.Random], Iterator[str]], rng: random.Random) -> list[Run]:
    return [timed(rule(rng), rng) for _ in range(NUM_RUNS)]


def drift(rng: random.Random) -> list[Run]:
    """The rules change twice, and with the last change the agents keep the names that they had under the first."""
    third = NUM_RUNS // 3
    rules = [roles] * third + [tools] * third + [roles_again] * third
    return [timed(rule(rng), rng) for rule in rules]


def roles_again(rng: random.Random) -> Iterator[str]:
    """The roles of `roles` in another order, where the engineer works once and the manager looks at everything."""
    yield from ("architect", "product_manager", "engineer", "product_manager", "tester")
    if rng.random() < 0.5:
        yield "product_manager"


def pauses(rng: random.Random) -> list[Run]:
    """People who take minutes between their turns, and some hours."""
    return [timed(talk(rng), rng, pause_s=60.0, spread=1.5) for _ in range(NUM_RUNS)]


def strangers(rng: random.Random) -> list[Run]:
    """Agents whose names no other run has, some of which act once and some throughout."""
    runs = []
    for number in range(NUM_RUNS):
        weights = [rng.expovariate(1.0) for _ in range(rng.randint(2, 6))]
        names = [f"agent{number}-{i}" for i in range(len(weights))]
        runs.append(timed(iter(rng.choices(names, weights, k=rng.randint(2, 30))), rng))
    return runs


def mixture(rng: random.Random) -> list[Run]:
    """Runs of all rules by one owner."""
    return [timed(rng.choice(list(RULES.values()))(rng), rng) for _ in range(NUM_RUNS)]


MADE: dict[str, Callable[[random.Random], list[Run]]] = {
    **{name: partial(_of, rule) for name, rule in RULES.items()},
    "at_once": lambda rng: [at_once(rng) for _ in range(NUM_RUNS)],
    "drift": drift,
    "pauses": pauses,
    "strangers": strangers,
    "mixture": mixture,
}
