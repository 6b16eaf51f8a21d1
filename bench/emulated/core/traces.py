"""Traces of requests that orders of starting are compared on: recorded ones, and made ones in which prompts and answers differ each in its own way.

`azure`, `mooncake`: conversations as recorded, with their arrivals; Mooncake's prompts a tenth as long.
`agents`: recorded runs of agents, begun at random times, whose calls come when they were recorded; prompts and answers hardly go together.
`heavy tail`: both lengths by Pareto's law, each for itself.
`equal prompts`: prompts of one size; one answer of five is 20 times as long as the others.
`bursts`: clients that each send a dozen chats within two seconds.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import cache
from pathlib import Path

from bench.data import AZURE, FOLDER, MOONCAKE, lines_of
from bench.emulated.agent_runs import RECORDED_TOKENS_PER_S, RecordedCall, read_runs
from bench.emulated.core.plays import lognormal
from bench.emulated.core.traffic import generated

MAX_TOKENS = 4096
AGENTS = FOLDER / "agent_runs/magagent.csv"
RECORDED = (AZURE, MOONCAKE, AGENTS)
# Mooncake's prompts are ten times as long as Azure's.
MOONCAKE_SHARE = 0.1
NUM_MADE = 20_000
# Seconds between two runs of agents, and the number of runs that are made of the recorded ones. Chosen: some ten are under way at a time.
RUN_EVERY_S, NUM_RUNS = 12.0, 600
EQUAL_PROMPT_TOKENS, SHORT_TOKENS, TIMES_LONGER, LONG_SHARE = 1500, 40, 20, 0.2
# Requests of one client's burst, the seconds between two of them, and between bursts. Chosen: two bursts seldom meet at the mean rate.
BURST_REQUESTS, WITHIN_BURST_S, BETWEEN_BURSTS_S = 12, 0.15, 12.0

Row = tuple[float, int, int]
"""Seconds since the one before, prompt tokens, answer tokens."""


def _with_gaps(timed: Iterable[Row]) -> list[Row]:
    before_s, found = None, []
    for at_s, prompt, answer in timed:
        found.append((at_s - before_s if before_s is not None else 0.0, prompt, answer))
        before_s = at_s
    return found


def _azure() -> list[Row]:
    rows = csv.DictReader(lines_of(AZURE))
    return _with_gaps(
        (
            datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )
        for row in rows
    )


def _mooncake() -> list[Row]:
    rng = random.Random("jitter")
    rows = [json.loads(line) for line in lines_of(MOONCAKE)]
    ordered = sorted(
        (row["timestamp"] / 1e3 + rng.uniform(0, 3), row["input_length"], row["output_length"])
        for row in rows
    )
    return _with_gaps(
        (at_s, max(int(prompt * MOONCAKE_SHARE), 1), answer) for at_s, prompt, answer in ordered
    )


def _timed(calls: Iterable[RecordedCall], at_s: float) -> Iterator[Row]:
    for call in calls:
        yield at_s, call.num_prompt_tokens, call.num_answer_tokens
        at_s += call.num_answer_tokens / RECORDED_TOKENS_PER_S + call.pause_s


def _agents() -> list[Row]:
    rng = random.Random("agents 0")
    runs, at_s, timed = read_runs(AGENTS), 0.0, []
    for _ in range(NUM_RUNS):
        at_s += rng.expovariate(1 / RUN_EVERY_S)
        timed.append(_timed(rng.choice(runs), at_s))
    return _with_gaps(heapq.merge(*timed))


def _heavy_tail() -> list[Row]:
    rng = random.Random("heavy tail 0")
    return [
        (rng.expovariate(1.0), int(100 * rng.paretovariate(1.1)), int(40 * rng.paretovariate(1.2)))
        for _ in range(NUM_MADE)
    ]


def _equal_prompts() -> list[Row]:
    rng = random.Random("equal prompts 0")
    return [
        (
            rng.expovariate(1.0),
            int(EQUAL_PROMPT_TOKENS * rng.uniform(0.95, 1.05)),
            int(SHORT_TOKENS * (TIMES_LONGER if rng.random() < LONG_SHARE else 1) * rng.uniform(0.8, 1.2)),
        )
        for _ in range(NUM_MADE)
    ]


def _bursts() -> list[Row]:
    rng = random.Random("bursts 0")
    gaps = itertools.cycle([BETWEEN_BURSTS_S, *[WITHIN_BURST_S] * (BURST_REQUESTS - 1)])
    return [(rng.expovariate(1 / next(gaps)), *pair) for pair in lognormal(NUM_MADE, 0).pairs]


TRACES: dict[str, tuple[Callable[[], list[Row]], Path | None]] = {
    "azure": (_azure, AZURE),
    "mooncake": (_mooncake, MOONCAKE),
    "agents": (_agents, AGENTS),
    "heavy tail": (_heavy_tail, None),
    "equal prompts": (_equal_prompts, None),
    "bursts": (_bursts, None),
}
"""What reads or makes a trace, and the file that it needs."""


@cache
def trace_rows(trace: str) -> list[Row]:
    """Return a trace's requests, cut to what the model takes; where its file is missing, lengths drawn between Azure's quantiles."""
    read, path = TRACES[trace]
    if path is None or path.exists():
        found = read()
    else:
        rng = random.Random(trace)
        found = [(rng.expovariate(1.0), prompt, answer) for prompt, answer in generated(rng).pairs]
    return [
        (gap, min(prompt, MAX_TOKENS * 3 // 4), min(answer, MAX_TOKENS // 4)) for gap, prompt, answer in found
    ]
